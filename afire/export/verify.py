"""Do weights give the same outputs here as where they were exported? Checked with every library that is installed.

An export carries a sample: a drawn film, no patient's, and the outputs of the networks for it. The film is larger than
the network's input and not square, so that reading and resizing are compared too.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from afire.config import ImageConfig
from afire.data.decode import fit_square, read_film
from afire.data.phantom.film import draw_film
from afire.detect.base import AnomalyDetector, load_detector
from afire.errors import UserError
from afire.export.formats import FORMATS, Format, missing, run_detector_graph, write_detector_graph
from afire.weights import BundleWeights, Weights
from afire.weights.bundle import SAMPLE, Bundle
from afire.weights.files import read_tensors, write_tensors

FILM, EXPECTED = "film.png", "expected.safetensors"
TOLERANCE = 1e-4
"""Of the largest expected value, or of 1 where that is smaller: float32 differs this much between machines."""
_SEED, _INDEX, _FINDING = 0, 1, "Consolidation"


@dataclass(frozen=True)
class Difference:
    """How far an output is from what was expected."""

    output: str
    largest: float
    bound: float

    @property
    def equal(self) -> bool:
        return self.largest <= self.bound  # false for NaN


def write_film(folder: Path, size: int) -> Path:
    """Draw the sample film and keep it as a 16-bit PNG; its path."""
    film = draw_film(_SEED, _INDEX, round(1.25 * size), diseases=(_FINDING,)).image
    margin = film.shape[1] // 16
    pixels: NDArray[np.uint16] = np.rint(film[:, margin:-margin] * 65535).astype(np.uint16)
    file = folder / SAMPLE / FILM
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(file, format="PNG")
    return file


def read_input(file: Path, image: ImageConfig) -> Tensor:
    """A film's file as the network takes it: (1, 1, S, S) in [0, 1]."""
    film, _ = read_film(file, voi=image.voi)
    return torch.from_numpy(fit_square(film, image.size, image.fit))[None, None]


def read_whole(file: Path) -> Tensor:
    """A film's file at its own size: (1, 1, H, W) in [0, 1]."""
    return torch.from_numpy(read_film(file)[0])[None, None]


@torch.no_grad()
def outputs(weights: Weights, film: Tensor) -> dict[str, Tensor]:
    """All outputs of the networks for a film (1, 1, S, S) in [0, 1]; those without a network are left out.

    ``tokens`` (1, L, D), ``embedding`` (1, D), and of a method also ``NETWORK_tokens`` of other networks, ``restored``
    (1, L, P), and the method's own readouts. Of a detector whose networks are its own nothing: see
    :func:`detector_outputs`.
    """
    if not weights.holds_networks:
        return {}
    if not weights.holds_method:
        return trunk_outputs(weights, film)
    model = weights.method
    tokens = model.encode(film)
    results = {"tokens": tokens, "embedding": tokens.mean(dim=1), **model.readouts(film)}
    results |= {f"{network}_tokens": model.encode(film, network) for network in model.networks[1:]}
    if model.restores:
        results["restored"] = model.restore(film)
    return {name: tensor.float().cpu() for name, tensor in results.items()}


@torch.no_grad()
def trunk_outputs(weights: Weights, film: Tensor) -> dict[str, Tensor]:
    """``tokens`` (1, L, D) and ``embedding`` (1, D) of a film (1, 1, S, S) in [0, 1], by the encoder alone."""
    tokens = weights.trunk(weights.normalise(film))[:, 1:].float().cpu()
    return {"tokens": tokens, "embedding": tokens.mean(dim=1)}


@torch.no_grad()
def detector_outputs(detector: AnomalyDetector, film: Tensor) -> dict[str, Tensor]:
    """``score`` and ``p_value`` (1,), ``heatmap`` (1, rows, columns) of a film (1, 1, S, S) in [0, 1]."""
    result = detector.score(film, restore=False)
    return {
        "score": torch.from_numpy(result.score).float(),
        "p_value": torch.from_numpy(detector.calibration.p_values(result.score)).float(),
        "heatmap": torch.from_numpy(result.heat),
    }


