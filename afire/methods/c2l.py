"""C2L, Comparing to Learn (Zhou et al. 2020): MoCo whose films are also mixed, as images and as features.

Written from the paper. As published: a student and a teacher that follows it see two views of a film; the views of two
films are mixed with one share for both networks; of a mixed film, the student's query should find the teacher's key
of the mixed image (a homogeneous pair) and the mix of the teacher's keys of the plain images (a heterogeneous pair).
The mean of these two losses and of the plain one is minimised, each against the queue of the teacher's plain keys. The
share is the larger part of a uniform split.

Ours, beside what :mod:`afire.methods.twins` says: a film is mixed with its neighbour in the batch, which the order of
the epoch has shuffled, and draws a share of its own, so that any number of processes mixes the same; neither of the two
films of a mix counts as something to tell it from; no holes are cut into the views.

Shapes: B films, F width of a key, Q places of the queue.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from afire.errors import UserError
from afire.methods.base import ALL, Keys, Losses, Outputs, Panel, Views, uniform_draws
from afire.methods.crops import CropSettings, crops
from afire.methods.moco import MoCoSettings
from afire.methods.twins import Queued, global_mean
from afire.nn.memory import of_all

_SHARES = 0xC21  # keeps the draws of mixing apart from those of the views


class C2LSettings(MoCoSettings):
    """Settings of C2L itself."""

    temperature: float = Field(0.07, gt=0, description="of the softmax over a film's own key and those of others")
    queue: int = Field(4096, ge=1, description="keys of earlier films to tell a film from; published: 16,384")
    crop: CropSettings = Field(CropSettings(turn=10, jitter=1.0, blur=0), description="what a view may be")


def neighbours(count: int, device: torch.device | None = None) -> Tensor:
    """The partner (B,) of each film of a batch: 1, 0, 3, 2, ...; a film that is alone is its own."""
    if count > 1 and count % 2:
        raise UserError(
            f"c2l mixes films in pairs, but a process works on {count} at a time; choose a training.batch_size whose "
            "share of each process and accumulated piece is even."
        )
    return (torch.arange(count, device=device) ^ 1).clamp_max(count - 1)


def mixed(first: Tensor, second: Tensor, share_B: Tensor) -> Tensor:
    """``share`` of the first and the rest of the second."""
    share = share_B.to(first).view(-1, *[1] * (first.ndim - 1))
    return share * first + (1 - share) * second


class C2L(Queued):
    """Student, teacher and queue."""

    settings_type = C2LSettings
    options: C2LSettings

    @torch.no_grad()
    def views(self, images: Tensor, keys: Keys) -> Views:
        """Two random views of each film, the share with which each is mixed, and whose they are."""
        two = crops(images, keys, views=2, size=self.config.image.size, settings=self.options.crop)
        share = uniform_draws(1, keys.seed ^ _SHARES, keys.epoch, keys.rows)[:, 0]
        partner = neighbours(len(images), images.device)
        rows = keys.rows.to(images.device)
        views = {"query": two[0::2], "key": two[1::2], "rows": rows, "partners": rows[partner]}
        views["share"] = torch.maximum(share, 1 - share).to(images)
        depth = self.depth(keys, 2, images)
        return views if depth is None else {**views, "depth": depth[0::2], "mixed_depth": depth[1::2]}

    def forward(self, views: Views) -> Outputs:
        """Queries and keys (B, F) of plain and of mixed films, and the mix of the plain films' keys."""
        self.check(views["query"])
        share = views["share"]
        partner = neighbours(len(share), share.device)
        query, key = (self.normalise(views[name]) for name in ("query", "key"))
        with torch.no_grad():
            plain = self.teacher(key)
            mixed_key = self.teacher(mixed(key, key[partner], share))
        return {
            "query": self.student(query, views.get("depth")),
            "key": plain,
            "mixed_query": self.student(mixed(query, query[partner], share), views.get("mixed_depth")),
            "mixed_key": mixed_key,
            "key_of_mix": F.normalize(mixed(plain, plain[partner], share), dim=-1),
            "rows": views["rows"],
            "partners": views["partners"],
        }

    def losses(self, outputs: Outputs, turn: str = ALL) -> Losses:
        """Plain, homogeneous and heterogeneous pairs; the total is their mean."""
        others = self.queue.others(outputs["rows"])
        of_neither = others & self.queue.others(outputs["partners"])
        pairs = {
            "contrast": ("query", "key", others),
            "homogeneous": ("mixed_query", "mixed_key", of_neither),
            "heterogeneous": ("mixed_query", "key_of_mix", of_neither),
        }
        terms = {
            name: global_mean(self.told_apart(outputs[query], outputs[key].detach(), counts))
            for name, (query, key, counts) in pairs.items()
        }
        keys, owners = of_all(outputs["key"], outputs["rows"])
        return Losses(terms, torch.stack([*terms.values()]).mean(), {"keys": keys, "owners": owners})

    def panels(self, views: Views, count: int) -> list[Panel]:
        """What the two networks were shown of a film, and the mix."""
        partner = neighbours(len(views["share"]), views["share"].device)
        mix = mixed(views["query"], views["query"][partner], views["share"])
        return [*super().panels(views, count), Panel("mixed query", mix[:count])]

    @property
    def views_per_film(self) -> int:
        return 4
