"""What was opened, by kind: random weights, a file, a checkpoint of a run, a bundle.

Each gives its ``trunk``, the encoder that a task starts from, and its ``method``, all that was pre-trained, when they
are asked for; each with a hash of its tensors and a message that says what was loaded. Weights that hold no trunk or no
method, or do not say their architecture, answer with a message why.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from afire.config import Config
from afire.errors import UserError
from afire.methods import METHODS, Method, make_method, method_type
from afire.methods.base import Progress
from afire.nn.residual import PATCH, Trunk, initialise_trunk, make_trunk, residual_config, residual_tensors
from afire.nn.vit import Normalise, VisionTransformer
from afire.settings import load_config
from afire.training.run_folder import MODEL, STATE, read_state
from afire.weights.architecture import TIMM, Architecture, Beside, plain_vit, read_architecture, read_beside, timm_model
from afire.weights.bundle import Bundle, Holds, component_of
from afire.weights.files import fill_encoder, find_encoder, misfit, read_tensors, tensor_hash

Loadable = TypeVar("Loadable", bound=nn.Module)
RANDOM = "random"
_ENCODER = "encoder."  # prefix of the tensors of a detector that looks through one encoder
_OWN_NETWORK = "network."  # prefix of the tensors of a detector's own network
_LONG_AFTER = 10**6  # epochs: behind any warm-up


class TrunkTensors(NamedTuple):
    """A trunk as it is stored, in timm's names."""

    layout: str  # whose names they had
    tensors: dict[str, Tensor]
    file: Path
    changes: tuple[str, ...] = ()  # that made it one of ours


@dataclass(frozen=True)
class _Loaded(Generic[Loadable]):
    """A network, what was loaded into it, and the hash of its tensors before anybody changed them."""

    module: Loadable
    report: str
    hash: str
    schedule: Mapping[str, float]

    @classmethod
    def of(
        cls, module: Loadable, report: str, schedule: Mapping[str, float] = MappingProxyType({})
    ) -> _Loaded[Loadable]:
        return cls(module.eval(), report, tensor_hash(module.state_dict()), schedule)


class Weights(ABC):
    """Weights that were found. Networks come in evaluation mode, on the CPU, and belong to the caller."""

    brings_settings = False
    """Whether they say their architecture themselves."""
    run: Path | None = None
    """The folder of the run they belong to."""
    detector: Path | None = None
    """The folder of the fitted detector that lies with them."""

    def __init__(self, name: str, settings: Config | None, network: str | None) -> None:
        """``settings``: their own, else those that were asked for; None where the architecture is unknown."""
        self.name, self._settings, self._network = name, settings, network

    @property
    def config(self) -> Config:
        """The settings, or a message that they must be given."""
        if self._settings is None:
            raise UserError(f"{self._why_no_settings}; add --preset, --config or --set encoder.* to say it.")
        return self._settings

    @property
    def kind(self) -> type[Method]:
        """The method they were pre-trained by, or that the settings name."""
        self.check_trunk()
        return method_type(self.config.method)

    @property
    def network(self) -> str:
        """Whose trunk it is, where the method has several."""
        return self.kind.network(self._network)

    @property
    def trunk(self) -> Trunk:
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
    def holds_trunk(self) -> bool:
        """Whether there is an encoder to start from; a detector may have networks of its own instead."""
        return not self._why_no_trunk

    @property
    def holds_vit(self) -> bool:
        """Whether that encoder is a vision transformer, which other libraries and pre-training know."""
        return self.holds_trunk and self.config.encoder.kind == "vit"

    @property
    def holds_networks(self) -> bool:
        """Whether there is more than the networks of a detector: a vision transformer, or a whole method."""
        return self.holds_vit or self.holds_method

    def check_trunk(self) -> None:
        """A message where there is no encoder to start from."""
        if self._why_no_trunk:
            raise UserError(f"{self._why_no_trunk}; give a pre-training run, a bundle of one, or a file of a ViT.")

    def check_vit(self) -> None:
        """A message where there is no vision transformer to start from."""
        self.check_trunk()
        if not self.holds_vit:
            raise UserError(f"{self.name} holds a residual network, and a ViT is needed; give a run or a file of one.")

    @property
    def holds_method(self) -> bool:
        """Whether there is more than a trunk."""
        return not self._why_no_method

    @property
    def method(self) -> Method:
        """Everything that was pre-trained: trunks, heads, decoder, prototypes; or a message why it is not there."""
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
    def schedule(self) -> Mapping[str, float]:
        """What the method's schedule had come to, by the names of its attributes; no tensor keeps it."""
        return self._method.schedule

    @abstractmethod
    def read_trunk(self) -> TrunkTensors:
        """The tensors of the trunk, or a message that there are none."""

    @property
    def _why_no_settings(self) -> str:
        return f"{self.name} does not say which architecture it has"

    @property
    def _why_no_trunk(self) -> str:
        """For weights that do not hold one."""
        return ""

    @property
    @abstractmethod
    def _why_no_method(self) -> str:
        """For weights that do not hold one."""

    @abstractmethod
    def _fill_trunk(self, trunk: Trunk) -> str:
        """Load the trunk's tensors; the report."""

    def _fill_method(self, method: Method) -> tuple[str, Mapping[str, float]]:
        """Load all tensors of a method; the report, and what its schedule had come to."""
        raise AssertionError("weights without a method say so")

    @cached_property
    def _trunk(self) -> _Loaded[Trunk]:
        self.check_trunk()
        trunk = make_trunk(self.config.encoder, self.config.image)
        return _Loaded.of(trunk, self._fill_trunk(trunk))

    @cached_property
    def _method(self) -> _Loaded[Method]:
        if self._why_no_method:
            raise UserError(f"{self._why_no_method}; give the folder of a pre-training run.")
        method = make_method(self.config)
        return _Loaded.of(method, *self._fill_method(method))


