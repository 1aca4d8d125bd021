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
PATCHES = 30  # of one Python, at most
HEADER = "# The versions that the tests pass with. Written by scripts/constraints.py; versions only, no addresses.\n"


def lines() -> list[str]:
    found = {}
    for distribution in distributions():
        name = canonicalize_name(distribution.metadata["Name"])
        if name in OURS:
            continue
        version = re.sub(r"\+.*", "", distribution.version)
        supported = SpecifierSet(distribution.metadata["Requires-Python"] or "")
        found[name] = f"{name}=={version}{marker(supported)}"
    return [found[name] for name in sorted(found)]


def marker(supported: SpecifierSet) -> str:
    """Nothing, or from which Python on the pin holds: some releases also leave early patches of a Python behind."""
    releases = ((python, patch) for python in PYTHONS for patch in range(PATCHES))
    python, patch = next(release for release in releases if supported.contains(f"{release[0]}.{release[1]}"))
    if patch:
        return f' ; python_full_version >= "{python}.{patch}"'
    return "" if python == PYTHONS[0] else f' ; python_version >= "{python}"'


if __name__ == "__main__":
    target = Path(__file__).parent.parent / "constraints.txt"
    target.write_text(HEADER + "\n".join(lines()) + "\n", encoding="utf-8")
