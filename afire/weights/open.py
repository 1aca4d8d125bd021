"""The one way to open weights: random, a run or a checkpoint of it, a bundle, a file, or one of them on a hub.

:func:`open_weights` finds them, checks that they are whole and reads their settings, once; :mod:`afire.weights.kinds`
and :mod:`afire.weights.own` say what they give. :class:`WeightsBySeed` opens those of an experiment, and
:func:`start_from` starts a pre-training from them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from afire.config import Config
from afire.data.pack import is_pack, read_summary
from afire.errors import UserError
from afire.methods import Method
from afire.nn.residual import PATCH, ResidualTrunk, Trunk
from afire.settings import load_config
from afire.training.run_folder import CONFIG, MODEL, newest_checkpoint
from afire.weights.architecture import TIMM, is_timm_name
from afire.weights.bundle import DETECTOR_SETTINGS, is_bundle, open_bundle
from afire.weights.files import fill_encoder, misfit
from afire.weights.hub import bundle_name, is_hub_name, local_path
from afire.weights.kinds import RANDOM, FileWeights, RandomWeights, TimmWeights, Weights
from afire.weights.own import BundleWeights, DetectorWeights, RunWeights

logger = logging.getLogger("afire")
_OLDER_MODEL = "pytorch_model.bin"  # of transformers
SEED = "{seed}"  # in a path: each seed's own weights
# What a run's settings need not repeat: no other weights follow from them. A named size stands for width, depth, heads.
_FREE = ("encoder.size", "encoder.drop_path", "encoder.gradient_checkpointing")
_FREE_UNLESS_GIVEN = ("image.fit", "image.voi")  # a preset says nothing about them, and a pack brings its own


def open_weights(
    source: str | Path, config: Config | None = None, *, network: str | None = None, seed: int = 0
) -> Weights:
    """``random``, a run folder (its newest whole checkpoint), a checkpoint folder, a bundle, or a weights file.

    ``hf://owner/name`` is a bundle or a file on a hub, ``timm:NAME`` a model of timm. A run, a bundle and a detector
    bring their own settings, and ``config`` may only repeat them; random weights need it for the architecture, and a
    file may do without, see :func:`said_by`. ``network`` chooses the trunk where there are several; ``seed`` draws
    random weights.
    """
    weights = _find(source, config, network, seed)
    if network is not None and weights.brings_settings:
        _ = weights.network  # says whether there is such a one
    return weights


def _find(source: str | Path, config: Config | None, network: str | None, seed: int) -> Weights:
    if str(source) == RANDOM:
        return RandomWeights(config, network, seed)
    if is_timm_name(source):
        return TimmWeights(config, network, str(source).removeprefix(TIMM))
    path = local_path(source)
    if is_bundle(path):
        bundle = open_bundle(path)
        _check_same(bundle.config, config, f"the bundle {bundle.folder}")
        return BundleWeights(bundle_name(source), bundle, network)
    file = _weights_file(path)
    run = _run_of(path)
    if run is not None:
        settings = load_config(file=run / CONFIG)
        _check_same(settings, config, f"the run in {run}")
        name = run.resolve().name + ("" if run == path else f"/{file.parent.name}")
        kind = DetectorWeights if (run / DETECTOR_SETTINGS).is_file() else RunWeights
        return kind(name, settings, network, run, file)
    name = path.stem if path.is_file() else bundle_name(source) if is_hub_name(source) else path.resolve().name
    return FileWeights(name, config, network, path, file)


def said_by(source: str | Path, data: Path | None = None, preset: str | None = None) -> Mapping[str, Any]:
    """What the tensors of a file say about settings, nested as in YAML, for :func:`~afire.settings.load_config`.

    Nothing for a run, a bundle and a detector, which bring all settings, and for random weights. Positions are made to
    fit another grid, so that the films of a pack ``data`` are taken as they are. Of heads, which tensors do not tell, a
    ``preset`` of the same width knows more than we do.
    """
    if str(source) == RANDOM:
        return {}
    weights = open_weights(source)
    if not isinstance(weights, FileWeights):
        return {}
    architecture = weights.architecture
    settings = architecture.settings()
    if data is not None and is_pack(data):
        packed = read_summary(data).settings.size
        if packed % architecture.patch_size == 0:
            settings["image"]["size"] = packed
    if preset is not None and not architecture.heads_said:
        encoder = load_config(preset).encoder
        if encoder.width == architecture.width:
            settings["encoder"]["heads"] = encoder.heads
    return settings


def said_by_start(source: str | Path, data: Path | None = None, preset: str | None = None) -> Mapping[str, Any]:
    """As :func:`said_by`, for a pre-training that starts from ``source``: a residual network says what it is, too."""
    if str(source) == RANDOM or not _holds_residual(weights := open_weights(source)):
        return said_by(source, data, preset)
    image = weights.config.image
    packed = read_summary(data).settings.size if data is not None and is_pack(data) else image.size
    size = packed if packed % PATCH == 0 else image.size
    return {
        "encoder": weights.config.encoder.model_dump(),
        "image": {"size": size, "channels": image.channels, "normalise": image.normalise},
    }


def _holds_residual(weights: Weights) -> bool:
    return weights.holds_trunk and not weights.holds_vit


def start_from(source: str | Path) -> Callable[[Method], None]:
    """What gives all trunks of a method the weights of an encoder, before its first step.

    The weights are looked for now, so that a wrong path is seen before anything else is done.
    """
    weights = open_weights(source)
    if isinstance(weights, RandomWeights):
        weights.read_trunk()  # says that they lie in no file
    weights.check_trunk()

    def start(method: Method) -> None:
        first, *others = method.starting_trunks()
        report = _fill(first, weights)
        if isinstance(weights, FileWeights):
            report = f"{weights.architecture.message(method.config)}; {report}"
        for trunk in others:
            trunk.load_state_dict(first.state_dict())
        if not dist.is_initialized() or dist.get_rank() == 0:
            logger.info("start from %s: %s", source, report)

    return start


def _fill(trunk: Trunk, weights: Weights) -> str:
    """Load the encoder's tensors into a trunk of its kind; the report."""
    if not isinstance(trunk, ResidualTrunk):
        weights.check_vit()
        return fill_encoder(trunk, *weights.read_trunk()).message()
    if not _holds_residual(weights):
        raise UserError(
            f"{weights.name} holds a ViT, and a residual network is needed (encoder.kind is residual); give builtin or "
            "a run of one, or leave out encoder.kind."
        )
    own, encoder = weights.trunk.state_dict(), weights.config.encoder
    if misfit(trunk.state_dict(), own):
        raise UserError(
            f"{weights.name} has encoder.width {encoder.width} and encoder.depth {encoder.depth}; leave both out, "
            "because a residual network brings its own."
        )
    trunk.load_state_dict(own)
    return weights.report


