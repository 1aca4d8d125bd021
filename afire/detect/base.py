"""What every detector is: fitted on normal films, it gives films scores, p-values and heatmaps, and has a domain.

A detector of another kind is one file: a subclass of :class:`AnomalyDetector` with its settings, and a line in
``afire.detect.DETECTORS``. Choice, calibration, domain check, evaluation, runs, report and export are the same for all.

On disk a folder with ``config.yaml`` and ``model.safetensors`` (its networks), ``detector.safetensors`` (all its other
tensors), ``atlas.safetensors`` (what normal films look like, for people) and, written last, ``detector.json`` (kind,
settings, choice, scale of heatmaps, domain, origin of it all).

Shapes: B films of S x S pixels, L = rows x columns positions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from typing_extensions import Self

from afire.config import Config, ImageConfig
from afire.data.pack import Films
from afire.data.splits import Split
from afire.detect import DETECTORS
from afire.detect.atlas import NormalAtlas
from afire.detect.choose import choice_from_json, choice_to_json, unchosen
from afire.detect.normals import Calibration, Domain, Floats, rank_pictures
from afire.errors import UserError
from afire.files import read_json, write_atomic, write_json, write_text
from afire.nn.vit import Grid
from afire.progress import progress
from afire.settings import load_config, to_yaml, validate
from afire.tasks.settings import DetectorConfig
from afire.weights import Weights
from afire.weights.bundle import is_bundle, open_bundle
from afire.weights.files import tensor_hash
from afire.weights.hub import local_path

FORMAT = 2
SETTINGS, TENSORS, MODEL, CONFIG = "detector.json", "detector.safetensors", "model.safetensors", "config.yaml"
DISCLAIMER = "Research software, not a medical device."
ADAPT = "adapt"  # folder of a detector with the training of its networks
BATCH = 64
_NETWORKS = "model."  # prefix of the networks' tensors in a detector's state

Begin = Literal["method", "trunk", "nothing"]
Rows = NDArray[np.int64]
Heat = NDArray[np.float32]


@dataclass(frozen=True)
class Subsets:
    """Rows of normal films. ``fit`` trains the networks and fits what is around them; the others are held out."""

    fit: Rows
    choose: Rows
    calibrate: Rows
    held_out_by: str  # a message: where the held-out normals come from

    @property
    def held_out(self) -> Rows:
        return np.concatenate([self.choose, self.calibrate])

    def counts(self) -> dict[str, int]:
        return {"fit": len(self.fit), "choose": len(self.choose), "calibrate": len(self.calibrate)}


@dataclass(frozen=True)
class FitTask:
    """Everything a fit needs to know. Networks come from a run (``pretrained``), from an encoder's weights (``init``)
    or, without either, from nothing."""

    config: Config  # of the networks: the run's own, or the one asked for
    settings: DetectorConfig
    films: Films
    out: Path
    pretrained: Weights | None = None
    run: Path | None = None  # folder of the pre-training run, with the record of its films
    init: str | Path | None = None
    split: Split | None = None
    source: str = ""
    device: str = "auto"
    resume: bool = False
    method: str = "afire"  # of DETECTORS
    procedure: str = "afire"  # or paper: whose choices the settings are


class NormalFilms:
    """The normal films that fit a detector, in batches (b, 1, S, S), for any number of passes."""

    def __init__(self, films: Films, rows: Rows) -> None:
        self._films, self.rows = films, rows
        self._ranks: Tensor | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def batches(self, description: str, limit: int | None = None) -> Iterator[Tensor]:
        """A pass over the films, shown as ``description``; with ``limit``, over about that many, evenly spaced."""
        rows = self.rows if limit is None else self.rows[:: max(1, len(self.rows) // limit)]
        ranks = []
        for images in film_batches(self._films, rows, description):
            yield images
            if self._ranks is None:
                ranks.append(rank_pictures(images))
        if self._ranks is None and len(rows) == len(self.rows):
            self._ranks = torch.cat(ranks)

    def rank_pictures(self) -> Tensor:
        """(N, P) for the domain check, kept from the first whole pass: reading films may be slower than scoring."""
        if self._ranks is None:
            for _ in self.batches("what films look like"):
                pass
        assert self._ranks is not None
        return self._ranks


def film_batches(films: Films, rows: Rows, description: str) -> Iterator[Tensor]:
    """Films (b, 1, S, S) of ``rows`` in order, with a line of progress."""
    with progress(description, len(rows), "films") as bar:
        for start in range(0, len(rows), BATCH):
            batch = rows[start : start + BATCH]
            yield films.batch(batch)
            bar.advance(len(batch))


@dataclass(frozen=True)
class HeatScale:
    """The one scale of all heatmaps, in sd of normal films: below ``low`` nothing is shown, at ``high`` it is full."""

    low: float
    high: float

    @classmethod
    def of(cls, heat_of_normals: Sequence[Heat]) -> HeatScale:
        """Nothing shows below what 1 position in 40 of a normal film reaches; full is thrice what 1 in 1,000 does."""
        values = np.concatenate([heat.ravel() for heat in heat_of_normals])
        low, rare = (float(value) for value in np.quantile(values, [0.975, 0.999]))
        return cls(low, max(3 * rare, low + 1))


@dataclass(frozen=True)
class ScoredBatch:
    """A detector's results for a batch. Larger scores are more abnormal."""

    score: Floats  # (B,)
    scores: dict[str, Floats]  # the scores behind it, or all of them
    heat: Heat  # (B, rows, columns), in sd of normal films
    restored: NDArray[np.float32] | None  # (B, S, S) in [0, 1]: the film with its suspicious places drawn as normal


