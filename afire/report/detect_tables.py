"""``detect.md``, ``detect.json`` and the table on the terminal: a detector beside the trivial ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from afire._version import __version__
from afire.files import write_json, write_text
from afire.report.compare_tables import signed
from afire.report.task_tables import markdown_table
from afire.report.words import DISCLAIMER, interval_text, mean_sd, number
from afire.tasks.detect.evaluate import Evaluated, Line, Place
from afire.tasks.detect.localise import PRO_LIMIT
from afire.tasks.detect.verdict import is_upside_down
from afire.tasks.results import PREDICTIONS, RESULT, to_json

PAGE, NUMBERS = "detect.md", "detect.json"
_HEADER = ["", "AUC", "95 % interval", "AP", "ACC", "F1", "ACC, oracle", "F1, oracle", "AUC against best trivial"]
_SHOWN = ("average_precision", "accuracy", "f1", "oracle_accuracy", "oracle_f1")


def write_detection(out: Path, found: Evaluated, pictures: Sequence[str] = ()) -> None:
    """Write the page and every number of it into the result's folder."""
    numbers = {
        "note": DISCLAIMER,
        "protocol": found.protocol,
        "films": found.counts,
        "best_trivial": found.best_trivial,
        "rows": [asdict(line) for line in found.lines],
        "findings": {
            name: {"films": found.finding_films[name], **{key: asdict(one) for key, one in row.items()}}
            for name, row in found.findings.items()
        },
        "localisation": asdict(found.place) if found.place is not None else None,
        "verdicts": found.verdicts,
        "notes": found.result.notes,
    }
    write_json(out / NUMBERS, to_json(numbers))
    write_text(out / PAGE, detection_page(found, pictures))


def detection_page(found: Evaluated, pictures: Sequence[str] = ()) -> str:
    """The page as Markdown."""
    result = found.result
    sections = [
        f"# Detection: {result.name}",
        _facts(found),
        "\n".join(f"- {sentence}" for sentence in found.verdicts),
        "## Test films",
        rows_table(found.lines),
        _reading(found),
    ]
    if found.place is not None:
        sections += ["## Places", place_table(found.place), _place_reading(found.place)]
    if found.findings:
        sections += ["## Findings", findings_table(found), "Normal films against films with the finding, chosen score."]
    others = [note for note in result.notes if note not in found.verdicts]
    if others:
        sections += ["## Notes", "\n".join(f"- {note}" for note in others)]
    sections += [f"![{Path(name).stem}]({name})" for name in pictures]
    sections += ["## Rows", "\n".join(f"- **{line.name}**: {line.meaning}" for line in found.lines)]
    sections += [
        f"`{RESULT}` and `{NUMBERS}` have every number, `{PREDICTIONS}` every film. afire {__version__}.",
        DISCLAIMER,
    ]
    return "\n\n".join(sections) + "\n"


def rows_table(lines: Sequence[Line]) -> str:
    """Chosen, single and trivial rows; the latter in italics."""
    return markdown_table(_HEADER, [[_styled(line), *_cells(line)] for line in lines])


def findings_table(found: Evaluated) -> str:
    """A row for each finding, the best found first."""
    order = sorted(found.findings, key=lambda name: -found.findings[name]["auc"].mean)
    rows = [
        [
            name.replace("_", " "),
            f"{found.finding_films[name]:,}",
            mean_sd(found.findings[name]["auc"]),
            interval_text(found.findings[name]["auc"]) or "–",
            mean_sd(found.findings[name]["average_precision"]),
        ]
        for name in order
    ]
    return markdown_table(["finding", "films", "AUC", "95 % interval", "AP"], rows)


def place_table(place: Place) -> str:
    rows = [
        ["hottest point inside", mean_sd(place.hit), interval_text(place.hit) or "–", number(place.chance)],
        ["pixel AUROC", mean_sd(place.pixel_auc), "–", "0.500"],
        [f"PRO to {PRO_LIMIT:g}", mean_sd(place.pro), "–", number(PRO_LIMIT / 2)],
    ]
    return markdown_table(["heat of the chosen score", "value", "95 % interval", "by chance"], rows)


