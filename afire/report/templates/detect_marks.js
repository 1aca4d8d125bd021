// Marks: what somebody thinks of a verdict. They are kept by this browser, by the name of the film, with the verdict and
// the threshold they were made at, and saved as CSV.
const KEY = `afire marks ${report.id}`;
const MARK_COLUMNS = ["file", "mark", "verdict", "score", "threshold", "false_alarm_rate", "region", "note", "model", "afire"];
const SIGNS = { agree: "✓", disagree: "✗", unsure: "?" };
const FORMULA = "=+\\-@\\t\\r＝＋－＠"; // what a spreadsheet takes for the start of a formula
const note = at("note");
let marks = readMarks();

function readMarks() {
  try {
    return new Map(Object.entries(JSON.parse(localStorage.getItem(KEY)) || {}));
  } catch {
    return new Map();
  }
}

function keepMarks() {
  try {
    localStorage.setItem(KEY, JSON.stringify(Object.fromEntries(marks)));
  } catch {
    complain("This browser keeps no marks for this page: save them before you close it.");
  }
}

const markOf = (film) => (marks.get(film.name) || {}).mark || "";

function fitsMark(film, wanted) {
  if (!wanted) return true;
  if (wanted === "note") return Boolean((marks.get(film.name) || {}).note);
  return markOf(film) === (wanted === "none" ? "" : wanted);
}

function showMark(cell, film) {
  const mark = markOf(film), written = (marks.get(film.name) || {}).note || "";
  cell.textContent = (SIGNS[mark] || "") + (written ? " ✎" : "");
  cell.className = `mark ${mark}`;
  cell.title = [mark, written].filter(Boolean).join(": ");
}

function verdictNow(film) {
  return { verdict: GROUPS[groupOf(film)], threshold: Number.isFinite(threshold) ? threshold : null, rate: pValue(threshold) };
}

// The same mark again takes it back.
function setMark(film, mark) {
  const before = marks.get(film.name) || { mark: "", note: "" };
  const next = { ...before, ...verdictNow(film), mark: before.mark === mark ? "" : mark };
  putMark(film, next);
  say(next.mark ? `${next.mark}: ${next.verdict}` : "mark taken back");
}

function setNote(film, words) {
  const before = marks.get(film.name) || { mark: "", ...verdictNow(film) };
  putMark(film, { ...before, note: words });
}

function putMark(film, next) {
  if (next.mark || next.note) marks.set(film.name, next);
  else marks.delete(film.name);
  keepMarks();
  showMarks(film);
  if (filters.marked.value || order.key === "mark") select();
  else refresh();
}

function showMarks(film) {
  const kept = marks.get(film.name) || { mark: "", note: "" };
  for (const button of document.querySelectorAll("[data-mark]")) {
    button.setAttribute("aria-pressed", String(button.dataset.mark === kept.mark));
  }
  if (note.value !== (kept.note || "")) note.value = kept.note || "";
  const moved = kept.mark && kept.verdict !== GROUPS[groupOf(film)];
  at("mark-words").textContent = moved ? `your mark is about "${kept.verdict}", at a threshold of ${short(kept.threshold ?? Infinity)}` : "";
  at("save").textContent = marks.size ? `save marks (${thousands(marks.size)})` : "save marks";
  at("save").disabled = marks.size === 0;
}

// An apostrophe keeps a spreadsheet from running a text; one that begins with an apostrophe gets another, so that the
// reader (afire/detect/marks.py) can take it away again.
function guarded(text) {
  return new RegExp(`^[${FORMULA}']`).test(text) ? `'${text}` : text;
}

// A note may also hold the separator of another language, behind which a spreadsheet would begin a new cell.
function plainNote(text) {
  const line = text.replace(/[\u0000-\u001f\u007f\u2028\u2029]+/g, " ").trim();
  return line.replace(new RegExp(`([;,|\\t"]\\s*)(?=[${FORMULA}])`, "g"), "$1'");
}

const cell = (value) => (/[",;\r\n\t]|^\s|\s$/.test(value) ? `"${value.replaceAll('"', '""')}"` : value);

function marksAsCsv() {
  const lines = [MARK_COLUMNS];
  for (const film of films) {
    const kept = marks.get(film.name);
    if (!kept) continue;
    const number = (value) => (value === null || value === undefined ? "" : String(value));
    lines.push([
      guarded(film.name), kept.mark, kept.verdict, number(film.score), number(kept.threshold), number(kept.rate),
      guarded(film.status ? "" : report.regions[film.region]), guarded(plainNote(kept.note || "")), report.model, report.afire,
    ]);
  }
  return lines.map((line) => line.map(cell).join(",")).join("\r\n") + "\r\n";
}

function saveMarks() {
  if (!marks.size) return;
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([marksAsCsv()], { type: "text/csv" }));
  link.download = "marks.csv";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  say(`${marks.size} marks saved`);
}

function parseCsv(text) {
  const lines = [[]];
  const pattern = /(?:"((?:[^"]|"")*)"|([^",\r\n]*))(,|\r?\n|$)/gy;
  for (let found; pattern.lastIndex < text.length && (found = pattern.exec(text)); ) {
    lines[lines.length - 1].push(found[1] === undefined ? found[2] : found[1].replaceAll('""', '"'));
    if (found[3] !== ",") lines.push([]);
  }
  return lines.filter((line) => line.length > 1);
}

// Marks of a file come to those that are here; for a film that has both, the file's count.
function openMarks(text) {
  const [header, ...lines] = parseCsv(text.replace(/^\ufeff/, ""));
  const of = (line, name) => line[(header || []).indexOf(name)];
  if (!header || ["file", "mark", "verdict", "model"].some((name) => !header.includes(name))) {
    return complain("This is not a file of marks: open a marks.csv that such a page has saved.");
  }
  if (lines.some((line) => of(line, "model") !== report.model)) {
    return complain("These marks were made on verdicts of another detector, so they do not belong to this page.");
  }
  const bare = (text) => (new RegExp(`^'[${FORMULA}']`).test(text) ? text.slice(1) : text);
  const known = new Set(films.map((film) => film.name));
  let taken = 0;
  for (const line of lines) {
    const file = bare(of(line, "file")), mark = of(line, "mark");
    if (!known.has(file) || !(mark in SIGNS || mark === "") || !Object.values(GROUPS).includes(of(line, "verdict"))) continue;
    const number = (name) => (of(line, name) ? Number(of(line, name)) : null);
    marks.set(file, { mark, verdict: of(line, "verdict"), threshold: number("threshold"), rate: number("false_alarm_rate"), note: bare(of(line, "note") || "") });
    taken += 1;
  }
  keepMarks();
  if (chosen) showMarks(chosen);
  select();
  say(`${taken} marks opened`);
}

for (const button of document.querySelectorAll("[data-mark]")) {
  button.addEventListener("click", () => chosen && setMark(chosen, button.dataset.mark));
}
note.addEventListener("input", () => chosen && setNote(chosen, note.value));
at("marks").addEventListener("submit", (event) => {
  event.preventDefault();
  note.blur();
});
at("save").addEventListener("click", saveMarks);
at("open").addEventListener("click", () => at("file").click());
at("file").addEventListener("change", async () => {
  const [file] = at("file").files;
  if (file) openMarks(await file.text());
  at("file").value = "";
});
// Another window of the same report.
window.addEventListener("storage", (event) => {
  if (event.key !== KEY) return;
  marks = readMarks();
  if (chosen) showMarks(chosen);
  select();
});
