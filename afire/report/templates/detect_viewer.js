// The chosen film: panes that show the same place of film, restored film and difference. Canvases are only drawn on,
// never read: pictures of a page opened from disk may be shown, and no script may look into them. So brightness and
// contrast are a filter over the canvas.
const panes = Array.from(document.querySelectorAll(".pane"), (figure) => ({
  figure,
  stage: figure.querySelector(".stage"),
  base: figure.querySelector(".base"),
  over: figure.querySelector(".over"),
  caption: figure.querySelector("figcaption"),
}));
const VIEWS = ["film", "overlay", "restored", "difference", "side"];
const MOST_ZOOM = 24, KEPT = 60; // pictures
const pictures = new Map(); // file -> image, the latest last
const opacity = at("opacity");
let view = "overlay", heated = true, drag = "move";
let place = { zoom: 1, x: 0.5, y: 0.5 }; // what is in the middle of every pane, in fractions of the film
let look = { width: 1, level: 0.5, inverted: false }; // of the grey values: black is level - width / 2
let pointed = null; // where the pointer is, in fractions of the film

function picture(file) {
  if (!file) return null;
  let image = pictures.get(file);
  if (image) pictures.delete(file);
  else {
    image = new Image();
    image.onload = image.onerror = drawSoon;
    image.src = file;
  }
  pictures.set(file, image);
  if (pictures.size > KEPT) pictures.delete(pictures.keys().next().value);
  return image;
}

const whole = (image) => image && image.complete && image.naturalWidth > 0;

// The film itself; an earlier version kept only the overlay of some films.
const filmOf = (film) => pictureOf(film, "film") || pictureOf(film, "overlay");

// What each pane shows: a name, its picture, whether grey values are windowed, whether heat lies over it.
function plan(film) {
  const base = { name: "film", file: filmOf(film), grey: true, heat: heated ? pictureOf(film, "heat") : "" };
  const others = [
    { name: "restored", file: pictureOf(film, "restored"), grey: true, heat: "" },
    { name: "difference", file: pictureOf(film, "difference"), grey: false, heat: "" },
  ].filter((one) => one.file);
  if (view === "side") return [base, ...others];
  return [others.find((one) => one.name === view) || base];
}

function showFilm(film) {
  place = { zoom: 1, x: 0.5, y: 0.5 };
  pointed = null;
  at("name").textContent = film.file;
  at("words").textContent = film.words;
  showVerdict(film);
  showMarks(film);
  for (const button of document.querySelectorAll("[data-view]")) {
    const kind = { film: "film", overlay: "heat", side: "restored" }[button.dataset.view] || button.dataset.view;
    button.disabled = !(kind === "film" ? filmOf(film) : pictureOf(film, kind));
  }
  const now = shown.indexOf(film);
  for (const neighbour of [shown[now + 1], shown[now - 1]]) if (neighbour) plan(neighbour).forEach((one) => picture(one.file));
  drawSoon();
}

function showVerdict(film) {
  const group = groupOf(film), numbers = at("numbers");
  numbers.textContent = film.status
    ? `${GROUPS[group]}: not scored`
    : `score ${scoreWords(film.score)}, ${GROUPS[group]}; above ${percentile(film.score).toFixed(1)} % of normals, p ${pValue(film.score).toFixed(4)}`;
  numbers.className = group;
}

function setView(next) {
  view = next;
  if (next === "film" || next === "overlay") heated = next === "overlay";
  drawSoon();
}

// Where a film of natural size lies in a pane, in pixels of the screen.
function frameOf(pane, size) {
  const across = pane.stage.clientWidth, down = pane.stage.clientHeight;
  const scale = Math.min(across / size.width, down / size.height) * place.zoom;
  const width = size.width * scale, height = size.height * scale;
  return { left: across / 2 - place.x * width, top: down / 2 - place.y * height, width, height };
}

// The film's proportions, from whichever picture has come: all have the same.
function sizeOf(film) {
  for (const kind of ["film", "overlay", "restored"]) {
    const image = pictures.get(pictureOf(film, kind));
    if (whole(image)) return { width: image.naturalWidth, height: image.naturalHeight };
  }
  return null;
}

