"""Where a token lies in the film: fixed 2-D sin-cos positions, and learned ones carried over to another grid.

Both depend on the place in the *film*, not on the number of the patch: a finer grid asks for the positions between
the old ones, so that a token of the left apex keeps the position of the left apex.

A vision transformer with timm's parameter names, so that weights go to and from timm by name.

Shapes: B images, C channels, H x W pixels, p patch size, L = (H/p) * (W/p) tokens, D width.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from afire.config import VIT_SIZES, EncoderConfig, ImageConfig
from afire.errors import UserError

Grid = tuple[int, int]  # rows, columns of patches


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


__all__ = ["VIT_SIZES", "Block", "VisionTransformer", "grid_of", "initialise", "patchify", "run_blocks", "unpatchify"]

_EPSILON = 1e-6  # of the layer norms, as in timm


def patchify(images: Tensor, patch_size: int) -> Tensor:
    """(B, C, H, W) -> (B, L, C*p*p): patches row by row; inside a patch channel, row, column."""
    B, C, H, W = images.shape
    rows, columns = grid_of(H, W, patch_size)
    blocks = images.reshape(B, C, rows, patch_size, columns, patch_size)
    return blocks.permute(0, 2, 4, 1, 3, 5).reshape(B, rows * columns, C * patch_size**2)


def unpatchify(patches: Tensor, patch_size: int, grid: Grid) -> Tensor:
    """(B, L, C*p*p) -> (B, C, H, W): the inverse of :func:`patchify` on a grid of (rows, columns) patches."""
    B, p = len(patches), patch_size
    blocks = patches.reshape(B, *grid, -1, p, p)
    return blocks.permute(0, 3, 1, 4, 2, 5).reshape(B, -1, grid[0] * p, grid[1] * p)


def grid_of(height: int, width: int, patch_size: int) -> Grid:
    """Rows and columns of patches, or a sentence when they do not fit."""
    if height % patch_size or width % patch_size:
        raise UserError(f"an image of {height} x {width} pixels is not a multiple of the patch size {patch_size}.")
    return height // patch_size, width // patch_size


class PatchEmbed(nn.Module):
    """Patches to tokens. The weight has a convolution's shape (timm's); the arithmetic is one matrix product."""

    def __init__(self, channels: int, patch_size: int, width: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, width, kernel_size=patch_size, stride=patch_size)

    def forward(self, images: Tensor) -> Tensor:
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
    ) -> None:
        super().__init__()
        self.patch_size, self.width, self.positions = patch_size, width, positions
        self.grid = grid_of(image_size, image_size, patch_size)
        self.drop_path, self.gradient_checkpointing = drop_path, gradient_checkpointing
        self.patch_embed = PatchEmbed(channels, patch_size, width)
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
        settings = encoder.model_dump(exclude={"size"})
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
        found: list[Tensor] = []
        for first, last in pairwise([0, *after]):
            scale = None if scales is None else scales[first:last]
            tokens = run_blocks([*self.blocks][first:last], tokens, self.gradient_checkpointing, scale)
            found.append(self.norm(tokens) if last == len(self.blocks) else tokens)
        return found

    def _embed(self, images: Tensor, keep: Tensor | None) -> Tensor:
        """Tokens (B, 1 + L, D) before the first block, or (B, 1 + N, D) where only N patches are kept."""
        positions = self.positions_for(grid_of(images.shape[-2], images.shape[-1], self.patch_size))
        # shape[0], not len: torch.export keeps a shape symbolic and freezes a len, and with it the batch size.
        class_token = (self.cls_token + positions[:, :1]).expand(images.shape[0], -1, -1)
        patches = self.patch_embed(images) + positions[:, 1:]
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
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Conv2d):
            nn.init.xavier_uniform_(part.weight.data.flatten(1), generator=generator)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
        elif isinstance(part, VisionTransformer):
            nn.init.normal_(part.cls_token, std=0.02, generator=generator)
            if isinstance(part.pos_embed, nn.Parameter):
                nn.init.normal_(part.pos_embed, std=0.02, generator=generator)
