"""The choice of threshold and smallest piece, against masks that are cut one by one."""

from __future__ import annotations

import numpy as np
import pytest

from afire.tasks import metrics as m
from afire.tasks.masks import choose, component_sizes, without_small_components


def smooth_films(count: int = 6, size: int = 20) -> np.ndarray:
    from scipy.ndimage import gaussian_filter

    noise = np.random.default_rng(4).normal(size=(count, size, size))
    smooth = gaussian_filter(noise, (0, 1.5, 1.5))
    return (smooth - smooth.min()) / np.ptp(smooth)


def test_pieces_and_their_overlap() -> None:
    inside = np.zeros((6, 6), bool)
    inside[0, 0] = inside[2:4, 2:5] = inside[5, 5] = True
    truth = np.zeros((6, 6), bool)
    truth[3, :] = truth[5, 5] = True
    areas, overlaps = component_sizes(inside, truth)
    assert areas.tolist() == [1, 6, 1] and overlaps.tolist() == [0, 3, 1]
    assert component_sizes(np.zeros((3, 3), bool), truth[:3, :3])[0].tolist() == []


def test_small_pieces_go_and_large_ones_stay() -> None:
    masks = np.zeros((2, 6, 6), bool)
    masks[0, 0, 0] = masks[0, 2:4, 2:5] = True
    kept = without_small_components(masks, 2)
    assert not kept[0, 0, 0] and kept[0].sum() == 6 and kept[1].sum() == 0
    assert without_small_components(masks, 7).sum() == 0
    assert np.array_equal(without_small_components(masks, 6), kept) and np.array_equal(
        without_small_components(masks, 0), masks
    )


def test_the_choice_is_the_best_of_all_pairs() -> None:
    films = smooth_films()
    truth = smooth_films(7)[1:] > 0.6
    truth[2] = False
    thresholds, least = [0.3, 0.5, 0.6, 0.8], [0.0, 0.02, 0.1]
    counts = np.zeros((2, len(films), 4, 3))
    slow = np.zeros((4, 3))
    for t, a in np.ndindex(4, 3):
        cut = without_small_components(films >= thresholds[t], least[a] * 400)
        slow[t, a] = m.dice(cut, truth).mean()
        for film in range(len(films)):
            areas, overlaps = component_sizes(films[film] >= thresholds[t], truth[film])
            large = areas >= least[a] * 400
            counts[:, film, t, a] = areas[large].sum(), overlaps[large].sum()
    choice = choose(counts[0], counts[1], truth.sum(axis=(1, 2)).astype(float), thresholds, least, "all")
    t, a = np.unravel_index(slow.argmax(), slow.shape)
    assert (choice.threshold, choice.min_area) == (thresholds[t], least[a])
    assert choice.value == pytest.approx(slow.max())


def test_of_equals_the_plain_one_wins() -> None:
    ones = np.ones((3, 4, 2))
    choice = choose(ones, ones, np.ones(3), [0.1, 0.4, 0.55, 0.9], [0.0, 0.01], "all")
    assert (choice.threshold, choice.min_area, choice.value) == (0.55, 0.0, 1.0)


def test_saying_nothing_is_best_by_all_and_not_by_both() -> None:
    """Nine empty films and one with a mask; the low threshold finds half of it and speckles three empty ones."""
    truth = np.array([0.0] * 9 + [10.0])
    areas = np.array([[4.0, 0.0]] * 3 + [[0.0, 0.0]] * 6 + [[10.0, 0.0]])[:, :, None]
    overlaps = np.array([[0.0, 0.0]] * 9 + [[5.0, 0.0]])[:, :, None]
    everything = choose(areas, overlaps, truth, [0.4, 0.8], [0.0], "all")
    both = choose(areas, overlaps, truth, [0.4, 0.8], [0.0], "both")
    assert (everything.threshold, everything.value) == (0.8, pytest.approx(0.9))
    assert (both.threshold, both.value) == (0.4, pytest.approx((0.65 + 0.5) / 2))
    assert choose(areas[:9], overlaps[:9], truth[:9], [0.4, 0.8], [0.0], "both").value == 1
