"""What version 0 wrote is still read, and says what it said: `tests/fixtures/v0`, made by `scripts/frozen.py`.

Only the command line and `afire.load` are used, so that this file outlives any move of modules. Numbers are equal up
to the rounding of another processor; `python scripts/frozen.py --check` compares every bit.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from safetensors.numpy import load_file
from typer.testing import CliRunner

from afire.cli import app
from tests import commands

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
import frozen

RTOL = 1e-5
ATOL = 1e-5  # of scores, in sd of normal films: near 0, another processor's rounding shows in the sixth digit
LAST = "checkpoints/step-00000020"
LEARNT = ("structure", "category", "restoration", "lesion", "total", "loss", "gradient_norm")
PLANNED = ("learning_rate", "weight_decay", "teacher_momentum", "teacher_temperature")


def start(folder: Path, *words: str, processes: int = 1) -> None:
    """A command in this process: importing torch again for each would take most of the time."""
    if processes > 1:
        commands.run_processes(processes, *words, "--quiet", folder=folder)
        return
    before = Path.cwd()
    os.chdir(folder)
    try:
        result = CliRunner().invoke(app, [*words, "--quiet"])
    finally:
        os.chdir(before)
    assert result.exit_code == 0, result.output


@pytest.fixture(scope="module")
def v0(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy, so that no test writes beside what is committed."""
    return shutil.copytree(frozen.FIXTURES, tmp_path_factory.mktemp("frozen") / "v0")


@pytest.fixture(scope="module")
def expected(v0: Path) -> dict[str, Any]:
    return json.loads((v0 / frozen.EXPECTED).read_text())


@pytest.fixture(scope="module")
def records(v0: Path) -> dict[str, Any]:
    return json.loads((v0 / frozen.TWENTY_STEPS).read_text())


def leaves(content: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value in nested dicts and lists, with the way to it."""
    if isinstance(content, dict | list):
        for key, value in content.items() if isinstance(content, dict) else enumerate(content):
            yield from leaves(value, f"{path}/{key}")
    else:
        yield path, content


def assert_same(found: Any, expected: Any) -> None:
    """Floats up to rounding, all else exactly; more than was expected may be there."""
    values = dict(leaves(found))
    for path, value in leaves(expected):
        if isinstance(value, float):
            assert values[path] == pytest.approx(value, rel=RTOL, abs=ATOL), path
        else:
            assert values[path] == value, path


def assert_same_steps(rows: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Losses and schedules of each step; health counts clusters, where a rounding may tip one over."""
    for row, old in zip(rows, expected, strict=True):
        assert row["step"] == old["step"]
        for key in (*LEARNT, *PLANNED):
            if key in old:
                np.testing.assert_allclose(row[key], old[key], RTOL, err_msg=f"step {row['step']} {key}")


def test_no_fixture_was_altered(v0: Path, expected: dict[str, Any]) -> None:
    found = {name: frozen.hashes(folder) for name, folder in frozen.weights_folders(v0).items()}

    assert found == expected["weights"]


def test_old_runs_bundles_and_detectors_load_and_say_the_same(v0: Path) -> None:
    found = frozen.arrays(v0)

    with np.load(v0 / frozen.ARRAYS) as file:
        assert set(file.files) <= set(found)
        for name in file.files:
            if file[name].dtype.kind in "fc":
                np.testing.assert_allclose(found[name], file[name], RTOL, atol=ATOL, err_msg=name)
            else:
                np.testing.assert_array_equal(found[name], file[name], name)


def test_commands_say_the_same_of_old_packs_runs_bundles_and_detectors(v0: Path, expected: dict[str, Any]) -> None:
    found = frozen.answers(v0, start)

    for part in ("embed", "detect", "probe"):
        assert_same(found[part], expected[part])


def test_the_phantom_is_drawn_as_before(v0: Path) -> None:
    start(v0, *frozen.PHANTOM, "--out", "drawn")

    folders = (frozen.PHANTOM_FIXTURE, v0 / "drawn")
    old, new = (pd.read_parquet(folder / "manifest.parquet") for folder in folders)
    pd.testing.assert_frame_equal(new[list(old)], old)
    for image in old["image"]:
        films = [np.asarray(Image.open(folder / image), np.int16) for folder in folders]
        np.testing.assert_allclose(*films, rtol=0, atol=1, err_msg=image)


def test_films_are_packed_and_split_as_before(v0: Path) -> None:
    start(v0, *frozen.PACK, "--out", "packed")
    start(v0, *frozen.SPLIT, "--out", "splits")

    np.testing.assert_array_equal(np.load(v0 / "packed" / "images.npy"), np.load(v0 / "pack" / "images.npy"))
    hashes = [json.loads((v0 / name / "pack.json").read_text())["hash"] for name in ("pack", "packed")]
    assert hashes[0] == hashes[1]
    assert_same(json.loads((v0 / "splits" / "split.json").read_text()), json.loads((v0 / "split.json").read_text()))


@pytest.mark.slow
@pytest.mark.parametrize("name", frozen.RECORDS)
def test_trainings_take_the_same_steps(name: str, v0: Path, records: dict[str, Any]) -> None:
    found = frozen.record(name, v0, f"again/{name}", start)

    assert_same_steps(found["rows"], records[name]["rows"])
    assert set(records[name]["hashes"]) <= set(found["hashes"])


@pytest.mark.slow
def test_an_old_run_that_was_stopped_is_finished(v0: Path, records: dict[str, Any]) -> None:
    run = shutil.copytree(v0 / "run", v0 / "stopped")
    shutil.rmtree(run / LAST)  # the checkpoint before it is four steps from the end

    start(v0, *frozen.RECORDS["one_process"].words, "--out", "stopped", "--resume")

    assert_same_steps(frozen.metrics(run / "metrics.jsonl"), records["one_process"]["rows"])
    assert json.loads((run / "summary.json").read_text())["status"] == "finished"
    old, new = (load_file(folder / LAST / "model.safetensors") for folder in (v0 / "run", run))
    assert set(new) == set(old)
    for name, tensor in old.items():
        np.testing.assert_allclose(new[name], tensor, 1e-4, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_an_old_run_that_was_finished_goes_on(v0: Path) -> None:
    run = shutil.copytree(v0 / "run", v0 / "longer")
    longer = ("--set", "training.epochs=6", "--resume", "--force")

    start(v0, *frozen.RECORDS["one_process"].words, "--out", "longer", *longer)

    assert json.loads((run / "summary.json").read_text())["step"] == 24
    assert [row["step"] for row in frozen.metrics(run / "metrics.jsonl") if "total" in row] == list(range(1, 25))
