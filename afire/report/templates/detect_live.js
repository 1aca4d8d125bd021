// A live list: the service is asked for its newest films every few seconds, and the list is put in order again. The film
// that is looked at stays, and so do the rows in sight.
let liveEdition = "";

function followLive() {
  let told = null;
  window.afireLive = (answer) => {
    told = answer;
  };
  const ask = () => {
    if (document.hidden) return;
    told = null;
    loadScript(`films.js?after=${liveEdition}`, () => takeLive(told), () => (at("live").textContent = "the service does not answer; the list is as it was"));
  };
  orderBy("file", true);
  ask();
  setInterval(ask, 1000 * report.live.seconds);
  document.addEventListener("visibilitychange", ask);
}

function takeLive(told) {
  if (!told) return;
  if (told.run !== report.live.run) return location.reload(); // another service by now
  const waiting = Object.entries(told.waiting).filter(([, count]) => count).map(([state, count]) => `${thousands(count)} ${state}`);
  at("live").textContent = [`as of ${told.time}`, ...waiting].join(", ");
  if (told.films) replaceFilms(told);
  liveEdition = told.edition;
  document.documentElement.dataset.edition = told.edition;
  document.documentElement.dataset.ready = "yes";
}

function replaceFilms({ films: rows, regions }) {
  const before = new Map(films.map((film) => [film.number, film])), inSight = list.scrollTop;
  report.regions = regions;
  films.length = scores.length = 0;
  addFilms(rows);
  films.forEach((film, place) => {
    if (before.has(film.number)) films[place] = Object.assign(before.get(film.number), film);
  });
  const added = films.filter((film) => !before.has(film.number)).length;
  if (!films.includes(chosen)) chosen = null;
  update();
  if (inSight > 0) list.scrollTop = inSight + added * ROW; // what is in sight stays there
}
