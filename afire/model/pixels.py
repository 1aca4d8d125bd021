"""Films in [0, 1] to what the networks see, and back. It happens inside the model, so data stays in [0, 1]."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from afire.config import ImageConfig
from afire.errors import UserError

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


def check_films(images: Tensor, channels: int, what: str) -> None:
    """A sentence when ``images`` are not films as afire hands them around: float (B, 1 or C, H, W) in [0, 1]."""
    if images.ndim != 4 or images.shape[1] not in (1, channels):
        expected = "1" if channels == 1 else f"1 or {channels}"
        raise UserError(f"{what} have shape {tuple(images.shape)}, but should be (films, {expected}, height, width).")
    if not images.is_floating_point():
        raise UserError(f"{what} are {images.dtype}, but should be floating point in [0, 1]; divide by the maximum.")
    if _is_exporting():  # a graph carries no values to look at
        return
    if len(images) == 0:
        raise UserError(f"{what} are an empty batch.")
    low, high = torch.stack(images.detach().aminmax()).tolist()
    if not (low >= -_TOLERANCE and high <= 1 + _TOLERANCE):  # written so that NaN fails too
        raise UserError(
            f"{what} lie between {low:.4g} and {high:.4g}, but should lie in [0, 1];"
            " hand over films before any normalisation, which the model does itself."
        )
