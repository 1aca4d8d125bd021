"""MAE (He et al. 2022): most patches are dropped, the encoder sees the rest, a decoder draws what was dropped.

Written from the paper. The decoder is the one AFiRe restores with, so the class token stays outside of it; the rest is
as published: random patches, the encoder on the visible ones only, squared error on the dropped ones only, against
pixels normalised patch by patch unless ``options.normalise_patches`` is off.

Shapes: B films, L positions, N visible ones, D width, P pixels of a patch.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from pydantic import Field
from torch import Tensor

from afire.config import Config, Section
from afire.errors import UserError
from afire.lesions.places import keyed
from afire.methods.base import ALL, NUMBERS_PER_KEY, Keys, Losses, Method, Outputs, Panel, Views, depth_draws
from afire.methods.health import Health, effective_rank
from afire.nn import distributed
from afire.nn.vit import (
    Decoder,
    VisionTransformer,
    at_least_float32,
    check_films,
    full_precision,
    grid_of,
    initialise,
    patchify,
)

_MASKS = 0x3AE  # keeps the draws of masks apart from other draws of the same key
_SMALLEST_VARIANCE = 1e-6


class MAESettings(Section):
    """Settings of MAE itself."""

    mask_ratio: float = Field(0.75, gt=0, lt=1, description="share of the patches that is dropped")
    normalise_patches: bool = Field(
        True, description="the target is each patch by its own mean and deviation; off: pixels as the encoder sees them"
    )


def masked_loss(drawn: Tensor, target: Tensor, dropped: Tensor) -> Tensor:
    """Mean squared error of the ``dropped`` patches (B, L) between ``drawn`` and ``target`` (B, L, P), all processes.

    Every film drops equally many, so the mean over processes is the mean of their means.
    """
    with full_precision(drawn):
        errors_BL = (at_least_float32(drawn) - target.float()).square().mean(dim=-1)
        return (errors_BL * dropped).sum() / dropped.sum()


class MAE(Method):
    """One encoder and a decoder."""

    networks = ("encoder",)
    sections = ("decoder",)
    settings_type = MAESettings

    def __init__(self, config: Config, generator: torch.Generator | None = None) -> None:
        """Initial weights come from ``generator``, or from ``config.seed`` without one."""
        super().__init__(config)
        assert isinstance(self.options, MAESettings)
        self.normalise_patches = self.options.normalise_patches
        self.positions = self.grid[0] * self.grid[1]
        self.visible = round(self.positions * (1 - self.options.mask_ratio))
        if not 0 < self.visible < self.positions:
            raise UserError(
                f"options.mask_ratio {self.options.mask_ratio} leaves {self.visible} of {self.positions} patches; "
                "choose one that leaves some and drops some."
            )
        if not config.decoder.mask_token:
            raise UserError("MAE needs decoder.mask_token=true: the decoder draws what stands behind it.")
        pixels = config.image.channels * self.patch_size**2
        self.encoder = VisionTransformer.from_config(config.encoder, config.image)
        self.decoder = Decoder(
            config.encoder.width, pixels, self.grid, config.decoder, config.encoder.gradient_checkpointing
        )
        generator = generator or torch.Generator().manual_seed(config.seed)
        initialise(self, generator)
        self.decoder.initialise(generator)

    @torch.no_grad()
    def views(self, images: Tensor, keys: Keys) -> Views:
        """The images, and which of their patches are kept: (B, N) places, rising."""
        slots = -(-self.positions // NUMBERS_PER_KEY)
        chance_BL = keyed(keys.seed ^ _MASKS, keys.epoch, keys.rows, 1, slots).flatten(1)[:, : self.positions]
        kept = chance_BL.argsort(dim=1, stable=True)[:, : self.visible].sort(dim=1).values
        views = {"images": images, "kept": kept.to(images.device)}
        if self.config.encoder.drop_path > 0:
            draws = depth_draws(self.config.encoder.depth, keys.seed, keys.step, keys.rows)
            views["depth"] = draws.to(images.device)
        return views

    def forward(self, views: Views) -> Outputs:
        """Views ``images`` (B, C, S, S) in [0, 1] and ``kept`` (B, N)."""
        images, kept = views["images"], views["kept"]
        check_films(images, self.config.image.channels, "images", values=self.config.run.check_images)
        normalised = self.normalise(images)
        dropped = torch.ones(len(images), self.positions, device=images.device).scatter(1, kept, 0.0)
        target = self._target(patchify(normalised, self.patch_size))
        return {"drawn": self._draw(normalised, kept, views.get("depth")), "target": target, "dropped": dropped}

    def losses(self, outputs: Outputs, turn: str = ALL) -> Losses:
        """The one loss there is."""
        loss = masked_loss(outputs["drawn"], outputs["target"], outputs["dropped"])
        restoration = distributed.with_global_value(loss)
        return Losses({"restoration": restoration}, restoration)

    def _draw(self, normalised: Tensor, kept: Tensor, depth: Tensor | None = None) -> Tensor:
        """Patches (B, L, P) as the decoder draws them from the ``kept`` ones."""
        tokens = self.encoder(normalised, depth, kept)[:, 1:]
        grid = grid_of(normalised.shape[-2], normalised.shape[-1], self.patch_size)
        drawn: Tensor = self.decoder(tokens, grid=grid, kept=kept)
        return drawn

    def _target(self, patches: Tensor) -> Tensor:
        if not self.normalise_patches:
            return patches
        variance, mean = torch.var_mean(patches, dim=-1, keepdim=True)
        return (patches - mean) / (variance + _SMALLEST_VARIANCE).sqrt()

    @torch.no_grad()
    def health(self, views: Views, losses: Mapping[str, float]) -> Health:
        """MAE does not collapse to a point; its known failure is a decoder that draws the mean of every patch."""
        rank = effective_rank(self.encode(views["images"][:64]).flatten(0, 1))
        outputs = self({name: view[:64] for name, view in views.items()})
        dropped = outputs["dropped"].bool()
        target = outputs["target"][dropped].float()
        explained = 1 - (outputs["drawn"][dropped].float() - target).square().mean() / target.var().clamp_min(1e-12)
        numbers = {"effective_rank": rank, "explained": float(explained), "restoration": losses["restoration"]}
        shown = f"rank {rank:.0f}, {numbers['explained']:.0%} of what was dropped explained"
        if rank < 2:
            reason = f"collapse: the encoder's features have one direction left (effective rank {rank:.1f})"
            return Health(numbers, "red", reason, shown)
        if explained < 0.01:
            return Health(numbers, "amber", "the decoder draws the same for every patch so far", shown)
        return Health(numbers, "green", "dropped patches are drawn from their surroundings", shown)

    @torch.no_grad()
    def panels(self, views: Views, count: int) -> list[Panel]:
        """The film, what the encoder saw of it, what the decoder drew, and the difference."""
        images, kept = views["images"][:count], views["kept"][:count]
        hidden = torch.ones(len(images), self.positions, device=images.device).scatter(1, kept, 0.0).bool()
        patches = self.patches(images)
        visible = self.picture(torch.where(hidden[..., None], torch.zeros_like(patches), patches), like=images)
        drawn = self.picture(self.restore(images, hidden), like=images)
        return [
            Panel("film", images),
            Panel("seen", visible),
            Panel("restored", drawn),
            Panel("film − restored", images - drawn, "difference"),
        ]

    @classmethod
    def trunk_prefix(cls, network: str | None = None) -> str:
        return f"{cls.network(network)}."

    @property
    def restores(self) -> bool:
        return True

    def restore(self, images: Tensor, hidden: Tensor | None = None) -> Tensor:
        """As for any method. The encoder drops ``hidden`` tokens (B, L). The other patches come back as they are: MAE
        does not learn to draw what it was shown.

        Without them each quarter of the patches, every fourth along rows and columns, is shown alone in turn, and a
        patch is the mean of the three times in which it was dropped. Where targets are normalised patch by patch,
        a drawn patch gets the mean and deviation of the patch it stands for: MAE tells structure, not brightness.
        """
        check_films(images, self.config.image.channels, "images")
        normalised = self.normalise(images)
        patches = patchify(normalised, self.patch_size)
        grid = grid_of(images.shape[-2], images.shape[-1], self.patch_size)
        if hidden is None:
            drawn = self._draw_by_quarters(normalised, grid)
        else:
            drawn = self._draw_hidden(normalised, hidden.bool())
        if self.normalise_patches:
            variance, mean = torch.var_mean(patches, dim=-1, keepdim=True)
            drawn = drawn * (variance + _SMALLEST_VARIANCE).sqrt() + mean
        return drawn if hidden is None else torch.where(hidden.bool()[..., None], drawn, patches)

    def _draw_hidden(self, normalised: Tensor, hidden_BL: Tensor) -> Tensor:
        """Films that hide equally many tokens go through the networks together."""
        drawn = torch.empty_like(patchify(normalised, self.patch_size))
        counts = hidden_BL.sum(dim=1)
        for count in sorted(set(counts.tolist())):
            same = counts == count
            kept = (~hidden_BL[same]).nonzero()[:, 1].view(int(same.sum()), hidden_BL.shape[1] - count)
            drawn[same] = self._draw(normalised[same], kept)
        return drawn

    def _draw_by_quarters(self, normalised: Tensor, grid: tuple[int, int]) -> Tensor:
        # Numbers, not tensors: a graph cannot be drawn of what depends on values.
        quarters = [2 * (row % 2) + column % 2 for row in range(grid[0]) for column in range(grid[1])]
        total = times = None
        for quarter in sorted(set(quarters)):  # a grid of one row or column has fewer than four
            shown = [place for place, of in enumerate(quarters) if of == quarter]
            kept = torch.tensor(shown, device=normalised.device).expand(normalised.shape[0], -1)
            dropped = normalised.new_tensor([float(of != quarter) for of in quarters])[None, :, None]
            drawn = self._draw(normalised, kept) * dropped
            total = drawn if total is None else total + drawn
            times = dropped if times is None else times + dropped
        assert total is not None and times is not None
        return total / times.clamp_min(1)
