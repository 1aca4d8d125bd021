// What is normal at a place: a piece of the film beside the same piece of normal films, two places wide and inside the
// film, as afire/detect/atlas.py cuts them. Without a pointer it is the most deviating place.
const normalBoxSide = 2 / report.places; // of the square that the networks saw
const meanFilm = picture(report.normal.mean), patchSheet = picture(report.normal.patches);
const PATCH_SIDE = 64; // pixels on the screen: film, mean and four pieces fit beside each other
const cards = [];

// The film as the networks saw it is square; how a film's fractions become those of the square.
function toSquare(size) {
  const side = report.fit === "letterbox" ? Math.max(size.width, size.height) : Math.min(size.width, size.height);
  const across = report.fit === "squash" ? 1 : size.width / side, down = report.fit === "squash" ? 1 : size.height / side;
  return { across, down };
}

// The position that is pointed at, by row and column of the places; null beside the film.
function placeAt(size) {
  const point = pointed || (chosen.x === null ? null : chosen);
  if (!point || point.x < 0 || point.x > 1 || point.y < 0 || point.y > 1) return null;
  const { across, down } = toSquare(size);
  const x = 0.5 + (point.x - 0.5) * across, y = 0.5 + (point.y - 0.5) * down;
  if (x < 0 || x > 1 || y < 0 || y > 1) return null;
  const cell = (value) => Math.min(Math.floor(value * report.places), report.places - 1);
  return { row: cell(y), column: cell(x) };
}

// Where its piece begins, in fractions of the square.
const begins = (cell) => within((cell + 0.5) / report.places - normalBoxSide / 2, 0, 1 - normalBoxSide);

// The piece as a box in fractions of the film.
function normalBox(size) {
  const found = report.normal.mean && placeAt(size);
  if (!found) return null;
  const { across, down } = toSquare(size);
  const left = begins(found.column), top = begins(found.row);
  return { left: 0.5 + (left - 0.5) / across, top: 0.5 + (top - 0.5) / down, width: normalBoxSide / across, height: normalBoxSide / down };
}

function makeCard(words) {
  const figure = document.createElement("figure"), canvas = document.createElement("canvas"), caption = document.createElement("figcaption");
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", words);
  canvas.style.filter = "url(#window)";
  caption.textContent = words;
  figure.append(canvas, caption);
  at("patches").append(figure);
  cards.push(canvas);
}

// Which of the kept pieces are closest to a film, as afire/report/detect_files.py writes it: a digit for each that is
// shown, place by place. Told by scripts beside the page, loaded with the first of their films that is looked at.
const NEAR_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz-_";
const near = new Map(), nearAsked = new Set(); // by row, or in a live list by number
const nearKey = (film) => (report.live ? film.number : film.at);
window.afireNear = (start, texts) => {
  texts.forEach((text, place) => near.set(start + place, text));
  drawSoon();
};

function askNear(film) {
  const file = report.live ? `near.js?film=${film.number}` : report.normal.near[Math.floor(film.at / report.normal.per_file)];
  if (!file || nearAsked.has(file)) return;
  nearAsked.add(file);
  loadScript(file, () => 0, () => 0);
}

// The pieces to show of a place, closest first; or the most typical ones, where nothing is known.
function piecesAt(row, column) {
  const { kept, shown } = report.normal, first = (row * report.places + column) * shown;
  const digits = (near.get(nearKey(chosen)) || "").slice(first, first + shown);
  const pieces = Array.from({ length: shown }, (_, number) => (digits ? NEAR_DIGITS.indexOf(digits[number]) : number));
  if (!digits) askNear(chosen);
  const words = digits ? (kept > shown ? `the ${shown} closest of ${kept} pieces kept` : "the pieces kept, closest first") : "the pieces kept, most typical first";
  return { pieces, words: kept ? `${words}.` : "what is typical; no pieces of single films were kept." };
}

function showNormal() {
  const size = chosen && sizeOf(chosen), box = size && normalBox(size);
  at("normal").hidden = !report.normal.mean || !size;
  if (!size || !report.normal.mean) return;
  at("patches").classList.toggle("none", !box);
  if (!box) return void (at("normal-words").textContent = "Point at a place of the film to see what is normal there.");
  const { row, column } = placeAt(size), film = picture(filmOf(chosen));
  const tall = report.fit === "squash" ? within((PATCH_SIDE * size.height) / size.width, 50, 120) : PATCH_SIDE;
  const piece = (canvas, image, left, top, width, height) => {
    const ratio = window.devicePixelRatio || 1;
    Object.assign(canvas, { width: Math.round(PATCH_SIDE * ratio), height: Math.round(tall * ratio) });
    canvas.style.height = `${tall}px`;
    const pen = canvas.getContext("2d");
    pen.imageSmoothingQuality = "high";
    if (whole(image)) pen.drawImage(image, left, top, width, height, 0, 0, canvas.width, canvas.height);
  };
  piece(cards[0], film, box.left * size.width, box.top * size.height, box.width * size.width, box.height * size.height);
  const side = meanFilm.naturalWidth;
  piece(cards[1], meanFilm, begins(column) * side, begins(row) * side, normalBoxSide * side, normalBoxSide * side);
  const cell = whole(patchSheet) ? patchSheet.naturalHeight / report.places : 0;
  const { pieces, words } = piecesAt(row, column);
  pieces.forEach((number, place) => {
    piece(cards[2 + place], patchSheet, (column * report.normal.kept + number) * cell, row * cell, cell, cell);
  });
  at("normal-words").textContent = `${pointed ? "At the pointer" : "At the most deviating place; point at another"}: ${words}`;
}

if (report.normal.mean) {
  makeCard("this film");
  makeCard("normal mean");
  for (let number = 0; number < report.normal.shown; number++) makeCard("normal film");
}