def _facts(found: Evaluated) -> str:
    result = found.result
    rows = [
        ["score", result.method],
        ["weights", f"{result.weights['name']} ({result.weights['report']}), hash `{result.weights['hash'][:12]}`"],
        ["data", f"{result.data['name']}, hash `{str(result.data['hash'])[:12]}`"],
        ["test films", f"{found.protocol}: {found.counts['normal']:,} normal, {found.counts['abnormal']:,} abnormal"],
        ["test hash", f"`{result.test_hash[:12]}`"],
        ["detectors", ", ".join(run.name for run in result.runs)],
        ["command", f"`{' '.join(result.command)}`"],
    ]
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {text.replace('|', '/')} |" for name, text in rows)])


def _reading(found: Evaluated) -> str:
    rate = found.result.config["false_alarms"]
    count = len(found.result.runs)
    over = "one detector, so there is no sd" if count == 1 else f"sd over {count} detectors"
    return (
        f"Mean and {over}; intervals and differences are bootstraps over test patients, the same draws for all rows. "
        f"ACC and F1 are at the threshold that lets at most {100 * rate:g} % of held-out normal films alarm. "
        "**Oracle**: the best that any threshold gives on these very test films; it looks at their labels and is an "
        "upper bound, not a result. Rows in italics are trivial detectors, which have seen the same normal films."
    )


def _place_reading(place: Place) -> str:
    return (
        f"{place.films:,} test films with {place.kind} of findings; normal films are left out, so they flatter nothing."
    )


def _styled(line: Line) -> str:
    name = f"{line.name}: {line.meaning}" if line.kind == "chosen" else line.name
    return f"**{name}**" if line.kind == "chosen" else f"*{name}*" if line.kind == "trivial" else name


def _cells(line: Line) -> list[str]:
    auc = mean_sd(line.metrics["auc"]) + (" (upside down)" if is_upside_down(line) else "")
    values = [mean_sd(line.metrics[name]) for name in _SHOWN]
    return [auc, interval_text(line.metrics["auc"]) or "–", *values, _against(line)]


def _against(line: Line) -> str:
    if line.against is None:
        return ""
    one = line.against
    better = "" if one.low > 0 else ", not better"
    return f"{signed(one.value)} ({signed(one.low)} to {signed(one.high)}){better}"


def show_detection(screen: Console, found: Evaluated) -> None:
    """The table on the terminal, narrow enough for 80 columns, and what it says."""
    several = len(found.result.runs) > 1
    title = f"{found.result.name}: {found.protocol}"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("", no_wrap=True)
    for name in ("AUC", *(("sd",) if several else ()), "95 %", "AP", "ACC", "F1", "ACC*", "F1*"):
        table.add_column(name, justify="right", no_wrap=True)
    kind = "chosen"
    for line in found.lines:
        if line.kind != kind:
            table.add_row()
        kind = line.kind
        style = "bold" if kind == "chosen" else "italic" if kind == "trivial" else ""
        table.add_row(*(Text(cell, style=style) for cell in _narrow(line, several)))
    screen.print(table)
    rate = 100 * float(found.result.config["false_alarms"])
    screen.print(
        Text(
            f"ACC and F1 at {rate:g} % false alarms on held-out normals; * oracle: best threshold on the test films; "
            "! upside down; the last block is trivial detectors."
        ),
        soft_wrap=True,
    )
    if found.place is not None:
        screen.print(Text(place_sentence(found.place)), soft_wrap=True)
    for sentence in found.result.notes:
        screen.print(Text(f"note: {sentence}", style="yellow"), soft_wrap=True)
    screen.print(Text(DISCLAIMER, style="dim"))


def _narrow(line: Line, several: bool) -> list[str]:
    auc = line.metrics["auc"]
    return [
        line.name + (" !" if is_upside_down(line) else ""),
        number(auc.mean),
        *([number(auc.sd)] if several else []),
        interval_text(auc, 2).replace(" to ", "-"),
        *(number(line.metrics[name].mean) for name in _SHOWN),
    ]


def place_sentence(place: Place) -> str:
    return (
        f"places ({place.films:,} films with {place.kind}): hottest point inside {mean_sd(place.hit)} (chance "
        f"{number(place.chance)}), pixel AUROC {mean_sd(place.pixel_auc)}, PRO {mean_sd(place.pro)}"
    )
