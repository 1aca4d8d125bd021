"""The one way to open weights: random, a run or a checkpoint of it, a bundle, a file, or one of them on a hub.

:func:`open_weights` finds them, checks that they are whole and reads their settings, once. What is in them is loaded
when it is asked for: ``trunk`` is the encoder that a task starts from, ``method`` all that was pre-trained. Each comes
with a hash of its tensors and a message that says what was loaded.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from afire.config import Config, load_config
from afire.errors import UserError
from afire.files import read_json
from afire.methods.afire import AFiRe, Network
from afire.methods.base import Method, Progress
from afire.nn.layers import Normalise
from afire.nn.vit import VisionTransformer, initialise
from afire.training.checkpoint import MODEL, STATE, newest_checkpoint
from afire.training.run_folder import CONFIG
from afire.weights.bundle import Bundle, component_file, is_bundle, join_components, open_bundle
from afire.weights.files import load_encoder, read_tensors, tensor_hash
from afire.weights.hub import bundle_name, is_hub_name, local_path

Loadable = TypeVar("Loadable", bound=nn.Module)
logger = logging.getLogger("afire")
RANDOM = "random"
DETECTOR_SETTINGS = "detector.json"  # what makes a folder a fitted detector
_BEHIND_ANY_WARM_UP = 10**6  # epochs
SEED = "{seed}"  # in a path: each seed's own weights
# What a run's settings need not repeat: no other weights follow from them. A named size stands for width, depth, heads.
_FREE = ("encoder.size", "encoder.drop_path", "encoder.gradient_checkpointing")
_FREE_UNLESS_GIVEN = ("image.fit", "image.voi")  # a preset says nothing about them, and a pack brings its own


@dataclass(frozen=True)
class _Loaded(Generic[Loadable]):
    """A network, what was loaded into it, and the hash of its tensors before anybody changed them."""

    module: Loadable
    report: str
    hash: str

    @classmethod
    def of(cls, module: Loadable, report: str) -> _Loaded[Loadable]:
        return cls(module.eval(), report, tensor_hash(module.state_dict()))


class Weights(ABC):
    """Weights that were found. Networks come in evaluation mode, on the CPU, and belong to the caller."""

    brings_settings = False
    """Whether they say their architecture themselves."""
    run: Path | None = None
    """The folder of the run they belong to."""

    detector: Path | None = None
    """The folder of the fitted detector that lies with them."""

    def __init__(self, name: str, settings: Config | None, network: Network) -> None:
        """``settings``: their own, else those that were asked for; None where nobody says the architecture."""
        self.name, self.settings, self.network = name, settings, network

    @property
    def config(self) -> Config:
        """The settings, or a message that they must be given."""
        if self.settings is None:
            raise UserError(f"{self._no_settings}; add --preset, --config or --set encoder.* to say it.")
        return self.settings

    @property
    def trunk(self) -> VisionTransformer:
        """The encoder alone."""
        return self._trunk.module

    @cached_property
    def normalise(self) -> Normalise:
        """From films in [0, 1] to the trunk's input."""
        return Normalise(self.config.image)

    @property
    def hash(self) -> str:
        """Of the trunk's tensors, as they were loaded."""
        return self._trunk.hash

    @property
    def report(self) -> str:
        """What was loaded into the trunk, for people."""
        return self._trunk.report

    @property
    def method(self) -> AFiRe:
        """Everything that was pre-trained: the networks with their heads, decoder and prototypes."""
        return self._method.module

    @property
    def method_hash(self) -> str:
        """Of all tensors of the method, as they were loaded."""
        return self._method.hash

    @property
    def method_report(self) -> str:
        """What was loaded into the method, for people."""
        return self._method.report

    @property
    @abstractmethod
    def file(self) -> Path:
        """Where the encoder's tensors are, perhaps among others."""

    @property
    def _no_settings(self) -> str:
        """Why there are none, for those that do not bring them."""
        raise AssertionError("weights that bring settings have them")

    @abstractmethod
    def _fill(self, trunk: VisionTransformer) -> str:
        """Load the trunk's tensors; the report."""

    @abstractmethod
    def _make_method(self) -> tuple[AFiRe, str]:
        """The method and the report, or a message why they do not hold one."""

    @cached_property
    def _trunk(self) -> _Loaded[VisionTransformer]:
        trunk = VisionTransformer.from_config(self.config.encoder, self.config.image)
        return _Loaded.of(trunk, self._fill(trunk))

    @cached_property
    def _method(self) -> _Loaded[AFiRe]:
        return _Loaded.of(*self._make_method())


