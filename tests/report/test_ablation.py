"""Pages of an ablation say what the table holds, in every format."""

from __future__ import annotations

import csv
import io
import math

import pytest

from afire.report.ablation import (
    ablation_csv,
    ablation_figure,
    ablation_json,
    ablation_latex,
    ablation_markdown,
    ordering_text,
    sections,
)
from afire.report.style import style
from afire.report.table import DISCLAIMER
from afire.studies.ablation_grid import Row, RowFile, known_rows
from afire.studies.ablation_table import MEASURES, AblationTable, Against, Ordering, TableRow
from afire.tasks.metrics import Difference
from afire.tasks.results import Estimate, estimate

KNOWN = known_rows()
FACTS = {"data": "films_1, 32 px, hash `abc`", "budget": "equal: 1 epochs, batch 8, in every row"}


def row(name: str, auc: float, against: bool = True) -> TableRow:
    measures: dict[str, Estimate] = {measure: estimate([auc - 0.01, auc + 0.01]) for measure in MEASURES}
    against_full = Against(-0.05, 0.0002, Difference(-0.05, -0.08, -0.02, 0.031))
    mine = Row(name, RowFile(title="100 % mine_1", note="a note"))  # type: ignore[call-arg]
    return TableRow(
        row=KNOWN.get(name, mine),
        seeds=[0, 1],
        measures=measures,
        scores={"gaussian": measures["detection"]},
        against=dict.fromkeys(MEASURES, against_full) if against else {},
        same_as_full=False,
        minutes=1.25,
    )


@pytest.fixture
def table() -> AblationTable:
    rows = [row("full", 0.9, against=False), row("no-category", 0.85), row("feature-contrast", 0.8), row("own", 0.7)]
    return AblationTable(rows, dict(FACTS), Ordering(3, 0.5, ["without category consistency"]), ["a note"])


def test_groups_open_with_the_full_method(table: AblationTable) -> None:
    groups = [(title, [row.row.name for row in rows]) for title, rows in sections(table)]
    assert groups == [
        ("Table 1 of the paper", ["full", "no-category"]),
        ("Table 4 of the paper", ["full", "feature-contrast"]),
        ("Other rows", ["full", "own"]),
    ]


def test_markdown(table: AblationTable) -> None:
    text = ablation_markdown(table, ["ablation.png"])
    line = next(line for line in text.splitlines() if line.startswith("| without category"))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[1] == "0.850 ± 0.014" and cells[4] == "87.7 / 79.8 / 78.4"
    assert cells[5:8] == ["−0.050", "< 0.001", "0.031"] and cells[-2:] == ["2", "1.2"]
    assert DISCLAIMER in text and "Caution" not in text and "![ablation.png](ablation.png)" in text


def test_a_caution_stands_before_every_number(table: AblationTable) -> None:
    table.facts["caution"] = "read on these_films."
    text = ablation_markdown(table)
    assert 0 < text.index("**Caution.** read on these_films.") < text.index("0.900")
    assert "Caution: read on these\\_films." in ablation_latex(table)


def test_latex_escapes_and_marks_the_best(table: AblationTable) -> None:
    text = ablation_latex(table)
    assert "100 \\% mine\\_1" in text and "films\\_1" in text
    assert text.count("\\mathbf{0.900}") == 3 * len(MEASURES)  # the full method, in each of three groups
    assert text.count("\\begin{tabular}") == text.count("\\end{tabular}") == 1
    columns = text.split("\\begin{tabular}{")[1].split("}")[0]
    rows = [line for line in text.splitlines() if line.endswith("\\\\") and "multicolumn" not in line]
    assert all(line.count(" & ") == len(columns) - 1 for line in rows)


def test_csv_and_json_hold_every_number(table: AblationTable) -> None:
    records = list(csv.DictReader(io.StringIO(ablation_csv(table))))
    assert [record["row"] for record in records] == ["full", "no-category", "feature-contrast", "own"]
    assert float(records[1]["auc_p_paired"]) == 0.031 and records[0]["auc_p_paired"] == ""
    record = ablation_json(table)
    assert record["rows"][1]["values"]["auc"] == pytest.approx([0.84, 0.86])
    assert record["rows"][0]["auc_low"] is None  # no bootstrap was drawn: not a number, so null
    assert record["ordering"]["spearman"] == 0.5


def test_the_sentence_on_order() -> None:
    assert "Every row" in ordering_text(Ordering(4, 1.0, []))
    assert "–" in ordering_text(Ordering(4, math.nan, []))
    assert "Not on the side" in ordering_text(Ordering(4, 0.1, ["a", "b"]))


def test_nothing_in_the_figure_lies_on_anything_else(table: AblationTable) -> None:
    with style():
        figure = ablation_figure(table)
        figure.canvas.draw()
        legend, words = figure.legends[0].get_window_extent(), [*figure.texts, figure._supxlabel]
        note = next(text for text in words if text is not None and text.get_text() == DISCLAIMER)
        boxes = [legend, note.get_window_extent(), *(axis.get_tightbbox() for axis in figure.axes)]
    overlaps = [(i, j) for i, a in enumerate(boxes) for j, b in enumerate(boxes) if i < j < 3 and a.overlaps(b)]
    assert overlaps == []
