"""Calibration on the normal films of another place: threshold, standards and domain move, the networks do not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from afire.data.keys import remember_films, seen_by_weights
from afire.data.manifest import make_manifest
from afire.data.pack import DecodedFilms
from afire.data.phantom import draw_batch
from afire.detect.base import AnomalyDetector, Subsets, load_detector
from afire.detect.calibrate import FEWEST_LOCAL, calibrate, calibrate_here
from afire.detect.taught import FinderConfig, FinderSettings, Taught
from afire.errors import UserError
from afire.settings import load_config


def local_films(folder: Path, size: int, count: int, seed: int = 50, dark: bool = True) -> DecodedFilms:
    """Normal films; ``dark``: of another scanner, with less contrast."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{number:03d}.png" for number in range(count)]
    for name, image in zip(names, draw_batch(seed, range(count), 64, diseases=()).images, strict=True):
        pixels = 0.5 * image[0] ** 1.4 + 0.1 if dark else image[0]
        Image.fromarray((255 * pixels).round().astype(np.uint8)).save(folder / name)
    return DecodedFilms(make_manifest(pd.DataFrame({"image": names, "patient": names}), folder), size)


@pytest.fixture(scope="module")
def detector_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A detector whose networks learnt nothing: what is calibrated does not depend on it."""
    folder = tmp_path_factory.mktemp("there")
    settings = FinderConfig(false_alarms=0.2, taught=FinderSettings(start="nothing", width=8, blocks=1))
    detector = Taught(Taught.config_of(load_config(None, None, ["image.size=32"]), settings), settings)
    films = local_films(folder / "films", 32, 60, seed=40, dark=False)
    fitted = Subsets(np.arange(30), np.arange(30, 40), np.arange(40, 60), "by their numbers")
    calibrate(detector, films, fitted)
    remember_films(folder / "model", films, np.arange(60))
    detector.save(folder / "model")
    return folder / "model"


@pytest.fixture(scope="module")
def here(detector_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[AnomalyDetector, Path, DecodedFilms]:
    detector = load_detector(detector_folder)
    folder = tmp_path_factory.mktemp("here")
    films = local_films(folder / "films", detector.config.image.size, 60)
    calibrate_here(detector, detector_folder, films, folder / "model", source="here", false_alarms=0.2)
    return detector, folder / "model", films


def test_about_as_many_local_normals_are_flagged_as_was_asked(
    here: tuple[AnomalyDetector, Path, DecodedFilms], detector_folder: Path, tmp_path: Path
) -> None:
    detector, _, _ = here
    new = local_films(tmp_path / "new", detector.config.image.size, 60, seed=51)
    images = new.batch(np.arange(60))
    before, after = load_detector(detector_folder), detector
    rate = float((after.score(images).score >= after.threshold).mean())
    assert abs(rate - 0.2) < 0.17, "three sd of 60 films around the rate that was asked for"
    centred = after.score(images).score
    shifted = before.score(images).score
    assert abs(np.median(centred)) < abs(np.median(shifted)) + 0.2, "what is usual here is the middle"
    assert after.false_alarms == 0.2 and len(after.calibration) >= FEWEST_LOCAL


def test_networks_stay_and_the_folder_opens_again(
    here: tuple[AnomalyDetector, Path, DecodedFilms], detector_folder: Path
) -> None:
    detector, folder, films = here
    again, before = load_detector(folder), load_detector(detector_folder)
    assert again.weights_hash == before.weights_hash
    images = films.batch(np.arange(4))
    np.testing.assert_array_equal(again.score(images).score, detector.score(images).score)
    assert again.origin["calibrated_on"]["name"] == "here"
    assert [c.weight for c in again.choice.components] == [c.weight for c in before.choice.components]
    assert sum(bool(said) for said in again.domain.warnings(films.batch(np.arange(60)))) <= 3


def test_the_films_of_a_calibration_are_remembered(here: tuple[AnomalyDetector, Path, DecodedFilms]) -> None:
    _, folder, films = here
    assert seen_by_weights(folder, films, np.arange(5)).answer == "seen"


def test_films_that_made_the_detector_are_noted(detector_folder: Path, tmp_path: Path) -> None:
    known = local_films(tmp_path / "known", 32, 40, seed=40, dark=False)
    notes = calibrate_here(load_detector(detector_folder), detector_folder, known, tmp_path / "a")
    assert any(note.startswith("39 of these 39 films have made this detector before") for note in notes)
    others = local_films(tmp_path / "others", 32, 40)
    notes = calibrate_here(load_detector(detector_folder), detector_folder, others, tmp_path / "b")
    assert not any("have made this detector" in note for note in notes)


def test_too_few_films_wrong_rates_and_taken_folders_are_refused(
    here: tuple[AnomalyDetector, Path, DecodedFilms], detector_folder: Path, tmp_path: Path
) -> None:
    _, folder, films = here
    few = local_films(tmp_path / "few", films.size, FEWEST_LOCAL - 1)

    def attempt(films: DecodedFilms, out: Path, rate: float | None = None) -> None:
        calibrate_here(load_detector(detector_folder), detector_folder, films, out, false_alarms=rate)

    with pytest.raises(UserError, match="too few to calibrate"):
        attempt(few, tmp_path / "a")
    with pytest.raises(UserError, match="the films are 48 px, but the detector takes 32 px; pack them with --size 32"):
        attempt(DecodedFilms(films.manifest, 48), tmp_path / "a")
    with pytest.raises(UserError, match=r"below 0\.0"):
        attempt(films, tmp_path / "a", 0.001)
    with pytest.raises(UserError, match="between 0 and 1"):
        attempt(films, tmp_path / "a", 2.0)
    with pytest.raises(UserError, match="already holds a detector"):
        attempt(films, folder)
    assert not (tmp_path / "a").exists()


def test_films_that_are_no_chests_are_left_out(detector_folder: Path, tmp_path: Path) -> None:
    detector = load_detector(detector_folder)
    films = local_films(tmp_path / "films", detector.config.image.size, 40)
    turned = tmp_path / "films" / "003.png"
    Image.open(turned).rotate(180).save(turned)
    notes = calibrate_here(detector, detector_folder, films, tmp_path / "model", false_alarms=0.2)
    assert any("left out" in note for note in notes) and len(detector.calibration) < 40


def test_standards_of_few_films_lean_on_what_was_known(detector_folder: Path) -> None:
    """A place where the local films happen not to differ must not become infinitely sure."""
    detector = load_detector(detector_folder)
    from afire.detect.calibrate import _measure_by
    from afire.detect.normals import Standard

    standards = {m: (m.mean.clone(), m.sd.clone()) for m in detector.modules() if isinstance(m, Standard)}
    size = detector.config.image.size
    images = torch.from_numpy(draw_batch(3, [1] * 4, size, diseases=()).images)

    class Same:
        def batch(self, rows: np.ndarray) -> torch.Tensor:
            return images[: len(rows)]

    _measure_by(detector, Same(), np.arange(4), standards)  # type: ignore[arg-type]
    for standard, (_, sd) in standards.items():
        assert (standard.sd > 0.5 * sd).all()
