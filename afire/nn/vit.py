"""The networks: a vision transformer with timm's parameter names, the projection head and the restoration decoder.

Weights go to and from timm by name. Images come in [0, 1] and are normalised inside (:class:`Normalise`). Positions
depend on the place in the *film*, not on the number of the patch: a finer grid asks for the positions between the old
ones, so that a token of the left apex keeps the position of the left apex.

Shapes: B images, C channels, H x W pixels, p patch size, L = (H/p) * (W/p) tokens, D width, F bottleneck of the head,
K clusters, P = C * p * p pixels of a patch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from afire.config import DecoderConfig, EncoderConfig, HeadConfig, ImageConfig
from afire.errors import UserError
from afire.nn.stem import ConvStem

Grid = tuple[int, int]  # rows, columns of patches

_IMAGENET_MEAN = (0.485, 0.456, 0.406)
_IMAGENET_STD = (0.229, 0.224, 0.225)
_SMALLEST_STD = 1e-3  # of a blank film
_TOLERANCE = 1e-3  # resampling and half precision overshoot a little; a film in [0, 255] does not


# Older torch has no name for it; its graphs are traced with values.
is_exporting = getattr(torch.compiler, "is_exporting", lambda: False)
_EPSILON = 1e-6  # of the layer norms, as in timm


# Precision: losses and assignments are computed in float32 even where the networks run in half precision.


def full_precision(tensor: Tensor) -> AbstractContextManager[object]:
    """``with full_precision(x):`` switches autocast off on the device of ``x``."""
    device = tensor.device.type
    if not torch.amp.is_autocast_available(device):
        return nullcontext()
    return torch.autocast(device, enabled=False)


def at_least_float32(tensor: Tensor) -> Tensor:
    """Half precision becomes float32; float32 and float64 stay as they are."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


# Pixels


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
    if is_exporting():  # a graph carries no values to look at
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


# Patches and their places


def patchify(images: Tensor, patch_size: int) -> Tensor:
    """(B, C, H, W) -> (B, L, C*p*p): patches row by row; inside a patch channel, row, column."""
    B, C, H, W = images.shape
    rows, columns = grid_of(H, W, patch_size)
    blocks = images.reshape(B, C, rows, patch_size, columns, patch_size)
    return blocks.permute(0, 2, 4, 1, 3, 5).reshape(B, rows * columns, C * patch_size**2)


def unpatchify(patches: Tensor, patch_size: int, grid: Grid) -> Tensor:
    """(B, L, C*p*p) -> (B, C, H, W): the inverse of :func:`patchify` on a grid of (rows, columns) patches."""
    B, p = patches.shape[0], patch_size  # not len: a graph would be of this many films only
    blocks = patches.reshape(B, *grid, -1, p, p)
    return blocks.permute(0, 3, 1, 4, 2, 5).reshape(B, -1, grid[0] * p, grid[1] * p)


def grid_of(height: int, width: int, patch_size: int) -> Grid:
    """Rows and columns of patches, or a message when they do not fit."""
    if height % patch_size or width % patch_size:
        raise UserError(f"an image of {height} x {width} pixels is not a multiple of the patch size {patch_size}.")
    return height // patch_size, width // patch_size