@dataclass(frozen=True)
class Look:
    """The same as tensors, before the scores are joined: what a kind of detector returns."""

    scores: dict[str, Tensor]  # (B,) each
    heat: Tensor  # (B, L)
    restored: Tensor | None = None  # (B, C, S, S)


class AnomalyDetector(nn.Module, ABC):
    """``detector = load_detector(folder)``, then ``detector.score(images)``.

    A kind of detector names its ``method`` (as in ``DETECTORS``), the class of its settings and the ``meanings`` of
    its scores, and writes :meth:`build`, :meth:`start`, :meth:`fit` and :meth:`look`. ``model`` holds its networks;
    what it fits beside them are buffers, so that they are saved, loaded, moved and exported with it.
    """

    method: ClassVar[str]
    Settings: ClassVar[type[DetectorConfig]]
    meanings: ClassVar[Mapping[str, str]]  # every score that it may give, and what it is
    takes: ClassVar[Begin] = "method"
    """What it starts from: the whole networks of a pre-training, the trunk of any weights, or no weights at all."""
    any_trunk: ClassVar[bool] = False
    """Whether that trunk may be another network than a ViT."""

    def __init__(self, model: nn.Module, config: Config, grid: Grid, settings: DetectorConfig) -> None:
        super().__init__()
        self.model = model.eval().requires_grad_(False)
        self.config, self.grid, self.settings = config, grid, settings
        self.calibration, self.domain = Calibration(), Domain()
        self.choice, self.scale = unchosen(next(iter(self.meanings))), HeatScale(0.0, 1.0)  # replaced by the fit
        self.origin: dict[str, Any] = {}  # data, split, counts, environment: for tables and the model card
        self.atlas: NormalAtlas | None = None  # for people; no score uses it

    @classmethod
    @abstractmethod
    def build(cls, config: Config, settings: DetectorConfig) -> Self:
        """A detector with these settings, whose tensors are about to be loaded."""

    @classmethod
    @abstractmethod
    def start(cls, task: FitTask, subsets: Subsets) -> Self:
        """A detector with its networks, on the device, trained on the films of ``subsets.fit`` if it needs training."""

    @classmethod
    def length(cls, pretrained: bool) -> str | None:
        """The setting for the number of epochs, from ``pretrained`` networks or not; None: it does not train."""
        return None

    @classmethod
    def training_flops(cls, config: Config, settings: DetectorConfig) -> float:
        """Counted FLOPs of one film in one update of its training; 0 where it trains nothing."""
        return 0.0

    @classmethod
    def begins_with(cls, task: FitTask) -> str | None:
        """The detector whose weights it begins with, where that is a setting of its own; mostly none."""
        return None

    @classmethod
    def remarks(cls, task: FitTask) -> Iterator[str]:
        """What a user must know about a fit of this kind from these weights; mostly nothing."""
        yield from ()

    @abstractmethod
    def fit(self, normals: NormalFilms) -> None:
        """Fill the buffers that :meth:`look` needs from normal films."""

    @abstractmethod
    def look(self, images: Tensor, names: Sequence[str] | None, restore: bool) -> Look:
        """Films on the device -> the named scores, or all, and the heat of the chosen one; restored if it can."""

    @property
    def device(self) -> torch.device:
        """Where the networks are."""
        return next(self.model.parameters()).device

    @property
    def false_alarms(self) -> float:
        """The share of normal films that may be flagged."""
        return self.settings.false_alarms

    @property
    def threshold(self) -> float:
        """The score from which on a film is flagged, at the false-alarm rate it was calibrated for."""
        return self.calibration.threshold(self.false_alarms)

    @property
    def weights_hash(self) -> str:
        """Of the networks' tensors."""
        return tensor_hash(self.model.state_dict())

    @torch.inference_mode()
    def score(self, images: Tensor, *, all_scores: bool = False, restore: bool = True) -> ScoredBatch:
        """Films (B, 1, S, S) in [0, 1] at the detector's size -> scores, heatmaps and restored films."""
        look = self.look(self.prepared(images), None if all_scores else self.choice.names, restore)
        scores = {name: values.cpu().double().numpy() for name, values in look.scores.items()}
        return ScoredBatch(
            score=self.choice(scores),
            scores=scores,
            heat=look.heat.view(len(images), *self.grid).float().cpu().numpy(),
            restored=look.restored.mean(dim=1).float().cpu().numpy() if look.restored is not None else None,
        )

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The graph of a detector: score (B,), p-value (B,) and heatmap (B, rows, columns) of films (B, 1, S, S)."""
        look = self.look(images, self.choice.names, restore=False)
        components = self.choice.components
        total = sum(c.weight for c in components)
        terms = [(look.scores[c.name].double() - c.centre) / c.spread * (c.weight / total) for c in components]
        score = torch.stack(terms).sum(dim=0)
        return score.float(), self.calibration(score).float(), look.heat.view(-1, *self.grid).float()

    def cost(self) -> int:
        """Counted FLOPs of scoring one film; a multiply and an add are two."""
        size = self.config.image.size
        # Fused attention is not counted on every device; the plain one is.
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            self.score(torch.zeros(1, 1, size, size), restore=False)
        return int(counter.get_total_flops())

    def prepared(self, images: Tensor) -> Tensor:
        """Films (B, 1, S, S) as the networks take them, on their device; others are refused."""
        size, channels = self.config.image.size, self.config.image.channels
        if images.ndim != 4 or images.shape[-2:] != (size, size) or images.shape[1] not in (1, channels):
            raise UserError(
                f"films of shape {tuple(images.shape)} came, but the detector takes (B, 1, {size}, {size})."
            )
        return images.to(self.device).expand(-1, channels, -1, -1)

    def save(self, folder: Path) -> None:
        """Write the folder; ``detector.json`` comes last, so its presence says that all is there."""
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / CONFIG, to_yaml(self.config))
        state = {name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()}
        networks = {name.removeprefix(_NETWORKS): state[name] for name in state if name.startswith(_NETWORKS)}
        buffers = {name: tensor for name, tensor in state.items() if not name.startswith(_NETWORKS)}
        for file, tensors in ((MODEL, networks), (TENSORS, buffers)):
            write_atomic(folder / file, partial(save_file, tensors))
        if self.atlas is not None:
            self.atlas.save(folder)
        write_json(folder / SETTINGS, self._description())

    def _description(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "note": DISCLAIMER,
            "method": self.method,
            "settings": self.settings.model_dump(),
            "choice": choice_to_json(self.choice),
            "threshold": self.threshold if np.isfinite(self.threshold) else None,
            "calibration_films": len(self.calibration),
            "flops": self.cost(),
            "heat_scale": {"low": self.scale.low, "high": self.scale.high},
            "domain": self.domain.limits(),
            "origin": self.origin,
        }


def load_detector(folder: Path | str) -> AnomalyDetector:
    """Read a detector's folder, of this version or of the one before."""
    folder = Path(folder)
    about = read_description(folder)
    tensors, networks = _tensors(folder / TENSORS), _tensors(folder / MODEL)
    try:
        if about["format"] == 1:
            about, tensors = from_format_1(about, tensors)
        # Detectors made before the check for chests refuse what is unlike their training films.
        tensors.setdefault("domain.chest", torch.zeros_like(tensors["domain.typical"]))
        kind: type[AnomalyDetector] = DETECTORS[about["method"]]
        settings = validate(about["settings"], kind.Settings)
        detector = kind.build(load_config(file=folder / CONFIG), settings)
        detector.load_state_dict({**tensors, **{_NETWORKS + name: tensor for name, tensor in networks.items()}})
        detector.choice = choice_from_json(about["choice"], kind.meanings)
        detector.scale = HeatScale(float(about["heat_scale"]["low"]), float(about["heat_scale"]["high"]))
        detector.domain.set_limits(about["domain"])
        detector.origin = dict(about["origin"])
        detector.atlas = NormalAtlas.load(folder)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"{folder} is truncated or not a detector of afire ({type(error).__name__}: {reason}); fit it again."
        ) from None
    return detector


