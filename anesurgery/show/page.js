"use strict";
// The state is the hash of the address (#sort=flop&dir=desc&q=conv), so that every view of the table is a link.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const table = document.getElementById("ops");
  const CELLS = 120;  // in a row of the strip
  const CHUNK = 150;  // rows drawn at a time: what fits on a screen, and some
  const UNITS = { ane: "Neural Engine", cpu: "CPU", gpu: "GPU" };
  const [INDEX, PART, NAME, TYPE, SHAPE, DTYPE, LEGAL, UNIT, MEASURED, ANE, CPU, GPU, FLOP, SEGMENT, FOUND] = Array(15).keys();
  const legal = (row) => row[LEGAL] === null ? "unknown" : row[LEGAL] ? "yes" : "no";
  const short = (n) => {
    const step = n < 1e3 ? 0 : Math.min(5, Math.floor(Math.log10(n) / 3));
    return step ? (n / 10 ** (3 * step)).toPrecision(3) + " " + " kMGTP"[step] : String(n);
  };
  const element = (tag, words = "", name = "") => {
    const made = document.createElement(tag);
    made.textContent = words;  // never as HTML: names come from the model
    if (name) made.className = name;
    return made;
  };
  const unit = (value) => element("span", UNITS[value] || "unknown", "unit " + (value || "unknown"));
  const number = (value, say = String) => ({ words: value === null ? "" : say(value), name: "right" });
  const rules = (row) => [...new Set(row[FOUND].map(([rule]) => data.rules[rule][0]))];

  // title, value to sort by, what the cell shows
  const columns = {
    index: ["#", (r) => r[INDEX], (r) => number(r[INDEX])],
    part: ["part", (r) => r[PART], (r, view) => ({ words: view.parts[r[PART]] })],
    name: ["name", (r) => r[NAME], (r) => ({ words: r[NAME], name: "name" })],
    type: ["type", (r) => r[TYPE], (r) => ({ words: r[TYPE], name: "type" })],
    shape: ["shape", (r) => r[SHAPE], (r) => ({ words: r[SHAPE], name: "shape" })],
    dtype: ["dtype", (r) => r[DTYPE], (r) => ({ words: r[DTYPE], name: "type" })],
    legal: ["can run", (r) => ["no", "unknown", "yes"].indexOf(legal(r)), (r) => ({ words: legal(r), name: "legal-" + legal(r) })],
    preferred: ["runs on", (r) => r[UNIT], (r) => ({ child: unit(r[UNIT]) })],
    measured: ["measured", (r) => r[MEASURED], (r) => ({ child: unit(r[MEASURED]) })],
    ane: ["Neural Engine µs", (r) => r[ANE], (r) => number(r[ANE])],
    cpu: ["CPU µs", (r) => r[CPU], (r) => number(r[CPU])],
    gpu: ["GPU µs", (r) => r[GPU], (r) => number(r[GPU])],
    flop: ["work", (r) => r[FLOP], (r) => number(r[FLOP], short)],
    findings: ["findings", (r) => r[FOUND].length, (r) => ({ child: r[FOUND].length ? more(r) : null })],
  };
  const DOWN_FIRST = new Set(["ane", "cpu", "gpu", "flop", "findings"]);

  let state, view, rows, drawn;

  function more(row) {
    const made = element("button", rules(row).join(", "), "more");
    made.setAttribute("aria-expanded", "false");
    made.addEventListener("click", () => {
      const line = made.closest("tr"), open = made.getAttribute("aria-expanded") === "true";
      made.setAttribute("aria-expanded", String(!open));
      if (open) line.nextSibling.remove(); else line.after(detail(row));
    });
    return made;
  }

  function detail(row) {
    const line = element("tr", "", "detail"), cell = element("td");
    cell.colSpan = shownColumns().length;
    for (const [at, message] of row[FOUND]) {
      const [rule, kind, because, source, grade, scope, remedy, advice] = data.rules[at];
      const list = element("dl", "", "evidence");
      const said = { [kind]: message, because, source, grade, scope, remedy: remedy || "none", advice, rule };
      for (const [name, words] of Object.entries(said)) if (words) list.append(element("dt", name), element("dd", words));
      cell.append(list);
    }
    line.append(cell);
    return line;
  }

  const shownColumns = () => Object.entries(columns).filter(([id]) =>
    (id !== "part" || view.parts.length > 1) && (id !== "measured" || view.measured)
    && (id !== "gpu" || view.rows.some((row) => row[GPU] !== null)));

  function read() {
    state = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
    view = data.views[state.view ?? data.views.length - 1] || data.views[0];
  }

  function matches(row) {
    const words = (state.q || "").toLowerCase();
    const text = () => [row[NAME], row[TYPE], row[SHAPE], row[DTYPE], ...rules(row)].join(" ").toLowerCase();
    return (!state.unit || (row[UNIT] || "unknown") === state.unit)
      && (!state.attention || row[LEGAL] !== true || row[UNIT] !== "ane")
      && (!state.segment || row[SEGMENT] === +state.segment)
      && (!state.part || row[PART] === +state.part)
      && (!state.rule || rules(row).includes(state.rule))
      && (!state.type || row[TYPE] === state.type)
      && (!words || text().includes(words));
  }

  function arrange() {
    rows = view.rows.filter(matches);
    if (!columns[state.sort]) return;
    const value = columns[state.sort][1], sign = state.dir === "desc" ? -1 : 1;
    rows.sort((a, b) => {
      const x = value(a), y = value(b);
      if (x === y) return a[PART] - b[PART] || a[INDEX] - b[INDEX];
      if (x === null || y === null) return x === null ? 1 : -1;  // what is not known comes last, either way
      return (x < y ? -1 : 1) * sign;
    });
  }

  function head() {
    const line = element("tr");
    for (const [id, [title]] of shownColumns()) {
      const cell = element("th"), button = element("button", title);
      cell.scope = "col";
      if (["index", ...DOWN_FIRST].includes(id) && id !== "findings") cell.className = "right";
      if (state.sort === id) cell.setAttribute("aria-sort", state.dir === "desc" ? "descending" : "ascending");
      button.addEventListener("click", () => {
        const first = DOWN_FIRST.has(id) ? "desc" : "asc", other = first === "desc" ? "asc" : "desc";
        go({ sort: id, dir: state.sort === id && state.dir === first ? other : first });
      });
      cell.append(button);
      line.append(cell);
    }
    table.tHead.replaceChildren(line);
  }

  function extend() {
    const made = document.createDocumentFragment(), shown = shownColumns();
    for (const row of rows.slice(drawn, drawn + CHUNK)) {
      const line = element("tr");
      for (const [, [title, , show]] of shown) {
        const { words, name, child } = show(row, view), cell = element("td", words, name);
        if (child) cell.append(child);
        cell.dataset.label = title;
        line.append(cell);
      }
      made.append(line);
    }
    drawn = Math.min(drawn + CHUNK, rows.length);
    table.tBodies[0].append(made);
  }

  function controls() {
    const search = document.getElementById("q"), chip = document.getElementById("chip");
    if (search.value !== (state.q || "")) search.value = state.q || "";
    document.getElementById("unit").value = state.unit || "";
    document.getElementById("attention").checked = Boolean(state.attention);
    for (const tab of document.querySelectorAll(".tab"))
      tab.setAttribute("aria-pressed", String(data.views[tab.dataset.view] === view));
    const only = ["type", "rule", "segment"].filter((k) => state[k]).map((k) => k + " " + state[k]);
    if (state.part && view.parts.length > 1) only.push("in " + (view.parts[state.part] || "part " + state.part));
    chip.hidden = !only.length;
    chip.textContent = only.join(", ") + "  ✕";
    document.getElementById("shown").textContent =
      `${rows.length.toLocaleString("en")} of ${view.rows.length.toLocaleString("en")} ops`;
  }

  // "part.index", the row to show among the others
  function reveal() {
    const [part, index] = state.op.split(".").map(Number);
    const at = rows.findIndex((row) => row[PART] === part && row[INDEX] === index);
    if (at < 0) return;
    while (drawn <= at) extend();
    const line = table.tBodies[0].rows[at];
    line.className = "here";
    line.scrollIntoView({ block: "center" });
  }

  function zoomable(card) {
    const svg = card.querySelector("svg"), bar = element("div", "", "zoom");
    if (!svg) return;
    let scale = 0;
    const zoom = (factor) => {
      const now = svg.getBoundingClientRect().width, full = card.clientWidth - 20;
      scale = factor ? Math.min(8 * full, Math.max(full, now * factor)) : full;
      svg.style.minWidth = "0";
      svg.style.width = scale + "px";
    };
    for (const [words, label, factor] of [["−", "zoom out", 1 / 1.5], ["fit", "fit the graph", 0], ["+", "zoom in", 1.5]]) {
      const button = element("button", words);
      button.setAttribute("aria-label", label);
      button.addEventListener("click", () => zoom(factor));
      bar.append(button);
    }
    card.before(bar);
    card.addEventListener("wheel", (e) => {
      if (!e.ctrlKey) return;
      e.preventDefault();
      zoom(e.deltaY < 0 ? 1.15 : 1 / 1.15);
    }, { passive: false });
  }

  function draw() {
    read();
    arrange();
    head();
    controls();
    drawn = 0;
    table.tBodies[0].replaceChildren();
    table.parentNode.scrollTop = 0;
    extend();
    if (state.op) reveal();
  }

  function go(changed) {
    const next = Object.entries({ ...state, op: "", ...changed }).filter(([, value]) => value);
    history.replaceState(null, "", "#" + new URLSearchParams(next));
    draw();
  }

  document.getElementById("q").addEventListener("input", (e) => go({ q: e.target.value }));
  document.getElementById("unit").addEventListener("change", (e) => go({ unit: e.target.value }));
  document.getElementById("attention").addEventListener("change", (e) => go({ attention: e.target.checked ? "1" : "" }));
  document.getElementById("chip").addEventListener("click", () => go({ type: "", rule: "", segment: "", part: "" }));
  for (const tab of document.querySelectorAll(".tab"))
    tab.addEventListener("click", () => go({ view: tab.dataset.view, segment: "", part: "" }));
  table.parentNode.addEventListener("scroll", (e) => {
    const pane = e.target;
    if (drawn < rows.length && pane.scrollTop + 2 * pane.clientHeight > pane.scrollHeight) extend();
  });
  addEventListener("hashchange", () => {
    draw();
    if (!state.op) document.getElementById("all").scrollIntoView();
  });
  document.querySelectorAll(".card.graph").forEach(zoomable);
  for (const card of document.querySelectorAll(".card.strip"))
    card.addEventListener("click", (e) => {
      const run = e.target.closest("[data-op]");
      if (!run) return;
      const edge = run.getBoundingClientRect(), cell = card.querySelector("svg").getBoundingClientRect().width / CELLS;
      const row = data.views[card.dataset.view].rows[+run.dataset.op + Math.floor((e.clientX - edge.left) / cell)];
      if (row) location.hash = new URLSearchParams({ view: card.dataset.view, op: row[PART] + "." + row[INDEX] });
    });
  draw();
})();
