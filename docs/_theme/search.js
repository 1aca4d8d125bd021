// Words typed -> sections that hold all of them, headings first. The index is a script, so that it works from disk too.
(function () {
  "use strict";
  var query = document.getElementById("query"), answers = document.getElementById("answers"), most = 12;

  function score(entry, words) {
    var total = 0;
    for (var i = 0; i < words.length; i++) {
      var inTitle = entry.title.toLowerCase().indexOf(words[i]) >= 0;
      var inPage = entry.page.toLowerCase().indexOf(words[i]) >= 0;
      if (!inTitle && !inPage && entry.text.indexOf(words[i]) < 0) return 0;
      total += inTitle ? 10 : inPage ? 4 : 1;
    }
    return total;
  }

  function show() {
    var words = query.value.toLowerCase().split(/\s+/).filter(Boolean);
    answers.textContent = "";
    answers.hidden = !words.length;
    if (!words.length) return;
    var found = (window.afireIndex || []).map(function (entry) { return { entry: entry, score: score(entry, words) }; })
      .filter(function (one) { return one.score > 0; })
      .sort(function (a, b) { return b.score - a.score; }).slice(0, most);
    found.forEach(function (one) {
      var link = document.createElement("a"), item = document.createElement("li"), page = document.createElement("small");
      link.href = window.afireBase + one.entry.url;
      link.textContent = one.entry.title;
      page.textContent = one.entry.page;
      link.appendChild(page);
      item.appendChild(link);
      answers.appendChild(item);
    });
    if (!found.length) answers.appendChild(document.createElement("li")).textContent = "nothing found";
  }

  query.addEventListener("input", show);
  query.addEventListener("keydown", function (event) {
    var first = answers.querySelector("a");
    if (event.key === "Enter" && first) window.location.href = first.href;
    if (event.key === "Escape") { query.value = ""; show(); }
  });
  document.addEventListener("keydown", function (event) {
    if (event.key === "/" && document.activeElement !== query) { event.preventDefault(); query.focus(); }
  });
  document.addEventListener("click", function (event) {
    if (!event.target.closest(".search")) answers.hidden = true;
  });
})();