const drawSoon = onceAFrame(draw);

function draw() {
  if (!chosen) return;
  const wanted = filmOf(chosen) ? plan(chosen) : [];
  picture(filmOf(chosen));
  const size = sizeOf(chosen);
  const failed = wanted.length && pictures.get(filmOf(chosen)).complete && !size;
  at("nothing").hidden = wanted.length > 0 && !failed;
  at("nothing").textContent = failed ? "The picture is missing: keep the folder pictures beside the page." : "No picture was drawn of this film.";
  panes.forEach((pane, number) => {
    pane.what = wanted[number];
    pane.figure.hidden = !pane.what || failed;
  });
  for (const pane of panes) if (pane.what && size) drawPane(pane, size);
  for (const button of document.querySelectorAll("[data-view]")) {
    const on = view === "film" || view === "overlay" ? (heated ? "overlay" : "film") : view;
    button.setAttribute("aria-pressed", String(button.dataset.view === on));
  }
  const differs = wanted.some((one) => one.name === "difference"), heat = wanted.some((one) => one.heat);
  at("opacity-row").hidden = at("heat-scale").hidden = !heat;
  at("difference-scale").hidden = !differs;
  setFilter();
  showNormal();
}

function fresh(canvas, stage) {
  const ratio = window.devicePixelRatio || 1;
  const width = Math.round(stage.clientWidth * ratio), height = Math.round(stage.clientHeight * ratio);
  if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, stage.clientWidth, stage.clientHeight);
  pen.imageSmoothingQuality = "high";
  return pen;
}

function drawPane(pane, size) {
  const { file, grey, heat, name } = pane.what;
  const frame = frameOf(pane, size), image = picture(file), warm = picture(heat);
  const pen = fresh(pane.base, pane.stage), top = fresh(pane.over, pane.stage);
  if (whole(image)) pen.drawImage(image, frame.left, frame.top, frame.width, frame.height);
  pane.base.style.filter = grey ? "url(#window)" : "none";
  if (whole(warm)) {
    top.globalAlpha = opacity.value / 100;
    top.drawImage(warm, frame.left, frame.top, frame.width, frame.height);
    top.globalAlpha = 1;
    if (chosen.x !== null) ring(top, frame.left + chosen.x * frame.width, frame.top + chosen.y * frame.height);
  }
  const box = normalBox(size);
  if (box && pointed) {
    top.strokeStyle = "#7db7f2";
    top.lineWidth = 1.5;
    top.strokeRect(frame.left + box.left * frame.width, frame.top + box.top * frame.height, box.width * frame.width, box.height * frame.height);
  }
  pane.caption.textContent = heat ? "film under its heat" : name;
  const zoom = place.zoom > 1 ? `, ${place.zoom.toFixed(1)} times enlarged` : "";
  pane.stage.setAttribute("aria-label", `${pane.caption.textContent} of ${chosen.file}${zoom}`);
}

function ring(pen, x, y) {
  for (const [colour, width] of [["#000", 3.5], ["#fff", 1.5]]) {
    pen.beginPath();
    pen.arc(x, y, 11, 0, 2 * Math.PI);
    pen.strokeStyle = colour;
    pen.lineWidth = width;
    pen.stroke();
  }
}

function setFilter() {
  const sign = look.inverted ? -1 : 1, slope = sign / look.width, intercept = 0.5 - (sign * look.level) / look.width;
  for (const channel of document.querySelectorAll("#window feComponentTransfer > *")) {
    channel.setAttribute("slope", slope.toFixed(4));
    channel.setAttribute("intercept", intercept.toFixed(4));
  }
  const plain = look.width === 1 && look.level === 0.5;
  at("window-words").textContent = plain ? "" : `window ${Math.round(100 * look.width)} %, level ${Math.round(100 * look.level)} %`;
  at("invert").setAttribute("aria-pressed", String(look.inverted));
}

const within = (value, low, high) => Math.min(Math.max(value, low), high);

function setLook(width, level) {
  look.width = within(width, 0.04, 3);
  look.level = within(level, -0.5, 1.5);
  drawSoon();
}

