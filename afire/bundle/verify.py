"""Does a bundle say here what it said where it was exported? Asked of every library that is installed."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from afire.bundle import sample
from afire.bundle.detector import detector_outputs
from afire.bundle.formats import FORMATS, Format, detector_graph, missing
from afire.bundle.sample import Difference
from afire.errors import UserError
from afire.model import AFiRe
from afire.tasks.backbone import Backbone, load_backbone
from afire.tasks.detect.detector import Detector
from afire.weights.bundle import SAMPLE, Bundle


@dataclass(frozen=True)
class Check:
    """What one library makes of the sample film; ``note`` says why it was not asked, or how it failed."""

    backend: str
    differences: list[Difference] = field(default_factory=list)
    note: str = ""
    failed: bool = False

    @property
    def equal(self) -> bool | None:
        """None where the library is not here."""
        if self.failed:
            return False
        return all(one.equal for one in self.differences) if self.differences else None


def verify_bundle(bundle: Bundle) -> Iterator[Check]:
    """Recompute the expected outputs of an opened bundle: torch on every device, then each other library."""
    folder = bundle.folder
    expected = sample.read_expected(folder)
    film = sample.read_input(folder / SAMPLE / sample.FILM, bundle.config.image)
    yield Check("reading and resizing", sample.compare(expected, {"input": film}))
    model = bundle.model()
    detector = Detector.load(bundle.detector) if bundle.detector is not None else None
    for device in devices():
        yield _guarded(f"torch {device}", expected, partial(_on_device, model, detector, film, device))
    backbone = load_backbone(str(folder))
    for one in FORMATS.values():
        absent = missing(one.needs_to_write + one.needs_to_run)
        if absent:
            yield Check(one.backend, note=f"not run, not installed: {', '.join(absent)}")
        else:
            yield _guarded(one.backend, expected, partial(_through, one, backbone, detector, film))


def _through(form: Format, backbone: Backbone, detector: Detector | None, film: Tensor) -> dict[str, Tensor]:
    """What another library says, by way of its files."""
    with tempfile.TemporaryDirectory(prefix="afire-") as name:
        form.write(Path(name), backbone)
        found = form.run(Path(name), backbone, film)
        if form.name == "onnx" and detector is not None:
            detector_graph.write(Path(name), detector)
            found |= detector_graph.run(Path(name), film)
        return found


def devices() -> list[str]:
    """The kinds of device that torch sees here."""
    found = ["cpu"]
    found += ["cuda"] if torch.cuda.is_available() else []
    return found + (["mps"] if torch.backends.mps.is_available() else [])


def _on_device(model: AFiRe, detector: Detector | None, film: Tensor, device: str) -> dict[str, Tensor]:
    found = sample.outputs(model.to(device), film.to(device))
    model.to("cpu")
    if detector is not None:
        found |= detector_outputs(detector.to(device), film)
        detector.to("cpu")
    return found


def _guarded(backend: str, expected: Mapping[str, Tensor], compute: Callable[[], Mapping[str, Tensor]]) -> Check:
    """Another library may fail in ways of its own; that is an answer too, and no reason to stop."""
    try:
        return Check(backend, sample.compare(expected, compute()))
    except UserError:
        raise
    except Exception as error:
        first = (str(error).strip() or "no reason given").splitlines()[0]
        return Check(backend, note=f"failed: {type(error).__name__}: {first}", failed=True)
