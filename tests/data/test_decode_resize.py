"""Square films, masks and boxes: antialiased, in [0,1], and all three with one geometry."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afire.data.decode import FIT_MODES, FitMode, fit_box, fit_mask, fit_square
from afire.errors import UserError

sides = st.integers(1, 90)
modes = st.sampled_from(FIT_MODES)


@settings(max_examples=80, deadline=None)
@given(height=sides, width=sides, size=st.integers(1, 70), mode=modes, seed=st.integers(0, 2**32 - 1))
def test_any_film_fits_and_stays_in_range(height: int, width: int, size: int, mode: FitMode, seed: int) -> None:
    film = np.random.default_rng(seed).integers(0, 2, (height, width)).astype(np.float32)
    square = fit_square(film, size, mode)
    assert square.shape == (size, size) and square.dtype == np.float32
    assert np.isfinite(square).all() and square.min() >= 0.0 and square.max() <= 1.0
    mask = fit_mask(film > 0, size, mode)
    assert mask.shape == (size, size) and mask.dtype == np.bool_


@pytest.mark.parametrize("value", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("mode", ["squash", "crop"])
def test_a_constant_film_stays_constant(value: float, mode: FitMode) -> None:
    square = fit_square(np.full((37, 61), value, np.float32), 24, mode)
    np.testing.assert_allclose(square, value, atol=1e-6)


def test_a_square_film_of_the_right_size_is_unchanged() -> None:
    film = np.random.default_rng(0).random((32, 32), np.float32)
    for mode in FIT_MODES:
        np.testing.assert_array_equal(fit_square(film, 32, mode), film)


def test_fine_stripes_become_grey_not_stripes() -> None:
    """Without antialiasing, stripes of one pixel reduced eight times come out as stripes of full contrast."""
    film = np.zeros((512, 512), np.float32)
    film[:, ::2] = 1.0
    square = fit_square(film, 60)
    assert square[:, 2:-2].std() < 0.02
    assert abs(square.mean() - 0.5) < 0.01


def test_the_mean_brightness_is_kept() -> None:
    film = np.random.default_rng(1).random((300, 200), np.float32)
    assert abs(fit_square(film, 50).mean() - film.mean()) < 2e-3


def test_letterbox_centres_on_black_and_keeps_proportions() -> None:
    square = fit_square(np.ones((40, 20), np.float32), 20, "letterbox")
    np.testing.assert_array_equal(square[:, :5], 0.0)
    np.testing.assert_allclose(square[:, 5:15], 1.0, atol=1e-6)
    np.testing.assert_array_equal(square[:, 15:], 0.0)


def test_crop_takes_the_middle() -> None:
    film = np.zeros((20, 60), np.float32)
    film[:, 18:42] = 1.0  # a little more: the filter looks past the edge of the crop, where there is film
    np.testing.assert_allclose(fit_square(film, 10, "crop"), 1.0, atol=1e-6)
    assert (fit_square(film, 10, "squash")[:, [0, -1]] < 0.01).all()


def test_a_film_one_pixel_wide_survives_letterbox() -> None:
    square = fit_square(np.ones((1000, 1), np.float32), 32, "letterbox")
    assert (square.max(axis=1) > 0.99).all() and (square > 0).sum() == 32


def test_a_view_with_strides_is_read_in_order() -> None:
    film = np.random.default_rng(2).random((40, 40), np.float32)
    np.testing.assert_array_equal(fit_square(film[::-1, ::2], 16), fit_square(film[::-1, ::2].copy(), 16))


def slow_mask(mask: np.ndarray, size: int) -> np.ndarray:
    """A pixel is inside when more than half of its area is: counted on a grid that divides both sizes."""
    fine = mask.repeat(size, axis=0).repeat(size, axis=1)
    height, width = mask.shape
    share = fine.reshape(size, height, size, width).mean(axis=(1, 3))
    return share > 0.5


@settings(max_examples=40, deadline=None)
@given(height=st.integers(1, 24), width=st.integers(1, 24), size=st.integers(1, 16), seed=st.integers(0, 2**32 - 1))
def test_masks_follow_the_area(height: int, width: int, size: int, seed: int) -> None:
    mask = np.random.default_rng(seed).random((height, width)) < 0.6
    fast, slow = fit_mask(mask, size, "squash"), slow_mask(mask, size)
    fine = mask.repeat(size, axis=0).repeat(size, axis=1).reshape(size, height, size, width).mean(axis=(1, 3))
    decided = np.abs(fine - 0.5) > 1e-5  # exactly half may fall either way by rounding
    np.testing.assert_array_equal(fast[decided], slow[decided])


def test_every_bit_of_a_uint8_mask_is_its_own_mask() -> None:
    rng = np.random.default_rng(3)
    left, right = rng.random((50, 70)) < 0.5, rng.random((50, 70)) < 0.7
    flags = left.astype(np.uint8) * 1 + right.astype(np.uint8) * 64
    for mode in FIT_MODES:
        together = fit_mask(flags, 20, mode)
        assert together.dtype == np.uint8
        np.testing.assert_array_equal(together & 1 != 0, fit_mask(left, 20, mode))
        np.testing.assert_array_equal(together & 64 != 0, fit_mask(right, 20, mode))
    white = fit_mask(left.astype(np.uint8) * 255, 20)
    assert set(np.unique(white)) <= {0, 255}


@settings(max_examples=60, deadline=None)
@given(
    height=st.integers(40, 200),
    width=st.integers(40, 200),
    mode=modes,
    data=st.data(),
)
def test_film_mask_and_box_agree(height: int, width: int, mode: FitMode, data: st.DataObject) -> None:
    """A white rectangle is found at the same place by its film, its mask and its box, to a pixel."""
    size = 64
    left = data.draw(st.integers(0, width - 20))
    top = data.draw(st.integers(0, height - 20))
    right, bottom = data.draw(st.integers(left + 16, width)), data.draw(st.integers(top + 16, height))
    film = np.zeros((height, width), np.float32)
    film[top:bottom, left:right] = 1.0
    box = fit_box((left / width, top / height, (right - left) / width, (bottom - top) / height), height, width, mode)
    mask = fit_mask(film > 0, size, mode)
    if box is None:
        assert not mask.any()
        return
    x, y, w, h = (value * size for value in box)
    if min(w, h) < 3:  # a sliver left by the crop: too thin for the mask to decide
        return
    rows, columns = np.nonzero(mask)
    found = np.array([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1])
    np.testing.assert_allclose(found, [x, y, x + w, y + h], atol=1.5 if mode == "letterbox" else 0.6)
    assert ((fit_square(film, size, mode) > 0.5) != mask).mean() < 0.1


def test_boxes_by_hand() -> None:
    box = (0.25, 0.5, 0.5, 0.25)
    assert fit_box(box, 100, 200, "squash") == pytest.approx(box)
    assert fit_box(box, 100, 200, "letterbox") == pytest.approx((0.25, 0.5, 0.5, 0.125))
    assert fit_box(box, 100, 200, "crop") == pytest.approx((0.0, 0.5, 1.0, 0.25))
    assert fit_box((0.0, 0.0, 0.2, 1.0), 100, 200, "crop") is None
    assert fit_box((0.2, 0.0, 0.1, 1.0), 100, 200, "crop") == pytest.approx((0.0, 0.0, 0.1, 1.0))
    assert fit_box((0.5, 0.5, 0.0, 0.1), 100, 200, "squash") is None


def test_an_unknown_mode_is_said_in_words() -> None:
    with pytest.raises(UserError, match="'stretch' is not one of squash, letterbox, crop"):
        fit_square(np.zeros((4, 4), np.float32), 4, "stretch")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="'stretch'"):
        fit_box((0, 0, 1, 1), 4, 4, "stretch")  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (5, 5, 3)])
def test_what_is_not_a_film_is_a_programming_error(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError):
        fit_square(np.zeros(shape, np.float32), 8)