@dataclass
class WeightsBySeed:
    """The weights of an experiment's runs: random ones are drawn anew for each seed, and ``runs/mine-{seed}`` is a
    pre-training for each seed; others are the same for all."""

    source: str
    seeds: Sequence[int]
    config: Config | None = None  # the architecture, where the weights do not say it
    network: str | None = None
    _opened: dict[int, Weights] = field(default_factory=dict)

    @property
    def differ(self) -> bool:
        """Whether each seed has its own weights."""
        return self.source == RANDOM or SEED in self.source

    def of(self, seed: int) -> Weights:
        """The weights of a run."""
        key = seed if self.differ else self.seeds[0]
        if key not in self._opened:
            source = self.source.replace(SEED, str(key))
            weights = open_weights(source, self.config, network=self.network, seed=key)
            if key != self.seeds[0]:
                self._check_same_kind(weights)
            self._opened[key] = weights
        return self._opened[key]

    def _check_same_kind(self, other: Weights) -> None:
        """One experiment, one architecture: else its mean over seeds would be of different things."""
        first = self.first
        for setting, what in (("method", "method"), ("encoder", "encoder settings"), ("image", "image settings")):
            if getattr(first.config, setting) != getattr(other.config, setting):
                raise UserError(
                    f"{first.name} and {other.name} differ in their {what}; {self.source} must be the same network "
                    "for every seed."
                )

    @property
    def first(self) -> Weights:
        return self.of(self.seeds[0])

    @property
    def name(self) -> str:
        if self.source == RANDOM:
            return "random weights"
        return Path(self.source).name if SEED in self.source else self.first.name

    @property
    def report(self) -> str:
        if self.source == RANDOM:
            return "drawn from each run's seed"
        return f"for each seed its own: {self.first.report}" if SEED in self.source else self.first.report


def pick_device(device: str) -> torch.device:
    """``auto`` is the best device torch sees; a named one that is not there is refused with a message."""
    if device == "auto":
        mps = torch.backends.mps.is_available()
        return torch.device("cuda" if torch.cuda.is_available() else "mps" if mps else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no CUDA device; use --device cpu or auto.")
    if device == "mps" and not torch.backends.mps.is_available():
        raise UserError("--device mps: torch sees no Apple GPU; use --device cpu or auto.")
    return torch.device(device)


def _weights_file(path: Path) -> Path:
    """The file itself, a folder's ``model.safetensors``, or that of the newest whole checkpoint of a run."""
    if not path.exists():
        raise UserError(f"weights {path} do not exist; give a run folder, a bundle, a .safetensors or a .pth file.")
    if path.is_file():
        return path
    for name in (MODEL, _OLDER_MODEL):
        if (path / name).exists():
            return path / name
    checkpoint = newest_checkpoint(path)
    if checkpoint is None:
        raise UserError(f"{path} holds no checkpoint; give a run folder, a bundle, a .safetensors or a .pth file.")
    return checkpoint.folder / MODEL


def _run_of(path: Path) -> Path | None:
    """The run that a run folder, a checkpoint folder or a checkpoint's file belongs to."""
    for folder in (path, *list(path.resolve().parents)[:3]):
        if (folder / CONFIG).is_file() and (folder == path or folder / "checkpoints" in path.resolve().parents):
            return folder
    return None


def _check_same(config: Config, request: Config | None, whose: str) -> None:
    """What was asked beside ``config``, which the weights bring, must not contradict it."""
    if request is None:
        return
    for section in ("encoder", "image"):
        ours, theirs = getattr(config, section).model_dump(), getattr(request, section).model_dump()
        explicit = getattr(request, section).model_fields_set
        for key, value in ours.items():
            name = f"{section}.{key}"
            free = name in _FREE or (name in _FREE_UNLESS_GIVEN and key not in explicit)
            if not free and theirs[key] != value:
                raise UserError(
                    f"{whose} has {name} {value}, but {theirs[key]} was asked for; "
                    "leave out --preset, --config and --set: a run brings its own settings."
                )