class RandomWeights(Weights):
    """Drawn from a seed."""

    _why_no_settings = "random weights have no architecture of their own"
    _why_no_method = "random weights restore nothing and have no prototypes"

    def __init__(self, settings: Config | None, network: str | None, seed: int) -> None:
        super().__init__(RANDOM, settings, network)
        self.seed = seed

    def read_trunk(self) -> TrunkTensors:
        raise UserError("random weights lie in no file; give a run folder, a bundle, a .safetensors or a .pth file.")

    def _fill_trunk(self, trunk: Trunk) -> str:
        initialise_trunk(trunk, torch.Generator().manual_seed(self.seed))
        return f"random weights from seed {self.seed}"


class FileWeights(Weights):
    """An encoder's tensors in any layout that we know; its architecture is read off them."""

    def __init__(self, name: str, settings: Config | None, network: str | None, path: Path, file: Path) -> None:
        super().__init__(name, settings, network)
        self.path, self.file = path, file

    @property
    def config(self) -> Config:
        """As they were asked for, else as the tensors say."""
        if self._settings is None:
            self._settings = load_config(weights=self.architecture.settings())
        return self._settings

    @cached_property
    def architecture(self) -> Architecture:
        """What the tensors say."""
        return read_architecture(self.read_trunk().tensors, self.file, self._beside.heads)

    @property
    def _why_no_method(self) -> str:
        return f"{self.path} is weights alone, without a decoder and prototypes"

    @cached_property
    def _beside(self) -> Beside:
        """What the files beside it say; those beside a file of another name may belong to others."""
        return read_beside(self.file) if self.path.is_dir() or self.file.name == MODEL else Beside()

    def _read(self) -> dict[str, Tensor]:
        return read_tensors(self.file)

    def read_trunk(self) -> TrunkTensors:
        layout, raw = find_encoder(self._read(), self.file)
        tensors, changes = plain_vit(raw, self.file, self._beside)
        return TrunkTensors(layout, tensors, self.file, tuple(changes))

    def _fill_trunk(self, trunk: Trunk) -> str:
        assert isinstance(trunk, VisionTransformer), "a file says its architecture"
        report = fill_encoder(trunk, *self.read_trunk())
        # Fewer or more blocks than the settings say: each name fits, and yet it is another network.
        for names, what in ((report.missing, "lacks"), (report.unexpected, "has the additional")):
            wrong = [name for name in names if name.startswith(("blocks.", "patch_embed."))]
            if wrong:
                raise UserError(
                    f"{self.file} has another architecture: it {what} {wrong[0]}; "
                    "set encoder.width, depth, heads, stem and patch_size as in the weights."
                )
        return f"{self.architecture.message(self.config)}; {report.message()}"


