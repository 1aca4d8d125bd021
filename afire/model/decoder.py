"""The restoration decoder: from the tokens of a film with lesions to the pixels of the film without.

Shapes: B images, L tokens, D encoder width, P = channels * p * p pixels of a patch.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from afire.config import DecoderConfig
from afire.model.positions import Grid, sincos_positions
from afire.model.vit import Block, run_blocks


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

    def forward(self, tokens: Tensor, abnormal: Tensor | None = None, grid: Grid | None = None) -> Tensor:
        """Image tokens (B, L, D) without the class token, labels (B, L) -> patches (B, L, P).

        The class token stays outside: it has looked at the abnormal tokens that z_mask is there to hide.
        """
        embedded = self.embed(tokens)
        if self.mask_token is not None and abnormal is not None:
            # where, not indexing: z_mask has a gradient (zero) even in a batch without abnormal tokens, as DDP needs.
            embedded = torch.where(abnormal.bool()[..., None], self.mask_token.to(embedded.dtype), embedded)
        hidden = run_blocks(self.blocks, embedded + self._positions(grid), self.gradient_checkpointing)
        patches: Tensor = self.pred(self.norm(hidden))
        return patches

    def _positions(self, grid: Grid | None) -> Tensor:
        if grid is None or grid == self.grid:
            return self.pos_embed
        return sincos_positions(self.width, grid, self.grid).to(self.pos_embed)[None]
