"""docs/benchmarks.md from results.json and history.json: the same files give the same page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from figures import Figure, Findings, Table
from idle import BUSY
from sections import SECTIONS, Section

Results = Mapping[str, Any]

HEAD = """\
# Benchmarks

Written by `make bench` from one run of `benchmarks/`; edit `benchmarks/sections.py`, not this page. Figures are ratios
of two things measured in the same run; seconds and images/s stand below only to show what the ratios are made of.
`python benchmarks/page.py --only losses,step` measures some parts again and keeps the others, each with its own date.
"""
STUDIES = """\
## Not on this page

Scripts in `benchmarks/` that count or study rather than time, and that `make bench` leaves alone: `flops.py`
([what a run costs](scaling.md)), `audit.py` ([audit](audit.md)), `detect_domain.py` ([detection](detect.md)),
`phantom.py` and `phantom_shortcuts.py` ([phantom](phantom.md)), and others that the pages they belong to name.
"""


def render(results: Results, history: Sequence[Mapping[str, Any]] = ()) -> str:
    parts: Mapping[str, Any] = results.get("parts", {})
    blocks = [HEAD.rstrip()]
    if results.get("quick"):
        blocks.append("**A quick run, only to see that everything works: its numbers mean nothing.**")
    blocks += [_machines(parts), *_warnings(parts), _summary(parts)]
    for section in SECTIONS:
        blocks.append(_section(section, parts.get(section.name)))
    blocks += [*_history(history), STUDIES.rstrip()]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _machines(parts: Mapping[str, Any]) -> str:
    """One line for each machine and set of versions."""
    taken: dict[str, list[str]] = {}
    for section in SECTIONS:
        if section.name in parts:
            taken.setdefault(_environment(parts[section.name]), []).append(section.name)
    if len(taken) == 1:
        return f"Measured on {next(iter(taken))}."
    return "\n".join(f"- {', '.join(f'`{name}`' for name in names)}: {where}" for where, names in taken.items())


def _environment(part: Mapping[str, Any]) -> str:
    machine = part["machine"]
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gb']} GB, {machine['system']}; Python "
        f"{machine['python']}, torch {machine['torch']} (threads: {machine['threads']}), NumPy {machine['numpy']}; "
        f"commit {part['commit']}, {part['date'][:10]}"
    )


def _warnings(parts: Mapping[str, Any]) -> list[str]:
    busy = [name for name, part in parts.items() if is_busy(part)]
    if not busy:
        return []
    named = ", ".join(f"`{name}` ({_others(parts[name])})" for name in sorted(busy))
    return [f"**The machine was busy with other work during {named}: do not trust these parts.**"]


def is_busy(part: Mapping[str, Any]) -> bool:
    """By the cores that others used meanwhile or, where the system does not tell, by the load before."""
    others, load = part.get("others"), part.get("load")
    if others is not None:
        return bool(others > BUSY)
    return load is not None and bool(load > part["machine"]["cores"] / 2)


def _others(part: Mapping[str, Any]) -> str:
    others = part.get("others")
    return f"load {part['load']} before" if others is None else f"others used {others:g} of its cores"


def _summary(parts: Mapping[str, Any]) -> str:
    rows = []
    for section in SECTIONS:
        if section.name in parts:
            figures = Findings.from_json(parts[section.name]).figures
            rows += [[_link(section, one), one.written(), one.goal_written(), _verdict(one)] for one in figures]
    return "## Summary\n\n" + _table(["figure", "measured", "goal", ""], rows) if rows else "Nothing was measured yet."


def _link(section: Section, figure: Figure) -> str:
    return f"{figure.name} ([how](#{anchor(section.title)}))"


def _verdict(figure: Figure) -> str:
    return {None: "", True: "met", False: "**MISSED**"}[figure.met]


def anchor(title: str) -> str:
    """As mkdocs makes it."""
    kept = "".join(c for c in title.lower() if c.isalnum() or c in " -_")
    return "-".join(kept.split())


def _section(section: Section, part: Mapping[str, Any] | None) -> str:
    blocks = [f"## {section.title}", f"{section.how} Alone: `python benchmarks/{section.name}.py`."]
    if part is None:
        return "\n\n".join([*blocks, "Not measured yet."])
    findings = Findings.from_json(part)
    words = [*findings.words, f"Taken in {part['seconds']:.0f} s on {part['date']}, {_state(part)}."]
    blocks += [_captioned(table) for table in findings.tables]
    return "\n\n".join([*blocks, " ".join(words)])


def _state(part: Mapping[str, Any]) -> str:
    before = f"load {part['load']} before" if part.get("load") is not None else "load unknown"
    others = part.get("others")
    return before if others is None else f"{before}, {others:g} cores used by others meanwhile"


def _captioned(table: Table) -> str:
    return f"{table.title}:\n\n{_table(table.columns, table.rows)}"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _history(history: Sequence[Mapping[str, Any]]) -> list[str]:
    """What profiles showed, and what a change made of it; each entry has the columns it needs."""
    if not history:
        return []
    blocks = [
        "## Profiles, before and after\n\nWhat profiles showed and what was changed for it. The numbers of a table are "
        "of one sitting on one machine, recorded by hand in `benchmarks/history.json`."
    ]
    for entry in history:
        told = f"{entry['told']} Measured with `{entry['command']}`, {entry['where']}."
        blocks.append("\n\n".join([f"### {entry['title']}", told, _table(entry["columns"], entry["rows"])]))
    return blocks
