"""Trivial detectors against slow references, and what is said where they cannot be."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from scipy.ndimage import laplace
from sklearn.decomposition import PCA

from afire.data.manifest import Manifest, make_manifest
from afire.data.pack import DecodedFilms, PackedFilms
from afire.detect.protocol import TRIVIAL, look_plainly, missing, trivial_scores

NORMALS = np.arange(0, 120, 3)


@pytest.fixture(scope="module")
def plain(films: PackedFilms):
    return look_plainly(films, np.arange(len(films)))


def test_blur_is_minus_the_variance_of_the_laplacian(films: PackedFilms, plain) -> None:
    film = films.batch([5])[0, 0].numpy().astype(float)
    assert trivial_scores(plain, NORMALS)["blur"][5] == pytest.approx(-laplace(film, mode="nearest").var(), rel=1e-4)


def test_metadata_and_area(films: PackedFilms, plain) -> None:
    scores = trivial_scores(plain, NORMALS)
    sides = films.manifest.table[["meta:orig_width", "meta:orig_height"]].to_numpy(float)
    np.testing.assert_allclose(scores["area"], -sides.prod(axis=1), rtol=1e-6)
    far = np.argmax(np.abs(np.log(sides[:, 0]) - np.log(sides[NORMALS, 0]).mean()))
    assert scores["metadata"].argmax() == far, "the width is all that varies"


def test_pixel_gaussian_and_pca_like_the_slow_way(films: PackedFilms, plain) -> None:
    scores = trivial_scores(plain, NORMALS)
    pictures = films.batch(np.arange(len(films)))[:, 0].numpy().astype(float).reshape(len(films), -1)  # 32 px
    pictures = (pictures - pictures.mean(axis=1, keepdims=True)) / pictures.std(axis=1, keepdims=True)
    normal = pictures[NORMALS]
    expected = (((pictures - normal.mean(axis=0)) / normal.std(axis=0)) ** 2).mean(axis=1)
    np.testing.assert_allclose(scores["pixel gaussian"], expected, rtol=1e-3)
    pca = PCA(len(NORMALS) - 1, svd_solver="full").fit(normal)  # 64 are more than 40 films have
    residual = ((pictures - pca.inverse_transform(pca.transform(pictures))) ** 2).sum(axis=1)
    np.testing.assert_allclose(scores["pca residual"], residual, rtol=1e-3, atol=1e-3)
    small = pictures.reshape(-1, 16, 2, 16, 2).mean(axis=(2, 4)).reshape(len(films), -1)
    small = (small - small.mean(axis=1, keepdims=True)) / small.std(axis=1, keepdims=True)
    pca = PCA(len(NORMALS) - 1, svd_solver="full").fit(small[NORMALS])
    spread = pca.explained_variance_ * (len(NORMALS) - 1) / len(NORMALS)
    distance = (pca.transform(small) ** 2 / spread).sum(axis=1)
    np.testing.assert_allclose(scores["pca mahalanobis"], distance, rtol=1e-2)


def test_rows_that_the_data_do_not_allow_are_left_out_and_said(plain) -> None:
    scores = trivial_scores(plain, NORMALS)
    assert set(TRIVIAL) - set(scores) == {"jpeg size", "view"}
    assert any("JPEG" in reason for reason in missing(plain, NORMALS))
    nothing = np.empty(0, np.int64)
    assert set(trivial_scores(plain, nothing)) == {"area", "blur"}
    assert any("hold none" in reason for reason in missing(plain, nothing))


def test_jpeg_size(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name, noise in (("smooth.jpg", 1), ("rough.jpg", 60)):
        values = np.clip(128 + noise * rng.normal(size=(32, 32)), 0, 255).astype(np.uint8)
        Image.fromarray(values).save(tmp_path / name)
    manifest = make_manifest(pd.DataFrame({"image": ["smooth.jpg", "rough.jpg"]}), tmp_path)
    plain = look_plainly(DecodedFilms(manifest, 32), np.array([0, 1]))
    sizes = trivial_scores(plain, np.array([0, 1]))["jpeg size"]
    assert sizes[0] == -(tmp_path / "smooth.jpg").stat().st_size and sizes[0] > sizes[1]
    assert any("32 x 32" in reason for reason in missing(plain, np.array([0, 1])))
    (tmp_path / "rough.jpg").unlink()
    assert look_plainly(DecodedFilms(manifest, 32), np.array([0])).file_bytes is not None


def test_the_view_alone_is_a_detector(films: PackedFilms) -> None:
    views = np.where(np.arange(120) % 3 == 0, "AP", "PA")
    seen = PackedFilms(films.folder)
    seen.manifest = Manifest(seen.manifest.table.assign(view=views), seen.manifest.root)
    scores = trivial_scores(look_plainly(seen, np.arange(120)), NORMALS)
    assert np.array_equal(scores["view"], np.arange(120) % 3 == 0)
    assert "view" not in trivial_scores(look_plainly(films, np.arange(120)), NORMALS), "these do not say their views"
