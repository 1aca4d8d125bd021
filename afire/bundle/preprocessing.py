"""From a film to the network's input, as numbers that other tools can follow."""

from __future__ import annotations

from typing import Any

from afire.config import ImageConfig
from afire.model.pixels import Normalise

FITS = {
    "squash": "both sides are scaled to size, each by its own factor",
    "letterbox": "the longer side is scaled to size, the rest is black on both sides",
    "crop": "the central square is scaled to size",
}


def constants(image: ImageConfig) -> tuple[list[float], list[float]] | None:
    """Mean and std of each channel, or None where each film has its own."""
    if image.normalise == "film":
        return None
    normalise = Normalise(image)
    mean, std = normalise.mean.flatten().tolist(), normalise.std.flatten().tolist()
    repeat = image.channels // len(mean)
    return mean * repeat, std * repeat


def describe(image: ImageConfig) -> dict[str, Any]:
    """What ``preprocessing.json`` holds."""
    known = constants(image)
    return {
        "size": image.size,
        "channels": image.channels,
        "range": [0.0, 1.0],
        "grey": "black is 0; 8 bits / 255, 16 bits / 65535; DICOM: modality LUT, then VOI, then MONOCHROME1 inverted",
        "voi": image.voi,
        "resize": {"fit": image.fit, "meaning": FITS[image.fit], "filter": "bicubic, antialiased, clipped to [0, 1]"},
        "normalise": image.normalise,
        "mean": known[0] if known else "of the film",
        "std": known[1] if known else "of the film, population form, at least 0.001",
        "channels_from_grey": "repeated" if image.channels == 3 else "as it is",
    }
