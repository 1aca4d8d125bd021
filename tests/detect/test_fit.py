"""Fitting: the adaptation is the paper's, the folder is whole, equal and refused where it must be."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from afire.data.keys import Seen, films_seen
from afire.data.manifest import make_manifest
from afire.data.pack import DecodedFilms, PackedFilms, open_manifest
from afire.detect.base import SETTINGS, TENSORS, AnomalyDetector, FitTask, load_detector
from afire.detect.calibrate import parse_scores
from afire.detect.fit import (
    adaptation,
    detect_settings,
    detection_subsets,
    fit_detector,
    open_networks,
    unadapted,
)
from afire.detect.maps import MapDetector
from afire.errors import UserError
from afire.files import folder_lock
from afire.settings import load_config
from afire.training.engine import Schedules
from afire.weights import open_weights
from tests.detect.conftest import SMALLEST, fit_smallest


@pytest.mark.parametrize("films", [20, 1000])
def test_the_adaptation_is_adam_at_1e4_with_a_cosine(films: int) -> None:
    config = adaptation(load_config("small"), detect_settings(["seed=5"]), films)
    batch = config.training.batch_size
    assert config.seed == 5 and batch == min(64, films)
    assert config.training.weight_decay == config.training.weight_decay_end == 0, "AdamW without decay is Adam"
    schedules = Schedules(config.training, 10)
    rates = [schedules.at(step).learning_rate for step in range(10 * config.training.epochs)]
    assert rates[0] == pytest.approx(1e-4, rel=1e-6) and rates[-1] < 2e-6 and sorted(rates, reverse=True) == rates


def test_a_detector_survives_the_disk(detector: AnomalyDetector, films: PackedFilms, model: Path) -> None:
    images = films.batch([0, 1, 2, 3])
    again = load_detector(model)
    first, second = (one.score(images, all_scores=True) for one in (detector, again))
    assert np.array_equal(first.score, second.score) and np.array_equal(first.heat, second.heat)
    assert first.scores.keys() == second.scores.keys() and len(first.scores) >= 8
    assert first.restored is not None and first.restored.shape == (4, 32, 32)
    assert first.restored.min() >= 0 and first.restored.max() <= 1
    alone = again.score(images[2:3], restore=False)
    np.testing.assert_allclose(alone.score, first.score[2:3], rtol=1e-4, atol=1e-5)
    assert again.threshold == detector.threshold and np.isfinite(detector.threshold)


def test_a_detector_of_the_format_before_says_the_same(detector: AnomalyDetector, model: Path, tmp_path: Path) -> None:
    old = Path(shutil.copytree(model, tmp_path / "old"))
    tensors = load_file(old / TENSORS)
    names = {name: name.removeprefix("maps.") for name in tensors if name.startswith("maps.gaussian.")}
    for name in [name for name in tensors if ".standard." in name]:
        _, patch_map, _, number = name.split(".")
        names[name] = f"standard.{patch_map}.{number}"
    names["calibration.scores"] = "calibration"
    save_file({names.get(name, name): tensor for name, tensor in tensors.items()}, old / TENSORS)
    about = json.loads((old / SETTINGS).read_text())
    about["origin"]["settings"] = about.pop("settings")
    about |= {"format": 1, "false_alarms": 0.4}
    del about["method"], about["flops"]
    (old / SETTINGS).write_text(json.dumps(about))
    again, images = load_detector(old), torch.rand(3, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    first, second = (each.score(images, all_scores=True) for each in (detector, again))
    assert again.false_alarms == 0.4 and again.settings.seed == detector.settings.seed
    assert np.array_equal(first.score, second.score) and np.array_equal(first.heat, second.heat)
    assert all(np.array_equal(first.scores[name], second.scores[name]) for name in first.scores)
    assert again.domain.objections(images) == detector.domain.objections(images)
    again.save(tmp_path / "new")
    assert json.loads((tmp_path / "new" / SETTINGS).read_text())["format"] == 2
    assert np.array_equal(load_detector(tmp_path / "new").score(images).score, first.score)


def test_all_that_was_fitted_is_state(detector: AnomalyDetector, model: Path) -> None:
    """So that nothing is packed by hand: another detector of the same settings becomes this one by its tensors."""
    other = MapDetector.build(detector.config, detector.settings)
    other.load_state_dict(detector.state_dict())
    other.choice = detector.choice
    images = torch.rand(2, 1, 32, 32, generator=torch.Generator().manual_seed(1))
    assert np.array_equal(other.score(images).score, detector.score(images).score)
    assert other.threshold == detector.threshold
    halved = MapDetector.build(detector.config, detector.settings).to(torch.bfloat16)
    assert halved.maps["gaussian"].mean.dtype == torch.bfloat16
    assert halved.calibration.scores.dtype == torch.float64, "p-values compare exact scores"


def test_the_cost_is_that_of_the_networks(detector: AnomalyDetector) -> None:
    cost, config = detector.cost(), detector.config.encoder
    tokens, width = 17, config.width
    block = 2 * tokens * (4 * width**2 + 8 * width**2) + 2 * 2 * tokens**2 * width
    embedding = 2 * 16 * 64 * width
    assert cost > config.depth * block + embedding, "an encoder at least"
    assert cost < 40 * (config.depth * block + embedding), "and not a batch"


def test_unadapted_is_the_detector_before_its_choice(films: PackedFilms, model: Path, tmp_path: Path) -> None:
    """What studies compare: the scores that users get, score by score."""
    networks = open_networks(str(model))
    settings = detect_settings(["adapt.epochs=0", "held_out=0.4", "false_alarms=0.2"])
    task = FitTask(networks.config, settings, films, tmp_path / "out", networks.pretrained, networks.run, device="cpu")
    fitted = fit_detector(task)
    subsets = detection_subsets(films.manifest, None, 0, 0.4)
    plain = unadapted(open_weights(model), films, subsets.fit, "cpu")
    images = films.batch(subsets.held_out)
    expected, given = (one.score(images, all_scores=True).scores for one in (fitted, plain))
    assert expected.keys() == given.keys() and len(given) >= 8
    for name, values in expected.items():
        np.testing.assert_allclose(given[name], values, rtol=1e-6, err_msg=name)
    assert not (tmp_path / "out" / "adapt").exists()


def test_the_same_seed_gives_the_same_detector(detector: AnomalyDetector, films: PackedFilms, tmp_path: Path) -> None:
    again = fit_smallest(films, tmp_path / "again")
    images = films.batch([5, 6])
    np.testing.assert_allclose(again.score(images).score, detector.score(images).score, rtol=1e-5)
    assert again.choice == detector.choice


def test_the_folder_knows_its_films(model: Path, films: PackedFilms, detector: AnomalyDetector) -> None:
    subsets = detection_subsets(films.manifest, None, 0, 0.4)
    used = np.concatenate([subsets.fit, subsets.held_out])
    assert films_seen(model, films, used) == Seen(len(used), sum(subsets.counts().values()))
    assert detector.origin["parts"] == subsets.counts() and detector.origin["notes"] is not None
    tested = np.flatnonzero(films.manifest.table["split"] == "test")
    assert films_seen(model, films, tested) == Seen(len(tested))


def test_calibration_is_that_of_the_calibration_films(films: PackedFilms, detector: AnomalyDetector) -> None:
    subsets = detection_subsets(films.manifest, None, 0, 0.4)
    scores = detector.score(films.batch(subsets.calibrate), restore=False).score
    np.testing.assert_allclose(np.sort(scores), detector.calibration.normal_scores, rtol=1e-4, atol=1e-4)


def test_nothing_is_written_over_or_begun_in_vain(films: PackedFilms, model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="already holds a detector"):
        fit_smallest(films, model)
    with pytest.raises(UserError, match="cannot vouch for a false-alarm rate"):
        fit_smallest(films, tmp_path / "rate", 0, "false_alarms=0.01")
    with pytest.raises(UserError, match="no score 'tea'"):
        fit_smallest(films, tmp_path / "score", 0, "score=tea")
    run = tmp_path / "run"
    run.mkdir()
    (run / "data.json").write_text("{}")
    with pytest.raises(UserError, match="already holds a run"):
        fit_smallest(films, run)
    assert list(tmp_path.iterdir()) == [run]


def test_a_folder_in_use_is_left_alone(films: PackedFilms, tmp_path: Path) -> None:
    with folder_lock(tmp_path / "new", "it"), pytest.raises(UserError, match="is writing the detector in"):
        fit_smallest(films, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_packed_film_that_was_altered_is_told_before_the_training(packed: Path, tmp_path: Path) -> None:
    shutil.copytree(packed, tmp_path / "pack")
    table = open_manifest(packed).table
    row = int(table["image"].index[(table["normal"] == 1) & (table["split"] != "test")][-1])
    images = np.load(tmp_path / "pack/images.npy", mmap_mode="r+")
    images[row, 3, 3] ^= 255
    images.flush()
    with pytest.raises(UserError, match=str(table["image"].iloc[row])):
        fit_smallest(PackedFilms(tmp_path / "pack"), tmp_path / "detector")
    assert not (tmp_path / "detector").exists()


def test_a_film_that_cannot_be_read_is_told_before_the_training(packed: Path, tmp_path: Path) -> None:
    manifest = open_manifest(packed)
    table, root = manifest.table.copy(), tmp_path / "films"
    shutil.copytree(manifest.root, root)
    bad = str(table["image"][(table["normal"] == 1) & (table["split"] != "test")].iloc[-1])
    (root / bad).write_bytes(b"not a film")
    films = DecodedFilms(make_manifest(table, root), 32)
    with pytest.raises(UserError, match=bad):
        fit_smallest(films, tmp_path / "detector")
    assert not (tmp_path / "detector").exists()


@pytest.mark.parametrize(
    ("films", "accumulate", "pieces"), [(64, 4, 4), (22, 4, 11), (37, 2, 37), (3, 8, 3), (100, 1, 1)]
)
def test_an_accumulated_run_is_adapted_on_any_number_of_films(films: int, accumulate: int, pieces: int) -> None:
    config = load_config("small", overrides=[f"training.accumulate={accumulate}"])
    training = adaptation(config, detect_settings([]), films).training
    assert (training.batch_size, training.accumulate) == (min(64, films), pieces)


def test_a_truncated_folder_is_one_message(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no detector"):
        load_detector(tmp_path)
    truncated = tmp_path / "truncated"
    truncated.mkdir()
    for file in model.iterdir():
        if file.is_file():
            (truncated / file.name).write_bytes(file.read_bytes())
    (truncated / "detector.safetensors").write_bytes(b"half")
    with pytest.raises(UserError, match="cannot be read"):
        load_detector(truncated)
    (truncated / SETTINGS).write_text("{}")
    with pytest.raises(UserError, match="not a detector of format"):
        load_detector(truncated)


def test_wrong_films_are_refused(detector: AnomalyDetector) -> None:
    with pytest.raises(UserError, match=r"takes \(B, 1, 32, 32\)"):
        detector.score(torch.zeros(1, 1, 16, 16))


def test_names_of_scores() -> None:
    known = MapDetector.meanings
    assert parse_scores("auto", known) is None
    assert parse_scores("gaussian + surprise", known) == ["gaussian", "surprise"]
    with pytest.raises(UserError, match="twice"):
        parse_scores("gaussian+gaussian", known)


def test_settings_change_one_by_one() -> None:
    settings = detect_settings(["adapt.lesions.place=anywhere"])
    assert settings.adapt.lesions.place == "anywhere"
    assert settings.adapt.lesions.haze == detect_settings([]).adapt.lesions.haze, "the rest stays"


def test_networks_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no architecture of their own"):
        open_networks("random")
    with pytest.raises(UserError, match="do not exist"):
        open_networks(str(tmp_path / "gone"), "tiny")
    with pytest.raises(UserError, match=r"adapt\.lesions\.place"):
        open_networks("random", "tiny", None, [*SMALLEST, "lesions.place=lungs"])


def test_a_fit_under_torchrun_is_refused_and_writes_nothing(
    films: PackedFilms, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every process says so: one that waited for the others would never end."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        UserError, match="a detector is fitted in one process; start `afire detect fit` without torchrun"
    ):
        fit_smallest(films, tmp_path / "out")
    assert not (tmp_path / "out").exists()
