"""PCRL (Zhou et al. 2021): views are told from other films, and drawn again as the network is asked to, mixed or not.

Written from the paper. As published: two views of a film, one through the student, one through a network that follows
it; InfoNCE against a queue of its keys (contrastive); and what preserves the rest of what a view shows: a decoder draws
the student's view mirrored, turned upside down or by quarters, conditioned on which of these by an attention over
channels, and it draws the mix of both views, each transformed in its own way, from the mix of both networks' features
(preservational). The mix has a share of at least one half of the student. Both losses have weight 1.

Ours, beside what :mod:`afire.methods.twins` says: a vision transformer with AFiRe's decoder in place of a U-Net on
ResNet-18, so one level of features is mixed and conditioned instead of all; each film draws the share of its own mix;
and films are not mixed with each other, which the published code also does, as C2L.

Shapes: B films, F width of a key, L positions, D width, P pixels of a patch, T = 6 numbers of a transformation.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from afire.config import Config
from afire.lesions.places import below, keyed, unit
from afire.methods.base import ALL, Keys, Losses, Outputs, Panel, Views
from afire.methods.c2l import mixed
from afire.methods.crops import crops
from afire.methods.health import Health
from afire.methods.moco import MoCoSettings
from afire.methods.restoring import Restored, Restoring, restored_well, squared_error
from afire.methods.twins import HEALTH_FILMS, Queued, global_mean, pooled
from afire.nn import distributed
from afire.nn.memory import of_all
from afire.nn.vit import Grid, initialise, patchify

_PCRL, _DECODER = 0x9C21, 0x9C22  # keep draws and first weights apart from others of the same key
_ATTENTION = 256  # hidden numbers between a transformation and the channels, as published
KINDS = 6


class PCRLSettings(MoCoSettings):
    """Settings of PCRL itself."""

    contrastive: float = Field(1.0, gt=0, description="weight of telling films apart")
    preservational: float = Field(1.0, gt=0, description="weight of drawing views as asked")


def transformed(images: Tensor, told_BT: Tensor) -> Tensor:
    """Images (B, C, S, S) upside down, mirrored, and turned by quarters, as the numbers (B, 6) tell.

    The first two say whether; of the last four, one says how many quarters.
    """
    over, mirrored = (told_BT[:, place, None, None, None] > 0 for place in (0, 1))
    images = torch.where(over, images.flip(-2), images)
    images = torch.where(mirrored, images.flip(-1), images)
    quarters = told_BT[:, 2:].argmax(dim=1)
    turned = [images, *(torch.rot90(images, times, (-2, -1)) for times in (1, 2, 3))]
    chosen = F.one_hot(quarters, 4).to(images)
    return sum(chosen[:, times, None, None, None] * picture for times, picture in enumerate(turned))  # type: ignore[return-value]


def drawn_transformations(draws_BD: Tensor) -> Tensor:
    """Random transformations (B, 6): each mirroring with one half, each number of quarters with one fourth."""
    flips = (unit(draws_BD[:, :2]) < 0.5).float()
    return torch.cat([flips, F.one_hot(below(draws_BD[:, 2], 4), 4).float()], dim=1)


class Attention(nn.Module):
    """Transformations (B, 6) -> a factor in (0, 1) for each channel (B, 1, D)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(KINDS, _ATTENTION), nn.ReLU(), nn.Linear(_ATTENTION, width))

    def forward(self, told_BT: Tensor) -> Tensor:
        factors: Tensor = torch.sigmoid(self.mlp(told_BT))
        return factors[:, None]


