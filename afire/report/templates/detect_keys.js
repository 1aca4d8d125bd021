// Keys: one list makes them work and is what the page shows of them. Then the page begins.
const PAN = 0.08;
const nudge = (x, y) => moveTo(place.x + (x * PAN) / place.zoom, place.y + (y * PAN) / place.zoom);
const focus = (field) => () => field.focus();
const KEYS = [
  ["Films", [
    [["ArrowDown", "j"], "↓ j", "next film", () => step(1)],
    [["ArrowUp", "k"], "↑ k", "film before", () => step(-1)],
    [["PageDown"], "Page ↓", "ten further", () => step(10)],
    [["PageUp"], "Page ↑", "ten back", () => step(-10)],
    [["Home"], "Home", "first film", () => step(-films.length)],
    [["End"], "End", "last film", () => step(films.length)],
    [["t"], "t", "next order of the list", nextOrder],
  ]],
  ["Which films", [
    [["/"], "/", "search a file name", focus(filters.words)],
    [["g"], "g", "choose a region", focus(filters.region)],
    [["l"], "l", "lowest score that is listed", focus(filters.least)],
    [["m"], "m", "choose by mark", focus(filters.marked)],
    [["F1"], "Shift 1", "flagged films on and off", () => toggleGroup("alarm")],
    [["F2"], "Shift 2", "films that are not flagged", () => toggleGroup("ok")],
    [["F3"], "Shift 3", "films out of domain", () => toggleGroup("out")],
    [["F4"], "Shift 4", "unreadable files", () => toggleGroup("bad")],
    [["c"], "c", "list all again", clearFilters],
  ]],
  ["Threshold", [
    [["["], "[", "lower", () => moveThreshold(-1)],
    [["]"], "]", "higher", () => moveThreshold(1)],
    [["{"], "{", "ten steps lower", () => moveThreshold(-10)],
    [["}"], "}", "ten steps higher", () => moveThreshold(10)],
    [["r"], "r", "the report's own", () => setThreshold(own)],
  ]],
  ["Picture", [
    [["1"], "1", "film", () => setView("film")],
    [["2"], "2", "film under its heat", () => setView("overlay")],
    [["3"], "3", "restored film", () => setView("restored")],
    [["4"], "4", "difference", () => setView("difference")],
    [["5"], "5", "side by side", () => setView("side")],
    [["h"], "h", "heat on and off", () => { heated = !heated; drawSoon(); }],
    [["o"], "o", "less heat", () => setOpacity(Number(opacity.value) - 10)],
    [["O"], "O", "more heat", () => setOpacity(Number(opacity.value) + 10)],
    [["+", "="], "+", "larger (or the wheel)", () => zoomBy(1.5)],
    [["-"], "-", "smaller", () => zoomBy(1 / 1.5)],
    [["ShiftArrowLeft"], "Shift ←", "move left", () => nudge(-1, 0)],
    [["ShiftArrowRight"], "Shift →", "move right", () => nudge(1, 0)],
    [["ShiftArrowUp"], "Shift ↑", "move up", () => nudge(0, -1)],
    [["ShiftArrowDown"], "Shift ↓", "move down", () => nudge(0, 1)],
    [["w"], "w", "dragging sets the window, or moves (Shift or the right button do too)", () => setDrag(drag === "move" ? "window" : "move")],
    [[","], ",", "more contrast", () => setLook(look.width / 1.15, look.level)],
    [["."], ".", "less contrast", () => setLook(look.width * 1.15, look.level)],
    [["b"], "b", "brighter", () => setLook(look.width, look.level - 0.04)],
    [["B"], "B", "darker", () => setLook(look.width, look.level + 0.04)],
    [["i"], "i", "invert", invert],
    [["0"], "0", "whole film, window as it was", resetView],
  ]],
  ["Marks", [
    [["a"], "a", "agree with the verdict", () => chosen && setMark(chosen, "agree")],
    [["d"], "d", "disagree", () => chosen && setMark(chosen, "disagree")],
    [["u"], "u", "unsure", () => chosen && setMark(chosen, "unsure")],
    [["n"], "n", "write a note", focus(note)],
    [["s"], "s", "save the marks as marks.csv", saveMarks],
  ]],
  ["Page", [
    [["?"], "?", "these keys", () => at("keys").showModal()],
    [["Escape"], "Esc", "leave a field or a window", () => document.activeElement.blur()],
  ]],
];
const actions = new Map(KEYS.flatMap(([, keys]) => keys.flatMap(([codes, , , run]) => codes.map((code) => [code, run]))));

function nextOrder() {
  const orders = [["score", true], ["score", false], ["file", false], ["mark", true]];
  const now = orders.findIndex(([key, falling]) => key === order.key && falling === order.falling);
  orderBy(...orders[(now + 1) % orders.length]);
  say(`ordered by ${order.key}, ${order.falling ? "falling" : "rising"}`);
}

// What was pressed, whatever the keyboard: with Shift the row of digits has other signs, and arrows move the film.
function pressed(event) {
  if (event.shiftKey && /^Digit[1-4]$/.test(event.code)) return `F${event.code.slice(-1)}`;
  if (event.shiftKey && event.key.startsWith("Arrow")) return `Shift${event.key}`;
  return event.key;
}

function takesText(element) {
  return element.matches("select, textarea, input:not([type=range]):not([type=file])");
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  const key = pressed(event), target = event.target;
  if (/^F\d+$/.test(event.key)) return; // the browser's own
  if (takesText(target) && key !== "Escape") return;
  if (target.matches("input[type=range]") && /^(Shift)?(Arrow|Page|Home|End)/.test(key)) return;
  const run = actions.get(key);
  if (!run) return;
  event.preventDefault();
  run();
});

function writeKeys() {
  for (const [title, keys] of KEYS) {
    const section = document.createElement("section"), head = document.createElement("h3"), rows = document.createElement("dl");
    head.textContent = title;
    for (const [, sign, words] of keys) {
      const term = document.createElement("dt"), key = document.createElement("kbd"), meaning = document.createElement("dd");
      key.textContent = sign;
      meaning.textContent = words;
      term.append(key);
      rows.append(term, meaning);
    }
    section.append(head, rows);
    at("key-list").append(section);
  }
}

for (const name of ["about", "keys"]) {
  at(`open-${name}`).addEventListener("click", () => at(name).showModal());
  at(name).querySelector(".close").addEventListener("click", () => at(name).close());
}

// What changes when films have come.
function update() {
  setAxis();
  fillRegions();
  setThreshold(threshold);
  if (!chosen && films.length) choose(report.live ? films.reduce((a, b) => (a.number > b.number ? a : b)) : films[0], false);
}

writeKeys();
if (report.live) followLive();
else loadFilms(
  (rows) => {
    const first = films.length === 0;
    addFilms(rows);
    if (first) update();
  },
  () => {
    update();
    requestAnimationFrame(() => requestAnimationFrame(() => (document.documentElement.dataset.ready = "yes"))); // and drawn
  },
  (file) => complain(`${file} cannot be loaded: keep the folders page and pictures beside this file.`),
);
