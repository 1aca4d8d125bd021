"""Progress: silent in a library, lines in a log, a bar on a terminal."""

from __future__ import annotations

import pytest

from afire import progress


def test_off_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(progress.track([1, 2], "x")) == [1, 2]
    assert capsys.readouterr().err == ""


def test_lines_say_how_far_and_how_fast(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    progress.configure("lines")
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 0.0)
    list(progress.track(range(3), "packing", unit="films"))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("packing: 1/3 films, ") and "films/s" in lines[0] and "left" in lines[0]
    assert lines[-1].startswith("packing: 3/3 films")


def test_a_bar_shows_the_work(capsys: pytest.CaptureFixture[str]) -> None:
    progress.configure("bar")
    list(progress.track(range(3), "packing", unit="films"))
    assert "packing" in capsys.readouterr().err


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (75, "1:15"), (3675, "1:01:15")])
def test_seconds(seconds: float, text: str) -> None:
    assert progress.format_seconds(seconds) == text
