"""A convolutional stem: from pixels to the tokens of a trunk by a few strided convolutions, in place of one matrix.

It is the ``patch_embed`` of a trunk and gives the same grid of tokens, so that the blocks behind it need no change.

Shapes: B images, C channels, H x W pixels, p patch size, L = (H/p) * (W/p) tokens, D width.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

_EPSILON = 1e-6  # as in the blocks
_FEWEST_CHANNELS = 8


class ConvStem(nn.Module):
    """3x3 convolutions of stride 2, each with twice the channels of the one before, then a matrix to the width.

    Channels are normalised at every pixel by themselves: no other film, no other place and no batch has a part in it,
    so that a film means the same alone, in a batch and at another size.
    """

    def __init__(self, channels: int, patch_size: int, width: int) -> None:
        super().__init__()
        self.patch_size = patch_size
        halvings = patch_size.bit_length() - 1
        assert patch_size == 2**halvings, "the settings refuse other patch sizes"
        widths = [max(width >> place, _FEWEST_CHANNELS) for place in reversed(range(halvings))]
        self.convs = nn.ModuleList(
            nn.Conv2d(before, after, kernel_size=3, stride=2, padding=1, bias=False)
            for before, after in zip([channels, *widths], widths, strict=False)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(channels_out, eps=_EPSILON) for channels_out in widths)
        self.proj = nn.Conv2d(widths[-1], width, kernel_size=1)

    def forward(self, images: Tensor, keep: Tensor | None = None) -> Tensor:
        """(B, C, H, W) -> (B, L, D). ``keep`` (B, N) are the only patches that will be looked at.

        A convolution looks over the edge of its patch. The others are therefore blanked before it, or a token
        would show what is to be hidden.
        """
        if keep is not None:
            images = images * self._seen(images, keep)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            images = F.gelu(norm(conv(images).permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
        places = images.permute(0, 2, 3, 1).flatten(1, 2)
        return F.linear(places, self.proj.weight.flatten(1), self.proj.bias)

    def _seen(self, images: Tensor, keep: Tensor) -> Tensor:
        """(B, 1, H, W): 1 where a pixel belongs to a patch that is kept, else 0."""
        rows, columns = (side // self.patch_size for side in images.shape[-2:])
        nothing = images.new_zeros(images.shape[0], rows * columns)
        visible = nothing.scatter(1, keep, 1.0).view(-1, 1, rows, columns)
        return visible.repeat_interleave(self.patch_size, dim=2).repeat_interleave(self.patch_size, dim=3)
