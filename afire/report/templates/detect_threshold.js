// The threshold: where the films lie among the calibration normals, and what another threshold would flag.
const slider = at("threshold"), exact = at("threshold-number"), chart = at("chart");
const STEPS = 1000, BINS = 80, LABEL = 14; // pixels above the bars
const INSET = 8; // half a slider's thumb: chart and slider share their axis
let axis = { low: 0, high: 1 };

// Nearly all scores and the report's own threshold; the few beyond pile up at the ends.
function setAxis() {
  const rising = scores.slice().reverse();
  const ends = [];
  for (const values of [rising, normals]) {
    if (!values.length) continue;
    const edge = Math.floor(0.002 * values.length);
    ends.push(values[edge], values[values.length - 1 - edge]);
  }
  if (Number.isFinite(own) && Math.abs(own) < 1e300) ends.push(own);
  const low = Math.min(...ends), high = Math.max(...ends), room = 0.03 * Math.max(high - low, 1e-9);
  axis = ends.length ? { low: low - room, high: high + room } : { low: 0, high: 1 };
}

const share = (score) => Math.min(Math.max((score - axis.low) / (axis.high - axis.low), 0), 1);

function setThreshold(score, from) {
  threshold = score;
  if (from !== slider) slider.value = String(Math.round(STEPS * share(score)));
  if (from !== exact) exact.value = Number.isFinite(score) ? short(score) : "";
  at("threshold-reset").hidden = threshold === own;
  updateThreshold();
}

const updateThreshold = onceAFrame(() => {
  const flagged = countFlagged(), rate = pValue(threshold);
  const words = Number.isFinite(threshold)
    ? `${thousands(flagged)} of ${thousands(scores.length)} films flagged; at most ${percent(rate)} of normal films score as high`
    : `no film is flagged: ${thousands(normals.length)} calibration normals are too few for the rate asked for`;
  at("rate").textContent = words;
  slider.setAttribute("aria-valuetext", `score ${short(threshold)}: ${words}`);
  countGroups();
  drawChart();
  select();
  if (chosen) showVerdict(chosen);
});

function moveThreshold(steps) {
  const now = Number.isFinite(threshold) ? threshold : axis.high;
  setThreshold(now + (steps * (axis.high - axis.low)) / STEPS);
  say(at("rate").textContent);
}

function countBins(values, part) {
  const bins = new Array(BINS).fill(0);
  for (const value of values) if (!part || part(value)) bins[Math.min(Math.floor(BINS * share(value)), BINS - 1)] += 1;
  return bins;
}

function drawChart() {
  const ratio = window.devicePixelRatio || 1, width = chart.clientWidth, height = chart.clientHeight;
  if (!width) return;
  chart.width = Math.round(width * ratio);
  chart.height = Math.round(height * ratio);
  const pen = chart.getContext("2d"), colours = getComputedStyle(document.documentElement);
  const colour = (name) => colours.getPropertyValue(name);
  pen.scale(ratio, ratio);
  const line = Math.round(0.5 * (height - 16)), across = width - 2 * INSET, step = across / BINS;
  const bars = (bins, top, up, name) => {
    pen.fillStyle = colour(name);
    bins.forEach((count, bin) => {
      const tall = count ? Math.max(1.5, (count / top) * (line - LABEL)) : 0;
      pen.fillRect(INSET + bin * step, up ? line - tall : line + 1, Math.max(step - 1, 1), tall);
    });
  };
  const ofNormals = countBins(normals), ofFilms = countBins(scores);
  bars(ofNormals, Math.max(...ofNormals, 1), true, "--bars");
  const tallest = Math.max(...ofFilms, 1);
  bars(ofFilms, tallest, false, "--ok");
  bars(countBins(scores, (score) => score >= threshold), tallest, false, "--alarm");
  pen.fillStyle = colour("--soft");
  pen.fillRect(INSET, line, across, 1);
  drawTicks(pen, height, across);
  pen.textAlign = "left";
  pen.fillText(`${thousands(normals.length)} calibration normals`, INSET, 10);
  pen.fillText("these films", INSET, height - 16);
  pen.fillStyle = colour("--ink");
  if (Number.isFinite(threshold)) pen.fillRect(INSET + share(threshold) * across - 0.75, 2, 1.5, height - 16);
}

function drawTicks(pen, height, across) {
  const span = axis.high - axis.low, power = 10 ** Math.floor(Math.log10(span / 3));
  const step = power * [1, 2, 5, 10].find((factor) => span / (power * factor) <= 8);
  pen.font = "11px system-ui, sans-serif";
  pen.textAlign = "center";
  for (let tick = Math.ceil(axis.low / step) * step; tick < axis.high; tick += step) {
    pen.fillText(Number(tick.toPrecision(6)).toString(), INSET + share(tick) * across, height - 2);
  }
}

slider.addEventListener("input", () => {
  setThreshold(axis.low + (Number(slider.value) / STEPS) * (axis.high - axis.low), slider);
});
exact.addEventListener("input", () => {
  if (!Number.isNaN(exact.valueAsNumber)) setThreshold(exact.valueAsNumber, exact);
});
at("threshold-reset").addEventListener("click", () => setThreshold(own));
new ResizeObserver(onceAFrame(drawChart)).observe(chart);
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawChart);
