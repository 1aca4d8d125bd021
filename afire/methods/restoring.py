"""What methods that restore spoilt films share: an encoder, AFiRe's decoder behind it, their error, health, pictures.

The decoder sees every token, so it has no z_mask. Tokens that it must not see at test time are covered as films are in
training: the pixels of their patches become noise before the encoder looks.

Shapes: B films, L positions, D width, P pixels of a patch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from afire.config import Config
from afire.lesions.corrupt import noise_for
from afire.methods.base import Keys, Method, depth_draws
from afire.methods.health import Colour, Health, effective_rank
from afire.methods.twins import HEALTH_FILMS
from afire.nn.vit import (
    Decoder,
    Grid,
    VisionTransformer,
    at_least_float32,
    check_films,
    full_precision,
    grid_of,
    initialise,
    patchify,
)

Rule = tuple[Colour, bool, str]
"""A colour, whether it holds, and why."""


def squared_error(drawn: Tensor, target: Tensor) -> Tensor:
    """Mean squared error of patches (B, L, P), over everything; in float32 at least."""
    with full_precision(drawn):
        return (at_least_float32(drawn) - at_least_float32(target)).square().mean()


class Restored(NamedTuple):
    """How well some films were restored: both are at most 1."""

    explained: float  # of what tells a film from the mean film of the batch, at each pixel
    against_copy: float  # of the error of the spoilt film itself, what the restoration took away

    def rules(self) -> list[Rule]:
        """The shortcuts of restoring: the mean film, which of chests is not far off, and the input handed on."""
        return [
            (
                "amber",
                self.explained < 0.01,
                f"the decoder draws the same film every time so far: {self.explained:.1%} of what tells films apart",
            ),
            (
                "amber",
                self.against_copy < 0,
                "what is restored is further from the film than the spoilt film itself so far",
            ),
        ]


@torch.no_grad()
def restored_well(drawn_BLP: Tensor, spoilt_BLP: Tensor, target_BLP: Tensor) -> Restored:
    """Measured on patches of normalised pixels."""
    drawn, spoilt, target = (patches.float() for patches in (drawn_BLP, spoilt_BLP, target_BLP))
    centre = target.mean(dim=0) if len(target) > 1 else target.mean()
    error = (drawn - target).square().mean()
    explained = 1 - error / (target - centre).square().mean().clamp_min(1e-6)
    against_copy = 1 - error / (spoilt - target).square().mean().clamp_min(1e-6)
    return Restored(float(explained), float(against_copy))


def judged(numbers: Mapping[str, float], rules: Iterable[Rule], good: str, shown: str) -> Health:
    """The first rule that holds; ``good`` is the reason where none does. A collapse of the encoder comes before all."""
    rank = numbers["effective_rank"]
    collapse = f"collapse: the encoder's features have one direction left (effective rank {rank:.1f})"
    first: Rule = ("red", rank < 2, collapse)
    for colour, holds, reason in (first, *rules):
        if holds:
            return Health(numbers, colour, reason, shown)
    return Health(numbers, "green", good, shown)


class Restoring(Method):
    """A trunk, and a decoder that draws a film from all of its tokens."""

    sections = ("decoder",)
    decoder: Decoder

    def make_decoder(self) -> Decoder:
        """AFiRe's, without z_mask; not yet initialised."""
        config = self.config
        pixels = config.image.channels * self.patch_size**2
        without_mask = config.decoder.model_copy(update={"mask_token": False})
        return Decoder(config.encoder.width, pixels, self.grid, without_mask, config.encoder.gradient_checkpointing)

    def drawn(self, tokens: Tensor, grid: Grid | None = None) -> Tensor:
        """Tokens (B, 1 + L, D), the class token first -> patches (B, L, P)."""
        patches: Tensor = self.decoder(tokens[:, 1:], grid=grid)
        return patches

    def target(self, images: Tensor) -> Tensor:
        """What is to be drawn: patches (B, L, P) of a film by its own grey levels."""
        return patchify(self.normalise(images), self.patch_size)

    @property
    def restores(self) -> bool:
        return True

    def restore(self, images: Tensor, hidden: Tensor | None = None) -> Tensor:
        """As for any method; ``hidden`` patches (B, L) are painted over with noise, without them nothing is."""
        check_films(images, self.config.image.channels, "images")
        grid = grid_of(images.shape[-2], images.shape[-1], self.patch_size)
        shown = images if hidden is None else self._painted(images, hidden, grid)
        return self.drawn(self.trunk()(self.normalise(shown)), grid)

    def _painted(self, images: Tensor, hidden_BL: Tensor, grid: Grid) -> Tensor:
        noise = noise_for(torch.zeros(1, dtype=torch.int64, device=images.device), max(images.shape[-2:]))
        places = hidden_BL.bool().view(-1, 1, *grid)
        pixels = places.repeat_interleave(self.patch_size, -2).repeat_interleave(self.patch_size, -1)
        return torch.where(pixels, noise[..., : images.shape[-2], : images.shape[-1]].to(images), images)


class RestoringMethod(Restoring):
    """One encoder and a decoder."""

    networks = ("encoder",)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.encoder = VisionTransformer.from_config(config.encoder, config.image)
        self.decoder = self.make_decoder()

    def initialise(self) -> None:
        """First weights of all networks there are so far, from ``config.seed``."""
        initialise(self, torch.Generator().manual_seed(self.config.seed))

    @classmethod
    def trunk_prefix(cls, network: str | None = None) -> str:
        return f"{cls.network(network)}."

    def depth(self, keys: Keys, device: torch.device) -> dict[str, Tensor]:
        """The draws of stochastic depth as a view, where there is any."""
        if self.config.encoder.drop_path == 0:
            return {}
        return {"depth": depth_draws(self.config.encoder.depth, keys.seed, keys.step, keys.rows).to(device)}

    def rank_of(self, images: Tensor) -> float:
        """Effective rank of the tokens of some films."""
        return effective_rank(self.encode(images[:HEALTH_FILMS]).flatten(0, 1))
