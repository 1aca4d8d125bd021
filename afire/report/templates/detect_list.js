// The list: which films, in which order; only the rows in sight are in the document.
const ROW = 72; // pixels
const SPARE = 4; // rows above and below what is in sight
const TALLEST = 8e6; // pixels: browsers end somewhere above; a longer list scrolls faster instead
const table = at("table"), list = at("list"), spacer = at("spacer");
const chips = Array.from(document.querySelectorAll(".chip"));
const filters = { words: at("search"), region: at("region"), least: at("least"), most: at("most"), marked: at("marked") };
const names = new Intl.Collator("en", { numeric: true });
let shown = []; // films that are listed, in order
let chosen = null;
let order = { key: "score", falling: true };
const pool = []; // row elements, each used for every pool.length-th row
let edition = 0; // of what rows show beside the film: threshold, marks, choice

function listed(film, groups, words, least, most) {
  if (!groups.has(groupOf(film))) return false;
  if (words && !film.file.toLowerCase().includes(words)) return false;
  if (filters.region.value !== "" && film.region !== Number(filters.region.value)) return false;
  if (least !== null && !(film.score !== null && film.score >= least)) return false;
  if (most !== null && !(film.score !== null && film.score <= most)) return false;
  return fitsMark(film, filters.marked.value);
}

const numberIn = (field) => (field.value === "" || Number.isNaN(field.valueAsNumber) ? null : field.valueAsNumber);

function select() {
  const groups = new Set(chips.filter((chip) => chip.getAttribute("aria-pressed") === "true").map((chip) => chip.dataset.group));
  const words = filters.words.value.toLowerCase(), least = numberIn(filters.least), most = numberIn(filters.most);
  shown = films.filter((film) => listed(film, groups, words, least, most));
  sort();
  const all = shown.length === films.length;
  at("listed").textContent = all ? `${thousands(films.length)} films` : `${thousands(shown.length)} of ${thousands(films.length)}`;
  at("filter-reset").hidden = all;
  table.setAttribute("aria-rowcount", String(shown.length + 1));
  refresh();
}

// Films without a score stay at the end, whatever the order.
function sort() {
  const { key, falling } = order;
  const sign = falling ? -1 : 1;
  const compare = {
    file: (a, b) => sign * (report.live ? a.number - b.number : names.compare(a.file, b.file)),
    score: (a, b) => sign * (a.score - b.score),
    p: (a, b) => -sign * (a.score - b.score),
    mark: (a, b) => sign * names.compare(markOf(a), markOf(b)),
  }[key];
  const scored = (film) => (key === "file" || key === "mark" ? 0 : film.status);
  if (key === "score" && falling) return; // the order they came in
  shown.sort((a, b) => scored(a) - scored(b) || (scored(a) ? 0 : compare(a, b)) || a.at - b.at);
}

function orderBy(key, falling) {
  order = { key, falling };
  for (const head of table.querySelectorAll("[role=columnheader]")) head.removeAttribute("aria-sort");
  const head = table.querySelector(`button[data-key=${key}]`).closest("[role=columnheader]");
  head.setAttribute("aria-sort", falling ? "descending" : "ascending");
  list.scrollTop = 0;
  select();
}

// How far the list is scrolled in pixels of rows, and how many of these one pixel of the scroll bar is.
function scrolled() {
  const whole = shown.length * ROW, tall = Math.min(whole, TALLEST), room = list.clientHeight;
  const factor = whole > tall ? (whole - room) / (tall - room) : 1;
  return { whole, tall, factor, top: list.scrollTop * factor };
}

function paintRows() {
  const { tall, top } = scrolled();
  spacer.style.height = `${tall}px`;
  const count = Math.ceil(list.clientHeight / ROW) + 2 * SPARE;
  while (pool.length < count) pool.push(makeRow());
  const first = Math.max(0, Math.floor(top / ROW) - SPARE);
  const used = new Set();
  for (let number = first; number < Math.min(first + count, shown.length); number++) {
    const row = pool[number % pool.length];
    used.add(row);
    fillRow(row, shown[number], number);
    row.element.style.transform = `translateY(${number * ROW - top + list.scrollTop}px)`;
  }
  for (const row of pool) {
    row.element.hidden = !used.has(row);
    if (row.element.hidden) row.film = null;
  }
  const active = pool.find((row) => row.film && row.film === chosen);
  if (active) table.setAttribute("aria-activedescendant", active.element.id);
  else table.removeAttribute("aria-activedescendant");
  showThumbs();
}

function makeRow() {
  const cell = (name) => {
    const element = document.createElement("div");
    element.className = name;
    element.setAttribute("role", "gridcell");
    return element;
  };
  const element = document.createElement("div");
  element.className = "row film";
  element.id = `row-${pool.length}`;
  element.setAttribute("role", "row");
  const row = { element, film: null, edition: -1, thumb: cell("thumb"), text: cell("text"), score: cell("number"), p: cell("number"), mark: cell("mark") };
  row.name = document.createElement("bdi");
  row.words = document.createElement("div");
  row.words.className = "soft";
  row.text.append(row.name, row.words);
  element.append(row.thumb, row.text, row.score, row.p, row.mark);
  element.addEventListener("click", () => row.film && choose(row.film));
  spacer.append(element);
  return row;
}

