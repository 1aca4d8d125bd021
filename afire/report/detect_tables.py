"""Tables about detectors: how a score was chosen (``choice.md``), and a detector beside the trivial ones
(``detect.md``, ``detect.json``); both also on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.text import Text

from afire._version import __version__
from afire.detect.base import AnomalyDetector
from afire.detect.choose import MOST, NEVER_CHOSEN, SHRINKAGE, Choice
from afire.detect.evaluate import Evaluated, Line, Place, is_sign_flipped
from afire.detect.localise import PRO_LIMIT
from afire.files import write_json, write_text
from afire.report.table import (
    DASH,
    DISCLAIMER,
    Block,
    Column,
    Mark,
    Row,
    Table,
    bullets,
    facts_table,
    interval_text,
    mean_sd,
    number,
    signed,
    table_of,
)
from afire.tasks.results import PREDICTIONS, RESULT, to_json

CHOICE_PAGE = "choice.md"


def write_choice(out: Path, detector: AnomalyDetector) -> Path:
    """Write ``choice.md`` beside the detector."""
    write_text(out / CHOICE_PAGE, choice_page(detector))
    return out / CHOICE_PAGE


def choice_page(detector: AnomalyDetector) -> str:
    """How the score was chosen, on what, and what its threshold is, as Markdown."""
    choice, origin = detector.choice, detector.origin
    notes = [str(note) for note in origin.get("notes", [])]
    meanings = [[name, detector.meanings[name]] for name in choice.table if name in detector.meanings]
    sections = [
        f"# Score: {choice.name}",
        " ".join([how_chosen(choice), rule(choice), _never(choice)]).strip(),
        choice_table(choice).markdown(),
        "AUC of held-out normal films against the same films with drawn lesions, kind by kind; larger scores mean more "
        "abnormal, so an AUC below 0.5 is a score that works sign-flipped. The chosen score is in bold.",
        "\n".join(f"{place}. {step}" for place, step in enumerate(choice.steps, start=1)),
        "## Films and threshold",
        bullets(facts(detector)),
        "## Scores",
        table_of(["score", Column("meaning", text=True)], meanings).markdown(),
    ]
    if notes:
        sections += ["## Warnings", bullets(notes)]
    sections += [f"`detector.json` has every number. afire {__version__}.", DISCLAIMER]
    return "\n\n".join(sections) + "\n"


def show_choice(screen: Console, detector: AnomalyDetector) -> None:
    """The same on the terminal; the chosen score is marked."""
    screen.print(choice_table(detector.choice, ("> ", "  ")).console(frame=False))
    screen.print(Text(f"score: {detector.choice.name}. {how_chosen(detector.choice)}"), soft_wrap=True)
    for line in facts(detector):
        screen.print(Text(line), soft_wrap=True)
    for note in detector.origin.get("notes", []):
        screen.print(Text(f"warning: {note}", style="yellow"), soft_wrap=True)
    screen.print(Text(DISCLAIMER, style="dim"))


def facts(detector: AnomalyDetector) -> list[str]:
    """Films of each subset, threshold and false-alarm rate, cost, weights and data, a line each."""
    origin, films = detector.origin, detector.origin.get("parts", {})
    counts = (
        f"{films.get('fit', 0):,} normal films fit, {films.get('choose', 0):,} choose, {films.get('calibrate', 0):,}"
    )
    weights = origin.get("weights", {}).get("name", "unknown")
    data, rate = origin.get("data", {}), 100 * detector.false_alarms
    paper = ", by the paper's procedure" if origin.get("procedure") == "paper" else ""
    return [
        f"{counts} calibrate; held out: {origin.get('held_out_by', 'unknown')}",
        f"threshold {detector.threshold:.4g}: at most {rate:g} % of such normal films are flagged",
        f"{detector.cost() / 1e9:.3g} GFLOP to score a film ({detector.method}{paper})",
        f"weights {weights}; films of {data.get('name', '')} ({str(data.get('hash', ''))[:12]})",
    ]


def how_chosen(choice: Choice) -> str:
    if choice.asked:
        films = f"{choice.films:,} held-out normals"
        return f"Not chosen: it was asked for, or is the method's own; mean AUC {number(choice.mean_auc)} on {films}."
    return f"Chosen on {choice.films:,} held-out normals and lesions drawn on them: mean AUC {number(choice.mean_auc)}."


def rule(choice: Choice) -> str:
    if choice.asked:
        return ""
    return (
        "The rule: scores that rise with every kind, and not only with their best kinds, are joined in the spread of "
        f"normals, at most {MOST} of them; {SHRINKAGE:.0%} of a weight is the same for all, the rest is fitted so that "
        "every kind counts the same. No film of a patient with a finding was looked at."
    )


def _never(choice: Choice) -> str:
    names = [name for name in NEVER_CHOSEN if name in choice.table]
    return f"`{', '.join(names)}` is shown and never chosen: its direction is known to be wrong." if names else ""


def choice_table(choice: Choice, bullets: tuple[str, str] = ("", "")) -> Table:
    """AUC of every score in every kind of drawn lesion, the best first; ``bullets`` stand before chosen and others."""
    kinds = list(next(iter(choice.table.values()), {}))
    means = {name: float(np.mean(list(values.values()))) for name, values in choice.table.items()}
    rows = []
    for name in sorted(means, key=lambda name: -means[name]):
        is_chosen, mean = name in choice.names, means[name]
        cells = [f"{bullets[not is_chosen]}{name}", number(mean), *map(number, choice.table[name].values())]
        rows.append(Row(cells, "bold" if is_chosen else "dim" if mean < 0.5 else ""))
    columns = [Column("score", text=True, wrap=False), *(Column(title, wrap=True) for title in ("mean AUC", *kinds))]
    return table_of(columns, rows)


PAGE, NUMBERS = "detect.md", "detect.json"
_HEADER = ["", "AUC", "95 % interval", "AP", "ACC", "F1", "ACC, oracle", "F1, oracle", "AUC against best trivial"]
_MARKS: Mapping[str, Mark] = {"chosen": "bold", "single": "", "trivial": "italic"}
_SHOWN = ("average_precision", "accuracy", "f1", "oracle_accuracy", "oracle_f1")


def write_detection(out: Path, evaluated: Evaluated, pictures: Sequence[str] = ()) -> None:
    """Write the page and every number of it into the result's folder."""
    numbers = {
        "note": DISCLAIMER,
        "protocol": evaluated.protocol,
        "films": evaluated.counts,
        "best_trivial": evaluated.best_trivial,
        "rows": [asdict(line) for line in evaluated.lines],
        "findings": {
            name: {"films": evaluated.finding_films[name], **{key: asdict(estimate) for key, estimate in row.items()}}
            for name, row in evaluated.findings.items()
        },
        "localisation": asdict(evaluated.place) if evaluated.place is not None else None,
        "verdicts": evaluated.verdicts,
        "notes": evaluated.result.notes,
    }
    write_json(out / NUMBERS, to_json(numbers))
    write_text(out / PAGE, detection_page(evaluated, pictures))


