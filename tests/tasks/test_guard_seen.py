"""Test films that pre-training saw, and patients that nobody knows: told in every result."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from afire.config import Config
from afire.data.keys import Seen, remember_films
from afire.data.manifest import Manifest, make_manifest
from afire.data.pack import PackedFilms, PackSettings, pack
from afire.data.splits import join_manifests
from afire.report.task_tables import comparison_markdown, result_page
from afire.tasks.compare import compare
from afire.tasks.finetune import run_finetune
from afire.tasks.guard import seen_in_pretraining
from afire.tasks.probe import ProbeTask, run_probe
from afire.tasks.results import read_result, write_result
from afire.tasks.segment import run_segment
from afire.tasks.settings import load_task_config
from afire.weights import open_weights
from tests.export.conftest import make_run
from tests.tasks.conftest import draw_films
from tests.tasks.drawn import QUICK, draw_spots, experiment, smallest_model


@pytest.fixture(scope="module")
def unlisted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack of labelled films without official lists: pre-training takes every normal film of it."""
    folder = tmp_path_factory.mktemp("unlisted")
    manifest = make_manifest(draw_films(folder / "films").assign(split=""), folder / "films")
    pack(manifest, folder / "pack", PackSettings(size=32), workers=1)
    return folder / "pack"


@pytest.fixture(scope="module")
def run(unlisted: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    films = PackedFilms(unlisted)
    folder = make_run(tmp_path_factory.mktemp("runs") / "run", smallest_model())
    remember_films(folder, films, np.flatnonzero(films.manifest.table["normal"] == 1))
    return folder


def test_a_probe_says_that_pretraining_saw_its_test_films(
    unlisted: Path, run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    task = ProbeTask(str(run), unlisted, seeds=[0], labels=["Blob"])
    with caplog.at_level(logging.WARNING, "afire"):
        ((_, (result, predictions)),) = run_probe(task)
    seen = result.seen["pretraining"]
    assert seen["answer"] == "seen" and 0 < seen["seen"] < seen["films"] == 24
    words = f"{seen['seen']} of the 24 test films, all of them normal, were among the films of the pre-training"
    assert words in result.notes[0] and words in caplog.text
    assert f"saw {seen['seen']} of 24 test films" in result_page(result)
    write_result(tmp_path / "a", result, predictions)
    write_result(tmp_path / "b", dataclasses.replace(result, name="other"), predictions)
    assert read_result(tmp_path / "a").seen == result.seen
    page = comparison_markdown(compare([tmp_path / "a", tmp_path / "b"]))
    assert f"saw {seen['seen']} of its 24 test films" in page


def test_films_that_are_new_and_weights_that_saw_none(unlisted: Path, run: Path, tmp_path: Path) -> None:
    films = PackedFilms(unlisted)
    normals = np.flatnonzero(films.manifest.table["normal"] == 1)
    rows = {"seed-0": normals[:5]}
    new = make_run(tmp_path / "new", smallest_model())
    remember_films(new, films, normals[5:])
    assert seen_in_pretraining({"seed-0": open_weights(new)}, films, rows) == (Seen(5), [])
    random = open_weights("random", smallest_model())
    assert seen_in_pretraining({"seed-0": random}, films, rows) == (Seen(5), [])
    silent = make_run(tmp_path / "random", smallest_model())  # its name must not pass for random weights
    seen, notes = seen_in_pretraining({"seed-0": open_weights(silent)}, films, rows)
    assert seen == Seen(5, 0, 5) and "is not known: random keeps no record" in notes[0]
    file = open_weights(next(silent.glob("checkpoints/*/model.safetensors")), smallest_model())
    assert seen_in_pretraining({"seed-0": file}, films, rows)[0].answer == "unknown"
    both = {"seed-0": open_weights(new), "seed-1": open_weights(run)}
    seen, notes = seen_in_pretraining(both, films, {**rows, "seed-1": normals[:5]})
    assert seen == Seen(5, 5) and len(notes) == 1 and notes[0].startswith("seed-1: 5 of the 5 test films")


def test_trivial_probes_have_no_pretraining(unlisted: Path) -> None:
    ((_, (result, _)),) = run_probe(ProbeTask("sharpness", unlisted, seeds=[0], labels=["Blob"]))
    assert result.seen == {} and "pre-training" not in result_page(result)


def test_trained_tasks_say_it_too(tmp_path: Path) -> None:
    data = draw_spots(tmp_path / "spots", 40)
    weights = make_run(tmp_path / "run", smallest_model())
    films = PackedFilms(data)
    remember_films(weights, films, np.flatnonzero(films.manifest.table["normal"] == 1))
    for task, runner in (("finetune", run_finetune), ("segment", run_segment)):
        overrides = [*QUICK, "training.epochs=1", *(["labels=[Spot]"] if task == "finetune" else ["decoder.width=16"])]
        config = load_task_config(task, overrides=overrides)  # type: ignore[call-overload]
        asked = experiment(data, tmp_path / task, weights=str(weights), model=None)
        ((_, result, _),) = runner(asked, config)
        assert result.seen["pretraining"] == {"answer": "seen", "films": 8, "seen": 4, "unknown": 0}
        assert any("4 of the 8 test films, all of them normal" in note for note in result.notes)


def probed(folder: Path, table: pd.DataFrame, config: Config) -> str:
    pack(make_manifest(table, folder / "films"), folder / "pack", PackSettings(size=32), workers=1)
    ((_, (result, _)),) = run_probe(ProbeTask("random", folder / "pack", [0], config=config, labels=["Blob"]))
    return result_page(result)


def test_intervals_are_over_patients_only_where_these_are_known(tmp_path: Path, smallest: Config) -> None:
    table = draw_films(tmp_path / "known" / "films")
    assert "bootstrap over test patients, of the mean" in probed(tmp_path / "known", table, smallest)
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "films").symlink_to(tmp_path / "known" / "films")
    page = probed(tmp_path / "none", table.drop(columns="patient"), smallest)
    assert "bootstrap over test films, patients unknown" in page and "test patients" not in page
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "films").symlink_to(tmp_path / "known" / "films")
    some = table.assign(patient=table["patient"].where(table.index != 100, ""))
    page = probed(tmp_path / "some", some, smallest)
    assert "test patients (1 of 30 test films have no patient id and count as one each)" in page


def test_unknown_patients_stay_unknown_in_a_joined_manifest(tmp_path: Path) -> None:
    sets = {}
    for name, patients in (("first", ["p1", ""]), ("second", ["", "p1"])):
        (tmp_path / name).mkdir()
        table = pd.DataFrame({"image": ["a/1.png", "2.png"], "patient": patients})
        sets[name] = make_manifest(table, tmp_path / name)
    assert sets["first"].patient_known.tolist() == [True, False]
    joined: Manifest = join_manifests(sets)
    assert joined.patient_known.tolist() == [True, False, False, True]
