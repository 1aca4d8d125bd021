"""The page of a reproduction: the paper's numbers and ours side by side, and what differs."""

from __future__ import annotations

from pathlib import Path

import pytest

from afire.files import read_json
from afire.report.reproduce_page import block_latex, block_table, percent_sd, write_reproduction
from afire.report.table import DISCLAIMER
from afire.studies.reproduce_collect import Block, Difference, Row, TargetReport
from afire.tasks.results import estimate


@pytest.fixture
def block() -> Block:
    rows = [
        Row("AFiRe_1", {"1": 0.632, "100": 0.832}, {"1": estimate([0.5, 0.6]), "100": estimate([0.7])}),
        Row("trivial", {}, {"1": estimate([0.55])}),
        Row("DINO", {"100": 0.81}),
    ]
    return Block("Fine-tuning", "Table 2 of the paper", {"1": "1 %", "100": "100 %"}, rows)


def test_both_numbers_stand_side_by_side(block: Block) -> None:
    lines = block_table(block).markdown().splitlines()
    assert lines[0] == "|  | 1 %, paper | 1 %, ours | 100 %, paper | 100 %, ours |"
    assert lines[2:] == [
        "| **AFiRe_1** | 63.2 | 55.0 ± 7.1 | 83.2 | 70.0 |",
        "| trivial | – | 55.0 | – | – |",
        "| DINO | – | – | 81.0 | – |",
    ]
    assert percent_sd(None) == percent_sd(estimate([float("nan")])) == "–"


def test_latex(block: Block) -> None:
    text = block_latex(block, "Table 2")
    assert "AFiRe\\_1 & 63.2 & 55.0 $\\pm$ 7.1 & 83.2 & 70.0 \\\\" in text and "DINO & -- & --" in text
    assert text.count("\\multicolumn{2}") == 2 and "1 \\%" in text


def test_the_whole_page(block: Block, tmp_path: Path) -> None:
    done = TargetReport(
        "table2", [block], [Difference("seeds", "3", "2 | 1")], [Difference("epochs", "800", "3")], notes=["a note"]
    )
    failed = TargetReport("table3", unfinished="step detect-0: no such film. (exit code 2)")
    page = write_reproduction(tmp_path, [done, failed], {"films": "drawn"}, ["afire pretrain", "afire probe"])
    text = page.read_text()
    assert "| seeds | 3 | 2 \\| 1 |" in text and "- a note" in text and DISCLAIMER in text
    assert "## The pre-training\n\nBehind table2:" in text and text.count("| epochs | 800 | 3 |") == 1
    assert "**Nothing here yet.** Step detect-0: no such film." in text
    assert "```\nafire pretrain\nafire probe\n```" in text
    assert (tmp_path / "tables" / "table2.tex").exists()
    record = read_json(tmp_path / "reproduce.json")
    assert record["targets"][0]["tables"][0]["rows"][0]["ours"]["100"]["sd"] is None
    assert record["targets"][1]["unfinished"].startswith("step detect-0")
