"""Heat against places: slow references, perfect and blind maps, masks of lungs are no findings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.ndimage import label
from sklearn.metrics import roc_auc_score

from afire.data.manifest import Manifest
from afire.data.pack import PackedFilms
from afire.detect.localise import enlarge, find_places, localise, region_overlap
from tests.tasks.drawn import draw_spots


def slow_overlap(values: np.ndarray, inside: np.ndarray, limit: float) -> float:
    """PRO by its definition: at every threshold, every place by itself."""
    pieces = [(film, label(mask, np.ones((3, 3)))) for film, mask in enumerate(inside)]
    points = [(0.0, 0.0)]
    for threshold in np.unique(values)[::-1]:
        called = values >= threshold
        found = [
            called[film][numbers == piece].mean() for film, (numbers, count) in pieces for piece in range(1, count + 1)
        ]
        points.append((called[~inside].mean(), float(np.mean(found))))
    false, overlap = np.array(points).T
    grid = np.linspace(0, limit, 20_001)
    heights = np.interp(grid, false, overlap)
    return float(((heights[1:] + heights[:-1]) / 2).mean())


def places(seed: int = 0) -> np.ndarray:
    """Two films of 12 px: one place, and two places of different sizes."""
    inside = np.zeros((2, 12, 12), bool)
    inside[0, 2:5, 3:7] = inside[1, 0:2, 0:2] = inside[1, 6:11, 5:11] = True
    return inside


@pytest.mark.parametrize("ties", [False, True])
def test_region_overlap_like_the_slow_one(ties: bool) -> None:
    rng = np.random.default_rng(1)
    inside = places()
    values = (rng.normal(size=inside.shape) + 1.2 * inside).astype(np.float32)
    values = np.round(values) if ties else values
    for limit in (0.05, 0.3, 1.0):
        assert region_overlap(values, inside, limit) == pytest.approx(slow_overlap(values, inside, limit), abs=2e-3)


def test_a_perfect_and_a_blind_map() -> None:
    inside = places()
    perfect = localise(inside.astype(np.float32), inside)
    assert perfect.pixel_auc == 1 and perfect.pro == pytest.approx(1, abs=0.01) and perfect.hit.tolist() == [1, 1]
    blind = localise(np.zeros((2, 12, 12), np.float32), inside)
    assert blind.pixel_auc == 0.5 and blind.pro == pytest.approx(0.15), "the diagonal"
    np.testing.assert_allclose(perfect.chance, [12 / 144, 34 / 144])


def test_pixel_auc_like_scikit_learn() -> None:
    inside = places()
    heat = np.random.default_rng(2).normal(size=(2, 3, 3)).astype(np.float32)
    large = enlarge(heat, 12)
    assert localise(heat, inside).pixel_auc == pytest.approx(roc_auc_score(inside.ravel(), large.ravel()))
    assert large[0, 1, 1] == pytest.approx(heat[0, 0, 0], abs=1e-6) or large.shape == (2, 12, 12)


@pytest.fixture(scope="module")
def spots(tmp_path_factory: pytest.TempPathFactory) -> PackedFilms:
    return PackedFilms(draw_spots(tmp_path_factory.mktemp("spots")))


def test_masks_of_abnormal_films(spots: PackedFilms) -> None:
    found = find_places(spots, np.arange(20))
    assert found is not None and found.kind == "masks" and found.rows.tolist() == list(range(1, 20, 2))
    assert (found.inside.sum(axis=(1, 2)) == 144).all()


def test_masks_of_lungs_are_no_findings_and_boxes_stand_in(spots: PackedFilms) -> None:
    table = spots.manifest.table.assign(boxes="")
    lungs = Manifest(table, spots.manifest.root, {"mask": "lungs"})
    films = PackedFilms(spots.folder)
    films.manifest = lungs
    assert find_places(films, np.arange(20)) is None
    box = '[{"label": "Spot", "x": 0.25, "y": 0.5, "w": 0.25, "h": 0.125}]'
    boxed = table.assign(boxes=pd.Series([box if row in (1, 2, 3) else "" for row in range(len(table))]))
    films.manifest = Manifest(boxed, spots.manifest.root, {"mask": "lungs"})
    found = find_places(films, np.arange(20))
    assert found is not None and found.kind == "boxes" and found.rows.tolist() == [1, 3], "film 2 is normal"
    assert found.inside[0].sum() == 8 * 4 and found.inside[0, 16:20, 8:16].all()


def test_masks_that_are_gone_are_not_used(spots: PackedFilms, caplog: pytest.LogCaptureFixture) -> None:
    films = PackedFilms(spots.folder)
    films.manifest = Manifest(spots.manifest.table.assign(boxes=""), Path("/nonexistent"), spots.manifest.info)
    assert find_places(films, np.arange(20)) is None and "masks are not used" in caplog.text
