"""Pastes: what is cut, where it goes, that batches do not matter, and the labels of what has changed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from lesion_films import draw_films
from pydantic import ValidationError

from afire.lesions.blend import Blend
from afire.lesions.pastes import (
    CutPasteLimits,
    Donors,
    change_labels,
    chests,
    cut_and_pasted,
    donor_rows,
    naturally_pasted,
)
from afire.lesions.places import lung_field

Kind = Literal["patch", "scar"]
ROWS = torch.tensor([3, 14, 15, 92, 65, 35])


def cut(films: torch.Tensor, kind: Kind, rows: torch.Tensor = ROWS, **limits: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return cut_and_pasted(films, seed=1, epoch=2, rows=rows, kind=kind, limits=CutPasteLimits(**limits))


def natural(films: torch.Tensor, donors: torch.Tensor | None, rows: torch.Tensor = ROWS, **more: Any) -> torch.Tensor:
    known = Donors.of(donors) if donors is not None else None
    return naturally_pasted(films, known, seed=1, epoch=2, rows=rows, **more)


def extent(where_SS: torch.Tensor) -> tuple[int, int]:
    """Height and width of the upright box around what is true."""
    rows, columns = where_SS.any(1).nonzero()[:, 0], where_SS.any(0).nonzero()[:, 0]
    return int(rows[-1] - rows[0]) + 1, int(columns[-1] - columns[0]) + 1


@pytest.mark.parametrize("kind", ["patch", "scar"])
def test_a_film_changes_where_something_was_pasted_and_nowhere_else(films: torch.Tensor, kind: Kind) -> None:
    pasted, where = cut(films, kind)
    assert pasted.shape == films.shape and where.dtype == torch.bool
    assert torch.equal(pasted[~where], films[~where])
    assert ((pasted != films) & where).flatten(1).any(1).all()
    assert pasted.min() >= 0 and pasted.max() <= 1


def test_a_patch_is_a_copy_of_another_place(films: torch.Tensor) -> None:
    pasted, where = cut(films, "patch", jitter=0)
    for film, after, mask in zip(films[:, 0], pasted[:, 0], where[:, 0], strict=True):
        height, width = extent(mask)
        assert mask.sum() == height * width, "upright and whole"
        patch = after[mask].view(height, width)
        windows = film.unfold(0, height, 1).unfold(1, width, 1)
        assert (windows - patch).abs().amax(dim=(2, 3)).min() < 1e-5


def test_patches_have_the_published_sizes() -> None:
    films = draw_films(1, 64, 64).expand(400, -1, -1, -1)
    where = cut(films, "patch", torch.arange(400))[1][:, 0]
    shares = where.float().mean((1, 2))
    assert 0.015 < shares.min() < 0.03 and 0.13 < shares.max() < 0.17
    aspects = torch.tensor([height / width for height, width in map(extent, where)])
    assert aspects.min() < 0.4 and aspects.max() > 2.5 and aspects.min() > 0.25 and aspects.max() < 4
    reached = where.any(0).float().mean()
    assert reached > 0.98, "everywhere in the film; corners are rare"


def test_scars_are_thin_and_turned() -> None:
    films = draw_films(1, 128, 128).expand(300, -1, -1, -1)
    where = cut(films, "scar", torch.arange(300))[1][:, 0]
    shares = where.flatten(1).sum(1)
    assert shares.min() >= 3 and shares.max() <= 9 * 14
    boxes = torch.tensor([height * width for height, width in map(extent, where)])
    assert (shares < 0.7 * boxes).float().mean() > 0.3, "a turned one leaves its box half empty"


def test_jitter_changes_the_grey_of_the_patch_alone(films: torch.Tensor) -> None:
    plain, where = cut(films, "patch", jitter=0)
    jittered, same = cut(films, "patch", jitter=0.3)
    assert torch.equal(where, same) and torch.equal(plain[~where], jittered[~where])
    assert not torch.allclose(plain[where], jittered[where], atol=1e-3)


def test_limits_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"area_min 0.3 is larger than area_max 0.15"):
        CutPasteLimits(area_min=0.3)
    with pytest.raises(ValidationError, match=r"scar_width_min 20.0 is larger than scar_width_max 16"):
        CutPasteLimits(scar_width_min=20)


def _patch(films: torch.Tensor, rows: torch.Tensor, seed: int, epoch: int) -> torch.Tensor:
    return cut_and_pasted(films, seed=seed, epoch=epoch, rows=rows, kind="patch")[0]


def _scar(films: torch.Tensor, rows: torch.Tensor, seed: int, epoch: int) -> torch.Tensor:
    return cut_and_pasted(films, seed=seed, epoch=epoch, rows=rows, kind="scar")[0]


def _natural(films: torch.Tensor, rows: torch.Tensor, seed: int, epoch: int) -> torch.Tensor:
    return naturally_pasted(films, Donors.of(draw_films(5, 64, 64, seed=9)), seed=seed, epoch=epoch, rows=rows)


@pytest.mark.parametrize("paste", [_patch, _scar, _natural])
def test_a_paste_follows_from_its_key_whatever_the_batch(
    films: torch.Tensor, paste: Callable[[torch.Tensor, torch.Tensor, int, int], torch.Tensor]
) -> None:
    whole = paste(films, ROWS, 1, 2)
    order = torch.tensor([4, 0, 5])
    torch.testing.assert_close(paste(films[order], ROWS[order], 1, 2), whole[order], atol=1e-6, rtol=0)
    assert torch.equal(paste(films, ROWS, 1, 2), whole)
    same_film = films[:1].expand(6, -1, -1, -1)
    for other in (paste(same_film, ROWS, 2, 2), paste(same_film, ROWS, 1, 3), paste(same_film, ROWS + 1, 1, 2)):
        assert not torch.allclose(other, paste(same_film, ROWS, 1, 2), atol=1e-3)


@pytest.mark.parametrize("blend", ["mixed", "poisson", "coons", "either"])
def test_natural_pastes_lie_at_the_lungs(blend: Blend) -> None:
    films = draw_films(40, 64, 64)
    pasted = natural(films, draw_films(8, 64, 64, seed=5), torch.arange(40), most=1, blend=blend)
    changed = ((pasted - films).abs() > 1e-3)[:, 0]
    assert pasted.min() >= 0 and pasted.max() <= 1 and changed.flatten(1).any(1).all()
    lungs = lung_field(films[:, 0])
    assert (changed & lungs).flatten(1).any(1).all()
    share = changed.float().mean((1, 2))
    assert share.min() > 0.002 and share.max() < 0.5
    # By chance as much of what has changed would be lung as of the film is.
    assert (changed & lungs).sum() / changed.sum() > 1.3 * lungs.float().mean()


def test_a_chest_is_the_box_around_the_lungs() -> None:
    lungs = torch.zeros(2, 16, 16, dtype=torch.bool)
    lungs[0, 3:9, 2:5] = lungs[0, 4:11, 8:14] = True
    assert chests(lungs).tolist() == [[2, 13, 3, 10], [0, 15, 0, 15]]


def test_patches_stay_in_the_chest_where_they_fit() -> None:
    films = draw_films(100, 64, 64)
    pasted = natural(films, draw_films(8, 64, 64, seed=5), torch.arange(100), most=1)
    places = torch.arange(64)
    for changed, (left, right, top, bottom) in zip(
        (pasted != films)[:, 0], chests(lung_field(films[:, 0])).tolist(), strict=True
    ):
        height, width = extent(changed)
        outside = (places < left) | (places > right), (places < top) | (places > bottom)
        assert width > right - left - 1 or not changed.any(0)[outside[0]].any()
        assert height > bottom - top - 1 or not changed.any(1)[outside[1]].any()


def test_one_patch_for_sure_and_each_further_one_by_a_coin() -> None:
    """Donors with a bright grain of their own in every pixel: what was pasted is never the film."""
    films = torch.full((200, 1, 64, 64), 0.5)
    donors = draw_films(4, 64, 64, seed=5)
    areas = [
        ((natural(films, donors, torch.arange(200), most=most, blend="poisson") - films).abs() > 1e-3)
        .flatten(1)
        .float()
        .mean(1)
        for most in (1, 2, 3)
    ]
    assert (areas[0] > 0).all() and (areas[0] <= areas[1]).all()
    for fewer, more in itertools.pairwise(areas):
        assert 0.35 < (fewer != more).float().mean() < 0.65


def test_patches_come_from_the_donors(films: torch.Tensor) -> None:
    first, second = (natural(films, draw_films(4, 64, 64, seed=seed)) for seed in (1, 2))
    assert not torch.allclose(first, second, atol=1e-3)
    own = natural(films, None)
    assert not torch.allclose(own, films, atol=1e-3) and not torch.allclose(own, first, atol=1e-3)
    flat = natural(films, torch.full((3, 1, 64, 64), 0.7), blend="mixed")
    torch.testing.assert_close(flat, films)  # nothing in them is larger than a step of the film


def test_a_blank_film_and_blank_donors_are_no_trouble() -> None:
    blank = torch.zeros(6, 1, 32, 32)
    assert torch.equal(natural(blank, blank[:2]), blank)
    assert torch.isfinite(natural(draw_films(6, 32, 32), blank[:2], blend="coons")).all()


def test_donors_are_a_sample_that_follows_from_the_rows_and_the_seed() -> None:
    rows = torch.arange(500) * 3
    chosen = donor_rows(rows, 64, seed=1)
    assert len(chosen) == 64 and (chosen.diff() > 0).all() and torch.isin(chosen, rows).all()
    assert torch.equal(chosen, donor_rows(rows.flip(0), 64, seed=1))
    assert not torch.equal(chosen, donor_rows(rows, 64, seed=2))
    assert donor_rows([5, 2], 64, seed=1).tolist() == [2, 5] and len(donor_rows(rows, 0, seed=1)) == 0
    assert 500 < chosen.float().mean() < 1000, "from all over the list"


def test_labels_say_how_much_has_changed() -> None:
    before = torch.full((1, 1, 64, 64), 0.4)
    after = before.clone()
    after[..., 8:24, 8:24] += 40 / 255
    after[..., 40:56, 40:56] -= 4 / 255
    logistic, binary = (change_labels(before, after, how)[0, 0] for how in ("logistic", "binary"))
    assert (logistic[30:36] == 0).all() and (binary[30:36] == 0).all()
    assert logistic[16, 16] > 0.99 and binary[16, 16] == 1
    assert logistic[48, 48] == pytest.approx(0.5, abs=0.01) and binary[48, 48] == 1
    gentle = change_labels(before, after, "logistic", steepness=0.1, middle=8)[0, 0]
    assert gentle[48, 48] == pytest.approx(1 / (1 + 2.718281828**0.4), abs=0.01)
    assert (change_labels(before, before, "logistic") == 0).all()
