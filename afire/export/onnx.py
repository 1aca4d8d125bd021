"""Graphs of networks, with what comes before them if wanted, for onnxruntime and torch.export.

``encoder.onnx`` takes images and gives tokens and their mean, ``detector.onnx`` score, p-value and heatmap. The batch
size is free; where the graph resizes, height and width are too. Both are compared with ours.
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from afire.config import ImageConfig
from afire.detect.base import AnomalyDetector
from afire.errors import UserError
from afire.weights import Weights

Preprocess = Literal["none", "normalise", "resize"]
_LARGEST = 16384  # pixels of a side


class Graph(nn.Module):
    """Something that takes ``images``.

    ``none``: the network's own input (B, C, S, S). ``normalise``: films (B, 1, S, S) in [0, 1]. ``resize``: films
    (B, 1, H, W) in [0, 1] of any size, squashed as :func:`afire.data.film.fit_square` does it.
    """

    def __init__(self, image: ImageConfig, preprocess: Preprocess) -> None:
        super().__init__()
        if preprocess == "resize" and image.fit != "squash":
            raise UserError(
                f"a graph can only squash films, but these weights want {image.fit}; use --preprocess normalise."
            )
        self.preprocess, self.size = preprocess, image.size
        self.channels = image.channels if preprocess == "none" else 1

    def square(self, images: Tensor) -> Tensor:
        """Films at the model's size, still in [0, 1]."""
        if self.preprocess != "resize":
            return images
        side = (self.size, self.size)
        # The same filter as pillow's: cubic with a = -0.5, widened by the factor of reduction.
        return F.interpolate(images, size=side, mode="bicubic", antialias=True, align_corners=False).clamp(0, 1)

    def trace(self) -> ExportedProgram:
        """With a free batch size and, where it resizes, free height and width."""
        side = (self.size, self.size)
        free: dict[int, Dim] = {0: Dim("batch", min=1)}
        if self.preprocess == "resize":
            side = (self.size + 24, self.size + 8)
            free |= {2: Dim("height", min=2, max=_LARGEST), 3: Dim("width", min=2, max=_LARGEST)}
        # Two films: torch.export takes a batch of one for a fixed one.
        films = torch.linspace(0, 1, side[0] * side[1]).view(1, 1, *side).repeat(2, self.channels, 1, 1)
        return torch.export.export(self.eval(), (films,), dynamic_shapes={"images": free})


class EncoderGraph(Graph):
    """Films -> image tokens (B, L, D) and their mean (B, D)."""

    def __init__(self, backbone: Weights, preprocess: Preprocess = "normalise") -> None:
        super().__init__(backbone.config.image, preprocess)
        self.encoder, self.normalise = backbone.trunk, backbone.normalise

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        films = images if self.preprocess == "none" else self.normalise(self.square(images))
        tokens: Tensor = self.encoder(films)[:, 1:]
        return tokens, tokens.mean(dim=1)


DETECTOR_FILE = "detector.onnx"
OUTPUTS = ["score", "p_value", "heatmap"]


class DetectorGraph(Graph):
    """Films -> score (B,), p-value (B,), heatmap (B, rows, columns) in sd of normal films."""

    def __init__(self, detector: AnomalyDetector, preprocess: Preprocess = "normalise") -> None:
        super().__init__(detector.config.image, preprocess)
        if preprocess == "none":
            raise UserError("a detector's graph normalises films itself; use --preprocess normalise or resize.")
        self.detector = detector

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        outputs: tuple[Tensor, Tensor, Tensor] = self.detector(self.square(images))
        return outputs


def write_detector_graph(folder: Path, detector: AnomalyDetector, preprocess: Preprocess = "normalise") -> None:
    """Write the graph of a detector."""
    graph = DetectorGraph(detector, preprocess)
    with quiet_exporter():
        try:
            program = graph.trace()
        except UserError:
            raise
        except Exception as error:  # torch.export has many, of many kinds
            reason = (str(error).strip() or "no reason given").splitlines()[0]
            raise UserError(
                f"the detector {detector.method} with the score {detector.choice.name} cannot be written as a graph "
                f"({type(error).__name__}: {reason}); export it in a bundle."
            ) from None
        save(program, folder / DETECTOR_FILE, OUTPUTS)


def run_detector_graph(folder: Path, images: Tensor) -> dict[str, Tensor]:
    """What onnxruntime makes of it, by name of the output."""
    return run_file(folder / DETECTOR_FILE, images)


ONNX_FILE = "encoder.onnx"
OPSET = 18  # the first that can resize without aliasing
_FREE = ("batch", "height", "width")


def write_onnx(folder: Path, backbone: Weights, preprocess: Preprocess = "normalise") -> None:
    with quiet_exporter():
        save(EncoderGraph(backbone, preprocess).trace(), folder / ONNX_FILE, ["tokens", "embedding"])


def save(program: ExportedProgram, file: Path, outputs: list[str]) -> None:
    """Translate an exported graph whose only input is ``images``."""
    converted = torch.onnx.export(
        program,
        (),
        dynamo=True,
        verbose=False,
        opset_version=OPSET,
        input_names=["images"],
        output_names=outputs,
    )
    assert converted is not None
    _name_free_sides(converted)
    converted.save(file)


def _name_free_sides(converted: Any) -> None:
    """torch calls them s34 and the like; give them their names back."""
    names: dict[str, str] = {}
    for place, side in zip((0, 2, 3), _FREE, strict=True):
        size = converted.model.graph.inputs[0].shape[place]
        if not isinstance(size, int):
            names[str(size.value)] = side
    for value in [*converted.model.graph.inputs, *converted.model.graph.outputs]:
        for place, size in enumerate(value.shape):
            if not isinstance(size, int) and str(size.value) in names:
                value.shape[place] = names[str(size.value)]


def run_onnx(folder: Path, backbone: Weights, images: Tensor) -> dict[str, Tensor]:
    return run_file(folder / ONNX_FILE, images)


def run_file(file: Path, images: Tensor) -> dict[str, Tensor]:
    """All outputs of a graph for images, by name, on the CPU."""
    import onnxruntime

    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    arrays = session.run(names, {"images": images.numpy()})
    return {name: torch.from_numpy(array) for name, array in zip(names, arrays, strict=True)}


@contextmanager
def quiet_exporter() -> Iterator[None]:
    """The exporter prints its progress and warns of what is not ours: that torchvision is not there, for one."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
