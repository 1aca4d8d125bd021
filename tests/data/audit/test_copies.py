"""Copies: all of them, and no film that only looks alike."""

from __future__ import annotations

import io

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from afire.data.audit import copies as duplicates
from afire.data.audit.copies import NearPair, exact_groups, group_pairs, near_pairs, unit_vectors
from afire.data.audit.measure import perceptual_hash, rank_thumb
from tests.data.audit.drawing import draw_chest

Film = NDArray[np.float32]


def describe(films: list[Film]) -> tuple[NDArray[np.uint8], NDArray[np.uint64]]:
    thumbs = [rank_thumb(film) for film in films]
    return np.stack([t.ravel() for t in thumbs]), np.array([perceptual_hash(t) for t in thumbs], np.uint64)


def compress(film: Film, quality: int) -> Film:
    buffer = io.BytesIO()
    Image.fromarray(np.round(film * 255).astype(np.uint8)).save(buffer, "JPEG", quality=quality)
    return np.asarray(Image.open(buffer), dtype=np.float32) / 255


CHANGES = {
    "compressed": lambda film: compress(film, 25),
    "gamma": lambda film: film**1.8,
    "windowed": lambda film: 0.3 + 0.4 * film,
    "noisy": lambda film: film + np.random.default_rng(9).normal(0, 0.03, film.shape).astype(np.float32),
}


@pytest.fixture(scope="module")
def films() -> list[Film]:
    rng = np.random.default_rng(4)
    return [draw_chest(rng, 128, 128) for _ in range(60)]


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_copy_is_found_and_nothing_else(films: list[Film], change: str) -> None:
    pairs = near_pairs(*describe([*films, CHANGES[change](films[7])]))
    assert [(pair.first, pair.second, pair.relation) for pair in pairs] == [(7, 60, "copy")]


def test_mirrored_and_negative_copies_are_named(films: list[Film]) -> None:
    pairs = near_pairs(*describe([*films, films[3][:, ::-1], 1 - films[5]]))
    assert {(pair.first, pair.second, pair.relation) for pair in pairs} == {(3, 60, "mirrored"), (5, 61, "negative")}


def test_different_films_are_not_copies(films: list[Film]) -> None:
    assert near_pairs(*describe(films)) == []


def test_blank_films_are_not_copies_of_each_other() -> None:
    blank = np.full((128, 128), 0.5, np.float32)
    assert near_pairs(*describe([blank, blank, blank])) == []
    assert near_pairs(np.empty((0, 1024), np.uint8), np.empty(0, np.uint64)) == []


def test_the_search_is_exact_and_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against all pairs by brute force, with films so alike that many lie near the limit."""
    rng = np.random.default_rng(5)
    base = np.stack([rank_thumb(draw_chest(rng, 32, 32)).ravel() for _ in range(150)]).astype(np.float32)
    mixed = base[rng.integers(0, 150, 2000)] + rng.uniform(2, 14, (2000, 1)) * rng.normal(0, 1, (2000, 1024))
    ranks = np.clip(np.round(mixed), 0, 255).astype(np.uint8)
    monkeypatch.setattr(duplicates, "_BLOCK", 257)
    found = {(p.first, p.second) for p in near_pairs(ranks, np.zeros(2000, np.uint64)) if p.relation == "copy"}
    unit = unit_vectors(ranks).astype(np.float64)
    close = np.argwhere(np.triu(unit @ unit.T, 1) > duplicates.MIN_CORRELATION + 1e-6)
    expected = {(int(a), int(b)) for a, b in close}
    assert len(expected) > 100
    assert expected <= found
    assert all(unit[a] @ unit[b] > duplicates.MIN_CORRELATION - 1e-6 for a, b in found)


def test_the_search_stops_in_a_set_of_one_film(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duplicates, "MAX_PAIRS", 50)
    monkeypatch.setattr(duplicates, "_BLOCK", 8)
    thumb = rank_thumb(draw_chest(np.random.default_rng(6), 32, 32)).ravel()
    pairs = near_pairs(np.tile(thumb, (100, 1)), np.zeros(100, np.uint64))
    assert 50 <= len(pairs) < 200


def test_a_hash_that_differs_much_overrules_the_correlation(films: list[Film]) -> None:
    ranks, hashes = describe([films[0], films[0] ** 1.2])
    assert len(near_pairs(ranks, hashes)) == 1
    assert near_pairs(ranks, np.array([0, 2**64 - 1], np.uint64)) == []


def test_exact_groups_leave_out_unreadable_films() -> None:
    assert exact_groups(["a", "", "b", "a", "", "b", "c", "a"]) == [(0, 3, 7), (2, 5)]


def test_pairs_become_groups() -> None:
    pairs = [NearPair(1, 4, "copy", 0.999), NearPair(4, 6, "copy", 0.995), NearPair(2, 3, "mirrored", 0.992)]
    assert sorted(group_pairs(pairs, 8)) == [(1, 4, 6), (2, 3)]
    assert group_pairs([], 8) == []