def write_expected(folder: Path, expected: Mapping[str, Tensor]) -> None:
    write_tensors(folder / SAMPLE / EXPECTED, expected)


def read_expected(folder: Path) -> dict[str, Tensor]:
    return read_tensors(folder / SAMPLE / EXPECTED)


def compare(expected: Mapping[str, Tensor], results: Mapping[str, Tensor]) -> list[Difference]:
    """The largest difference of every output that is given; another shape is infinitely far away."""
    return [_difference(name, expected[name], tensor) for name, tensor in results.items() if name in expected]


def _difference(name: str, expected: Tensor, result: Tensor) -> Difference:
    bound = TOLERANCE * max(1.0, float(expected.abs().max()))
    if expected.shape != result.shape:
        return Difference(name, float("inf"), bound)
    return Difference(name, float((result.float().cpu() - expected).abs().max()), bound)


@dataclass(frozen=True)
class Check:
    """One library's outputs for the sample film; ``note`` says why it was not run, or how it failed."""

    backend: str
    differences: list[Difference] = field(default_factory=list)
    note: str = ""
    failed: bool = False

    @property
    def equal(self) -> bool | None:
        """None where the library is not here."""
        if self.failed:
            return False
        return all(difference.equal for difference in self.differences) if self.differences else None


def verify_bundle(bundle: Bundle) -> Iterator[Check]:
    """Recompute the expected outputs of an opened bundle: torch on every device, then each other library."""
    folder = bundle.folder
    expected = read_expected(folder)
    film = read_input(folder / SAMPLE / FILM, bundle.config.image)
    yield Check("reading and resizing", compare(expected, {"input": film}))
    weights = BundleWeights(folder.name, bundle)
    detector = load_detector(bundle.detector) if bundle.detector is not None else None
    for device in devices():
        yield _guarded(f"torch {device}", expected, partial(_on_device, weights, detector, film, device))
    for form in FORMATS.values():
        if not (weights.holds_vit or (form.has_detectors and detector is not None)):
            continue
        absent = missing(form.needs_to_write + form.needs_to_run)
        if absent:
            yield Check(form.backend, note=f"not run, not installed: {', '.join(absent)}")
        else:
            yield _guarded(form.backend, expected, partial(_through, form, weights, detector, film))


def _through(form: Format, backbone: Weights, detector: AnomalyDetector | None, film: Tensor) -> dict[str, Tensor]:
    """The outputs of another library, through its files."""
    results: dict[str, Tensor] = {}
    with tempfile.TemporaryDirectory(prefix="afire-") as name:
        if backbone.holds_vit:
            form.write(Path(name), backbone)
            results |= form.run(Path(name), backbone, film)
        if form.has_detectors and detector is not None:
            write_detector_graph(Path(name), detector)
            results |= run_detector_graph(Path(name), film)
        return results


def devices() -> list[str]:
    """The kinds of device that torch sees here."""
    cuda = ["cuda"] if torch.cuda.is_available() else []
    mps = ["mps"] if torch.backends.mps.is_available() else []
    return ["cpu", *cuda, *mps]


def _on_device(weights: Weights, detector: AnomalyDetector | None, film: Tensor, device: str) -> dict[str, Tensor]:
    networks: list[nn.Module] = [] if detector is None else [detector]
    if weights.holds_networks:
        networks += [weights.method] if weights.holds_method else [weights.trunk, weights.normalise]
    try:
        for network in networks:
            network.to(device)
        results = outputs(weights, film.to(device))
        return results if detector is None else {**results, **detector_outputs(detector, film)}
    finally:
        for network in networks:
            network.to("cpu")


def _guarded(backend: str, expected: Mapping[str, Tensor], compute: Callable[[], Mapping[str, Tensor]]) -> Check:
    """Another library may fail in its own way; that is a result too, and no reason to stop."""
    try:
        return Check(backend, compare(expected, compute()))
    except UserError:
        raise
    except Exception as error:
        reason = (str(error).strip() or "no reason given").splitlines()[0]
        return Check(backend, note=f"failed: {type(error).__name__}: {reason}", failed=True)
