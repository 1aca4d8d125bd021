"""Films spoilt on purpose: keyed, switched off by zeros, and each kind is what it says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from afire.lesions.corrupt import KINDS, Corrupted, CorruptSettings, _counts, bent, corrupted, curves, noise_for
from afire.lesions.places import DRAW_BITS

OFF = {"nonlinear": 0.0, "shuffle": 0.0, "paint": 0.0}
ROWS = torch.tensor([3, 14, 15, 92, 65, 35])


def spoil(films: Tensor, rows: Tensor = ROWS, epoch: int = 2, view: int = 0, **shares: float) -> Corrupted:
    return corrupted(films, seed=1, epoch=epoch, rows=rows, settings=CorruptSettings(**shares), view=view)


def test_zeros_switch_everything_off(films: Tensor) -> None:
    spoilt = spoil(films, **OFF)
    assert torch.equal(spoilt.images, films) and not spoilt.painted.any() and not spoilt.done.any()


@pytest.mark.parametrize("name", [*OFF, "all"])
def test_each_kind_is_keyed_and_knows_no_other_film(films: Tensor, name: str) -> None:
    shares = {} if name == "all" else {**OFF, name: 1.0}
    whole = spoil(films, **shares).images
    assert not torch.allclose(whole, films, atol=1e-3) and whole.min() >= 0 and whole.max() <= 1
    order = torch.tensor([4, 0])
    torch.testing.assert_close(spoil(films[order], rows=ROWS[order], **shares).images, whole[order], atol=0, rtol=0)
    assert torch.equal(spoil(films, **shares).images, whole)
    for other in (spoil(films, epoch=3, **shares), spoil(films, view=1, **shares)):
        assert not torch.allclose(other.images, whole, atol=1e-3)
    both = spoil(films.expand(-1, 3, -1, -1), **shares).images
    assert torch.equal(both[:, 0], whole[:, 0]) and torch.equal(both[:, 2], whole[:, 0]), "channels stay equal"


def test_how_often_each_kind_happens(films: Tensor) -> None:
    rows = torch.arange(4000)
    tiny = torch.nn.functional.interpolate(films[:1], size=(4, 4)).expand(4000, -1, -1, -1)
    shares = dict(zip(KINDS, spoil(tiny, rows).done.mean(dim=0).tolist(), strict=True))
    expected = {"bent": 0.9, "shuffled": 0.5, "in-painted": 0.9 * 0.2, "out-painted": 0.9 * 0.8}
    assert shares == pytest.approx(expected, abs=0.03)


def test_curves_are_the_bezier_curves_rising_or_falling() -> None:
    draws = torch.randint(0, 1 << DRAW_BITS, (40, 16), generator=torch.Generator().manual_seed(0))
    made = curves(draws)
    rising = made[:, -1] > 0.5
    assert 8 < rising.sum() < 32
    steps = made.diff(dim=1)
    assert (steps[rising] >= -1e-5).all() and (steps[~rising] <= 1e-5).all()
    torch.testing.assert_close(made[:, 0], (~rising).float(), atol=1e-5, rtol=0)
    numbers = draws[:, 2:6].double() / 2**DRAW_BITS
    for film in range(5):  # each level looked up on a finely drawn curve
        x1, y1, x2, y2 = numbers[film].tolist()
        t = torch.linspace(0, 1, 20_001, dtype=torch.float64)
        x, y = (3 * (1 - t) ** 2 * t * a + 3 * (1 - t) * t**2 * b + t**3 for a, b in ((x1, x2), (y1, y2)))
        y = y if rising[film] else y.flip(0)
        for level in (13, 100, 200):
            nearest = (x - level / 255).abs().argmin()
            assert made[film, level].item() == pytest.approx(y[nearest].item(), abs=5e-3)


def test_bending_looks_every_pixel_up(films: Tensor) -> None:
    curve = torch.stack([torch.linspace(1, 0, 256), torch.linspace(0, 1, 256).square()])
    made = bent(films[:2], curve)
    torch.testing.assert_close(made[0], 1 - films[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(made[1], films[1].square(), atol=1e-4, rtol=0)


def test_shuffling_moves_pixels_inside_small_windows_and_loses_none() -> None:
    side = 60
    places = torch.arange(side * side, dtype=torch.float32).view(1, 1, side, side).expand(6, -1, -1, -1) / side**2
    moved = spoil(places, **{**OFF, "shuffle": 1.0}).images
    from_where = (moved * side**2).round().long().flatten(1)
    assert torch.equal(from_where.sort(dim=1).values, torch.arange(side * side).expand(6, -1))
    here = torch.arange(side * side)
    for film in from_where:
        rows, columns = (film // side - here // side).abs(), (film % side - here % side).abs()
        assert 1 <= rows.max() < side // 10 and 1 <= columns.max() < side // 10
        assert (film != here).float().mean() > 0.5


def test_painting_covers_blocks_or_all_but_windows(films: Tensor) -> None:
    side = films.shape[-1]
    inside = spoil(films, **{**OFF, "paint": 1.0, "inpaint": 1.0})
    outside = spoil(films, **{**OFF, "paint": 1.0, "inpaint": 0.0})
    for spoilt in (inside, outside):
        assert torch.equal(spoilt.images[~spoilt.painted], films[~spoilt.painted])
        noise = spoilt.images[spoilt.painted]
        assert abs(noise.mean() - 0.5) < 0.05 and noise.std() > 0.25
    shares = [spoilt.painted.float().mean(dim=(1, 2, 3)) for spoilt in (inside, outside)]
    assert (shares[0] >= (side // 6 - 1) ** 2 / side**2).all() and (shares[0] <= 5 / 9 + 0.05).all()
    assert (shares[1] <= 1 - (3 / 7 - 1 / side) ** 2).all() and (shares[1] > 0.05).all()


def test_most_films_get_five_blocks() -> None:
    """A block is followed by another with a chance of 0.95, so 0.95^4 of the films have all five."""
    shares = torch.bincount(_counts((torch.arange(10_000) + 0.5) / 10_000), minlength=6) / 10_000
    expected = [0, 0.05, 0.95 * 0.05, 0.95**2 * 0.05, 0.95**3 * 0.05, 0.95**4]
    assert shares.tolist() == pytest.approx(expected, abs=1e-3)


def test_noise_follows_from_its_key() -> None:
    noise = noise_for(torch.tensor([7, 8, 7]), 50)
    assert noise.shape == (3, 1, 50, 50) and torch.equal(noise[0], noise[2]) and not torch.equal(noise[0], noise[1])
    assert abs(noise.mean() - 0.5) < 0.02 and noise.min() >= 0 and noise.max() < 1
