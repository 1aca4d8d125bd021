"""The page of the benchmarks shows its results: nothing busy, missed or unmeasured goes unmarked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import page  # noqa: E402
import quickstart  # noqa: E402
from figures import Figure, Findings, Table, digits, write_number  # noqa: E402
from render import anchor, render  # noqa: E402
from sections import NAMES, SECTIONS  # noqa: E402

MACHINE = {
    "cpu": "A processor",
    "cores": 2,
    "memory_gb": 24,
    "threads": 2,
    "torch": "2.13.0",
    "numpy": "2.4.6",
    "python": "3.11.7",
    "system": "Linux x86_64",
}


def measured(*figures: Figure, **changes: Any) -> dict[str, Any]:
    table = Table("Some films", ["films", "films/s"], [["packed", "4,000"]])
    around = {"date": "2026-11-16 05:00 UTC", "commit": "abc123", "seconds": 12.3, "load": 0.1, "others": 0.02}
    return {**around, "machine": MACHINE, **Findings(figures, [table], ["A note."]).as_json(), **changes}


LOADER = Figure("packed / decoded", 37.52, "x", 20)


def test_a_page_says_figure_goal_machine_and_how_to_measure_again() -> None:
    text = render({"sections": {"loader": measured(LOADER)}})
    row = next(line for line in text.splitlines() if "packed / decoded" in line)
    assert "37.5 ×" in row and "at least 20 ×" in row and row.endswith("| met |")
    for words in ("A processor, 2 cores, 24 GB", "torch 2.13.0", "NumPy 2.4.6", "commit abc123, 2026-11-16"):
        assert words in text
    assert "Run it alone: `python benchmarks/loader.py`" in text and "A note. Measured in 12 s" in text
    assert "| packed | 4,000 |" in text
    assert "busy" not in text and "MISSED" not in text
    assert text.count("Not measured yet.") == len(SECTIONS) - 1


@pytest.mark.parametrize(
    ("figure", "marked"),
    [
        (Figure("a", 0.69, "share", 0.7), True),
        (Figure("a", 0.7, "share", 0.7), False),
        (Figure("a", 1.21, "share", 1.2, "at most"), True),
        (Figure("a", 1.2, "share", 1.2, "at most"), False),
        (Figure("a", 0.0, "count", 0, "at most"), False),
        (Figure("a", 0.001), False),
    ],
)
def test_a_missed_goal_is_marked(figure: Figure, marked: bool) -> None:
    assert ("**MISSED**" in render({"sections": {"step": measured(figure)}})) is marked


@pytest.mark.parametrize(
    ("changes", "warned"),
    [
        ({"others": 0.05, "load": 2.0}, False),  # the load of the section before it
        ({"others": 1.2}, True),
        ({"others": None, "load": 1.7}, True),
        ({"others": None, "load": 0.2}, False),
        ({"others": None, "load": None}, False),
    ],
)
def test_a_busy_machine_is_told(changes: dict[str, Any], warned: bool) -> None:
    text = render({"sections": {"loader": measured(LOADER, **changes)}})
    assert ("The machine was busy with other work during `loader`" in text) is warned


def test_sections_of_different_commits_are_listed_apart() -> None:
    text = render({"sections": {"losses": measured(LOADER), "loader": measured(LOADER, commit="def456")}})
    assert "- `losses`: A processor" in text and "- `loader`: A processor" in text and "commit def456" in text


def test_history_shows_before_and_after() -> None:
    entry = {"title": "A step", "text": "Copies.", "command": "python x.py", "where": "here"}
    entry |= {"columns": ["figure", "before", "after"], "rows": [["whole / bare", "1.40", "1.05"]]}
    text = render({"sections": {}}, [entry])
    assert (
        "## Profiles, before and after" in text and "| whole / bare | 1.40 | 1.05 |" in text and "`python x.py`" in text
    )
    assert "before and after" not in render({"sections": {}})


def test_numbers_keep_about_three_digits() -> None:
    assert [digits(value) for value in (0.8344, 2.914, 37.52, 1240.3)] == ["0.834", "2.91", "37.5", "1,240"]
    assert write_number(0.0045, "%") == "0.450 %" and write_number(0.7, "share", exact=True) == "0.7"


def test_only_some_sections_are_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results, written = tmp_path / "results.json", tmp_path / "page.md"
    results.write_text(
        json.dumps({"sections": {"startup": measured(LOADER), "losses": measured(LOADER)}}), encoding="utf-8"
    )
    asked: list[str] = []

    def measure(name: str, quick: bool) -> dict[str, Any]:
        asked.append(name)
        return measured(LOADER, commit="new")

    monkeypatch.setattr(page, "measure_section", measure)
    arguments = ["--only", "loader,losses", "--results", str(results), "--page", str(written)]
    assert page.main(arguments) == 0
    sections = json.loads(results.read_text(encoding="utf-8"))["sections"]
    assert asked == ["loader", "losses"] and list(sections) == ["losses", "loader", "startup"]
    assert [one["commit"] for one in sections.values()] == ["new", "new", "abc123"]
    assert written.read_text(encoding="utf-8") == page.render({"sections": sections}, page.read(page.HISTORY, []))


def test_a_section_that_fails_keeps_its_last_result_and_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results, written = tmp_path / "results.json", tmp_path / "page.md"
    results.write_text(json.dumps({"sections": {"losses": measured(LOADER)}}), encoding="utf-8")

    def measure(name: str, quick: bool) -> dict[str, Any]:
        if name == "losses":
            raise subprocess.CalledProcessError(1, ["python"])
        return measured(LOADER, commit="new")

    monkeypatch.setattr(page, "measure_section", measure)
    arguments = ["--only", "losses,loader", "--results", str(results), "--page", str(written)]
    assert page.main(arguments) == 1
    sections = json.loads(results.read_text(encoding="utf-8"))["sections"]
    assert sections["losses"]["commit"] == "abc123" and sections["loader"]["commit"] == "new"
    assert "failed: losses" in capsys.readouterr().err


def test_an_unknown_part_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        page.main(["--only", "loses"])
    assert ended.value.code == 2 and "loses is not a section" in capsys.readouterr().err


def test_a_quick_run_leaves_the_committed_page_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    committed = page.PAGE.read_bytes(), page.RESULTS.read_bytes()
    monkeypatch.setattr(page.tempfile, "mkdtemp", lambda prefix: str(tmp_path))
    monkeypatch.setattr(page, "measure_section", lambda name, quick: measured(LOADER))
    assert page.main(["--quick", "--only", "loader"]) == 0
    assert "its numbers mean nothing" in (tmp_path / "benchmarks.md").read_text(encoding="utf-8")
    assert committed == (page.PAGE.read_bytes(), page.RESULTS.read_bytes())


@pytest.mark.slow
def test_a_part_runs_in_a_process_of_its_own() -> None:
    found = page.measure_section("losses", quick=True)
    figures = Findings.from_json(found).figures
    assert len(figures) == 2 and all(figure.value > 0 for figure in figures)
    assert found["machine"]["torch"] and found["machine"]["memory_gb"] > 0 and found["commit"]
    assert found["seconds"] > 0


def test_every_part_has_its_script_and_its_anchor() -> None:
    for section in SECTIONS:
        assert "def measure(quick: bool = False) -> Findings:" in (
            ROOT / "benchmarks" / f"{section.name}.py"
        ).read_text(encoding="utf-8")
    assert len(set(NAMES)) == len(NAMES)
    assert anchor("`afire detect run` against FLOP/s, and more") == "afire-detect-run-against-flops-and-more"


def test_the_committed_page_is_that_of_the_committed_results() -> None:
    """After editing sections.py: ``python benchmarks/page.py --render``."""
    results = json.loads(page.RESULTS.read_text(encoding="utf-8"))
    history = json.loads(page.HISTORY.read_text(encoding="utf-8"))
    assert not results.get("quick"), "a quick run was committed"
    assert page.PAGE.read_text(encoding="utf-8") == render(results, history), "run python benchmarks/page.py --render"


def test_the_quickstart_takes_its_commands_from_the_readme_and_hides_paths() -> None:
    commands = quickstart.readme_commands((ROOT / "README.md").read_text(encoding="utf-8"))
    assert commands[0] == "pip install -c constraints.txt ." and any("afire pretrain" in one for one in commands)
    assert all("#" not in one for one in commands)
    steps = [
        quickstart.TimedStep("README", "/opt/bin/python3.11 -m venv own", 75.0),
        quickstart.TimedStep("README", "cp /a/b c", 2),
    ]
    page = quickstart.write_page(steps, "566 films of Shenzhen", "3.11.2")
    assert "| README | `python3 -m venv own` | 1:15 min |" in page and "| README | `cp b c` | 2.0 s |" in page
    assert "1:17 min in all" in page and "566 films" in page and "Python 3.11.2," in page


def test_a_quickstart_that_failed_continues_with_the_failed_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "films").mkdir()
    (tmp_path / "films" / "a.png").touch()
    failing, called = {"probe"}, []

    def step(where: str, command: str, place: Path, out: Path) -> quickstart.TimedStep:
        if command.startswith("afire") and command.split()[1] in failing:
            sys.exit("failed")
        (out / "own").mkdir(exist_ok=True)
        called.append(command)
        return quickstart.TimedStep(where, command, 1.0)

    monkeypatch.setattr(quickstart, "_step", step)
    with pytest.raises(SystemExit, match="failed"):
        quickstart.run(tmp_path / "films", "folder", tmp_path / "out", tests=True)
    before = len(called)
    failing.clear()
    timed = quickstart.run(tmp_path / "films", "folder", tmp_path / "out", tests=True)
    assert 0 < before < len(called) == len(set(called)) and [one.command for one in timed] == called
    assert (tmp_path / "out" / "own" / "new" / "a.png").exists()
