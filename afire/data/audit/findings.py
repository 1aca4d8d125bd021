"""What an audit has to say: findings with a level, a sentence and the films it is about."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Level = Literal["error", "warning", "notice"]
LEVELS: tuple[Level, ...] = ("error", "warning", "notice")
"""From worst to mildest. An error invalidates results, a warning may, a notice is worth knowing."""

Number = int | float | str | None


@dataclass(frozen=True)
class Finding:
    """One thing that was found.

    ``groups`` holds the films, as rows of the manifest: one film to a group, or the films that belong together (a pair
    of duplicates, the films of one patient). ``notes`` has one short text for each group, or nothing.
    """

    level: Level
    kind: str
    sentence: str
    groups: tuple[tuple[int, ...], ...] = ()
    notes: tuple[str, ...] = ()
    numbers: Mapping[str, Number] = field(default_factory=dict)

    @property
    def films(self) -> list[int]:
        """Every film concerned, once, in order of appearance."""
        return list(dict.fromkeys(row for group in self.groups for row in group))


def single(rows: Iterable[int]) -> tuple[tuple[int, ...], ...]:
    """Groups of one film each."""
    return tuple((int(row),) for row in rows)


def sort_findings(findings: Iterable[Finding]) -> list[Finding]:
    """Worst first; within a level in the order in which the checks ran."""
    return sorted(findings, key=lambda finding: LEVELS.index(finding.level))


def count_levels(findings: Sequence[Finding]) -> dict[Level, int]:
    """How many findings there are of each level."""
    return {level: sum(finding.level == level for finding in findings) for level in LEVELS}


def verdict(findings: Sequence[Finding]) -> str:
    """One sentence about the whole set."""
    counts = count_levels(findings)
    if counts["error"]:
        worst = [finding for finding in findings if finding.level == "error"]
        if all(finding.kind == "shortcut" for finding in worst):
            labels = " or ".join(str(finding.numbers["label"]) for finding in worst)
            return f"A result on {labels} can be explained without disease; report a metadata-only row beside it."
        return "Results on this set would not be valid until the errors are dealt with."
    if counts["warning"]:
        return "Nothing was found that invalidates results; look at the warnings before training."
    return "Nothing was found that invalidates results."


def it_or_them(count: int) -> str:
    """The word for ``count`` films that were just named."""
    return "it" if count == 1 else "them"


def films_in_words(count: int) -> str:
    """``1 film``, ``1,234 films``."""
    return f"{count:,} film{'' if count == 1 else 's'}"
