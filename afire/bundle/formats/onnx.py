"""``encoder.onnx``: films in, tokens and their mean out, with a free batch size; checked against onnxruntime."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from afire.bundle.formats.graph import EncoderGraph, Preprocess
from afire.tasks.backbone import Backbone

FILE = "encoder.onnx"
OPSET = 18  # the first that can resize without aliasing
_FREE = ("batch", "height", "width")


def write(folder: Path, backbone: Backbone, preprocess: Preprocess = "normalise") -> None:
    with quiet_exporter():
        save(EncoderGraph(backbone, preprocess).trace(), folder / FILE, ["tokens", "embedding"])


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


def run(folder: Path, backbone: Backbone, films: Tensor) -> dict[str, Tensor]:
    return run_file(folder / FILE, films)


def run_file(file: Path, films: Tensor) -> dict[str, Tensor]:
    """All outputs of a graph for films, by name, on the CPU."""
    import onnxruntime

    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    found = session.run(names, {"images": films.numpy()})
    return {name: torch.from_numpy(array) for name, array in zip(names, found, strict=True)}


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