class TimmWeights(FileWeights):
    """A pre-trained ViT of timm, by its name there; timm keeps what it has downloaded."""

    def __init__(self, settings: Config | None, network: str | None, model: str) -> None:
        place = Path(f"{TIMM}{model}")
        super().__init__(model, settings, network, place, place)
        self.model = model

    @cached_property
    def _beside(self) -> Beside:
        return timm_model(self.model).beside

    def _read(self) -> dict[str, Tensor]:
        return timm_model(self.model).tensors


class _OwnWeights(Weights):
    """What afire wrote itself: whole, and with settings."""

    brings_settings = True

    @property
    def holds(self) -> Holds:
        """A whole method, the one encoder of a detector, or a detector whose networks are its own."""
        return "method"

    @property
    def config(self) -> Config:
        """Their own; of a detector with a residual network, with what describes that as an encoder."""
        return super().config if not self._residual else residual_config(super().config, self._residual)

    @cached_property
    def _residual(self) -> dict[str, Tensor]:
        """The residual trunk inside a detector, its own network or the one it looks through; empty where there is none.

        One for films of a size that the trunk does not divide is used as a detector alone.
        """
        if self.holds != "detector" or super().config.image.size % PATCH:
            return {}
        tensors = read_tensors(self._own_file)
        return residual_tensors(tensors, _OWN_NETWORK) or residual_tensors(tensors, _ENCODER)

    @property
    def network(self) -> str:
        if self._residual:
            own = _OWN_NETWORK.removesuffix(".")
            if self._network not in (None, own):
                raise UserError(f"{self._folder} holds one network, and no {self._network}; leave out --network.")
            return own
        name = super().network
        if self.holds == "encoder" and name != self.kind.networks[0]:
            raise UserError(f"{self._folder} holds the encoder of a detector, and no {name}.")
        return name

    @property
    def _why_no_trunk(self) -> str:
        if self.holds != "detector" or self._residual:
            return ""
        return f"{self._folder} holds the detector {self.config.method} alone, whose networks are its own"

    @property
    def _why_no_method(self) -> str:
        if self.holds == "encoder" or self._residual:
            return f"{self._folder} holds a detector and its encoder, and no decoder or prototypes"
        return self._why_no_trunk

    @property
    @abstractmethod
    def _folder(self) -> Path:
        """Of the run, the detector or the bundle."""

    @property
    @abstractmethod
    def _own_file(self) -> Path:
        """Where the networks of a detector lie that are its own."""

    def _fill_trunk(self, trunk: Trunk) -> str:
        tensors = self.read_trunk().tensors
        self._check(trunk.state_dict(), tensors)
        trunk.load_state_dict(tensors)
        return f"{len(tensors)} tensors of the {self.network} from {self._place}"

    def _fill_method(self, method: Method) -> tuple[str, Mapping[str, float]]:
        tensors = self._read_method(method)
        method.load_state_dict(tensors)
        return f"{len(tensors)} tensors of the whole model from {self._place}", self._schedule(method)

    def _check(self, state: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
        problem = misfit(state, tensors)
        if problem:
            raise UserError(self._refusal(problem))

    @property
    @abstractmethod
    def _place(self) -> str:
        """Where they lie, for reports."""

    @abstractmethod
    def _refusal(self, problem: str) -> str:
        """What to say when tensors do not fit."""

    @abstractmethod
    def _read_method(self, method: Method) -> dict[str, Tensor]:
        """All tensors of a method, which fit it."""

    @abstractmethod
    def _schedule(self, method: Method) -> Mapping[str, float]:
        """Bring what a schedule moves, such as a temperature, to where it was, and give it by name."""


class RunWeights(_OwnWeights):
    """A checkpoint of a pre-training run."""

    run: Path

    def __init__(self, name: str, settings: Config, network: str | None, run: Path, file: Path) -> None:
        super().__init__(name, settings, network)
        self.run, self.file = run, file

    @property
    def _folder(self) -> Path:
        return self.run

    @property
    def _own_file(self) -> Path:
        return self.file

    @property
    def _place(self) -> str:
        return f"{self.file.parent.name}/{self.file.name}"

    def _refusal(self, problem: str) -> str:
        return f"{self.file} {problem}; it is not a checkpoint of this run."

    @property
    def _trunk_prefix(self) -> str:
        return self.kind.trunk_prefix(self.network)

    def read_trunk(self) -> TrunkTensors:
        if self._residual:
            return TrunkTensors("afire", self._residual, self.file)
        prefix, every = self._trunk_prefix, read_tensors(self.file)
        tensors = {name.removeprefix(prefix): tensor for name, tensor in every.items() if name.startswith(prefix)}
        return TrunkTensors(self.kind.__name__, tensors, self.file)

    def _read_method(self, method: Method) -> dict[str, Tensor]:
        tensors = read_tensors(self.file)
        self._check(method.state_dict(), tensors)
        return tensors

    def _schedule(self, method: Method) -> Mapping[str, float]:
        """To the checkpoint's step; to the end where no step is known."""
        step, per_epoch = _LONG_AFTER, 1
        if (self.file.parent / STATE).exists():
            state = read_state(self.file.parent)
            try:
                step, per_epoch = max(int(state["step"]) - 1, 0), int(state["steps_per_epoch"])
            except (KeyError, TypeError, ValueError):
                raise UserError(
                    f"{self.file.parent / STATE} does not say its step; the checkpoint is not whole."
                ) from None
        return method.schedule(Progress(step, per_epoch * self.config.training.epochs, per_epoch))


class DetectorWeights(RunWeights):
    """The networks of a fitted detector: a whole method, the one encoder that it looks through, or its own."""

    def __init__(self, name: str, settings: Config, network: str | None, run: Path, file: Path) -> None:
        super().__init__(name, settings, network, run, file)
        self.detector = run

    @cached_property
    def holds(self) -> Holds:
        assert self._settings is not None, "a detector brings them"
        if self._settings.method not in METHODS:  # a detector that trains networks of its own goes by its own name
            return "detector"
        return "encoder" if all(name.startswith(_ENCODER) for name in read_tensors(self.file)) else "method"

    @property
    def _trunk_prefix(self) -> str:
        return _ENCODER if self.holds == "encoder" else super()._trunk_prefix


class BundleWeights(_OwnWeights):
    """A bundle, whose files were compared with their hashes."""

    def __init__(self, name: str, bundle: Bundle, network: str | None = None) -> None:
        super().__init__(name, bundle.config, network)
        self.bundle, self.detector = bundle, bundle.detector

    @property
    def holds(self) -> Holds:
        return self.bundle.holds

    @property
    def _folder(self) -> Path:
        return self.bundle.folder

    @property
    def _own_file(self) -> Path:
        assert self.detector is not None, "the format says that there is one"
        return self.detector / MODEL

    @property
    def _place(self) -> str:
        return f"the bundle {self.name} ({self.bundle.hash[:12]})"

    def _refusal(self, problem: str) -> str:
        return f"{self.bundle.folder}: the weights do not fit config.json: the bundle {problem}."

    def read_trunk(self) -> TrunkTensors:
        if self._residual:
            return TrunkTensors("afire", self._residual, self._own_file)
        file = self.bundle.trunk_file(self.network)
        return TrunkTensors("timm", read_tensors(file), file)

    def _read_method(self, method: Method) -> dict[str, Tensor]:
        state = method.state_dict()
        names = {name: "/".join(component_of(name, self.kind)) for name in state}
        stored = {
            f"{component}/{short}": tensor
            for component in self.bundle.components
            for short, tensor in read_tensors(self.bundle.component_file(component)).items()
        }
        self._check({names[name]: tensor for name, tensor in state.items()}, stored)
        return {name: stored[names[name]] for name in state}

    def _schedule(self, method: Method) -> Mapping[str, float]:
        """As it was exported. Before there were several methods, a bundle kept AFiRe's temperature alone."""
        about = self.bundle.about
        stored = about.get("schedule", {"teacher_temperature": about.get("teacher_temperature")})
        end = method.schedule(Progress(_LONG_AFTER, 1, 1))
        try:
            reached = {name: value if stored.get(name) is None else float(stored[name]) for name, value in end.items()}
        except (AttributeError, TypeError, ValueError):
            raise UserError(
                f"{self.bundle.folder}: config.json says no numbers of a schedule; export it again."
            ) from None
        for name, value in reached.items():
            setattr(method, name, value)
        return reached