def detection_page(evaluated: Evaluated, pictures: Sequence[str] = ()) -> str:
    """The page as Markdown."""
    result = evaluated.result
    sections = [
        f"# Detection: {result.name}",
        facts_table(_facts(evaluated)).markdown(),
        bullets(evaluated.verdicts),
        "## Test films",
        rows_table(evaluated.lines).markdown(),
        _reading(evaluated),
    ]
    if evaluated.place is not None:
        sections += ["## Places", place_table(evaluated.place).markdown(), _place_reading(evaluated.place)]
    if evaluated.findings:
        sections += ["## Findings", findings_table(evaluated).markdown()]
        sections.append("Normal films against films with the finding, chosen score.")
    notes = [note for note in result.notes if note not in evaluated.verdicts]
    if notes:
        sections += ["## Notes", bullets(notes)]
    sections += [f"![{Path(name).stem}]({name})" for name in pictures]
    sections += ["## Rows", "\n".join(f"- **{line.name}**: {line.meaning}" for line in evaluated.lines)]
    sections += [
        f"`{RESULT}` and `{NUMBERS}` have every number, `{PREDICTIONS}` every film. afire {__version__}.",
        DISCLAIMER,
    ]
    return "\n\n".join(sections) + "\n"


def rows_table(lines: Sequence[Line]) -> Table:
    """Chosen, single and trivial rows."""
    return table_of(_HEADER, [Row([_name(line), *_cells(line)], _MARKS[line.kind]) for line in lines])


def findings_table(evaluated: Evaluated) -> Table:
    """A row for each finding, the best found first."""
    order = sorted(evaluated.findings, key=lambda name: -evaluated.findings[name]["auc"].mean)
    rows = [
        [
            name.replace("_", " "),
            f"{evaluated.finding_films[name]:,}",
            mean_sd(evaluated.findings[name]["auc"]),
            interval_text(evaluated.findings[name]["auc"]) or DASH,
            mean_sd(evaluated.findings[name]["average_precision"]),
        ]
        for name in order
    ]
    return table_of(["finding", "films", "AUC", "95 % interval", "AP"], rows)


