"""The choice of a detector's score and the numbers behind it, as ``choice.md`` and on the terminal."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from afire._version import __version__
from afire.files import write_text
from afire.report.task_tables import markdown_table
from afire.report.words import DISCLAIMER, number
from afire.tasks.detect.choose import GAIN, NEVER_CHOSEN, Choice
from afire.tasks.detect.detector import Detector
from afire.tasks.detect.scores import SCORES

PAGE = "choice.md"


def write_choice(out: Path, detector: Detector) -> Path:
    """Write ``choice.md`` beside the detector."""
    write_text(out / PAGE, choice_page(detector))
    return out / PAGE


def choice_page(detector: Detector) -> str:
    """How the score was chosen, on what, and what its threshold is, as Markdown."""
    choice, origin = detector.choice, detector.origin
    kinds = _kinds(choice)
    rows = [
        [f"**{name}**" if chosen else name, number(mean), *(number(value) for value in values)]
        for name, chosen, mean, values in _rows(choice)
    ]
    notes = [str(note) for note in origin.get("notes", [])]
    meanings = [[name, SCORES[name].meaning] for name in choice.table if name in SCORES]
    sections = [
        f"# Score: {choice.name}",
        " ".join([how_chosen(choice), rule(choice), _never(choice)]).strip(),
        markdown_table(["score", "mean AUC", *kinds], rows),
        "AUC of held-out normal films against the same films with drawn lesions, kind by kind; larger scores mean more "
        "abnormal, so an AUC below 0.5 is a score that works upside down. The chosen score is in bold.",
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


def show_choice(screen: Console, detector: Detector) -> None:
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


def facts(detector: Detector) -> list[str]:
    """Films of each part, threshold and false-alarm rate, weights and data, a sentence each."""
    origin, parts = detector.origin, detector.origin.get("parts", {})
    counts = (
        f"{parts.get('fit', 0):,} normal films fit, {parts.get('choose', 0):,} choose, {parts.get('calibrate', 0):,}"
    )
    weights = origin.get("weights", {}).get("name", "unknown")
    data = origin.get("data", {})
    return [
        f"{counts} calibrate; held out: {origin.get('held_out_by', 'unknown')}",
        f"threshold {detector.threshold:.4g}: at most {100 * detector.false_alarms:g} % of such normal films alarm",
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
    chosen = {one.name for one in choice.components}
    rows = [
        (name, name in chosen, float(np.mean(list(row.values()))), list(row.values()))
        for name, row in choice.table.items()
    ]
    return sorted(rows, key=lambda row: -row[2])
