/* The page of `serve`: sends a model file by file, asks how far the work is, and shows what comes of it. */
"use strict";

const at = (id) => document.getElementById(id);
const show = (id, is) => { at(id).hidden = !is; };
let model = null;       // the address of the model that is here
let round = 0;          // a model that was replaced is not asked about any more

async function call(address, how = {}) {
  const answer = await fetch(address, how);
  const told = answer.status === 204 ? {} : await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Error(told.error || `the server answered ${answer.status}`);
  return told;
}

function problem(words) {
  at("problem").textContent = words;
  show("problem", words !== "");
}

function working(words, share) {
  at("words").textContent = words;
  show("words", words !== "");
  show("bar", words !== "");
  if (share === undefined) at("bar").removeAttribute("value"); else at("bar").value = share;
  for (const id of ["inspect", "apply"]) at(id).disabled = words !== "";
}

function clear() {
  problem("");
  for (const id of ["sentence", "links", "download", "changes", "report"]) show(id, false);
  at("report").removeAttribute("src");
}

async function forget() {
  const gone = model;
  model = null;
  round += 1;
  if (gone) await call(gone, { method: "DELETE" }).catch(() => {});
}

/* files: [path, File] of all that was dropped or chosen */
async function send(files) {
  await forget();
  const mine = round;
  clear();
  show("now", true);
  show("choose", false);
  if (!files.length) return problem("there is no file in what was dropped");
  working("sending", 0);
  try {
    const address = `/models/${(await call("/models", { method: "POST" })).id}`;
    if (mine !== round) { await call(address, { method: "DELETE" }); return; }
    model = address;
    for (const [k, [path, file]] of files.entries()) {
      working(`sending ${file.name}`, k / files.length);
      const place = path.split("/").map(encodeURIComponent).join("/");
      await call(`${model}/files/${place}`, { method: "PUT", body: file });
      if (mine !== round) return;
    }
    show("choose", true);
    await start("inspect");
  } catch (error) {
    if (mine !== round) return;
    working("");
    problem(error.message);
  }
}

async function start(task) {
  const mine = round;
  clear();
  working("asking");
  try {
    const question = { task };
    for (const id of ["target", "recipe", "prove"]) question[id] = at(id).value;
    let told = await call(`${model}/work`, { method: "POST", body: JSON.stringify(question) });
    while (mine === round && (told.state === "waiting" || told.state === "working")) {
      if (told.state === "waiting") working(`waiting: ${told.ahead} before this one`);
      else working(`${told.words || "starting"} (${told.seconds} s)`);
      await new Promise((done) => setTimeout(done, 500));
      if (mine === round) told = await call(model);
    }
    if (mine === round) finished(told);
  } catch (error) {
    if (mine !== round) return;
    working("");
    problem(error.message);
  }
}

function finished(told) {
  working("");
  problem(told.error || "");
  at("sentence").textContent = told.sentence || "";
  show("sentence", told.sentence);
  show("links", told.report);
  show("report", told.report);
  show("download", told.download);
  show("changes", told.changes);
  at("changes").querySelector("pre").textContent = told.changes || "";
  if (told.report) { at("open").href = `${model}/report`; at("report").src = `${model}/report`; }
  if (told.download) { at("download").href = `${model}/download`; at("download").download = told.download; }
  if (told.sentence) at("sentence").focus();
}

/* a dropped folder is read folder by folder; its reader gives a hundred at a time */
async function inside(entry, before) {
  const path = before + entry.name;
  if (entry.isFile) return [[path, await new Promise((give, fail) => entry.file(give, fail))]];
  const reader = entry.createReader(), found = [];
  for (;;) {
    const some = await new Promise((give, fail) => reader.readEntries(give, fail));
    if (!some.length) return found;
    for (const one of some) found.push(...await inside(one, `${path}/`));
  }
}

async function dropped(event) {
  const entries = [...event.dataTransfer.items].map((item) => item.webkitGetAsEntry()).filter(Boolean);
  const files = [];
  for (const entry of entries) files.push(...await inside(entry, ""));
  return files;
}

const hidden = (path) => path.split("/").some((part) => part === ".DS_Store" || part === "__MACOSX");
const chosen = (input) => [...input.files].map((file) => [file.webkitRelativePath || file.name, file]);

addEventListener("dragover", (event) => { event.preventDefault(); at("drop").classList.add("over-it"); });
addEventListener("dragleave", () => at("drop").classList.remove("over-it"));
addEventListener("drop", async (event) => {
  event.preventDefault();
  at("drop").classList.remove("over-it");
  send((await dropped(event)).filter(([path]) => !hidden(path)));
});
for (const id of ["file", "folder"]) {
  at(id).addEventListener("change", () => send(chosen(at(id)).filter(([path]) => !hidden(path))));
}
at("form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (model) start(event.submitter ? event.submitter.value : "inspect");
});
at("delete").addEventListener("click", async () => {
  await forget();
  clear();
  working("");
  for (const id of ["choose", "now"]) show(id, false);
  for (const id of ["file", "folder"]) at(id).value = "";
  at("file").focus();
});
/* a sign that somebody is here still; and none is left behind */
setInterval(() => { if (model) call(model).catch(() => {}); }, 60000);
addEventListener("pagehide", () => { if (model) fetch(model, { method: "DELETE", keepalive: true }); });
addEventListener("pageshow", (event) => { if (event.persisted) location.reload(); });
