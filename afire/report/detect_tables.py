"""Tables about detectors: how a score was chosen (``choice.md``), and a detector beside the trivial ones
(``detect.md``, ``detect.json``); both also on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from afire._version import __version__
from afire.detect.base import AnomalyDetector
from afire.detect.choose import GAIN, NEVER_CHOSEN, Choice
from afire.detect.evaluate import Evaluated, Line, Place, is_sign_flipped
from afire.detect.localise import PRO_LIMIT
from afire.files import write_json, write_text
from afire.report.table import DISCLAIMER, interval_text, mean_sd, number, signed, table_of
from afire.tasks.results import PREDICTIONS, RESULT, to_json

CHOICE_PAGE = "choice.md"


def write_choice(out: Path, detector: AnomalyDetector) -> Path:
    """Write ``choice.md`` beside the detector."""
    write_text(out / CHOICE_PAGE, choice_page(detector))
    return out / CHOICE_PAGE


def choice_page(detector: AnomalyDetector) -> str:
    """How the score was chosen, on what, and what its threshold is, as Markdown."""
    choice, origin = detector.choice, detector.origin
    kinds = _kinds(choice)
    rows = [
        [f"**{name}**" if chosen else name, number(mean), *(number(value) for value in values)]
        for name, chosen, mean, values in _rows(choice)
    ]
    notes = [str(note) for note in origin.get("notes", [])]
    meanings = [[name, detector.meanings[name]] for name in choice.table if name in detector.meanings]
    sections = [
        f"# Score: {choice.name}",
        " ".join([how_chosen(choice), rule(choice), _never(choice)]).strip(),
        table_of(["score", "mean AUC", *kinds], rows).markdown(),
        "AUC of held-out normal films against the same films with drawn lesions, kind by kind; larger scores mean more "
        "abnormal, so an AUC below 0.5 is a score that works sign-flipped. The chosen score is in bold.",
        "\n".join(f"{place}. {step}" for place, step in enumerate(choice.steps, start=1)),
        "## Films and threshold",
        "\n".join(f"- {line}" for line in facts(detector)),
        "## Scores",
        "\n".join(["| score | meaning |", "| --- | --- |", *(f"| {name} | {text} |" for name, text in meanings)]),
    ]
    if notes:
        sections += ["## Warnings", "\n".join(f"- {note}" for note in notes)]
    sections += [f"`detector.json` has every number. afire {__version__}.", DISCLAIMER]
    return "\n\n".join(sections) + "\n"


def show_choice(screen: Console, detector: AnomalyDetector) -> None:
    """The same on the terminal; the chosen score is marked."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("score", no_wrap=True)
    table.add_column("mean AUC", justify="right")
    for kind in _kinds(detector.choice):
        table.add_column(kind, justify="right")
    for name, chosen, mean, values in _rows(detector.choice):
        style = "bold" if chosen else "dim" if mean < 0.5 else ""
        cells = [f"{'> ' if chosen else '  '}{name}", number(mean), *(number(value) for value in values)]
        table.add_row(*(Text(cell, style=style) for cell in cells))
    screen.print(table)
    screen.print(Text(f"score: {detector.choice.name}. {how_chosen(detector.choice)}"), soft_wrap=True)
    for line in facts(detector):
        screen.print(Text(line), soft_wrap=True)
    for note in detector.origin.get("notes", []):
        screen.print(Text(f"warning: {note}", style="yellow"), soft_wrap=True)
    screen.print(Text(DISCLAIMER, style="dim"))


def facts(detector: AnomalyDetector) -> list[str]:
    """Films of each subset, threshold and false-alarm rate, cost, weights and data, a line each."""
    origin, parts = detector.origin, detector.origin.get("parts", {})
    counts = (
        f"{parts.get('fit', 0):,} normal films fit, {parts.get('choose', 0):,} choose, {parts.get('calibrate', 0):,}"
    )
    weights = origin.get("weights", {}).get("name", "unknown")
    data, rate = origin.get("data", {}), 100 * detector.false_alarms
    return [
        f"{counts} calibrate; held out: {origin.get('held_out_by', 'unknown')}",
        f"threshold {detector.threshold:.4g}: at most {rate:g} % of such normal films are flagged",
        f"{detector.cost() / 1e9:.3g} GFLOP to score a film ({detector.method})",
        f"weights {weights}; films of {data.get('name', '')} ({str(data.get('hash', ''))[:12]})",
    ]


def how_chosen(choice: Choice) -> str:
    if choice.asked:
        return f"It was asked for, not chosen; mean AUC {number(choice.mean_auc)} on {choice.films:,} held-out normals."
    return f"Chosen on {choice.films:,} held-out normals and lesions drawn on them: mean AUC {number(choice.mean_auc)}."


