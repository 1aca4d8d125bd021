from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from afire.report.task_tables import (
    comparison_latex,
    comparison_markdown,
    result_page,
    show_comparison,
    show_results,
    write_page,
)
from afire.tasks.compare import Comparison, Entry, Pair
from afire.tasks.metrics import Difference, TTest
from afire.tasks.results import Estimate, Result
from tests.report.test_task_figures import LABELS, drawn


def complete(name: str = "run_1 & co") -> Result:
    result, _ = drawn(LABELS)
    return dataclasses.replace(
        result,
        name=name,
        data={"name": "pack", "hash": "d" * 64},
        weights={"name": "runs|x", "hash": "w" * 64, "report": "10 tensors"},
        notes=["label Hernia has 0 positive films"],
    )


def comparison() -> Comparison:
    first, second = complete("random"), complete("run_1 & co")
    better = Estimate(0.85, 0.02, 0.8, 0.9, [0.84, 0.86])
    second = dataclasses.replace(second, metrics={"auc": better})
    entries = [Entry(Path("a"), first, first.name), Entry(Path("b"), second, second.name)]
    pair = Pair("run_1 & co", "random", "auc", 0.05, Difference(0.05, -0.01, 0.1, 0.0004), TTest(2.0, 3.0, math.nan))
    return Comparison(1.0, entries, ["auc"], LABELS, [pair], ["a note"])


def test_the_page_says_what_was_measured_on_what(tmp_path: Path) -> None:
    page = result_page(complete(), ["roc.png"])
    for piece in (
        "run_1 & co",
        "0.800",
        "0.700 to 0.900",
        "wwwwwwwwwwww",
        "Pleural_Thickening",
        "seed-1",
        "![roc](roc.png)",
    ):
        assert piece in page, piece
    assert "runs\\|x" in page  # a bar would end the cell
    assert "label Hernia has 0 positive films" in page
    assert "Research software, not a medical device." in page and "nan" not in page
    write_page(tmp_path, complete(), [tmp_path / "roc.png", tmp_path / "roc.pdf"])
    assert "roc.pdf" not in (tmp_path / "result.md").read_text(encoding="utf-8")


def test_a_comparison_as_markdown() -> None:
    page = comparison_markdown([comparison()])
    assert "| run_1 & co | AUC | +0.050 | −0.010 to +0.100 | < 0.001 | – |" in page
    assert "| Mass | 0.800 ± 0.010 | 0.800 ± 0.010 |" in page
    assert "- a note" in page and "not a medical device" in page
    two = comparison_markdown([comparison(), dataclasses.replace(comparison(), fraction=0.1)])
    assert "## 10 % of the training labels" in two


def test_a_comparison_as_latex_escapes_and_marks_the_best() -> None:
    table = comparison_latex([comparison()])
    assert r"run\_1 \& co & $\mathbf{0.850} \pm 0.020$ & $<$ 0.001 & -- \\" in table
    assert r"random & $0.800 \pm 0.010$ & -- & -- \\" in table
    assert table.count(r"\begin{tabular}{lrrr}") == 1 == table.count(r"\bottomrule")


@pytest.mark.parametrize("several", [False, True])
def test_results_fit_a_narrow_terminal(several: bool) -> None:
    from rich.console import Console

    screen = Console(width=80, record=True)
    results = [complete(), dataclasses.replace(complete(), fraction=0.1)] if several else [complete()]
    show_results(screen, results)
    show_comparison(screen, comparison(), ["auc"])
    text = screen.export_text()
    assert "0.800" in text and "note: label Hernia" in text and "…" not in text
    assert ("labels used" in text) is several


def test_names_of_results_stay_readable_in_a_narrower_terminal() -> None:
    from rich.console import Console

    screen = Console(width=60, record=True)
    show_comparison(screen, comparison(), ["auc"])
    text = screen.export_text()
    assert text.count("run_1 & co") == 2 and "−0.010 to +0.100" in text