function fillRow(row, film, number) {
  const first = isFirstBelow(number);
  if (row.film === film && row.edition === edition && row.first === first) return;
  const group = groupOf(film), scored = film.status === 0;
  if (row.film !== film) row.thumb.style.backgroundImage = "";
  Object.assign(row, { film, edition, first });
  row.element.className = `row film ${group}${film === chosen ? " chosen" : ""}${first ? " below" : ""}`;
  row.element.dataset.group = group;
  row.element.dataset.file = film.file;
  row.element.dataset.line = first ? `threshold ${short(threshold)}` : "";
  row.element.setAttribute("aria-rowindex", String(number + 2));
  row.element.setAttribute("aria-selected", String(film === chosen));
  row.name.textContent = row.name.title = film.file;
  row.words.textContent = row.words.title = [film.view, film.words].filter(Boolean).join(": ");
  row.score.textContent = scored ? scoreWords(film.score) : GROUPS[group];
  row.score.classList.toggle("badge", !scored);
  row.p.textContent = scored ? pValue(film.score).toFixed(4) : "";
  showMark(row.mark, film);
}

// Whether the threshold runs above this row: only where the order is one of scores.
function isFirstBelow(number) {
  if (order.key === "file" || order.key === "mark" || number === 0) return false;
  const [before, here] = [groupOf(shown[number - 1]), groupOf(shown[number])];
  return before !== here && ["alarm", "ok"].includes(before) && ["alarm", "ok"].includes(here);
}

// Sheets are asked for when the list has come to rest: a fast scroll passes hundreds.
let resting = 0;
const loaded = new Set();
function showThumbs() {
  for (const row of pool) if (row.film && loaded.has(sheetOf(row.film))) showThumb(row);
  clearTimeout(resting);
  resting = setTimeout(() => {
    for (const row of pool) {
      if (!row.film) continue;
      loaded.add(sheetOf(row.film));
      showThumb(row);
    }
  }, 90);
}

const sheetOf = (film) => Math.floor(film.at / report.sheets.across ** 2);

function showThumb(row) {
  if (report.live) return showLiveThumb(row);
  const { files, thumb, across } = report.sheets;
  const file = files[sheetOf(row.film)];
  if (!file || !row.film.kinds || row.thumb.style.backgroundImage) return;
  const place = row.film.at % across ** 2, side = 64, share = side / thumb;
  row.thumb.style.backgroundImage = `url("${file}")`;
  row.thumb.style.backgroundSize = `${across * thumb * share}px auto`;
  row.thumb.style.backgroundPosition = `${-(place % across) * side}px ${-Math.floor(place / across) * side}px`;
}

function showLiveThumb(row) {
  if (!row.film.kinds || row.thumb.style.backgroundImage) return;
  row.thumb.style.backgroundImage = `url("thumbs/${row.film.number}.jpg")`;
  row.thumb.style.backgroundSize = "contain";
  row.thumb.style.backgroundPosition = "center";
}

const refresh = onceAFrame(() => {
  edition += 1;
  paintRows();
});

function choose(film, announce = true) {
  chosen = film;
  showFilm(film);
  refresh();
  if (announce) say(`${shown.indexOf(film) + 1} of ${shown.length}: ${film.file}, ${GROUPS[groupOf(film)]}`);
}

function step(by) {
  const now = shown.indexOf(chosen);
  const next = Math.min(Math.max(now < 0 ? 0 : now + by, 0), shown.length - 1);
  if (!shown.length || next === now) return;
  choose(shown[next]);
  bringIntoSight(next);
}

function bringIntoSight(number) {
  const { factor, top } = scrolled();
  const room = list.clientHeight;
  const wanted = Math.min(Math.max(top, (number + 1) * ROW - room), number * ROW);
  if (wanted !== top) list.scrollTop = wanted / factor;
}

function countGroups() {
  const flagged = countFlagged();
  const counts = { alarm: flagged, ok: scores.length - flagged, out: 0, bad: 0 };
  for (const film of films.slice(scores.length)) counts[groupOf(film)] += 1;
  for (const chip of chips) chip.querySelector("b").textContent = thousands(counts[chip.dataset.group]);
}

function fillRegions() {
  const counts = new Map();
  for (const film of films) if (!film.status) counts.set(film.region, (counts.get(film.region) || 0) + 1);
  const kept = filters.region.value;
  filters.region.length = 1;
  report.regions.forEach((words, number) => {
    filters.region.add(new Option(`${words} (${thousands(counts.get(number) || 0)})`, String(number)));
  });
  filters.region.value = kept;
}

function clearFilters() {
  for (const field of Object.values(filters)) field.value = "";
  for (const chip of chips) chip.setAttribute("aria-pressed", "true");
  select();
}

function toggleGroup(group) {
  const chip = chips.find((one) => one.dataset.group === group);
  chip.setAttribute("aria-pressed", String(chip.getAttribute("aria-pressed") !== "true"));
  select();
}

for (const chip of chips) chip.addEventListener("click", () => toggleGroup(chip.dataset.group));
for (const field of Object.values(filters)) field.addEventListener("input", select);
at("filter-reset").addEventListener("click", clearFilters);
for (const button of table.querySelectorAll("button[data-key]")) {
  button.addEventListener("click", () => {
    const { key } = button.dataset;
    orderBy(key, order.key === key ? !order.falling : key === "score" || key === "mark");
  });
}
list.addEventListener("scroll", onceAFrame(paintRows), { passive: true });
new ResizeObserver(onceAFrame(paintRows)).observe(list);