def rule(choice: Choice) -> str:
    if choice.asked:
        return ""
    return (
        "The rule: of the scores that rise with every kind of lesion, the one with the highest AUC, mean over the "
        "kinds; another joins, with equal weight in the spread of normals, only where that mean gains at least "
        f"{GAIN:g}. No film with a finding was looked at."
    )


def _never(choice: Choice) -> str:
    shown = [name for name in NEVER_CHOSEN if name in choice.table]
    return f"`{', '.join(shown)}` is shown and never chosen: its direction is known to be wrong." if shown else ""


def _kinds(choice: Choice) -> list[str]:
    return list(next(iter(choice.table.values()), {}))


def _rows(choice: Choice) -> list[tuple[str, bool, float, list[float]]]:
    """Name, whether chosen, mean and AUC of each kind; the best first."""
    chosen = set(choice.names)
    rows = [
        (name, name in chosen, float(np.mean(list(row.values()))), list(row.values()))
        for name, row in choice.table.items()
    ]
    return sorted(rows, key=lambda row: -row[2])


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
            name: {"films": found.finding_films[name], **{key: asdict(estimate) for key, estimate in row.items()}}
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
        "\n".join(f"- {message}" for message in found.verdicts),
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
    return table_of(_HEADER, [[_styled(line), *_cells(line)] for line in lines]).markdown()


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
    return table_of(["finding", "films", "AUC", "95 % interval", "AP"], rows).markdown()


def place_table(place: Place) -> str:
    rows = [
        ["hottest point inside", mean_sd(place.hit), interval_text(place.hit) or "–", number(place.chance)],
        ["pixel AUROC", mean_sd(place.pixel_auc), "–", "0.500"],
        [f"PRO to {PRO_LIMIT:g}", mean_sd(place.pro), "–", number(PRO_LIMIT / 2)],
    ]
    return table_of(["heat of the chosen score", "value", "95 % interval", "by chance"], rows).markdown()


def _facts(found: Evaluated) -> str:
    result = found.result
    rows = [
        ["detector", f"{result.config['detector']}, {result.config['flops'] / 1e9:.3g} GFLOP a film"],
        ["score", result.method],
        ["weights", f"{result.weights['name']} ({result.weights['report']}), hash `{result.weights['hash'][:12]}`"],
        ["data", f"{result.data['name']}, hash `{str(result.data['hash'])[:12]}`"],
        ["test films", f"{found.protocol}: {found.counts['normal']:,} normal, {found.counts['abnormal']:,} abnormal"],
        ["test hash", f"`{result.test_hash[:12]}`"],
        ["detectors", ", ".join(run.name for run in result.runs)],
        *([["pre-training", result.seen_text]] if result.seen_text else []),
        ["command", f"`{' '.join(result.command)}`"],
    ]
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {text.replace('|', '/')} |" for name, text in rows)])


def _reading(found: Evaluated) -> str:
    rate = found.result.config["false_alarms"]
    count = len(found.result.runs)
    over = "one detector, so there is no sd" if count == 1 else f"sd over {count} detectors"
    return (
        f"Mean and {over}; intervals and differences are bootstraps over {found.result.drawn_over}, the same draws for "
        "all rows. "
        f"ACC and F1 are at the threshold that lets at most {100 * rate:g} % of held-out normal films be flagged. "
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
    auc = mean_sd(line.metrics["auc"]) + (" (sign-flipped)" if is_sign_flipped(line) else "")
    values = [mean_sd(line.metrics[name]) for name in _SHOWN]
    return [auc, interval_text(line.metrics["auc"]) or "–", *values, _against(line)]


def _against(line: Line) -> str:
    if line.against is None:
        return ""
    difference = line.against
    better = "" if difference.low > 0 else ", not better"
    return f"{signed(difference.value)} ({signed(difference.low)} to {signed(difference.high)}){better}"


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
            "! sign-flipped; the last block is trivial detectors."
        ),
        soft_wrap=True,
    )
    if found.place is not None:
        screen.print(Text(place_message(found.place)), soft_wrap=True)
    for note in found.result.notes:
        screen.print(Text(f"note: {note}", style="yellow"), soft_wrap=True)
    screen.print(Text(DISCLAIMER, style="dim"))


def _narrow(line: Line, several: bool) -> list[str]:
    auc = line.metrics["auc"]
    return [
        line.name + (" !" if is_sign_flipped(line) else ""),
        number(auc.mean),
        *([number(auc.sd)] if several else []),
        interval_text(auc, 2).replace(" to ", "-"),
        *(number(line.metrics[name].mean) for name in _SHOWN),
    ]


def place_message(place: Place) -> str:
    return (
        f"places ({place.films:,} films with {place.kind}): hottest point inside {mean_sd(place.hit)} (chance "
        f"{number(place.chance)}), pixel AUROC {mean_sd(place.pixel_auc)}, PRO {mean_sd(place.pro)}"
    )
