"""What a detector keeps of normal films for people: an average that shows nobody, patches only when they are asked."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from afire.data.manifest import Manifest
from afire.data.pack import PackedFilms
from afire.detect.atlas import MEAN_FILE, PATCH, PATCH_FILE, NormalAtlas, cut_patches, make_atlas, pick_typical
from afire.detect.base import load_detector
from afire.errors import UserError
from afire.export.write import export_bundle
from tests.detect.conftest import fit_smallest


def normal_rows(films: PackedFilms) -> np.ndarray:
    return np.flatnonzero(films.manifest.table["normal"].to_numpy() == 1)


def test_the_mean_is_that_of_the_films(films: PackedFilms) -> None:
    rows = normal_rows(films)
    atlas = make_atlas(films, rows, positions=4)
    assert atlas is not None and atlas.patches is None and (atlas.films, atlas.places) == (len(rows), 4)
    mean = films.batch(rows)[:, 0].double().mean(dim=0).numpy() * 255
    assert np.abs(atlas.mean - mean).max() <= 0.5 + 1e-6


def test_an_average_of_few_patients_is_not_kept(films: PackedFilms) -> None:
    few = normal_rows(films)[:18]
    assert films.manifest.table["patient"].iloc[few].nunique() == 9
    assert make_atlas(films, few, positions=4) is None
    assert make_atlas(films, few, positions=4, patches=1) is not None, "who asks for pieces of films gets the mean too"


def test_no_film_with_a_finding_and_no_held_out_film_is_in_it(films: PackedFilms, tmp_path: Path) -> None:
    detector = fit_smallest(films, tmp_path / "model")
    assert detector.atlas is not None and detector.atlas.films == detector.origin["parts"]["fit"]


def test_a_patch_is_the_surroundings_of_its_place() -> None:
    film = torch.zeros(1, 1, 64, 64)
    film[0, 0, 16:32, 32:48] = 1  # the place in row 1, column 2 of four
    patches = cut_patches(film, 4)[0].float() / 255
    assert patches.shape == (4, 4, PATCH, PATCH)
    quarter = PATCH // 4
    assert patches[1, 2, quarter:-quarter, quarter:-quarter].mean() > 0.97
    assert patches[1, 2].mean() == pytest.approx(0.25, abs=0.02)
    assert patches[1, 1, quarter:-quarter, -quarter:].mean() > 0.9, "at the edge of its neighbour"
    assert patches[3, 0].max() == 0
    film[0, 0, :16, :16] = 1
    assert cut_patches(film, 4)[0, 0, 0, : PATCH // 2, : PATCH // 2].float().mean() > 245, "not beyond the film"


def test_typical_patches_leave_odd_ones_out_and_show_the_range() -> None:
    levels = torch.tensor([100, 101, 99, 110, 90, 0, 255, 254])
    windows = levels.view(-1, 1, 1, 1, 1).expand(-1, 2, 2, PATCH, PATCH).to(torch.uint8)
    picked = pick_typical(windows, 3)[0, 1].float().mean(dim=(1, 2)).tolist()
    assert picked[0] in (110.0, 101.0), "the closest to their mean"
    assert set(picked) <= {90.0, 99.0, 100.0, 101.0, 110.0} and len(set(picked)) == 3
    assert pick_typical(windows, 20).shape[2] == len(levels), "not more than there are"


def test_patches_are_kept_only_where_asked_and_never_go_into_a_bundle(films: PackedFilms, tmp_path: Path) -> None:
    fit_smallest(films, tmp_path / "plain")
    assert (tmp_path / "plain" / MEAN_FILE).is_file() and not (tmp_path / "plain" / PATCH_FILE).exists()
    fit_smallest(films, tmp_path / "model", 0, "atlas.patches=2")
    loaded = load_detector(tmp_path / "model").atlas
    assert loaded is not None and loaded.patches is not None and loaded.patches.shape == (4, 4, 2, PATCH, PATCH)
    export_bundle(tmp_path / "model", tmp_path / "bundle")
    inside = {file.name for file in (tmp_path / "bundle").rglob("*")}
    assert MEAN_FILE in inside and PATCH_FILE not in inside
    kept = load_detector(tmp_path / "bundle" / "detector").atlas
    assert kept is not None and kept.patches is None and (kept.mean == loaded.mean).all()


def test_a_detector_of_the_version_before_has_none(model: Path, tmp_path: Path) -> None:
    assert NormalAtlas.load(tmp_path) is None
    assert "mean" in load_file(model / MEAN_FILE)
    (tmp_path / MEAN_FILE).write_bytes(b"truncated")
    with pytest.raises(UserError, match="fit the detector again"):
        NormalAtlas.load(tmp_path)


def test_rows_of_one_patient_count_once(films: PackedFilms) -> None:
    one = PackedFilms(films.folder)
    one.manifest = Manifest(one.manifest.table.assign(patient="p"), one.manifest.root)
    assert make_atlas(one, normal_rows(films), positions=4) is None


def test_the_closest_patches_are_those_of_a_slow_search() -> None:
    rng = np.random.default_rng(3)
    patches = rng.integers(0, 256, (4, 4, 5, PATCH, PATCH), dtype=np.uint8)
    atlas = NormalAtlas(10, np.zeros((8, 8), np.uint8), 4, patches)
    film = rng.random((atlas.patch_side, atlas.patch_side), dtype=np.float32)
    found = atlas.closest(film, 3)
    pieces = cut_patches(torch.from_numpy(film)[None, None], 4)[0].numpy().astype(int)
    for row in range(4):
        for column in range(4):
            far = [float(((patches[row, column, k].astype(int) - pieces[row, column]) ** 2).mean()) for k in range(5)]
            assert found[row, column].tolist() == sorted(range(5), key=far.__getitem__)[:3]
    patches[2, 1, 4] = pieces[2, 1]
    assert NormalAtlas(10, atlas.mean, 4, patches).closest(film, 1)[2, 1, 0] == 4, "itself above all"