class RandomWeights(Weights):
    """Drawn from a seed."""

    def __init__(self, settings: Config | None, network: Network, seed: int) -> None:
        super().__init__(RANDOM, settings, network)
        self.seed = seed

    @property
    def _no_settings(self) -> str:
        return "random weights have no architecture of their own"

    @property
    def file(self) -> Path:
        raise UserError("random weights lie in no file; give a run folder, a bundle, a .safetensors or a .pth file.")

    def _fill(self, trunk: VisionTransformer) -> str:
        initialise(trunk, torch.Generator().manual_seed(self.seed))
        return f"random weights from seed {self.seed}"

    def _make_method(self) -> tuple[AFiRe, str]:
        raise UserError("random weights restore nothing and have no prototypes; give the folder of a pre-training run.")


class FileWeights(Weights):
    """An encoder's tensors in any layout that we know, without settings."""

    def __init__(self, name: str, settings: Config | None, network: Network, path: Path, file: Path) -> None:
        super().__init__(name, settings, network)
        self.path, self._file = path, file

    @property
    def file(self) -> Path:
        return self._file

    @property
    def _no_settings(self) -> str:
        return f"{self.path} does not say which architecture it has"

    def _fill(self, trunk: VisionTransformer) -> str:
        report = load_encoder(trunk, self.file)
        # Fewer or more blocks than the settings say: each name fits, and yet it is another network.
        for names, what in ((report.missing, "lacks"), (report.unexpected, "has the additional")):
            wrong = [name for name in names if name.startswith(("blocks.", "patch_embed."))]
            if wrong:
                raise UserError(
                    f"{self.file} has another architecture: it {what} {wrong[0]}; "
                    "set encoder.width, depth, heads and patch_size as in the weights."
                )
        return report.message()

    def _make_method(self) -> tuple[AFiRe, str]:
        raise UserError(
            f"{self.path} is weights alone, without a decoder and prototypes; give the folder of a pre-training run."
        )


