"""The report in a browser, opened from disk: its list of films, its threshold, its keys and its policy."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from afire.detect.base import AnomalyDetector
from afire.detect.findings import Rule
from afire.report.detect_files import visible
from tests.browser import Browser
from tests.detect_page_parts import HOSTILE, MANY, chosen, fresh, in_browser, listed, report_of, shown

pytestmark = in_browser


def test_it_opens_from_disk_and_shows_the_first_film(opened: Browser) -> None:
    assert opened.problems() == [] and opened.run("location.protocol") == "file:"
    assert chosen(opened) == HOSTILE[0] and len(listed(opened)) == len(HOSTILE) + 2
    assert "\\u202egnp.exe\\u2066.png" in listed(opened)
    assert opened.run("document.querySelectorAll('script').length") == 2, "its data and its own; those of rows are gone"
    opened.press("1")
    opened.wait_for("document.querySelector('.stage').getAttribute('aria-label').startsWith('film of')")
    grey = shown(opened)
    middle = grey[grey.shape[0] // 2]
    left, right = np.flatnonzero(np.abs(middle - 60) < 8), np.flatnonzero(np.abs(middle - 190) < 8)
    assert len(left) > 50 and len(right) > 50 and left.max() < right.min()
    opened.wait_for("document.querySelector('.row.film .thumb').style.backgroundImage.includes('sheet-0000.jpg')")
    assert opened.problems() == []


INTRUDERS = """
window.refused = [];
document.addEventListener("securitypolicyviolation", (event) => refused.push(event.violatedDirective));
for (const [name, key, value] of [
  ["script", "textContent", "window.ran = true"], ["script", "src", "other.js"], ["img", "src", "https://example.org/a.png"],
]) {
  const made = document.createElement(name);
  made[key] = value;
  document.body.append(made);
}
fetch("https://example.org/").catch(() => 0);
"""


def test_the_policy_holds(opened: Browser) -> None:
    opened.run(INTRUDERS)
    opened.wait_for("refused.includes('connect-src') && refused.includes('img-src')")
    assert opened.run("refused.filter((one) => one === 'script-src-elem').length") == 2
    assert opened.run("window.ran") is None


def test_only_rows_in_sight_are_in_the_document(browser: Browser, many: Path) -> None:
    fresh(browser, many)
    assert browser.problems() == [] and browser.run("document.querySelector('#table').ariaRowCount") == str(MANY + 1)
    assert browser.run("document.querySelectorAll('.row.film').length") < 40
    assert len(report_of(many.read_text(encoding="utf-8"))["chunks"]) == 10
    browser.run("document.querySelector('#list').scrollTop = 72 * 12000")
    browser.settle()
    assert "ward/12003.png" in listed(browser) and browser.run("document.querySelectorAll('.row.film').length") < 40
    browser.press("End")
    assert chosen(browser) == "hand.png" and listed(browser)[-1] == "hand.png"
    browser.press("Home")
    assert chosen(browser) == "ward/00000.png" and listed(browser)[0] == "ward/00000.png"


WATCH_SHEETS = """
window.asked = new Set();
const note = (changes) => changes.forEach(({ target }) => asked.add(target.style.backgroundImage));
new MutationObserver(note).observe(document.querySelector("#spacer"), {
  subtree: true, attributes: true, attributeFilter: ["style"],
});
0
"""
SCROLL_FAST = """
new Promise((done) => {
  const list = document.querySelector("#list");
  let count = 0;
  const on = () => {
    list.scrollTop = 30000 * ++count;
    count < 40 ? requestAnimationFrame(on) : done(0);
  };
  on();
})
"""


def test_sheets_are_loaded_where_the_list_rests(browser: Browser, many: Path) -> None:
    fresh(browser, many)
    sheets = "new Set([...document.querySelectorAll('.thumb')].map((one) => one.style.backgroundImage).filter(Boolean))"
    browser.wait_for(f"{sheets}.size === 1")
    browser.run(WATCH_SHEETS)
    browser.run(SCROLL_FAST)
    assert browser.run("[...asked].filter(Boolean).length") <= 2, "none of the hundreds that were passed"
    browser.wait_for(f"{sheets}.size > 0")


def test_order(opened: Browser) -> None:
    first = listed(opened)
    opened.click("button[data-key=score]")
    assert listed(opened) == first[:8][::-1] + first[8:], "films without a score stay at the end"
    opened.click("button[data-key=p]")
    assert listed(opened) == first, "the smallest p-value is the highest score"
    opened.click("button[data-key=file]")
    assert listed(opened)[:2] != first[:2] and set(listed(opened)) == set(first)
    assert opened.run("document.querySelector('[aria-sort]').textContent").startswith("file")
    opened.press("t", "t")
    assert listed(opened) == first, "around to the scores again"


def test_filters(opened: Browser, detector: AnomalyDetector) -> None:
    whole = listed(opened)
    opened.click(".chip.alarm")
    assert listed(opened) == whole[3:] and opened.run("document.querySelector('.chip.alarm').ariaPressed") == "false"
    opened.press("c")
    assert listed(opened) == whole
    opened.press("/")
    opened.write("SCRIPT")
    opened.press("Escape")
    assert len(listed(opened)) == 3 and opened.text("#listed") == "3 of 10"
    opened.click("#filter-reset")
    opened.fill("#region", "1")
    assert listed(opened) == whole[1:6:2] and "left lower zone (3)" in opened.text("#region")
    opened.press("c", "l")
    opened.write(str(detector.threshold + 0.4))
    opened.press("Escape")
    assert listed(opened) == whole[:2], "from a score on"
    opened.press("c")
    opened.run("document.querySelector('#most').focus()")
    opened.write(str(detector.threshold - 1.9))
    assert listed(opened) == whole[6:8], "up to a score"


def test_the_threshold_recounts_and_says_its_rate(opened: Browser, rule: Rule, detector: AnomalyDetector) -> None:
    def said() -> tuple[int, float]:
        found = re.search(r"([\d,]+) of 8 films flagged; at most ([\d.]+) %", opened.text("#rate"))
        assert found
        return int(found[1]), float(found[2])

    def right(threshold: float) -> tuple[int, float]:
        flagged = sum(detector.threshold + (2 - number) * 0.5 >= threshold for number in range(8))
        return flagged, float(f"{100 * rule.calibration.p_values(threshold):.3g}")

    assert said() == right(detector.threshold) and said()[0] == 3
    opened.run("(() => { const n = document.querySelector('#threshold-number'); n.value = ''; n.focus(); })()")
    opened.write(f"{detector.threshold - 0.9:.6f}")
    assert said() == right(detector.threshold - 0.9) and opened.text(".chip.alarm b") == "4"
    below = opened.run("document.querySelector('.row.film.below').dataset.file")
    assert below == visible(HOSTILE[4]), "the line runs above the first film that is not flagged"
    opened.press("Escape", "r")
    assert said()[0] == 3 and opened.run("document.querySelector('#threshold-reset').hidden")
    opened.press("]", "]")
    moved = opened.run("Number(document.querySelector('#threshold-number').value)")
    assert moved > detector.threshold
    opened.press("{")
    assert opened.run("Number(document.querySelector('#threshold-number').value)") < detector.threshold
    box = opened.middle("#threshold")
    opened.drag(box, (-500, 0))
    assert said()[0] == 8 and opened.text(".chip.ok b") == "0", "all the way down"


def test_the_rate_is_the_calibrations_at_every_normal(opened: Browser, rule: Rule) -> None:
    """What the script computes is what Python does, ties and ends included."""
    scores = rule.calibration.normal_scores
    for threshold in (scores[0] - 1, scores[0], scores[len(scores) // 2], scores[-1], scores[-1] + 1):
        opened.run("(() => { const n = document.querySelector('#threshold-number'); n.value = ''; n.focus(); })()")
        opened.write(repr(float(threshold)))
        assert f"at most {float(f'{100 * rule.calibration.p_values(threshold):.3g}'):g} %" in opened.text("#rate")


def test_every_key_that_the_page_tells_of_works(opened: Browser) -> None:
    opened.press("?")
    assert opened.run("document.querySelector('#keys').open")
    told = opened.run("[...document.querySelectorAll('#key-list kbd')].map((key) => key.textContent)")
    opened.press("Escape")
    opened.wait_for("!document.querySelector('#keys').open")
    names = {"Page ↓": "PageDown", "Page ↑": "PageUp", "Esc": "Escape", "↓": "ArrowDown", "↑": "ArrowUp"}
    arrows = {"←": "ArrowLeft", "→": "ArrowRight", "↑": "ArrowUp", "↓": "ArrowDown"}
    opened.run("window.taken = []; document.addEventListener('keydown', (e) => taken.push(e.defaultPrevented)); 0")
    count = 0
    for sign in told:
        if sign in ("?", "s"):
            continue
        opened.run("document.activeElement.blur()")
        if sign.startswith("Shift "):
            key = sign.removeprefix("Shift ")
            opened.press(arrows.get(key, key), shift=True)
        else:
            for key in [sign] if sign in names else sign.split():
                opened.press(names.get(key, key))
                count += 1
            count -= 1
        count += 1
        assert opened.run("taken.at(-1)"), f"{sign} does nothing"
    assert count > 40 and opened.problems() == []


def test_keys_are_left_to_fields(opened: Browser) -> None:
    opened.press("/", "a", "d")
    assert opened.run("document.querySelector('#search').value") == "ad"
    assert opened.run("document.querySelectorAll('[data-mark][aria-pressed=true]').length") == 0


def test_it_can_be_used_without_seeing_it(opened: Browser) -> None:
    opened.press("j")
    said = opened.text("#said")
    assert said.startswith("2 of 10: ") and said.endswith(", flagged")
    active = opened.run("document.querySelector('#table').getAttribute('aria-activedescendant')")
    assert opened.run(f"document.querySelector('#{active}').dataset.file") == HOSTILE[1]
    unnamed = opened.run(
        "[...document.querySelectorAll('button, input, select, [role=img], [role=grid]')]"
        ".filter((one) => !one.closest('[hidden]'))"
        ".filter((one) => !(one.ariaLabel || one.textContent.trim() || one.closest('label'))).length"
    )
    assert unnamed == 0


def test_what_is_missing_is_said(browser: Browser, few: Path, tmp_path: Path) -> None:
    (tmp_path / "report.html").write_bytes(few.read_bytes())
    browser.open(tmp_path / "report.html", until="document.querySelector('#trouble')?.textContent")
    assert "keep the folders page and pictures beside this file" in browser.text("#trouble")
