"""Views of several sorts: painted lesions, opacities, and patches of other normal films without a seam.

Opacities are painted as haze with ragged edges that fades to nothing. Patches are :mod:`afire.lesions.pastes`, and end
with the lungs. The settings give each sort its share of the views.

Shapes: B films of H x W with C channels, V views. A sample is one view of one film, samples are numbered film by film;
N of them are of one sort.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from afire.config import LesionConfig
from afire.lesions.pastes import Donors, change_labels, naturally_pasted
from afire.lesions.places import grey, keyed, lung_depth, unit

OPACITY: dict[str, Any] = {
    **{"kind": "slm", "haze": 1.0, "place": "lungs", "fade": True, "rotate": True},
    **{"gamma": 2.0, "irregularity": 0.5, "patchy": 0.7},
}
"""What an opacity is, as settings; how many, how large and how strong it is are those of the user."""
Painter = Callable[[Tensor, Tensor, LesionConfig], tuple[Tensor, Tensor]]
"""Films (B, C, H, W), draws (B, V, S, D) and settings -> lesioned (B*V, C, H, W) and mask (B*V, 1, H, W)."""
_SORT = 0x50A7
"""Keeps the draw of a view's sort apart from those of its lesions."""
_MOST_VIEWS = 64  # of LesionConfig.views
_AT_ONCE = 32  # views with patches


def slots(config: LesionConfig) -> int:
    """Lesions that are drawn for each sample; not all of them need be there."""
    return 1 if config.kind == "anatpaste" else config.count_max


def is_mixed(config: LesionConfig) -> bool:
    """Whether any view is of another sort than the painted one."""
    return bool(config.opacities or config.pasted)


@torch.no_grad()
def mixed(
    images: Tensor,
    seed: int,
    epoch: int,
    indices: Tensor,
    config: LesionConfig,
    donors: Donors | None,
    painted: Painter,
) -> tuple[Tensor, Tensor]:
    """Each view by the sort that it drew; samples of one sort are worked on together."""
    views = config.views
    lesioned = images.repeat_interleave(views, 0)
    mask = images.new_zeros((len(lesioned), 1, *images.shape[2:]), dtype=torch.float32)
    chance = unit(keyed(seed ^ _SORT, epoch, indices, views, 1)[:, :, 0, 0].flatten())
    pasted = chance < config.pasted
    opacities = ~pasted & (chance < config.pasted + config.opacities)
    plain = config.model_copy(update={"views": 1})
    for chosen, settings in ((opacities, plain.model_copy(update=OPACITY)), (~pasted & ~opacities, plain)):
        if chosen.any():
            draws = keyed(seed, epoch, indices, views, slots(settings)).flatten(0, 1)[chosen, None]
            rows = chosen.to(images.device)
            lesioned[rows], mask[rows] = painted(lesioned[rows], draws, settings)
    numbers = (indices[:, None] * _MOST_VIEWS + torch.arange(views)).flatten()
    places = pasted.nonzero()[:, 0]
    for start in range(0, len(places), _AT_ONCE):
        some = places[start : start + _AT_ONCE]
        rows = some.to(images.device)
        before = lesioned[rows]
        after = _with_patches(before, seed, epoch, numbers[some], config, donors)
        if config.pasted_too:
            draws = keyed(seed, epoch, indices, views, slots(plain)).flatten(0, 1)[some, None]
            after = painted(after, draws, plain)[0]
        lesioned[rows] = after
        labels = change_labels(grey(before)[:, None], grey(after)[:, None], "logistic")
        # They are averaged over their surroundings; what has not changed at all is not abnormal.
        mask[rows] = labels * (after != before).any(dim=1, keepdim=True)
    return lesioned, mask


def _with_patches(
    images: Tensor, seed: int, epoch: int, numbers: Tensor, config: LesionConfig, donors: Donors | None
) -> Tensor:
    """Films (N, C, S, S), each known by its number, with patches that fade out at the edge of the lungs.

    What lies beyond it would move the heart and the diaphragm or bleach the spine, as nothing does that is looked for.
    What has changed is the same in all channels.
    """
    height, width = images.shape[-2:]
    if height != width or (donors is not None and donors.films.shape[-1] != width):
        other = "" if donors is None else f", and donors have {donors.films.shape[-1]} x {donors.films.shape[-1]}"
        raise ValueError(f"patches need square films of the donors' size; these have {height} x {width} pixels{other}.")
    before = grey(images)[:, None]
    after = naturally_pasted(
        before, donors, seed=seed, epoch=epoch, rows=numbers, most=config.patches, blend=config.blend
    )
    change = (after - before) * lung_depth(before[:, 0])[:, None]
    return (images + change).clamp(0, 1).to(images.dtype)
