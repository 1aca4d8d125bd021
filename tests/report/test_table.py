"""The one table: the same rows in every format, each with what it would misread escaped."""

from __future__ import annotations

import csv
import io
import math

import pytest
from rich.console import Console

from afire.report.table import (
    Block,
    Cell,
    Column,
    Row,
    Table,
    best_mean,
    estimate_cell,
    facts_table,
    interval_text,
    latex_text,
    mean_sd,
    metric_word,
    number,
    p_text,
    records_table,
    short_word,
    signed,
    table_of,
)
from afire.tasks.results import Estimate, estimate

NOTHING = Estimate(math.nan, math.nan, math.nan, math.nan, [])


def shown(table: Table, width: int = 80, frame: bool = True) -> str:
    screen = Console(width=width, record=True)
    screen.print(table.console(frame))
    return screen.export_text()


@pytest.fixture
def table() -> Table:
    columns = [
        Column("result", text=True, latex="Result"),
        Column("average precision", short="AP", key="ap"),
        Column("p", latex="$p$"),
    ]
    first = [Row(["a|b_1", Cell("0.500 ± 0.010", r"$0.500 \pm 0.010$"), "< 0.001"], "bold")]
    return Table(columns, [Block(first, "50 % of it"), Block([Row(["[c]\nd", "−0.100", "–"], "italic")])])


def test_markdown(table: Table) -> None:
    assert table.markdown().splitlines() == [
        "| result | average precision | p |",
        "| --- | ---: | ---: |",
        "| **a\\|b_1** | 0.500 ± 0.010 | < 0.001 |",
        "| *[c] d* | −0.100 | – |",
    ]


def test_latex(table: Table) -> None:
    assert table.latex("A $p$.").splitlines() == [
        r"\begin{table}",
        r"  \centering\small",
        r"  \caption{A $p$.}",
        r"  \begin{tabular}{lrr}",
        r"  \toprule",
        r"  Result & AP & $p$ \\",
        r"  \midrule",
        r"  \multicolumn{3}{l}{\emph{50 \% of it}} \\",
        r"  a|b\_1 & $0.500 \pm 0.010$ & $<$ 0.001 \\",
        r"  \midrule",
        "  [c]\nd & $-0.100$ & -- \\\\".replace("\n", " "),
        r"  \bottomrule",
        r"  \end{tabular}",
        r"\end{table}",
    ]
    assert r"\centering" + "\n" in table.latex("", small=False)


def test_csv_is_read_back(table: Table) -> None:
    assert list(csv.reader(io.StringIO(table.csv()))) == [
        ["result", "ap", "p"],
        ["a|b_1", "0.500 ± 0.010", "< 0.001"],
        ["[c]\nd", "−0.100", "–"],
    ]
    rows = list(csv.DictReader(io.StringIO(records_table([{"a": 0.1 + 0.2}, {"b": None, "c": "x,y"}]).csv())))
    assert rows == [{"a": "0.30000000000000004", "b": "", "c": ""}, {"a": "", "b": "", "c": "x,y"}]


def test_the_terminal_shows_names_whole_and_takes_nothing_for_markup(table: Table) -> None:
    assert "[c]" in shown(table) and "AP" in shown(table) and "average" not in shown(table)
    long = table_of(["name", "value"], [["x" * 100, "0.123"]])
    assert shown(long, 40).count("x") == 100 and "0.123" in shown(long, 40)
    bare = shown(table, frame=False).splitlines()
    assert not bare[2].strip(), "blocks are apart"
    assert len(bare[0].rstrip()) < len(shown(table).splitlines()[0])


def test_only_takes_columns_by_key_in_the_order_asked_for(table: Table) -> None:
    assert table.only("p", "ap").csv().splitlines()[:2] == ["p,ap", "< 0.001,0.500 ± 0.010"]


def test_groups_of_columns() -> None:
    columns = [Column("", text=True), *(Column(side, group="1 %") for side in ("paper", "ours"))]
    both = table_of(columns, [["x", "1", "2"]])
    assert both.markdown().startswith("|  | 1 %, paper | 1 %, ours |")
    assert r"  & \multicolumn{2}{c}{1 \%} \\" + "\n" + r"   & paper & ours \\" in both.latex("")
    assert "1 %" in shown(both)


def test_facts_are_text() -> None:
    assert facts_table({"data": "a | b"}).markdown().splitlines()[1:] == ["| --- | --- |", "| data | a \\| b |"]


def test_the_best_mean_is_bold_in_latex() -> None:
    values = [estimate([0.8, 0.9]), estimate([0.7]), NOTHING]
    best = best_mean(values)
    assert best == pytest.approx(0.85) and math.isnan(best_mean([NOTHING]))
    assert [estimate_cell(value, best).latex for value in values] == [
        r"$\mathbf{0.850} \pm 0.071$",
        "$0.700$",
        "--",
    ]
    assert [estimate_cell(value).text for value in values] == ["0.850 ± 0.071", "0.700", "–"]


def test_numbers_are_written_one_way() -> None:
    value = Estimate(0.85349, 0.0041, 0.8, 0.9, [])
    assert mean_sd(value) == "0.853 ± 0.004" and interval_text(value) == "0.800 to 0.900"
    assert mean_sd(Estimate(0.5, math.nan, math.nan, math.nan, [])) == "0.500"
    assert number(math.nan) == "–" and interval_text(Estimate(0.5, 0.1, math.nan, math.nan, [])) == ""
    assert [p_text(p) for p in (0.0004, 0.03, math.nan)] == ["< 0.001", "0.030", "–"]
    assert [signed(value) for value in (0.0341, -0.0119, math.nan)] == ["+0.034", "−0.012", "–"]
    assert metric_word("average_precision") == "average precision" and short_word("average_precision") == "AP"


def test_latex_has_its_special_characters_escaped() -> None:
    assert latex_text("a_b%{c}~^\\") == r"a\_b\%\{c\}\textasciitilde{}\textasciicircum{}\textbackslash{}"
