"""Random walks over the commands keep the promises of the README; ``AFIRE_SEQUENCES=500`` takes more of them.

A walk that breaks one prints its commands: ``python -m tests.sequences --seeds SEED --keep FOLDER`` repeats it.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.sequences.shell import BrokenPromiseError, Shell
from tests.sequences.walk import Walk

SEEDS = range(int(os.environ["AFIRE_SEQUENCES"])) if "AFIRE_SEQUENCES" in os.environ else (2, 7, 15, 27)
STEPS = 14 if "AFIRE_SEQUENCES" in os.environ else 8


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_a_walk_breaks_no_promise(seed: int, tmp_path: Path) -> None:
    walk = Walk(seed, tmp_path / "walk")
    walk.world.folder.mkdir()
    try:
        walk.go(STEPS)
    except BrokenPromiseError as promise:
        commands = "\n".join(walk.shell.history)
        pytest.fail(f"seed {seed}, {STEPS} steps:\n{commands}\n{promise}", pytrace=False)


def test_the_same_seed_is_the_same_walk(tmp_path: Path) -> None:
    histories = []
    for name in ("first", "second"):
        folder = tmp_path / name
        folder.mkdir()
        walk = Walk(9, folder)
        walk.go(2)
        histories.append("\n".join(walk.shell.history).replace(str(folder), ""))
    assert histories[0] == histories[1] and "afire" in histories[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["config", "--set", "nonsense=1"], "exit code 2, not 0"),
        (["config", "--out", "film.png"], "overwritten or removed"),
        (["config", "--out", "other.yaml"], "outside of"),
    ],
)
def test_a_broken_promise_is_noticed(tmp_path: Path, words: list[str], message: str) -> None:
    (tmp_path / "film.png").write_text("mine")
    shell = Shell(tmp_path)
    with pytest.raises(BrokenPromiseError, match=message):
        shell.run(*words, out="film.png", expect=[0])


def test_what_a_kill_left_is_excused_until_the_command_is_done(tmp_path: Path) -> None:
    """A refusal leaves everything as it was, so that it cannot be what removes the litter of a kill."""
    shell = Shell(tmp_path)
    shell.kill("config", "--out", "run", out="run", when=lambda: False, seconds=0, how=signal.SIGKILL)
    (tmp_path / "run").unlink(missing_ok=True)
    (tmp_path / "run").mkdir()
    for name in (".part-1.json", ".lock"):
        (tmp_path / "run" / name).touch()
    shell.run("config", "--set", "nonsense=1", out="run", expect=[2])
    shell.run("config", "--out", "other.yaml", out="other.yaml", expect=[0])
    with pytest.raises(BrokenPromiseError, match=r"left half-written: .*run/"):
        shell.run("config", "--out", "run/c.yaml", out="run", expect=[0])
