"""Films in [0, 1] to what the networks see, and back. It happens inside the model, so data stays in [0, 1].

The projection head h: tokens to unit features, and unit features to K cluster logits.

Shapes: B images, L positions, D width, F bottleneck, K clusters.

The restoration decoder: from the tokens of a film with lesions to the pixels of the film without.

Shapes: B images, L tokens, D encoder width, P = channels * p * p pixels of a patch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from afire.config import DecoderConfig, HeadConfig, ImageConfig
from afire.errors import UserError
from afire.nn.distributed import at_least_float32, full_precision
from afire.nn.vit import Block, Grid, run_blocks, sincos_positions

_IMAGENET_MEAN = (0.485, 0.456, 0.406)
_IMAGENET_STD = (0.229, 0.224, 0.225)
_SMALLEST_STD = 1e-3  # of a blank film
_TOLERANCE = 1e-3  # resampling and half precision overshoot a little; a film in [0, 255] does not


# Older torch has no name for it; its graphs are traced with values.
_is_exporting = getattr(torch.compiler, "is_exporting", lambda: False)


class Normalise(nn.Module):
    """Films (B, 1 or C, H, W) in [0, 1] -> (B, C, H, W): by ImageNet's numbers, by the film's own, or as they are.

    With one channel, ImageNet's numbers are averaged over its three. ``film`` uses the mean and deviation of each
    film by itself, also of one with lesions: at test time there is no clean version to take them from.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, config: ImageConfig) -> None:
        super().__init__()
        self.kind, self.channels = config.normalise, config.channels
        mean, std = torch.zeros(1), torch.ones(1)
        if config.normalise == "imagenet":
            mean, std = torch.tensor(_IMAGENET_MEAN), torch.tensor(_IMAGENET_STD)
            if config.channels == 1:
                mean, std = mean.mean(0, keepdim=True), std.mean(0, keepdim=True)
        self.register_buffer("mean", mean.view(1, -1, 1, 1), persistent=False)
        self.register_buffer("std", std.view(1, -1, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Films (B, C, H, W) in [0, 1] -> what the encoder takes."""
        mean, std = self.statistics(images)
        return ((images - mean) / std).expand(-1, self.channels, -1, -1)

    def statistics(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """What is subtracted and what is divided by, of a shape that broadcasts with ``images``."""
        if self.kind != "film":
            return self.mean, self.std
        std, mean = torch.std_mean(images, dim=(1, 2, 3), correction=0, keepdim=True)
        return mean, std.clamp_min(_SMALLEST_STD)

    def undo(self, normalised: Tensor, like: Tensor) -> Tensor:
        """Normalised pixels (B, C, H, W) back to [0, 1], by the numbers of the films ``like``."""
        mean, std = self.statistics(like)
        return (normalised * std + mean).clamp(0, 1)


def check_films(images: Tensor, channels: int, what: str, *, values: bool = True) -> None:
    """A message when ``images`` are not as afire hands them around: float (B, 1 or C, H, W) in [0, 1].

    ``values`` looks at the numbers too, for which a GPU has to finish its queue.
    """
    if images.ndim != 4 or images.shape[1] not in (1, channels):
        expected = "1" if channels == 1 else f"1 or {channels}"
        raise UserError(f"{what} have shape {tuple(images.shape)}, but should be (films, {expected}, height, width).")
    if not images.is_floating_point():
        raise UserError(f"{what} are {images.dtype}, but should be floating point in [0, 1]; divide by the maximum.")
    if _is_exporting():  # a graph carries no values to look at
        return
    if len(images) == 0:
        raise UserError(f"{what} are an empty batch.")
    if not values:
        return
    low, high = torch.stack(images.detach().aminmax()).tolist()
    if not (low >= -_TOLERANCE and high <= 1 + _TOLERANCE):  # written so that NaN fails too
        raise UserError(
            f"{what} lie between {low:.4g} and {high:.4g}, but should lie in [0, 1];"
            " hand over films before any normalisation, which the model does itself."
        )


class ProjectionHead(nn.Module):
    """Three linear layers, L2 normalisation, and a weight-normalised map to the clusters without bias.

    The map's rows count by their direction only (weight normalisation with its gain fixed at 1), so logits are
    cosines in [-1, 1]. ``per_position`` has one matrix for each position, ``shared`` one for all.
    """

    def __init__(self, width: int, positions: int, config: HeadConfig, clusters: bool = True) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(width, config.hidden),
            nn.GELU(),
            nn.Linear(config.hidden, config.hidden),
            nn.GELU(),
            nn.Linear(config.hidden, config.bottleneck),
        )
        self.last_layer = ClusterLayer(positions, config) if clusters else None

    def features(self, tokens: Tensor) -> Tensor:
        """(B, L, D) -> (B, L, F) of length one, in float32 at least."""
        projected: Tensor = self.mlp(tokens)
        return F.normalize(at_least_float32(projected), dim=-1)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, L, D) -> logits (B, L, K) in [-1, 1]."""
        if self.last_layer is None:
            raise UserError("this head contrasts features (losses.contrast is feature) and has no clusters.")
        logits: Tensor = self.last_layer(self.features(tokens))
        return logits


class ClusterLayer(nn.Module):
    """Cosines between features (B, L, F) and cluster directions, (K, F) for all positions or (L, K, F)."""

    def __init__(self, positions: int, config: HeadConfig) -> None:
        super().__init__()
        shape = (config.clusters, config.bottleneck)
        self.weight = nn.Parameter(torch.zeros(shape if config.form == "shared" else (positions, *shape)))

    def initialise(self, generator: torch.Generator) -> None:
        """Directions uniform on the sphere; the length does not matter to the output, only to the step size."""
        nn.init.normal_(self.weight, std=self.weight.shape[-1] ** -0.5, generator=generator)

    def forward(self, features: Tensor) -> Tensor:
        """Normalised features (B, L, F) -> logits (B, L, K)."""
        if self.weight.ndim == 3 and features.shape[1] != len(self.weight):
            raise UserError(
                f"a per_position head of {len(self.weight)} positions cannot take {features.shape[1]} tokens;"
                " use films of the size it was made for, or head.form shared."
            )
        # In float32: cosines are divided by temperatures down to 0.04, where bfloat16's digits would be worth 0.1.
        with full_precision(features):
            # Dividing the products by the rows' lengths is weight normalisation without a second copy of the weight,
            # which for per_position is by far the largest tensor of the head.
            lengths: Tensor = torch.linalg.vector_norm(self.weight, dim=-1).clamp_min(1e-12)
            if self.weight.ndim == 2:
                return F.linear(features, self.weight) / lengths
            products = torch.bmm(features.transpose(0, 1), self.weight.transpose(1, 2))
            return (products / lengths[:, None]).transpose(0, 1)


class Decoder(nn.Module):
    """Linear to the decoder's width, abnormal tokens replaced by z_mask, positions, blocks, linear to pixels."""

    pos_embed: Tensor

    def __init__(
        self, width: int, pixels: int, grid: Grid, config: DecoderConfig, gradient_checkpointing: bool = False
    ) -> None:
        super().__init__()
        self.grid, self.width, self.gradient_checkpointing = grid, config.width, gradient_checkpointing
        self.embed = nn.Linear(width, config.width)
        self.mask_token = nn.Parameter(torch.zeros(config.width)) if config.mask_token else None
        self.register_buffer("pos_embed", sincos_positions(config.width, grid)[None])
        self.blocks = nn.ModuleList(Block(config.width, config.heads) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.width, eps=1e-6)
        self.pred = nn.Linear(config.width, pixels)

    def initialise(self, generator: torch.Generator) -> None:
        """z_mask from N(0, 0.02^2)."""
        if self.mask_token is not None:
            nn.init.normal_(self.mask_token, std=0.02, generator=generator)

    def forward(
        self, tokens: Tensor, abnormal: Tensor | None = None, grid: Grid | None = None, kept: Tensor | None = None
    ) -> Tensor:
        """Image tokens (B, L, D) without the class token, labels (B, L) -> patches (B, L, P).

        The class token stays outside: it has looked at the abnormal tokens that z_mask is there to hide. Where the
        encoder saw some patches only, ``tokens`` (B, N, D) are those at the places ``kept`` (B, N), and z_mask stands
        at all others.
        """
        embedded = self.embed(tokens)
        if kept is not None:
            embedded = self._spread(embedded, kept, grid or self.grid)
        if self.mask_token is not None and abnormal is not None:
            # where, not indexing: z_mask has a gradient (zero) even in a batch without abnormal tokens, as DDP needs.
            embedded = torch.where(abnormal.bool()[..., None], self.mask_token.to(embedded.dtype), embedded)
        hidden = run_blocks(self.blocks, embedded + self._positions(grid), self.gradient_checkpointing)
        patches: Tensor = self.pred(self.norm(hidden))
        return patches

    def _spread(self, embedded: Tensor, kept: Tensor, grid: Grid) -> Tensor:
        """Tokens (B, N, D) to their places among (B, L, D) of z_mask."""
        if self.mask_token is None:
            raise UserError("decoder.mask_token is off, but tokens that were dropped need one; set it to true.")
        everywhere = self.mask_token.to(embedded.dtype).expand(len(embedded), grid[0] * grid[1], -1)
        return everywhere.scatter(1, kept[..., None].expand_as(embedded), embedded)

    def _positions(self, grid: Grid | None) -> Tensor:
        if grid is None or grid == self.grid:
            return self.pos_embed
        return sincos_positions(self.width, grid, self.grid).to(self.pos_embed)[None]
