// What the page knows: the report, its films, the threshold in use.
const report = JSON.parse(document.getElementById("report").textContent);
const at = (id) => document.getElementById(id);
const GROUPS = { alarm: "flagged", ok: "not flagged", out: "out of domain", bad: "unreadable" };
const normals = report.calibration; // scores of the calibration normals, rising
const films = []; // in the order of the report: highest score first, then those that have none
const scores = []; // of the scored films, falling
const own = report.threshold === null ? Infinity : report.threshold;
let threshold = own;

// What the page loads are scripts, because a page opened from disk may load nothing else; its nonce lets them run.
function loadScript(file, done, fail) {
  const script = document.createElement("script");
  script.nonce = report.nonce;
  script.src = file;
  const end = (then) => () => {
    script.remove();
    then();
  };
  script.onload = end(done);
  script.onerror = end(fail);
  document.head.append(script);
}

// Films come from scripts beside the page, one after the other, each of which calls afireFilms with its first row's
// number and its rows. A live list is fed in another way (detect_live.js).
function loadFilms(receive, done, fail) {
  window.afireFilms = (start, rows) => receive(rows);
  const load = (number) => {
    if (number === report.chunks.length) return done();
    loadScript(report.chunks[number], () => load(number + 1), () => fail(report.chunks[number]));
  };
  load(0);
}

// Rows are arrays, as afire/report/detect_files.py writes them.
function addFilms(rows) {
  for (const [number, file, status, score, region, words, x, y, view, kinds, name] of rows) {
    films.push({ at: films.length, number, file, name: name || file, status, score, region, words, x, y, view, kinds });
    if (status === 0) scores.push(score);
  }
}

// How many of the rising values are below x (or, with `reached`, not above it).
function countBelow(values, x, reached) {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < x || (reached && values[middle] === x)) low = middle + 1;
    else high = middle;
  }
  return low;
}

// The same as Calibration in afire/detect/normals.py.
function pValue(score) {
  return (1 + normals.length - countBelow(normals, score)) / (1 + normals.length);
}

function percentile(score) {
  return (50 * (countBelow(normals, score) + countBelow(normals, score, true))) / normals.length;
}

// How many films the threshold flags; scores fall.
function countFlagged() {
  let low = 0, high = scores.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (scores[middle] >= threshold) low = middle + 1;
    else high = middle;
  }
  return low;
}

function groupOf(film) {
  if (film.status) return film.status === 1 ? "out" : "bad";
  return film.score >= threshold ? "alarm" : "ok";
}

const thousands = (count) => count.toLocaleString("en");
const percent = (rate) => `${Number((100 * rate).toPrecision(3))} %`;
const scoreWords = (score) => (Math.abs(score) < 10000 ? score.toFixed(2) : score.toExponential(1)); // fits its column
const short = (score) => (Number.isFinite(score) ? Number(score.toPrecision(4)).toString() : "none");

function kindBit(kind) {
  return report.pictures.kinds.findIndex(([name]) => name === kind);
}

// The file of a film's picture, or nothing.
function pictureOf(film, kind) {
  const bit = kindBit(kind);
  if (!((film.kinds >> bit) & 1)) return "";
  const folder = String(Math.floor(film.number / report.pictures.per_folder)).padStart(3, "0");
  const number = String(film.number).padStart(6, "0");
  return `${report.pictures.folder}/${folder}/${number}-${kind}.${report.pictures.kinds[bit][1]}`;
}

// Calls that come many at a time are answered once, before the next picture of the screen.
function onceAFrame(work) {
  let waiting = false;
  return () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      work();
    });
  };
}

function say(words) {
  at("said").textContent = words;
}

function complain(words) {
  at("trouble").textContent = words;
  at("trouble").hidden = false;
}