def place_table(place: Place) -> Table:
    rows = [
        ["hottest point inside", mean_sd(place.hit), interval_text(place.hit) or DASH, number(place.chance)],
        ["pixel AUROC", mean_sd(place.pixel_auc), DASH, "0.500"],
        [f"PRO to {PRO_LIMIT:g}", mean_sd(place.pro), DASH, number(PRO_LIMIT / 2)],
    ]
    return table_of(["heat of the chosen score", "value", "95 % interval", "by chance"], rows)


def _facts(evaluated: Evaluated) -> dict[str, str]:
    result, counts = evaluated.result, evaluated.counts
    paper = ", by the paper's procedure" if result.config["procedure"] == "paper" else ""
    return {
        "detector": f"{result.config['detector']}{paper}, {result.config['flops'] / 1e9:.3g} GFLOP a film",
        "score": result.method,
        "weights": f"{result.weights['name']} ({result.weights['report']}), hash `{result.weights['hash'][:12]}`",
        "data": f"{result.data['name']}, hash `{str(result.data['hash'])[:12]}`",
        "test films": f"{evaluated.protocol}: {counts['normal']:,} normal, {counts['abnormal']:,} abnormal",
        "test hash": f"`{result.test_hash[:12]}`",
        "detectors": ", ".join(run.name for run in result.runs),
        **({"pre-training": result.seen_text} if result.seen_text else {}),
        "command": f"`{' '.join(result.command)}`",
    }


def _reading(evaluated: Evaluated) -> str:
    rate = evaluated.result.config["false_alarms"]
    count = len(evaluated.result.runs)
    over = "one detector, so there is no sd" if count == 1 else f"sd over {count} detectors"
    return (
        f"Mean and {over}; intervals and differences are bootstraps over {evaluated.result.drawn_over}, the same "
        "draws for all rows. "
        f"ACC and F1 are at the threshold that lets at most {100 * rate:g} % of held-out normal films be flagged. "
        "**Oracle**: the best that any threshold gives on these very test films; it looks at their labels and is an "
        "upper bound, not a result. Rows in italics are trivial detectors, which have seen the same normal films."
    )


def _place_reading(place: Place) -> str:
    return (
        f"{place.films:,} test films with {place.kind} of findings; normal films are left out, so they flatter nothing."
    )


def _name(line: Line) -> str:
    return f"{line.name}: {line.meaning}" if line.kind == "chosen" else line.name


def _cells(line: Line) -> list[str]:
    auc = mean_sd(line.metrics["auc"]) + (" (sign-flipped)" if is_sign_flipped(line) else "")
    values = [mean_sd(line.metrics[name]) for name in _SHOWN]
    return [auc, interval_text(line.metrics["auc"]) or DASH, *values, _against(line)]


def _against(line: Line) -> str:
    if line.against is None:
        return ""
    difference = line.against
    better = "" if difference.low > 0 else ", not better"
    return f"{signed(difference.value)} ({signed(difference.low)} to {signed(difference.high)}){better}"


def show_detection(screen: Console, evaluated: Evaluated) -> None:
    """The table on the terminal, narrow enough for 80 columns, with its messages."""
    screen.print(_narrow_table(evaluated).console(frame=False))
    rate = 100 * float(evaluated.result.config["false_alarms"])
    screen.print(
        Text(
            f"ACC and F1 at {rate:g} % false alarms on held-out normals; * oracle: best threshold on the test films; "
            "! sign-flipped; the last block is trivial detectors."
        ),
        soft_wrap=True,
    )
    if evaluated.place is not None:
        screen.print(Text(place_message(evaluated.place)), soft_wrap=True)
    for note in evaluated.result.notes:
        screen.print(Text(f"note: {note}", style="yellow"), soft_wrap=True)
    screen.print(Text(DISCLAIMER, style="dim"))


def _narrow_table(evaluated: Evaluated) -> Table:
    """The rows without what does not fit, a block for each kind."""
    several = len(evaluated.result.runs) > 1
    header = ["", "AUC", *(("sd",) if several else ()), "95 %", "AP", "ACC", "F1", "ACC*", "F1*"]
    columns = [Column(title, text=not place) for place, title in enumerate(header)]
    blocks = [
        Block([Row(_narrow(line, several), _MARKS[kind]) for line in lines])
        for kind, lines in groupby(evaluated.lines, key=lambda line: line.kind)
    ]
    return Table(columns, blocks, f"{evaluated.result.name}: {evaluated.protocol}")


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
