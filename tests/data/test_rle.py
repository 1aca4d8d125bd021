"""Masks as runs, against a slow loop that follows the format's own words."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from afire.data.rle import decode_rle, decode_siim, encode_rle, encode_siim, mask_to_runs, runs_to_mask
from afire.errors import UserError

masks = hnp.arrays(np.bool_, hnp.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=9))


def slow_decode_siim(text: str, height: int, width: int) -> np.ndarray:
    """Pixel by pixel: skip the gap, paint the length, one column after the other."""
    mask = np.zeros((height, width), bool)
    numbers = [int(word) for word in text.split()]
    position = 0
    for gap, length in zip(numbers[0::2], numbers[1::2], strict=True):
        position += gap
        for _ in range(length):
            mask[position % height, position // height] = True
            position += 1
    return mask


def slow_runs(mask: np.ndarray) -> list[list[int]]:
    runs: list[list[int]] = []
    before = False
    for position, inside in enumerate(mask.ravel().tolist()):
        if inside and before:
            runs[-1][1] += 1
        elif inside:
            runs.append([position, 1])
        before = inside
    return runs


def test_a_siim_row_by_hand() -> None:
    # 3 rows, 4 columns: skip 1, paint 3 (rows 1, 2 of column 0 and row 0 of column 1), skip 2, paint 1.
    expected = [[0, 1, 1, 0], [1, 0, 0, 0], [1, 0, 0, 0]]
    assert decode_siim("1 3 2 1", height=3, width=4).astype(int).tolist() == expected


@pytest.mark.parametrize("text", ["-1", " -1", "", "  "])
def test_minus_one_is_nothing(text: str) -> None:
    mask = decode_siim(text, 5, 7)
    assert mask.shape == (5, 7) and mask.dtype == bool and not mask.any()
    assert encode_siim(mask) == "-1"


@settings(deadline=None)
@given(mask=masks)
def test_siim_round_trip_and_reference(mask: np.ndarray) -> None:
    text = encode_siim(mask)
    decoded = decode_siim(text, *mask.shape)
    assert np.array_equal(decoded, mask)
    assert decoded.flags.c_contiguous
    if mask.any():
        assert np.array_equal(slow_decode_siim(text, *mask.shape), mask)


@settings(deadline=None)
@given(data=st.data(), height=st.integers(1, 8), width=st.integers(1, 8))
def test_any_valid_siim_text_decodes_like_the_reference(data: st.DataObject, height: int, width: int) -> None:
    """Also texts that no encoder writes: lengths of zero, runs that touch."""
    left, numbers = height * width, []
    for _ in range(data.draw(st.integers(1, 4))):
        for _ in range(2):
            numbers.append(data.draw(st.integers(0, left)))
            left -= numbers[-1]
    text = " ".join(map(str, numbers))
    assert np.array_equal(decode_siim(text, height, width), slow_decode_siim(text, height, width))


@settings(deadline=None)
@given(mask=masks)
def test_runs_round_trip_and_reference(mask: np.ndarray) -> None:
    runs = mask_to_runs(mask)
    assert runs.tolist() == slow_runs(mask)
    assert np.array_equal(runs_to_mask(runs, mask.shape), mask)
    assert np.array_equal(decode_rle(encode_rle(mask)), mask)


def test_overlapping_runs_in_any_order_are_a_union() -> None:
    mask = runs_to_mask([[4, 3], [0, 2], [5, 1]], (2, 5))
    assert mask.ravel().astype(int).tolist() == [1, 1, 0, 0, 1, 1, 1, 0, 0, 0]


def test_a_mask_of_a_transposed_array() -> None:
    mask = np.array([[1, 0, 1], [1, 1, 0]], bool).T
    assert mask_to_runs(mask).tolist() == slow_runs(mask)


def test_an_empty_mask_is_not_a_missing_one() -> None:
    assert json.loads(encode_rle(np.zeros((2, 3), bool))) == {"size": [2, 3], "runs": []}
    assert decode_rle('{"size":[2,3],"runs":[]}').shape == (2, 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 2 3", "has 3 numbers; they come in pairs"),
        ("1 x", "not a whole number"),
        ("1.5 2", "not a whole number"),
        ("1 -2", "negative number -2"),
        ("-1 3", "negative number -1"),
        ("3 4", "runs past the end of a film of 6 pixels"),
        ("0 1 0 1 5 1", "runs past the end"),
        ("9223372036854775807 9223372036854775807", "runs past the end"),
        ("99999999999999999999999 1", "not a whole number"),
    ],
)
def test_malformed_siim(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        decode_siim(text, 2, 3)


@pytest.mark.parametrize(
    "cell",
    [
        "",
        "{",
        "[]",
        "7",
        '{"size":[2,3]}',
        '{"size":[2],"runs":[]}',
        '{"size":[2.5,3],"runs":[]}',
        '{"size":[true,3],"runs":[]}',
        '{"size":["2",3],"runs":[]}',
        '{"size":[0,3],"runs":[]}',
        '{"size":[1000000,1000000],"runs":[]}',
        '{"size":[2,3],"runs":[[0,7]]}',
        '{"size":[2,3],"runs":[[-1,2]]}',
        '{"size":[2,3],"runs":[[0,-2]]}',
        '{"size":[2,3],"runs":[[0,1.5]]}',
        '{"size":[2,3],"runs":[[0,1,2]]}',
        '{"size":[2,3],"runs":[[0,1],[2]]}',
        '{"size":[2,3],"runs":[["a","b"]]}',
        '{"size":[2,3],"runs":[[9223372036854775807,9223372036854775807]]}',
        '{"size":[2,3],"runs":[[99999999999999999999999,1]]}',
        '{"size":[2,3],"runs":{"0":1}}',
    ],
)
def test_malformed_cells(cell: str) -> None:
    with pytest.raises(UserError) as caught:
        decode_rle(cell)
    assert "\n" not in str(caught.value)


def test_a_full_film_is_quick_enough_for_thousands() -> None:
    yy, xx = np.mgrid[:1024, :1024]
    mask = (yy - 400) ** 2 + (xx - 300) ** 2 < 200**2
    assert np.array_equal(decode_siim(encode_siim(mask)), mask)
    assert np.array_equal(decode_rle(encode_rle(mask)), mask)
