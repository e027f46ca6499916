"use strict";
(() => {
  const { nodes, edges, folds } = JSON.parse(document.getElementById("data").textContent);
  const about = document.getElementById("about"), find = document.getElementById("find");
  const fold = document.getElementById("fold");
  const HINT = about.textContent;
  const open = new Set();  // the folds that show their ops
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const shown = (n) => nodes[n].fold === null || open.has(nodes[n].fold) ? `n${n}` : `f${nodes[n].fold}`;

  const elements = () => {
    const boxes = new Map(), lines = new Map();
    nodes.forEach((node, n) => {
      if (open.has(node.fold)) boxes.set(`f${node.fold}`, { data: { id: `f${node.fold}`, fold: node.fold, label: "" }, classes: "opened" });
      const id = shown(n);
      if (boxes.has(id)) return;
      const folded = id[0] === "f";
      const parent = !folded && node.fold !== null ? `f${node.fold}` : undefined;
      const classes = [folded ? "fold" : "", (folded ? folds[node.fold].unit : node.unit) || "plain", node.op ? "" : "input", node.around ? "around" : ""].join(" ");
      boxes.set(id, { data: { id, parent, label: folded ? folds[node.fold].label : node.label, at: folded ? null : n, fold: node.fold }, classes });
    });
    edges.forEach(([a, b]) => {
      const [source, target] = [shown(a), shown(b)];
      if (source !== target) lines.set(`${source}>${target}`, { data: { id: `${source}>${target}`, source, target } });
    });
    return [...boxes.values(), ...lines.values()];
  };

  const HEIGHT = 52, GAP = 14;  // of a box; between a line and the boxes that it passes
  const style = () => [
    { selector: "node", style: {
      shape: "round-rectangle", width: 190, height: HEIGHT, label: "data(label)", "text-wrap": "wrap", "text-valign": "center",
      "font-family": "ui-monospace, Menlo, Consolas, monospace", "font-size": 11, color: colour("ink"),
      "background-color": colour("paper"), "border-width": 1.5, "border-color": colour("unknown") } },
    ...["ane", "cpu", "gpu"].map((unit) => ({ selector: `.${unit}`, style: { "border-color": colour(unit), "border-width": 2.5 } })),
    { selector: ".input", style: { "border-style": "dashed" } },
    { selector: ".fold", style: { "border-style": "double", "border-width": 6, "font-weight": "bold" } },
    { selector: ".opened", style: { "background-opacity": 0, "border-style": "dotted" } },
    { selector: ".around", style: { "border-width": 5 } },
    { selector: ".found", style: { "border-color": colour("found"), "border-width": 5 } },
    { selector: "edge", style: {
      width: 1.2, "line-color": colour("soft"), "target-arrow-color": colour("soft"), "target-arrow-shape": "vee", "curve-style": "bezier" } },
  ];

  const graph = cytoscape({ container: document.getElementById("graph"), style: style(), minZoom: 0.02, maxZoom: 3, wheelSensitivity: 0.3 });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => graph.style(style()));

  const start = () => {  // the first ops at a size that can be read; all of them where they fit
    graph.fit(undefined, 20);
    if (graph.zoom() >= 0.6) return;
    const first = graph.nodes().min((node) => node.position("y")).ele;
    graph.zoom(0.8);
    graph.pan({ x: graph.width() / 2 - 0.8 * first.position("x"), y: 20 - 0.8 * first.boundingBox().y1 });
  };
  const bend = (edge, boxes) => {  // a line that would run behind boxes goes past them, straight down
    const [s, t] = [edge.source().position(), edge.target().position()];
    const [top, bottom] = [s.y + HEIGHT / 2 + GAP, t.y - HEIGHT / 2 - GAP];
    if (bottom - top < 2 * GAP) return;
    const passed = boxes.filter((box) => box.y1 < bottom && box.y2 > top);
    const at = (y) => s.x + (t.x - s.x) * (y - s.y) / (t.y - s.y);
    const hits = (box) => Math.max(at(box.y1), at(box.y2)) > box.x1 && Math.min(at(box.y1), at(box.y2)) < box.x2;
    if (!passed.some(hits)) return;
    const free = (x) => !passed.some((box) => box.x1 - GAP < x && x < box.x2 + GAP);
    const way = (x) => Math.abs(x - s.x) + Math.abs(x - t.x);
    const lanes = [s.x, t.x, ...passed.flatMap((box) => [box.x1 - GAP, box.x2 + GAP])].filter(free);
    const x = lanes.reduce((best, lane) => (way(lane) < way(best) ? lane : best));
    const [dx, dy] = [t.x - s.x, t.y - s.y], length = Math.hypot(dx, dy);
    const ends = [top, bottom].map((y) => [((x - s.x) * dx + (y - s.y) * dy) / length ** 2, (dx * (y - s.y) - dy * (x - s.x)) / length]);
    edge.style({ "curve-style": "segments", "edge-distances": "node-position",
      "segment-weights": ends.map(([weight]) => weight), "segment-distances": ends.map(([, distance]) => distance) });
  };
  const draw = () => {
    graph.elements().remove();
    graph.add(elements());
    graph.layout({ name: "dagre", rankDir: "TB", nodeSep: 24, rankSep: 34, animate: false, fit: false }).run();
    const boxes = graph.nodes(":childless").map((box) => box.boundingBox());
    graph.edges().forEach((edge) => bend(edge, boxes));
    fold.hidden = !folds.length;
    fold.textContent = open.size ? "Fold" : "Unfold";
  };
  const show = (n) => {
    const node = nodes[n];
    about.textContent = [node.line || `${node.kind} ${node.name}: ${node.gives}`, node.unit && `expected on: ${node.unit}`].filter(Boolean).join("\n");
  };
  const mark = (box) => {
    graph.elements().removeClass("found");
    box.addClass("found");
  };

  graph.on("tap", "node", ({ target }) => {
    const { at, fold: block } = target.data();
    if (at === null || at === undefined) {
      open.has(block) ? open.delete(block) : open.add(block);
      const name = open.has(block) ? `n${nodes.findIndex((node) => node.fold === block)}` : `f${block}`;
      draw();
      graph.center(graph.getElementById(name));
      return;
    }
    mark(target);
    show(at);
  });
  graph.on("tap", ({ target }) => { if (target === graph) { graph.elements().removeClass("found"); about.textContent = HINT; } });

  let last = "", hit = -1;
  const search = (words, step) => {
    const hits = nodes.map((_, n) => n).filter((n) => ["kind", "name", "gives"].some((key) => nodes[n][key].toLowerCase().includes(words)));
    hit = words === last ? hit + step : 0;
    last = words;
    if (!hits.length) { about.textContent = `nothing has "${words}" in its name, type or shape`; return; }
    hit = (hit + hits.length) % hits.length;
    const n = hits[hit];
    if (nodes[n].fold !== null && !open.has(nodes[n].fold)) { open.add(nodes[n].fold); draw(); }
    const box = graph.getElementById(`n${n}`);
    mark(box);
    graph.zoom(Math.max(graph.zoom(), 0.8));
    graph.center(box);
    show(n);
    about.textContent = `${hit + 1} of ${hits.length}, Enter for the next\n${about.textContent}`;
  };
  find.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && find.value.trim()) search(find.value.trim().toLowerCase(), event.shiftKey ? -1 : 1);
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && document.activeElement !== find) { event.preventDefault(); find.focus(); }
  });
  fold.addEventListener("click", () => {
    open.size ? open.clear() : folds.forEach((_, n) => open.add(n));
    try {
      draw();
    } catch (error) {  // the layout follows paths by recursion, and a browser has only so much of a stack
      if (!(error instanceof RangeError)) throw error;
      open.clear();
      draw();
      about.textContent = "That is too deep to be laid out at once. Click a block to open it alone.";
    }
    start();
  });
  document.getElementById("fit").addEventListener("click", () => graph.fit(undefined, 20));
  let width = innerWidth;  // a phone that is turned; its height changes with the bar of addresses too
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    graph.resize();
    start();
  });
  draw();
  start();
  window.graph = graph;
})();
