"""Pins hold for the Pythons that their release supports, to the patch."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from constraints import marker  # noqa: E402


@pytest.mark.parametrize(
    ("supported", "oldest", "too_old"),
    [(">=3.11", "3.11.0", "3.10.19"), (">=3.11.5", "3.11.5", "3.11.2"), ("!=3.14.1,>=3.11", "3.11.0", "3.10.0")],
)
def test_a_pin_is_for_the_pythons_of_its_release(supported: str, oldest: str, too_old: str) -> None:
    held = Marker(marker(SpecifierSet(supported)).removeprefix(" ; "))
    for python, holds in ((oldest, True), (too_old, False)):
        where = {"python_version": ".".join(python.split(".")[:2]), "python_full_version": python}
        assert held.evaluate(where) is holds


@pytest.mark.parametrize("supported", ["", ">=3.8", ">=3.10"])
def test_a_release_for_all_our_pythons_is_pinned_for_all(supported: str) -> None:
    assert marker(SpecifierSet(supported)) == ""


def test_every_line_is_a_pin_without_an_address() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines() if line[:1] != "#"]
    assert len(lines) > 50
    for line in lines:
        one = Requirement(line)
        assert one.url is None and [pin.operator for pin in one.specifier] == ["=="], line
