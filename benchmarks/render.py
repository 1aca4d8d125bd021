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

Written by `make bench`; edit `benchmarks/sections.py`, not this page. Figures are ratios of two measurements from the
same run; seconds and images/s are shown only to explain the ratios. `python benchmarks/page.py --only losses,step`
repeats some sections and keeps the others, each with its own date.
"""
STUDIES = """\
## Not on this page

`make bench` skips scripts in `benchmarks/` that count or study instead of timing: `flops.py` ([what a run
costs](scaling.md)), `audit.py` ([audit](audit.md)), `detect_domain.py` ([detection](detect.md)), `phantom.py` and
`phantom_shortcuts.py` ([phantom](phantom.md)), `search.py` ([search](../benchmarks/search.md)), `faults.py`
([faults](../benchmarks/faults.md)), `study.py` ([results](results.md)), `quickstart.py` ([quickstart](quickstart.md)).
"""


def render(results: Results, history: Sequence[Mapping[str, Any]] = ()) -> str:
    sections: Mapping[str, Any] = results.get("sections", {})
    blocks = [HEAD.rstrip()]
    if results.get("quick"):
        blocks.append("**A quick run to check that everything works: its numbers mean nothing.**")
    blocks += [_machines(sections), *_warnings(sections), _summary(sections)]
    for section in SECTIONS:
        blocks.append(_section(section, sections.get(section.name)))
    blocks += [*_history(history), STUDIES.rstrip()]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _machines(sections: Mapping[str, Any]) -> str:
    """One line for each machine and set of versions."""
    taken: dict[str, list[str]] = {}
    for section in SECTIONS:
        if section.name in sections:
            taken.setdefault(_environment(sections[section.name]), []).append(section.name)
    if len(taken) == 1:
        return f"Measured on {next(iter(taken))}."
    return "\n".join(f"- {', '.join(f'`{name}`' for name in names)}: {where}" for where, names in taken.items())


def _environment(found: Mapping[str, Any]) -> str:
    machine = found["machine"]
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gb']} GB, {machine['system']}; Python "
        f"{machine['python']}, torch {machine['torch']} (threads: {machine['threads']}), NumPy {machine['numpy']}; "
        f"commit {found['commit']}, {found['date'][:10]}"
    )


def _warnings(sections: Mapping[str, Any]) -> list[str]:
    busy = [name for name, found in sections.items() if is_busy(found)]
    if not busy:
        return []
    named = ", ".join(f"`{name}` ({_others(sections[name])})" for name in sorted(busy))
    return [f"**The machine was busy with other work during {named}: do not trust these sections.**"]


def is_busy(found: Mapping[str, Any]) -> bool:
    """By the cores that other processes used or, where the system does not report it, by the load before."""
    others, load = found.get("others"), found.get("load")
    if others is not None:
        return bool(others > BUSY)
    return load is not None and bool(load > found["machine"]["cores"] / 2)


def _others(found: Mapping[str, Any]) -> str:
    others = found.get("others")
    return f"load {found['load']} before" if others is None else f"other processes used {others:g} cores"


def _summary(sections: Mapping[str, Any]) -> str:
    rows = []
    for section in SECTIONS:
        if section.name in sections:
            figures = Findings.from_json(sections[section.name]).figures
            rows += [[_link(section, one), one.written(), one.goal_written(), _verdict(one)] for one in figures]
    return (
        "## Summary\n\n" + _table(["figure", "measured", "goal", ""], rows)
        if rows
        else "Nothing has been measured yet."
    )


def _link(section: Section, figure: Figure) -> str:
    return f"{figure.name} ([how](#{anchor(section.title)}))"


def _verdict(figure: Figure) -> str:
    return {None: "", True: "met", False: "**MISSED**"}[figure.met]


def anchor(title: str) -> str:
    """As mkdocs makes it."""
    kept = "".join(c for c in title.lower() if c.isalnum() or c in " -_")
    return "-".join(kept.split())


def _section(section: Section, found: Mapping[str, Any] | None) -> str:
    blocks = [f"## {section.title}", f"{section.how} Run it alone: `python benchmarks/{section.name}.py`."]
    if found is None:
        return "\n\n".join([*blocks, "Not measured yet."])
    findings = Findings.from_json(found)
    notes = [*findings.notes, f"Measured in {found['seconds']:.0f} s on {found['date']}, {_state(found)}."]
    blocks += [_captioned(table) for table in findings.tables]
    return "\n\n".join([*blocks, " ".join(notes)])


def _state(found: Mapping[str, Any]) -> str:
    before = f"load {found['load']} before" if found.get("load") is not None else "load unknown"
    others = found.get("others")
    return before if others is None else f"{before}, other processes used {others:g} cores"


def _captioned(table: Table) -> str:
    return f"{table.title}:\n\n{_table(table.columns, table.rows)}"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _history(history: Sequence[Mapping[str, Any]]) -> list[str]:
    """What profiles showed and what was changed; each entry has its own columns."""
    if not history:
        return []
    blocks = [
        "## Profiles, before and after\n\nWhat profiles showed and what was changed. The numbers of a table are "
        "from one session on one machine and recorded by hand in `benchmarks/history.json`."
    ]
    for entry in history:
        text = f"{entry['text']} Measured with `{entry['command']}`, {entry['where']}."
        blocks.append("\n\n".join([f"### {entry['title']}", text, _table(entry["columns"], entry["rows"])]))
    return blocks