class PCRL(Queued, Restoring):
    """Student, teacher and queue; a decoder, and what tells it how to draw."""

    settings_type = PCRLSettings
    options: PCRLSettings
    sections = ("decoder",)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.decoder = self.make_decoder()
        self.attention = Attention(config.encoder.width)
        generator = torch.Generator().manual_seed(config.seed ^ _DECODER)
        for network in (self.decoder, self.attention):
            initialise(network, generator)

    @torch.no_grad()
    def views(self, images: Tensor, keys: Keys) -> Views:
        """Two random views of each film, how each is to be drawn (B, 6), and the student's share of the mix (B,)."""
        two = crops(images, keys, views=2, size=self.config.image.size, settings=self.options.crop)
        draws_BVD = keyed(keys.seed ^ _PCRL, keys.epoch, keys.rows, 2, 1)[:, :, 0].to(images.device)
        share = unit(draws_BVD[:, 0, 3])
        views = {
            "query": two[0::2],
            "key": two[1::2],
            "query_told": drawn_transformations(draws_BVD[:, 0]),
            "key_told": drawn_transformations(draws_BVD[:, 1]),
            "share": torch.maximum(share, 1 - share),
            "rows": keys.rows.to(images.device),
        }
        depth = self.depth(keys, 1, images)
        return views if depth is None else {**views, "depth": depth}

    def forward(self, views: Views) -> Outputs:
        """Queries and keys (B, F); patches (B, L, P) of the view and of the mix, as drawn and as asked for."""
        self.check(views["query"])
        share = views["share"]
        tokens = self.student.encoder(self.normalise(views["query"]), views.get("depth"))
        with torch.no_grad():
            tokens_of_key = self.teacher.encoder(self.normalise(views["key"]))
            key = self.teacher.head(pooled(tokens_of_key, self.teacher.pool))
        told, told_of_key = (self.attention(views[name]) for name in ("query_told", "key_told"))
        target, target_of_key = (
            patchify(transformed(self.normalise(views[name]), views[f"{name}_told"]), self.patch_size)
            for name in ("query", "key")
        )
        return {
            "query": self.student.head(pooled(tokens, self.student.pool)),
            "key": key,
            "rows": views["rows"],
            "drawn": self.decoder(tokens[:, 1:] * told),
            "target": target,
            "mix_drawn": self.decoder(mixed(tokens * told, tokens_of_key * told_of_key, share)[:, 1:]),
            "mix_target": mixed(target, target_of_key, share),
        }

    def drawn(self, tokens: Tensor, grid: Grid | None = None) -> Tensor:
        """As it is: not mirrored, no quarter turned."""
        as_it_is = torch.tensor([[0.0, 0.0, 1.0, 0.0, 0.0, 0.0]], device=tokens.device)
        return super().drawn(tokens * self.attention(as_it_is), grid)

    def losses(self, outputs: Outputs, turn: str = ALL) -> Losses:
        """Contrastive, and the mean of both drawings' errors; keys of all processes wait for the queue."""
        counts = self.queue.others(outputs["rows"])
        contrast = global_mean(self.told_apart(outputs["query"], outputs["key"].detach(), counts))
        restoration, mix = (
            distributed.with_global_value(squared_error(outputs[f"{of}drawn"], outputs[f"{of}target"]))
            for of in ("", "mix_")
        )
        weights = self.options
        total = weights.contrastive * contrast + weights.preservational * (restoration + mix) / 2
        keys, owners = of_all(outputs["key"], outputs["rows"])
        return Losses(
            {"contrast": contrast, "restoration": restoration, "mix": mix}, total, {"keys": keys, "owners": owners}
        )

    @torch.no_grad()
    def look(self, views: Views) -> dict[str, float]:
        """Also how well views are drawn, and whether they are drawn as asked: nearer to that than to the view."""
        shown = {name: view[:HEALTH_FILMS] for name, view in views.items()}
        outputs = self(shown)
        as_seen = self.target(shown["query"])
        well = restored_well(outputs["drawn"], as_seen, outputs["target"])
        to_target, plain = ((outputs["drawn"] - other).square().mean() for other in (outputs["target"], as_seen))
        heeds = float(1 - to_target / plain.clamp_min(1e-6))
        return {**super().look(views), "explained": well.explained, "heeds": heeds}

    def more_rules(self, numbers: Mapping[str, float]) -> list[tuple[str, bool, str]]:
        rules = Restored(numbers["explained"], 0.0).rules()[:1]
        ignores = "views are drawn no nearer to what was asked for than to what was seen: the decoder ignores it so far"
        return [*rules, ("amber", numbers["heeds"] <= 0, ignores)]

    def health(self, views: Views, losses: Mapping[str, float]) -> Health:
        health = super().health(views, losses)
        shown = f"{health.shown}, {health.numbers['explained']:.0%} of what tells views apart drawn"
        return Health(health.numbers, health.colour, health.reason, shown)

    @torch.no_grad()
    def panels(self, views: Views, count: int) -> list[Panel]:
        """The view, what was asked for, what was drawn, the difference, and the other view."""
        some = {name: view[:count] for name, view in views.items()}
        query = some["query"]
        target = transformed(query, some["query_told"])
        drawn = self.picture(self(some)["drawn"], like=query)
        return [
            Panel("query", query),
            Panel("asked for", target),
            Panel("drawn", drawn),
            Panel("asked − drawn", target - drawn, "difference"),
            Panel("key", some["key"]),
        ]
