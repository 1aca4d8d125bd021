"""Write constraints.txt from the environment that passed the tests: ``python scripts/constraints.py``.

Versions only, never addresses. A release that has left an old Python behind is pinned for the newer ones alone, so
that Python 3.10 takes the newest release it can.
"""

from __future__ import annotations

import re
from importlib.metadata import distributions
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

OURS = {"afire", "pip", "setuptools", "wheel"}
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
HEADER = "# The versions that the tests pass with. Written by scripts/constraints.py; versions only, no addresses.\n"


def lines() -> list[str]:
    found = {}
    for distribution in distributions():
        name = canonicalize_name(distribution.metadata["Name"])
        if name in OURS:
            continue
        version = re.sub(r"\+.*", "", distribution.version)
        supported = SpecifierSet(distribution.metadata["Requires-Python"] or "")
        oldest = next(python for python in PYTHONS if supported.contains(f"{python}.99"))
        marker = "" if oldest == PYTHONS[0] else f' ; python_version >= "{oldest}"'
        found[name] = f"{name}=={version}{marker}"
    return [found[name] for name in sorted(found)]


if __name__ == "__main__":
    target = Path(__file__).parent.parent / "constraints.txt"
    target.write_text(HEADER + "\n".join(lines()) + "\n", encoding="utf-8")