class RunWeights(Weights):
    """A checkpoint of a pre-training run, or the networks of a detector."""

    brings_settings = True

    def __init__(self, name: str, settings: Config, network: Network, run: Path, file: Path) -> None:
        super().__init__(name, settings, network)
        self.run, self._file = run, file
        self.detector = run if (run / DETECTOR_SETTINGS).is_file() else None

    @property
    def file(self) -> Path:
        return self._file

    @property
    def _place(self) -> str:
        return f"{self.file.parent.name}/{self.file.name}"

    def _fill(self, trunk: VisionTransformer) -> str:
        prefix = f"{self.network}.encoder."
        tensors = {
            name.removeprefix(prefix): tensor
            for name, tensor in read_tensors(self.file).items()
            if name.startswith(prefix)
        }
        self._check(trunk.state_dict(), tensors)
        trunk.load_state_dict(tensors)
        return f"{len(tensors)} tensors of the {self.network} from {self._place}"

    def _make_method(self) -> tuple[AFiRe, str]:
        method = AFiRe(self.config)
        tensors = read_tensors(self.file)
        self._check(method.state_dict(), tensors)
        method.load_state_dict(tensors)
        _to_step(method, self.file.parent / STATE)
        return method, f"{len(tensors)} tensors of the whole model from {self._place}"

    def _check(self, wanted: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
        problem = _misfit(wanted, given)
        if problem:
            raise UserError(f"{self.file} {problem}; it is not a checkpoint of this run.")


class BundleWeights(Weights):
    """A bundle, whose files were compared with their hashes."""

    brings_settings = True

    def __init__(self, name: str, bundle: Bundle, network: Network = "teacher") -> None:
        super().__init__(name, bundle.config, network)
        self.bundle, self.detector = bundle, bundle.detector

    @property
    def file(self) -> Path:
        return self.bundle.encoder_file()

    def _fill(self, trunk: VisionTransformer) -> str:
        file = self.bundle.encoder_file(self.network)
        tensors = read_tensors(file)
        self._check(trunk.state_dict(), tensors)
        trunk.load_state_dict(tensors)
        return f"{len(tensors)} tensors of the {self.network} from the bundle {self._place}"

    def _make_method(self) -> tuple[AFiRe, str]:
        folder, names = self.bundle.folder, self.bundle.components
        method = AFiRe(self.config)
        tensors = join_components({name: read_tensors(component_file(folder, name)) for name in names})
        self._check(method.state_dict(), tensors)
        method.load_state_dict(tensors)
        method.teacher_temperature = float(self.bundle.about["teacher_temperature"])
        return method, f"the whole model from the bundle {self._place}"

    @property
    def _place(self) -> str:
        return f"{self.name} ({self.bundle.hash[:12]})"

    def _check(self, wanted: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
        problem = _misfit(wanted, given)
        if problem:
            raise UserError(f"{self.bundle.folder}: the weights do not fit config.json: the bundle {problem}.")


def open_weights(
    source: str | Path, config: Config | None = None, *, network: Network | None = None, seed: int = 0
) -> Weights:
    """``random``, a run folder (its newest whole checkpoint), a checkpoint folder, a bundle, or a weights file.

    ``hf://owner/name`` is a bundle or a file on a hub. A run, a bundle and a detector bring their own settings, and
    ``config`` may only repeat them; random weights and files need it for the architecture. ``network`` chooses the
    trunk where there are several; ``seed`` draws random weights.
    """
    network = network or "teacher"
    if str(source) == RANDOM:
        return RandomWeights(config, network, seed)
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
        return RunWeights(name, settings, network, run, file)
    name = path.stem if path.is_file() else bundle_name(source) if is_hub_name(source) else path.resolve().name
    return FileWeights(name, config, network, path, file)


def start_from(source: str | Path) -> Callable[[Method], None]:
    """What gives all trunks of a method the weights of an encoder, before its first step.

    The weights are looked for now, so that a wrong path is seen before anything else is done.
    """
    file = open_weights(source).file

    def start(method: Method) -> None:
        first, *others = (method.trunk(network) for network in method.networks)
        report = load_encoder(first, file)
        for trunk in others:
            trunk.load_state_dict(first.state_dict())
        if not dist.is_initialized() or dist.get_rank() == 0:
            logger.info("start from %s: %s", source, report.message())

    return start


@dataclass
class WeightsBySeed:
    """The weights of an experiment's runs: random ones are drawn anew for each seed, and ``runs/mine-{seed}`` is a
    pre-training for each seed; others are the same for all."""

    source: str
    seeds: Sequence[int]
    config: Config | None = None  # the architecture, where the weights do not say it
    network: Network | None = None
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
        for section in ("encoder", "image"):
            if getattr(first.config, section) != getattr(other.config, section):
                raise UserError(
                    f"{first.name} and {other.name} differ in their {section} settings; {self.source} must be "
                    "the same network for every seed."
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
    if (path / MODEL).exists():
        return path / MODEL
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


def _check_same(config: Config, asked: Config | None, whose: str) -> None:
    """What was asked beside ``config``, which the weights bring, must not contradict it."""
    if asked is None:
        return
    for section in ("encoder", "image"):
        ours, theirs = getattr(config, section).model_dump(), getattr(asked, section).model_dump()
        given = getattr(asked, section).model_fields_set
        for key, value in ours.items():
            name = f"{section}.{key}"
            free = name in _FREE or (name in _FREE_UNLESS_GIVEN and key not in given)
            if not free and theirs[key] != value:
                raise UserError(
                    f"{whose} has {name} {value}, but {theirs[key]} was asked for; "
                    "leave out --preset, --config and --set: a run brings its own settings."
                )


def _misfit(wanted: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> str:
    """What is wrong with tensors that were given for those of a network; empty where nothing is."""
    for name in wanted:
        if name not in given:
            return f"lacks {name}"
    for name, tensor in given.items():
        if name not in wanted:
            return f"holds {name}, which its settings do not have"
        if tensor.shape != wanted[name].shape:
            return f"has {name} as {tuple(tensor.shape)}, but its settings say {tuple(wanted[name].shape)}"
    return ""


def _to_step(method: Method, state_file: Path) -> None:
    """Bring what a schedule moves (temperatures) to the checkpoint's step; to the end where no step is known."""
    epochs, per_epoch, step = method.config.training.epochs, 1, _BEHIND_ANY_WARM_UP
    if state_file.exists():
        state = read_json(state_file)
        per_epoch, step = int(state["steps_per_epoch"]), max(int(state["step"]) - 1, 0)
    method.schedule(Progress(step, per_epoch * epochs, per_epoch))
