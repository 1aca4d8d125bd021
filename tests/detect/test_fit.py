"""Fitting: the adaptation is the paper's, the folder is whole, equal and refused where it must be."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from afire.config import load_config
from afire.data.keys import Seen, films_seen
from afire.data.pack import PackedFilms
from afire.detect.detector import SETTINGS, Detector
from afire.detect.fit import adaptation, asked_scores, detect_overrides, detect_settings, detection_parts, open_networks
from afire.errors import UserError
from afire.training.engine import Schedules
from tests.detect.conftest import SMALLEST, fit_smallest


@pytest.mark.parametrize("films", [20, 1000])
def test_the_adaptation_is_adam_at_1e4_with_a_cosine(films: int) -> None:
    config = adaptation(load_config("small"), detect_settings(["seed=5"]), films)
    batch = config.training.batch_size
    assert config.seed == 5 and batch == min(64, films)
    assert config.training.weight_decay == config.training.weight_decay_end == 0, "AdamW without decay is Adam"
    schedules = Schedules(config.training, config.losses, 10, batch)
    rates = [schedules.at(step).learning_rate for step in range(10 * config.training.epochs)]
    assert rates[0] == pytest.approx(1e-4, rel=1e-6) and rates[-1] < 2e-6 and sorted(rates, reverse=True) == rates


def test_a_detector_survives_the_disk(detector: Detector, films: PackedFilms, model: Path) -> None:
    images = films.batch([0, 1, 2, 3])
    again = Detector.load(model)
    first, second = (one.score(images, all_scores=True) for one in (detector, again))
    assert np.array_equal(first.score, second.score) and np.array_equal(first.heat, second.heat)
    assert first.parts.keys() == second.parts.keys() and len(first.parts) >= 8
    assert first.restored is not None and first.restored.shape == (4, 32, 32)
    assert first.restored.min() >= 0 and first.restored.max() <= 1
    alone = again.score(images[2:3], restore=False)
    np.testing.assert_allclose(alone.score, first.score[2:3], rtol=1e-4, atol=1e-5)
    assert again.threshold == detector.threshold and np.isfinite(detector.threshold)


def test_the_same_seed_gives_the_same_detector(detector: Detector, films: PackedFilms, tmp_path: Path) -> None:
    again = fit_smallest(films, tmp_path / "again")
    images = films.batch([5, 6])
    np.testing.assert_allclose(again.score(images).score, detector.score(images).score, rtol=1e-5)
    assert again.choice == detector.choice


def test_the_folder_knows_its_films(model: Path, films: PackedFilms, detector: Detector) -> None:
    parts = detection_parts(films.manifest, None, 0, 0.4)
    used = np.concatenate([parts.fit, parts.held_out])
    assert films_seen(model, films, used) == Seen(len(used), sum(parts.counts().values()))
    assert detector.origin["parts"] == parts.counts() and detector.origin["notes"] is not None
    tested = np.flatnonzero(films.manifest.table["split"] == "test")
    assert films_seen(model, films, tested) == Seen(len(tested))


def test_calibration_is_that_of_the_calibration_films(films: PackedFilms, detector: Detector) -> None:
    parts = detection_parts(films.manifest, None, 0, 0.4)
    scores = detector.score(films.batch(parts.calibrate), restore=False).score
    np.testing.assert_allclose(np.sort(scores), detector.calibration.normal_scores, rtol=1e-4, atol=1e-4)


def test_nothing_is_written_over_or_begun_in_vain(films: PackedFilms, model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="already holds a detector"):
        fit_smallest(films, model)
    with pytest.raises(UserError, match="cannot vouch for a false-alarm rate"):
        fit_smallest(films, tmp_path / "rate", 0, "false_alarms=0.01")
    with pytest.raises(UserError, match="no score 'tea'"):
        fit_smallest(films, tmp_path / "score", 0, "score=tea")
    assert list(tmp_path.iterdir()) == []


def test_a_torn_folder_is_a_sentence(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no detector"):
        Detector.load(tmp_path)
    torn = tmp_path / "torn"
    torn.mkdir()
    for file in model.iterdir():
        if file.is_file():
            (torn / file.name).write_bytes(file.read_bytes())
    (torn / "detector.safetensors").write_bytes(b"torn")
    with pytest.raises(UserError, match="cannot be read"):
        Detector.load(torn)
    (torn / SETTINGS).write_text("{}")
    with pytest.raises(UserError, match="not a detector of format"):
        Detector.load(torn)


def test_wrong_films_are_a_sentence(detector: Detector) -> None:
    with pytest.raises(UserError, match=r"takes \(B, 1, 32, 32\)"):
        detector.score(torch.zeros(1, 1, 16, 16))


def test_names_of_scores() -> None:
    assert asked_scores("auto") is None and asked_scores("gaussian + surprise") == ["gaussian", "surprise"]
    with pytest.raises(UserError, match="twice"):
        asked_scores("gaussian+gaussian")


def test_settings_are_told_apart_and_change_one_by_one() -> None:
    own, others = detect_overrides(["adapt.epochs=3", "encoder.depth=2", "seed=4"])
    assert own == ["adapt.epochs=3", "seed=4"] and others == ["encoder.depth=2"]
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
