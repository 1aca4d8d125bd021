"""``afire compare``: results side by side, with the question whether the difference is one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from afire.cli.options import Quiet, Verbose

if TYPE_CHECKING:
    from afire.tasks.compare import Comparison


def compare(
    results: Annotated[
        list[Path], typer.Argument(help="Folders of results; the first is what the others are compared with.")
    ],
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for comparison.md, comparison.tex, figures.")
    ] = None,
    metrics: Annotated[str | None, typer.Option(help="Metrics, separated by commas. Default: all shared ones.")] = None,
    allow_different_splits: Annotated[
        bool, typer.Option("--allow-different-splits", help="Compare although the films differ.")
    ] = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Compare results: means and sds, paired bootstrap over patients, t-test over runs.

    Example: [cyan]afire compare results/random results/afire --out tables[/cyan]
    """
    from afire.tasks.compare import compare as compare_results

    wanted = [word.strip() for word in metrics.split(",")] if metrics else None
    found = compare_results(results, metrics=wanted, allow_different_splits=allow_different_splits)
    if not quiet:
        for one in found:
            _show(one, wanted or one.metrics[:1], len(found) > 1)
    if out is not None:
        _write(found, out)
        if not quiet:
            from afire.cli.options import console

            console().print(str(out), soft_wrap=True, markup=False, highlight=False)


def _show(one: Comparison, metrics: list[str], several: bool) -> None:
    """All means; differences in ``metrics`` only, because all of them are many and stand in comparison.md."""
    from rich.text import Text

    from afire.cli.options import console
    from afire.report.task_console import comparison_tables

    screen = console()
    if several:
        screen.print(Text(f"{100 * one.fraction:g} % of the training labels", style="bold"))
    for table in comparison_tables(one, metrics):
        screen.print(table)
    for note in one.notes:
        screen.print(Text(f"note: {note}", style="yellow"), soft_wrap=True)


def _write(found: list[Comparison], out: Path) -> None:
    from afire.files import write_text
    from afire.report.compare_tables import comparison_latex, comparison_markdown
    from afire.report.style import save_figure, style
    from afire.report.task_figures import label_figure

    write_text(out / "comparison.md", comparison_markdown(found))
    write_text(out / "comparison.tex", comparison_latex(found))
    for one in found:
        if len(one.labels) > 1 and one.entries[0].result.per_label:
            stem = f"labels-{100 * one.fraction:g}pct" if len(found) > 1 else "labels"
            with style():
                shown = [entry.result for entry in one.entries]
                save_figure(label_figure(shown, one.metrics[0], [entry.name for entry in one.entries]), out / stem)