def detector_folder(model: Path | str) -> Path:
    """The folder of a detector: ``model`` itself, or the one in a bundle, of which every file is then checked."""
    path = local_path(model)
    if not is_bundle(path):
        return path
    bundle = open_bundle(path)
    if bundle.detector is None:
        raise UserError(f"the bundle {path} holds no detector; export one with `afire export RUN --detector DETECTOR`.")
    return bundle.detector


def read_description(folder: Path) -> Mapping[str, Any]:
    """``detector.json`` of a folder, before its weights are read."""
    if not (folder / SETTINGS).is_file():
        raise UserError(f"{folder} holds no detector ({SETTINGS}); make one with `afire detect fit`.")
    about = read_json(folder / SETTINGS)
    if not isinstance(about, Mapping) or about.get("format") not in range(1, FORMAT + 1):
        raise UserError(f"{folder / SETTINGS} is not a detector of format 1 to {FORMAT}; fit it again.")
    return about


def image_settings(folder: Path) -> ImageConfig:
    """How a detector's films are read, before its weights are."""
    read_description(folder)
    return load_config(file=folder / CONFIG).image


def from_format_1(about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A detector of the version before under today's names: maps and standards were packed one by one."""
    names = {"calibration": "calibration.scores"}
    for name in tensors:
        if name.startswith("gaussian."):
            names[name] = f"maps.{name}"
        elif name.startswith("standard."):
            _, patch_map, number = name.split(".")
            names[name] = f"maps.{patch_map}.standard.{number}"
    settings = {**about["origin"].get("settings", {}), "false_alarms": about["false_alarms"]}
    renamed = {names.get(name, name): tensor for name, tensor in tensors.items()}
    return {**about, "method": "afire", "settings": settings}, renamed


def _tensors(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file} cannot be read ({error}); fit the detector again.") from None