def sincos_positions(width: int, grid: Grid, reference: Grid | None = None) -> Tensor:
    """Sin-cos positions (rows * columns, width), row by row: the first half of the width tells the column.

    ``reference`` is the grid the network was made for. Patch numbers are scaled to it, so at the reference grid the
    coordinates are 0, 1, 2, ... (the convention of MAE, whose weights therefore fit) and a grid twice as fine has
    -0.25, 0.25, 0.75, ...
    """
    rows, columns = (_coordinates(size, other) for size, other in zip(grid, reference or grid, strict=True))
    row_codes = _sincos(rows, width // 2)[:, None].expand(-1, grid[1], -1)
    column_codes = _sincos(columns, width // 2)[None].expand(grid[0], -1, -1)
    return torch.cat([column_codes, row_codes], dim=-1).reshape(-1, width).float()


def _coordinates(size: int, reference: int) -> Tensor:
    """Centres of ``size`` equal patches, in units of a patch of the reference grid, the first of which is at 0."""
    return (torch.arange(size, dtype=torch.float64) + 0.5) * (reference / size) - 0.5


def _sincos(coordinates: Tensor, width: int) -> Tensor:
    """(N,) -> (N, width): sines, then cosines, of frequencies from 1 down to nearly 1/10000."""
    frequencies = 10000.0 ** (-torch.arange(width // 2, dtype=torch.float64) / (width // 2))
    angles = coordinates[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def resize_positions(positions: Tensor, grid: Grid, target: Grid) -> Tensor:
    """Learned positions (1, 1 + rows * columns, D), class token first, carried from ``grid`` to ``target``."""
    if grid == target:
        return positions
    class_position, patches = positions[:, :1], positions[:, 1:]
    image = patches.float().reshape(1, *grid, -1).permute(0, 3, 1, 2)
    image = F.interpolate(image, size=target, mode="bicubic", antialias=True)
    resized = image.permute(0, 2, 3, 1).reshape(1, target[0] * target[1], -1)
    return torch.cat([class_position, resized.to(positions.dtype)], dim=1)


# The transformer


class PatchEmbed(nn.Module):
    """Patches to tokens. The weight has a convolution's shape (timm's); the arithmetic is one matrix product."""

    def __init__(self, channels: int, patch_size: int, width: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, width, kernel_size=patch_size, stride=patch_size)

    def forward(self, images: Tensor, keep: Tensor | None = None) -> Tensor:
        """(B, C, H, W) -> (B, L, D). Which patches are kept afterwards changes none: each sees its own pixels."""
        patches = patchify(images, self.proj.kernel_size[0])
        return F.linear(patches, self.proj.weight.flatten(1), self.proj.bias)


class Attention(nn.Module):
    """Multi-head self-attention through the fused kernel."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        B, N, D = tokens.shape
        query, key, value = self.qkv(tokens).view(B, N, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value)
        out: Tensor = self.proj(mixed.transpose(1, 2).reshape(B, N, D))
        return out


class Mlp(nn.Module):
    """Two layers, four times as wide in between."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.fc2(F.gelu(self.fc1(tokens)))
        return out


class Block(nn.Module):
    """Attention, then an MLP, each on normalised tokens and added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=_EPSILON)
        self.attn = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps=_EPSILON)
        self.mlp = Mlp(width)

    def forward(self, tokens: Tensor, scales: Tensor | None = None) -> Tensor:
        """``scales`` (2, B, 1, 1) multiplies the two branches of each image; None is 1."""
        attention_scale, mlp_scale = (None, None) if scales is None else scales.unbind(0)
        tokens = tokens + _scaled(self.attn(self.norm1(tokens)), attention_scale)
        return tokens + _scaled(self.mlp(self.norm2(tokens)), mlp_scale)


def _scaled(branch: Tensor, scale: Tensor | None) -> Tensor:
    return branch if scale is None else branch * scale.to(branch.dtype)


def run_blocks(
    blocks: Iterable[nn.Module], tokens: Tensor, checkpointing: bool, scales: Tensor | None = None
) -> Tensor:
    """Tokens (B, N, D) through all blocks; ``checkpointing`` keeps only the tokens between blocks for backward."""
    for number, block in enumerate(blocks):
        scale = None if scales is None else scales[number]
        if checkpointing and torch.is_grad_enabled():
            tokens = checkpoint(block, tokens, scale, use_reentrant=False, preserve_rng_state=False)
        else:
            tokens = block(tokens, scale)
    return tokens


def layer_of(name: str, depth: int) -> int:
    """Of a parameter of a trunk: 0 for patches, tokens and positions, 1 + i for block or stage i, depth + 1 for the
    norm."""
    if name.startswith(("blocks.", "stages.")):
        return 1 + int(name.split(".")[1])
    return depth + 1 if name.startswith("norm.") else 0


class VisionTransformer(nn.Module):
    """Images (B, C, H, W) -> tokens (B, 1 + L, D) after the last norm, the class token first."""

    pos_embed: Tensor

    def __init__(
        self,
        image_size: int = 224,
        patch_size: int = 16,
        channels: int = 3,
        width: int = 768,
        depth: int = 12,
        heads: int = 12,
        positions: Literal["sincos", "learned"] = "sincos",
        drop_path: float = 0.0,
        gradient_checkpointing: bool = False,
        stem: Literal["patch", "conv"] = "patch",
    ) -> None:
        super().__init__()
        self.patch_size, self.width, self.positions = patch_size, width, positions
        self.grid = grid_of(image_size, image_size, patch_size)
        self.drop_path, self.gradient_checkpointing = drop_path, gradient_checkpointing
        self.patch_embed = (ConvStem if stem == "conv" else PatchEmbed)(channels, patch_size, width)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        if positions == "learned":
            self.pos_embed = nn.Parameter(torch.zeros(1, 1 + self.grid[0] * self.grid[1], width))
        else:
            self.register_buffer("pos_embed", self._sincos(self.grid))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width, eps=_EPSILON)

    @classmethod
    def from_config(cls, encoder: EncoderConfig, image: ImageConfig) -> VisionTransformer:
        """The encoder that the settings describe, not yet initialised (see :func:`initialise`)."""
        if encoder.kind != "vit":
            raise UserError(
                f"encoder.kind {encoder.kind} is no vision transformer, which this needs; give other weights, or set "
                "encoder.kind to vit."
            )
        settings = encoder.model_dump(exclude={"size", "kind"})
        return cls(image_size=image.size, channels=image.channels, **settings)

    def forward(self, images: Tensor, depth: Tensor | None = None, keep: Tensor | None = None) -> Tensor:
        """Any image size that the patch divides. ``depth`` (B, blocks, 2), uniform numbers, decides the stochastic
        depth; torch draws them where they are missing. ``keep`` (B, N) are the patches to look at, all without it."""
        return self.levels(images, [len(self.blocks)], depth, keep)[0]

    def levels(
        self, images: Tensor, after: Sequence[int], depth: Tensor | None = None, keep: Tensor | None = None
    ) -> list[Tensor]:
        """Tokens (B, 1 + L, D) after the given numbers of blocks, rising; only those after the last are normalised."""
        tokens = self._embed(images, keep)
        scales = self._depth_scales(tokens, depth)
        outputs: list[Tensor] = []
        for first, last in pairwise([0, *after]):
            scale = None if scales is None else scales[first:last]
            tokens = run_blocks([*self.blocks][first:last], tokens, self.gradient_checkpointing, scale)
            outputs.append(self.norm(tokens) if last == len(self.blocks) else tokens)
        return outputs

    def _embed(self, images: Tensor, keep: Tensor | None) -> Tensor:
        """Tokens (B, 1 + L, D) before the first block, or (B, 1 + N, D) where only N patches are kept."""
        positions = self.positions_for(grid_of(images.shape[-2], images.shape[-1], self.patch_size))
        # shape[0], not len: torch.export keeps a shape symbolic and freezes a len, and with it the batch size.
        class_token = (self.cls_token + positions[:, :1]).expand(images.shape[0], -1, -1)
        patches = self.patch_embed(images, keep) + positions[:, 1:]
        if keep is not None:
            patches = patches.gather(1, keep[..., None].expand(-1, -1, self.width))
        return torch.cat([class_token.to(patches.dtype), patches], dim=1)

    def positions_for(self, grid: Grid) -> Tensor:
        """Positions (1, 1 + L, D) of a grid of patches: sin-cos ones computed, learned ones interpolated."""
        if grid == self.grid:
            return self.pos_embed
        if self.positions == "learned":
            return resize_positions(self.pos_embed, self.grid, grid)
        return self._sincos(grid).to(self.pos_embed)

    def _sincos(self, grid: Grid) -> Tensor:
        """(1, 1 + L, D); the class token lies nowhere."""
        return F.pad(sincos_positions(self.width, grid, self.grid), (0, 0, 1, 0))[None]

    def _depth_scales(self, tokens: Tensor, depth: Tensor | None) -> Tensor | None:
        """(blocks, 2, B, 1, 1): 0 where a branch is dropped, else 1 / its probability to stay.

        Decided for all blocks at once and before them, so that gradient checkpointing, which runs a block twice,
        sees the same decision both times.
        """
        if not self.training or self.drop_path == 0:
            return None
        if depth is None:
            depth = torch.rand(len(tokens), len(self.blocks), 2, device=tokens.device)
        stay = 1 - torch.linspace(0, self.drop_path, len(self.blocks), device=tokens.device).view(-1, 1, 1, 1, 1)
        chance = depth.to(tokens.device).permute(1, 2, 0)[..., None, None]
        return (chance < stay) / stay


def initialise(module: nn.Module, generator: torch.Generator) -> None:
    """Xavier-uniform matrices, zero biases, class token and learned positions from N(0, 0.02^2), in place."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            nn.init.xavier_uniform_(layer.weight.data.flatten(1), generator=generator)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        elif isinstance(layer, VisionTransformer):
            nn.init.normal_(layer.cls_token, std=0.02, generator=generator)
            if isinstance(layer.pos_embed, nn.Parameter):
                nn.init.normal_(layer.pos_embed, std=0.02, generator=generator)


# On top of it


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
        everywhere = self.mask_token.to(embedded.dtype).expand(embedded.shape[0], grid[0] * grid[1], -1)
        return everywhere.scatter(1, kept[..., None].expand_as(embedded), embedded)

    def _positions(self, grid: Grid | None) -> Tensor:
        if grid is None or grid == self.grid:
            return self.pos_embed
        return sincos_positions(self.width, grid, self.grid).to(self.pos_embed)[None]
