"""What is measured of one film; AUC against scikit-learn's, and its interval over patients."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from sklearn.metrics import roc_auc_score

from afire.data.audit import measure as roc
from afire.data.audit.copies import hamming, unit_vectors
from afire.data.audit.measure import (
    auc,
    auc_interval,
    edge_ranks,
    hash_pixels,
    laplacian_variance,
    measure_film,
    perceptual_hash,
    rank_thumb,
    weighted_auc,
)
from tests.data.audit.drawing import draw_chest, save


def test_one_film_in_two_formats_has_other_bytes_and_equal_pixels(tmp_path: Path) -> None:
    film = draw_chest(np.random.default_rng(0))
    save(film, tmp_path / "a.png")
    save(film, tmp_path / "a.bmp")
    png, bmp = measure_film(tmp_path / "a.png", "a.png"), measure_film(tmp_path / "a.bmp", "a.bmp")
    assert png.error == bmp.error == ""
    assert png.sha256 != bmp.sha256
    assert png.pixels == bmp.pixels
    assert (png.width, png.height, png.bits) == (96, 96, 8)
    assert png.brightness == pytest.approx(float(film.mean()), abs=0.01)


def test_pixel_hash_sees_one_grey_level_and_the_shape() -> None:
    film = np.zeros((4, 6), np.float32)
    other = film.copy()
    other[0, 0] = 1 / 255
    assert hash_pixels(film) != hash_pixels(other)
    assert hash_pixels(film) != hash_pixels(film.reshape(6, 4))


def test_ranks_ignore_gamma_and_windowing() -> None:
    film = draw_chest(np.random.default_rng(1), 128, 128)
    plain = rank_thumb(film).ravel()
    for changed in (film**0.5, film**2.0, 0.2 + 0.5 * film):
        ranks = rank_thumb(changed.astype(np.float32)).ravel()
        correlation = float((unit_vectors(plain[None]) * unit_vectors(ranks[None])).sum())
        assert correlation > 0.995


def test_ranks_of_a_blank_film_are_one_value() -> None:
    blank = np.full((128, 128), 0.5, np.float32) + np.random.default_rng(0).normal(0, 1e-5, (128, 128))
    assert len(np.unique(rank_thumb(blank.astype(np.float32)))) == 1


def test_ranks_share_ties() -> None:
    halves = np.zeros((32, 32), np.float32)
    halves[:, 16:] = 1
    low, high = np.unique(rank_thumb(halves))
    assert (low, high) == (64, 191)  # mean ranks 255.5 and 767.5 of 0..1023


def test_ranks_along_the_edge_know_nothing_of_what_lies_inside() -> None:
    film = np.random.default_rng(2).random((32, 32)).astype(np.float32)
    inside = film.copy()
    inside[3:-3, 3:-3] = np.linspace(0, 5, 26 * 26, dtype=np.float32).reshape(26, 26)
    outside = film.copy()
    outside[0, :16] += 1
    thumbs = np.stack([rank_thumb(each).ravel() for each in (film, inside, outside)])
    assert (thumbs[0] != thumbs[1]).any()
    same, painted, framed = edge_ranks(thumbs)
    assert same.shape == (32 * 32 - 26 * 26,) and same.min() == 0 and same.max() == 1
    # ranks of a whole film come in 256 steps, so that neighbours along the edge may tie and untie
    np.testing.assert_allclose(painted, same, atol=0.02)
    assert np.abs(framed - same).max() > 0.1


def test_perceptual_hash_survives_compression_and_tells_films_apart(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    film, stranger = draw_chest(rng, 128, 128), draw_chest(rng, 128, 128)
    save(film, tmp_path / "a.jpg", quality=30)
    again = np.asarray(Image.open(tmp_path / "a.jpg"), dtype=np.float32) / 255
    hashes = np.array([perceptual_hash(rank_thumb(one)) for one in (film, again, stranger)], np.uint64)
    assert hamming(hashes[:1], hashes[1:2])[0] <= 4
    assert hamming(hashes[:1], hashes[2:])[0] >= 8


def test_hamming_counts_bits() -> None:
    first = np.array([0, 0b1011, 2**64 - 1], np.uint64)
    assert hamming(first, np.zeros(3, np.uint64)).tolist() == [0, 3, 64]


def test_blur_lowers_sharpness() -> None:
    film = np.random.default_rng(3).random((128, 128), np.float32)
    blurred = (film + np.roll(film, 1, 0) + np.roll(film, 1, 1) + np.roll(film, (1, 1), (0, 1))) / 4
    assert laplacian_variance(blurred) < 0.5 * laplacian_variance(film)


@pytest.mark.parametrize("content", [b"", b"not an image", b"\x89PNG\r\n\x1a\n" + b"\0" * 40])
def test_a_broken_file_is_one_message(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.png").write_bytes(content)
    found = measure_film(tmp_path / "bad.png", "bad.png")
    assert found.error.startswith("bad.png ")  # the name in the manifest, not where the data lie
    assert str(tmp_path) not in found.error
    assert found.error.endswith(".")


def test_a_missing_file_is_one_message(tmp_path: Path) -> None:
    assert "gone.png" in measure_film(tmp_path / "gone.png", "gone.png").error


def test_a_defect_in_a_decoder_names_the_film_and_quotes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("PatientName = DOE^JANE")

    save(draw_chest(np.random.default_rng(0)), tmp_path / "a.png")
    monkeypatch.setattr("afire.data.audit.measure.read_film", fail)
    error = measure_film(tmp_path / "a.png", "a.png").error
    assert "a.png" in error
    assert "DOE" not in error


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 6), st.booleans(), st.integers(0, 3)), min_size=2, max_size=40
    )  # few distinct scores: ties
)
def test_auc_is_scikit_learns(films: list[tuple[int, bool, int]]) -> None:
    scores = np.array([film[0] for film in films], float)
    positive = np.array([film[1] for film in films])
    weights = np.array([[film[2] for film in films], [1] * len(films)], float)
    found = weighted_auc(scores, positive, weights)
    for value, weight in zip(found, weights, strict=True):
        if weight[positive].sum() > 0 and weight[~positive].sum() > 0:
            assert value == pytest.approx(roc_auc_score(positive, scores, sample_weight=weight))
        else:
            assert np.isnan(value)


def test_auc_without_both_classes_is_nan() -> None:
    assert np.isnan(auc(np.array([1.0, 2.0]), np.array([True, True])))


def test_interval_holds_the_auc_and_widens_when_films_come_from_few_patients() -> None:
    rng = np.random.default_rng(0)
    positive = np.repeat(rng.random(40) < 0.5, 10)
    of_patient = np.repeat(rng.normal(0, 1, 40), 10)  # all films of a patient score alike
    scores = positive + of_patient + rng.normal(0, 0.1, 400)
    people, films = np.repeat(np.arange(40), 10).astype(object), np.arange(400).astype(object)
    by_patient = auc_interval(scores, positive, people, np.random.default_rng(1))
    by_film = auc_interval(scores, positive, films, np.random.default_rng(1))
    assert by_patient[0] < auc(scores, positive) < by_patient[1]
    assert by_patient[1] - by_patient[0] > 2 * (by_film[1] - by_film[0])


def test_interval_does_not_depend_on_how_much_fits_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(2)
    scores, positive = rng.normal(size=50), rng.random(50) < 0.5
    people = np.arange(50).astype(object)
    whole = auc_interval(scores, positive, people, np.random.default_rng(3))
    monkeypatch.setattr(roc, "_ROWS_AT_ONCE", 50 * 7)
    assert auc_interval(scores, positive, people, np.random.default_rng(3)) == whole
