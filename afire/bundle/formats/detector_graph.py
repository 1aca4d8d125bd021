"""``detector.onnx``: films in, score, p-value and heatmap out."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from afire.bundle.formats import onnx
from afire.bundle.formats.graph import Graph, Preprocess
from afire.errors import UserError
from afire.tasks.detect.detector import Detector
from afire.tasks.detect.evidence import look
from afire.tasks.detect.gaussian import TokenGaussian
from afire.tasks.detect.scores import SCORES, Standard, film_scores, raw_maps, standardised

FILE = "detector.onnx"
OUTPUTS = ["score", "p_value", "heatmap"]
_GAUSSIAN = ("mean", "whiten", "shrinkage")


class DetectorGraph(Graph):
    """Films -> score (B,), p-value (B,), heatmap (B, rows, columns) in sd of normal films.

    What was fitted becomes buffers, so that it is part of the graph's weights.
    """

    calibration: Tensor

    def __init__(self, detector: Detector, preprocess: Preprocess = "normalise") -> None:
        super().__init__(detector.config.image, preprocess)
        if preprocess == "none":
            raise UserError("a detector's graph normalises films itself; use --preprocess normalise or resize.")
        self.model, self.choice = detector.model, detector.choice
        self.standards = list(detector.fitted.standards)
        self.register_buffer("calibration", torch.from_numpy(detector.calibration.normal_scores))
        for name in _GAUSSIAN:
            self.register_buffer(f"tokens_{name}", getattr(detector.fitted.gaussian, name))
        for name, standard in detector.fitted.standards.items():
            self.register_buffer(f"standard_{name}_mean", standard.mean)
            self.register_buffer(f"standard_{name}_sd", standard.sd)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        standards, gaussian = self._fitted()
        evidence = look(self.model, self.square(images))
        components = self.choice.components
        wanted = {SCORES[one.name].map for one in components}
        raw = raw_maps(self.model, evidence, gaussian, standards.get("student_surprise"), wanted)
        standard = standardised(raw, standards)
        scores = film_scores(raw, standard, [one.name for one in components])
        score = torch.stack([(scores[one.name] - one.centre) / one.spread for one in components]).mean(dim=0)
        as_high = (self.calibration[None] >= score[:, None]).sum(dim=1)
        p_value = (1 + as_high) / (1 + self.calibration.shape[0])
        heat = torch.stack([standard[SCORES[one.name].map] for one in components]).mean(dim=0)
        return score.float(), p_value.float(), heat.view(-1, *self.model.grid).float()

    def _fitted(self) -> tuple[dict[str, Standard], TokenGaussian]:
        standards = {
            name: Standard(getattr(self, f"standard_{name}_mean"), getattr(self, f"standard_{name}_sd"))
            for name in self.standards
        }
        return standards, TokenGaussian(*(getattr(self, f"tokens_{name}") for name in _GAUSSIAN))


def write(folder: Path, detector: Detector, preprocess: Preprocess = "normalise") -> None:
    """Write the graph of a detector."""
    with onnx.quiet_exporter():
        onnx.save(DetectorGraph(detector, preprocess).trace(), folder / FILE, OUTPUTS)


def run(folder: Path, films: Tensor) -> dict[str, Tensor]:
    """What onnxruntime makes of it, by name of the output."""
    return onnx.run_file(folder / FILE, films)
