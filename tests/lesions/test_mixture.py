"""Views of several sorts: their shares and keys, where patches lie, that they leave no seam, what the mask says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lesion_films import draw_films
from pydantic import ValidationError
from torch import Tensor
from torch.nn.functional import avg_pool2d, max_pool2d

from afire.config import LesionConfig
from afire.lesions.mixture import OPACITY
from afire.lesions.pastes import Donors, change_labels, naturally_pasted
from afire.lesions.places import lung_depth, lung_field
from afire.lesions.synthesis import lesion_shares, synthesize, synthesize_keyed, token_labels

MIXED = LesionConfig(pasted=0.4, opacities=0.3, views=3, donors=5)
PASTED = LesionConfig(pasted=1.0)
INDICES = torch.tensor([3, 14, 15, 92, 65, 35])


def donors(size: int = 64) -> Donors:
    return Donors.of(draw_films(5, size, size, seed=9))


def lesioned(films: Tensor, config: LesionConfig, indices: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
    chosen = {"seed": 1, "epoch": 2, "donors": donors(), **more}
    return synthesize_keyed(films, indices=indices, config=config, **chosen)


def same_film(count: int) -> tuple[Tensor, Tensor]:
    return draw_films(1, 64, 64).expand(count, -1, -1, -1), torch.arange(count)


def sorts(films: Tensor, indices: Tensor, config: LesionConfig) -> dict[str, Tensor]:
    """Which views equal those of a single sort."""
    drawn = lesioned(films, config, indices)[0]
    alone = {
        "painted": config.model_copy(update={"pasted": 0.0, "opacities": 0.0}),
        "opacities": config.model_copy(update={"pasted": 0.0, "opacities": 1.0}),
        "pasted": config.model_copy(update={"pasted": 1.0, "opacities": 0.0}),
    }
    return {
        name: ((lesioned(films, settings, indices)[0] - drawn).abs() < 1e-5).flatten(1).all(1)
        for name, settings in alone.items()
    }


@pytest.mark.parametrize(("pasted", "opacities"), [(0.0, 0.5), (0.5, 0.0), (0.3, 0.3), (0.6, 0.4)])
def test_views_are_of_the_sorts_that_were_asked_for(pasted: float, opacities: float) -> None:
    config = LesionConfig(pasted=pasted, opacities=opacities, views=2)
    found = sorts(*same_film(300), config)
    assert (torch.stack([*found.values()]).sum(0) == 1).all(), "each view is of one sort, and as that sort alone is"
    expected = {"pasted": pasted, "opacities": opacities, "painted": 1 - pasted - opacities}
    for name, share in expected.items():
        assert found[name].float().mean() == pytest.approx(share, abs=0.07)
    both = found["pasted"].view(300, 2).all(1).float().mean()
    assert both == pytest.approx(pasted**2, abs=0.08), "views of a film draw their sort by themselves"


def test_without_shares_every_bit_is_as_before() -> None:
    films = draw_films(6, 64, 64)
    plain = synthesize_keyed(films, seed=1, epoch=2, indices=INDICES)
    unused = lesioned(films, LesionConfig(patches=9, donors=0, blend="mixed"), INDICES)
    assert torch.equal(unused[0], plain[0]) and torch.equal(unused[1], plain[1])
    first, second = (torch.Generator().manual_seed(0) for _ in range(2))
    assert torch.equal(synthesize(films, generator=first)[0], synthesize(films, generator=second, donors=donors())[0])
    assert torch.equal(first.get_state(), second.get_state())


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("too", [True, False])
def test_a_view_does_not_depend_on_its_batch(channels: int, too: bool) -> None:
    films = draw_films(6, 64, 64).repeat(1, channels, 1, 1)
    films[:, -1] *= 0.9
    config = MIXED.model_copy(update={"pasted_too": too})
    whole = [part.unflatten(0, (6, 3)) for part in lesioned(films, config, INDICES)]
    for rows in ([0], [4, 1], [5, 3, 0, 4, 2, 1]):
        for part, expected in zip(lesioned(films[rows], config, INDICES[rows]), whole, strict=True):
            torch.testing.assert_close(part, expected[rows].flatten(0, 1), atol=1e-5, rtol=0)
    alone = lesioned(films, config.model_copy(update={"views": 1}), INDICES)
    for part, expected in zip(alone, whole, strict=True):
        torch.testing.assert_close(part, expected[:, 0], atol=1e-5, rtol=0)
    for other in ({"seed": 2}, {"epoch": 3}):
        assert not torch.allclose(lesioned(films, config, INDICES, **other)[0], whole[0].flatten(0, 1), atol=1e-3)
    views = lesioned(films[:1], PASTED.model_copy(update={"views": 4}), INDICES[:1])[0]
    assert all(not torch.allclose(views[0], view, atol=1e-3) for view in views[1:])


def test_the_same_generator_gives_the_same_mixture() -> None:
    films = draw_films(6, 64, 64)

    def draw(seed: int) -> Tensor:
        return synthesize(films, generator=torch.Generator().manual_seed(seed), config=MIXED, donors=donors())[0]

    assert torch.equal(draw(3), draw(3)) and not torch.equal(draw(3), draw(4))


def test_opacities_add_density_in_the_lungs_and_fade_to_nothing() -> None:
    films, indices = smooth_films(1, 3, 224).expand(60, -1, -1, -1), torch.arange(60)
    settings: dict[str, Any] = {"count_max": 1, "size_min": 60, "size_max": 100}
    drawn, mask = lesioned(films, LesionConfig(**settings, opacities=1.0), indices)
    torch.testing.assert_close(drawn, (films + mask).clamp(0, 1), atol=0, rtol=0)
    assert torch.equal(mask, lesioned(films, LesionConfig(**{**settings, **OPACITY}), indices)[1])
    even = lesioned(films, LesionConfig(**{**settings, **OPACITY, "patchy": 0.0}), indices)[1]
    assert (mask <= even + 1e-6).all() and 0.2 * even.sum() < mask.sum() < 0.8 * even.sum(), "clouds only thin it out"
    lungs = lung_field(films[:, 0])[:, None]
    assert (mask * lungs).sum() > 0.7 * mask.sum()
    painted = lesioned(films, LesionConfig(**settings), indices)[1]
    assert border_share(mask) < 0.25 and border_share(painted) > 0.95, "these end at a box"


def border_share(mask: Tensor) -> float:
    """Mean over films of how much of the border of the upright box around a lesion is lesion."""
    shares = []
    for inside in mask[:, 0] > 0:
        rows, columns = inside.any(1).nonzero()[:, 0], inside.any(0).nonzero()[:, 0]
        box = inside[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        shares.append(torch.cat([box[0], box[-1], box[:, 0], box[:, -1]]).float().mean())
    return float(torch.stack(shares).mean())


def smooth_films(count: int, seed: int, size: int = 64) -> Tensor:
    """Lungs and slow shading, without noise: what is abrupt in a change was not there before."""
    plain = draw_films(1, size, size)
    coarse = torch.rand(count, 1, 5, 5, generator=torch.Generator().manual_seed(seed))
    shading = torch.nn.functional.interpolate(coarse, size=(size, size), mode="bicubic")
    blurred = avg_pool2d(plain, 9, 1, 4, count_include_pad=False)
    return (0.7 * blurred + 0.3 * shading).clamp(0.02, 0.98)


def jump(change: Tensor) -> float:
    """The mean change at the rim of what has changed: how much of a seam there is."""
    inside = change > 1e-4
    rim = inside & (max_pool2d((~inside).float(), 3, 1, 1) > 0)
    return float(change[rim].mean())


@pytest.mark.parametrize("blend", ["mixed", "poisson", "either"])
def test_patches_leave_no_seam(blend: Any) -> None:
    films, indices = smooth_films(40, 1), torch.arange(40)
    source = Donors.of(smooth_films(8, 2))
    ours = lesioned(films, LesionConfig(pasted=1.0, blend=blend, patches=1), indices, donors=source)[0]
    hard = naturally_pasted(films, source, seed=1, epoch=2, rows=indices * 64, most=1, blend="none")
    assert ((ours - films).abs() > 5 / 255).flatten(1).any(1).float().mean() > 0.8, "and yet they are seen"
    assert jump((ours - films).abs()) < 0.03 and jump((hard - films).abs()) > 0.08


def test_patches_lie_in_the_lungs() -> None:
    films, indices = draw_films(40, 64, 64), torch.arange(40)
    change = (lesioned(films, PASTED, indices)[0] - films).abs()
    assert (change[lung_depth(films[:, 0])[:, None] == 0] == 0).all()
    share = (change > 4 / 255).float().mean((1, 2, 3))
    assert share.min() > 0 and 0.01 < share.mean() < 0.3


@pytest.mark.parametrize("too", [True, False])
def test_the_mask_of_patches_says_where_the_film_has_really_changed(too: bool) -> None:
    films, indices = draw_films(40, 64, 64), torch.arange(40)
    drawn, mask = lesioned(films, PASTED.model_copy(update={"pasted_too": too}), indices)
    torch.testing.assert_close(mask, change_labels(films, drawn, "logistic") * (drawn != films))
    assert mask.dtype == torch.float32 and mask.min() >= 0 and mask.max() <= 1
    abnormal, change = token_labels(mask, 8), avg_pool2d((drawn - films).abs(), 8).flatten(1)
    assert abnormal.any(1).all() and (change[abnormal] > 0).all()
    assert change[abnormal].mean() > 5 * change[~abnormal].mean()


def test_patches_may_come_with_lesions() -> None:
    films, indices = draw_films(40, 64, 64), torch.arange(40)
    alone, both = (
        (lesioned(films, PASTED.model_copy(update={"pasted_too": too}), indices)[0] - films).abs()
        for too in (False, True)
    )
    assert (both > 1e-3).float().mean() > 1.3 * (alone > 1e-3).float().mean()
    beyond = lung_depth(films[:, 0])[:, None] == 0
    assert (both[beyond] > 0.05).any() and (alone[beyond] == 0).all()


def test_channels_change_alike(films: Tensor) -> None:
    grey, mask = lesioned(films, PASTED, INDICES)
    three, same = lesioned(films.repeat(1, 3, 1, 1), PASTED, INDICES)
    torch.testing.assert_close(three, grey.expand(-1, 3, -1, -1), atol=1e-4, rtol=0)
    torch.testing.assert_close(same, mask, atol=1e-3, rtol=0)
    half = lesioned(films.half(), PASTED, INDICES)[0]
    assert half.dtype == torch.float16
    torch.testing.assert_close(half.float(), grey, atol=5e-3, rtol=0)


def test_a_film_alone_is_its_own_donor(films: Tensor) -> None:
    drawn, mask = lesioned(films, PASTED, INDICES, donors=None)
    torch.testing.assert_close(lesioned(films[:1], PASTED, INDICES[:1], donors=None)[0], drawn[:1], atol=1e-5, rtol=0)
    assert (mask.flatten(1).amax(1) > 0).all() and not torch.allclose(drawn, lesioned(films, PASTED, INDICES)[0])


def test_a_blank_film_has_no_abnormal_token() -> None:
    blank = torch.full((6, 1, 64, 64), 0.5)
    drawn, mask = lesioned(blank, PASTED, INDICES, donors=None)
    torch.testing.assert_close(drawn, blank)
    assert not token_labels(mask, 16).any() and not lesion_shares(mask, 8).any()


def test_mistakes_are_one_sentence(films: Tensor) -> None:
    with pytest.raises(ValidationError, match=r"opacities 0\.7 and pasted 0\.5 are more than all views together"):
        LesionConfig(opacities=0.7, pasted=0.5)
    wrong = {"pasted": 1.5, "opacities": -0.1, "patches": 0, "donors": -1, "patchy": 2, "blend": "x"}
    for name, value in wrong.items():
        with pytest.raises(ValidationError, match=name):
            LesionConfig.model_validate({name: value})
    with pytest.raises(ValueError, match="of the donors' size; these have 64 x 64 pixels, and donors have 32 x 32"):
        lesioned(films, PASTED, INDICES, donors=donors(32))
    with pytest.raises(ValueError, match=r"these have 32 x 64 pixels\."):
        lesioned(films[:, :, :32], PASTED, INDICES, donors=None)


def slow_shares(mask: Tensor, cell: int) -> list[list[float]]:
    whole = mask.mean()
    rows, columns = mask.shape[0] // cell, mask.shape[1] // cell
    return [
        [
            sum(
                float(mask[y, x] > whole)
                for y in range(row * cell, (row + 1) * cell)
                for x in range(column * cell, (column + 1) * cell)
            )
            / cell**2
            for column in range(columns)
        ]
        for row in range(rows)
    ]


def test_shares_of_cells_equal_the_loop() -> None:
    masks = torch.rand(3, 1, 16, 24, generator=torch.Generator().manual_seed(0))
    masks[0] = 0
    shares = lesion_shares(masks, 4)
    assert shares.shape == (3, 1, 4, 6)
    for share, mask in zip(shares[:, 0], masks[:, 0], strict=True):
        torch.testing.assert_close(share, torch.tensor(slow_shares(mask, 4)))