function moveTo(x, y) {
  place.x = within(x, 0, 1);
  place.y = within(y, 0, 1);
  drawSoon();
}

// Enlarge around a point of a pane, or its middle.
function zoomBy(factor, pane = panes[0], point = null) {
  const size = chosen && sizeOf(chosen);
  if (!size) return;
  const before = frameOf(pane, size);
  const zoom = within(place.zoom * factor, 1, MOST_ZOOM);
  const grown = zoom / place.zoom;
  place.zoom = zoom;
  if (zoom === 1) return moveTo(0.5, 0.5);
  if (!point) return drawSoon();
  const width = before.width * grown, height = before.height * grown;
  const x = (point.x - before.left) / before.width, y = (point.y - before.top) / before.height;
  moveTo(x - (point.x - pane.stage.clientWidth / 2) / width, y - (point.y - pane.stage.clientHeight / 2) / height);
}

function resetView() {
  place = { zoom: 1, x: 0.5, y: 0.5 };
  look = { width: 1, level: 0.5, inverted: false };
  drawSoon();
}

function setDrag(next) {
  drag = next;
  for (const button of document.querySelectorAll("[data-drag]")) button.setAttribute("aria-pressed", String(button.dataset.drag === drag));
}

function invert() {
  look.inverted = !look.inverted;
  drawSoon();
}

function setOpacity(value) {
  opacity.value = String(value);
  drawSoon();
}

function pointIn(pane, event) {
  const box = pane.stage.getBoundingClientRect();
  return { x: event.clientX - box.left, y: event.clientY - box.top };
}

// Dragging moves the film; with the right button, the Shift key or the tool for it, it sets the window: sideways its
// width, up and down its level.
function dragged(pane, held, event) {
  const across = event.clientX - held.x, down = event.clientY - held.y;
  if (held.sets) return setLook(held.look.width * 2 ** (across / 200), held.look.level + down / 400);
  const frame = frameOf(pane, held.size);
  moveTo(held.place.x - across / frame.width, held.place.y - down / frame.height);
}

for (const pane of panes) {
  let held = null;
  pane.stage.addEventListener("pointerdown", (event) => {
    const size = chosen && sizeOf(chosen);
    if (!size || event.button === 1) return;
    const sets = event.button === 2 || event.shiftKey || drag === "window";
    held = { x: event.clientX, y: event.clientY, sets, size, place: { ...place }, look: { ...look } };
    pane.stage.setPointerCapture(event.pointerId);
    pane.stage.classList.add("held");
  });
  pane.stage.addEventListener("pointermove", (event) => {
    if (held) return dragged(pane, held, event);
    const size = chosen && sizeOf(chosen);
    if (!size) return;
    const point = pointIn(pane, event), frame = frameOf(pane, size);
    pointed = { x: (point.x - frame.left) / frame.width, y: (point.y - frame.top) / frame.height };
    drawSoon();
  });
  const release = () => {
    held = null;
    pane.stage.classList.remove("held");
  };
  pane.stage.addEventListener("pointerup", release);
  pane.stage.addEventListener("pointercancel", release);
  pane.stage.addEventListener("pointerleave", () => {
    pointed = null;
    drawSoon();
  });
  pane.stage.addEventListener("contextmenu", (event) => event.preventDefault());
  pane.stage.addEventListener("dblclick", resetView);
  pane.stage.addEventListener("wheel", (event) => {
    event.preventDefault();
    zoomBy(2 ** (-within(event.deltaY, -240, 240) / 240), pane, pointIn(pane, event));
  }, { passive: false });
}
for (const button of document.querySelectorAll("[data-view]")) button.addEventListener("click", () => setView(button.dataset.view));
for (const button of document.querySelectorAll("[data-drag]")) button.addEventListener("click", () => setDrag(button.dataset.drag));
at("zoom-in").addEventListener("click", () => zoomBy(1.5));
at("zoom-out").addEventListener("click", () => zoomBy(1 / 1.5));
at("reset").addEventListener("click", resetView);
at("invert").addEventListener("click", invert);
opacity.addEventListener("input", drawSoon);
new ResizeObserver(drawSoon).observe(at("panes"));
