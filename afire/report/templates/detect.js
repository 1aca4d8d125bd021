"use strict";
// Pictures and places by film number; everything shown as text is already in the page.
const films = JSON.parse(document.getElementById("films").textContent);
const body = document.querySelector("#scored tbody");
const viewer = document.getElementById("viewer");
const layers = { film: "film", overlay: "film", restored: "restored", difference: "difference" };
let view = "overlay";
let chosen = null;

function rows() {
  return body ? Array.from(body.querySelectorAll("tr.film")) : [];
}

function sortBy(key, descending) {
  const value = (row) => (key === "file" ? row.dataset.file : Number(row.dataset[key]));
  const sorted = rows().sort((a, b) => {
    const x = value(a), y = value(b);
    const order = key === "file" ? x.localeCompare(y) : x - y;
    return descending ? -order : order;
  });
  body.append(...sorted);
  drawThreshold(key, descending);
}

// The line between films that are flagged and those that are not, where the order is one of scores.
function drawThreshold(key, descending) {
  const line = document.getElementById("line");
  if (!line) return;
  const falling = key === "p" ? !descending : descending;
  const shown = rows().filter((row) => !row.hidden);
  const next = shown.findIndex((row) => (row.dataset.group === "ok") === falling);
  line.hidden = key === "file" || next <= 0;
  if (!line.hidden) shown[next].before(line);
}

let order = ["score", true];
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const key = button.dataset.key;
    const descending = order[0] === key ? !order[1] : key === "score" || key === "percentile";
    order = [key, descending];
    for (const other of document.querySelectorAll("th")) other.removeAttribute("aria-sort");
    button.closest("th").setAttribute("aria-sort", descending ? "descending" : "ascending");
    sortBy(key, descending);
  });
}

const search = document.getElementById("search");
const chips = Array.from(document.querySelectorAll(".chip"));
function filter() {
  const groups = new Set(chips.filter((chip) => chip.getAttribute("aria-pressed") === "true").map((c) => c.dataset.group));
  const words = search.value.toLowerCase();
  for (const row of document.querySelectorAll("tr.film")) {
    row.hidden = !groups.has(row.dataset.group) || !row.dataset.file.toLowerCase().includes(words);
  }
  for (const section of document.querySelectorAll("section[data-group]")) section.hidden = !groups.has(section.dataset.group);
  drawThreshold(order[0], order[1]);
}
for (const chip of chips) {
  chip.addEventListener("click", () => {
    chip.setAttribute("aria-pressed", String(chip.getAttribute("aria-pressed") !== "true"));
    filter();
  });
}
search.addEventListener("input", filter);

function show(row) {
  const pictures = films[row.dataset.id];
  if (!viewer || !pictures) return;
  if (chosen) chosen.classList.remove("chosen");
  chosen = row;
  row.classList.add("chosen");
  document.getElementById("name").textContent = row.dataset.file;
  document.getElementById("words").textContent = row.dataset.words;
  document.getElementById("numbers").textContent = row.dataset.score
    ? `score ${row.querySelector(".score").textContent}, above ${row.querySelector(".percentile").textContent} of normals, p ${row.querySelector(".p").textContent}`
    : "not scored";
  document.getElementById("numbers").classList.toggle("alarm", row.dataset.group === "alarm");
  draw();
}

function draw() {
  if (!chosen) return;
  const pictures = films[chosen.dataset.id];
  const has = { film: true, overlay: "heat" in pictures, restored: "restored" in pictures, difference: "difference" in pictures };
  const now = has[view] ? view : "film";
  for (const button of viewer.querySelectorAll(".views button")) {
    button.disabled = !has[button.dataset.view];
    button.setAttribute("aria-pressed", String(button.dataset.view === now));
  }
  document.getElementById("base").src = pictures[layers[now]];
  const heat = document.getElementById("heat");
  heat.hidden = now !== "overlay";
  if (!heat.hidden) heat.src = pictures.heat;
  const mark = document.getElementById("mark");
  mark.hidden = now !== "overlay" || pictures.x === null;
  if (!mark.hidden) {
    mark.style.left = `${100 * pictures.x}%`;
    mark.style.top = `${100 * pictures.y}%`;
  }
  document.getElementById("opacity-row").hidden = now !== "overlay";
  document.getElementById("heat-scale").hidden = now !== "overlay";
  document.getElementById("difference-scale").hidden = now !== "difference";
}

function step(by) {
  const shown = Array.from(document.querySelectorAll("tr.film")).filter((row) => row.offsetParent && films[row.dataset.id]);
  const next = shown[shown.indexOf(chosen) + by];
  if (!next) return;
  show(next);
  next.scrollIntoView({ block: "nearest" });
}

if (viewer) {
  for (const row of document.querySelectorAll("tr.film")) {
    if (films[row.dataset.id]) row.addEventListener("click", () => show(row));
  }
  for (const button of viewer.querySelectorAll(".views button")) {
    button.addEventListener("click", () => { view = button.dataset.view; draw(); });
  }
  const slider = document.getElementById("opacity");
  slider.addEventListener("input", () => { document.getElementById("heat").style.opacity = slider.value / 100; });
  document.addEventListener("keydown", (event) => {
    if (event.target === search) return;
    const views = ["film", "overlay", "restored", "difference"];
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      if (event.target === slider) return;
      event.preventDefault();
      step(event.key === "ArrowDown" ? 1 : -1);
    } else if ("1234".includes(event.key)) {
      view = views[Number(event.key) - 1];
      draw();
    }
  });
  const base = document.getElementById("base");
  base.addEventListener("load", () => {
    document.getElementById("stage").style.setProperty("--ratio", base.naturalWidth / base.naturalHeight);
  });
  const first = Array.from(document.querySelectorAll("tr.film")).find((row) => films[row.dataset.id]);
  if (first) show(first);
}
document.documentElement.dataset.ready = "yes";
