"""Weights that afire wrote itself: a checkpoint of a run, the networks of a detector, a bundle.

They are whole and bring their settings. A detector may hold a whole method, the one encoder that it looks through, or
networks of its own, in which an encoder for other tasks may lie.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

from torch import Tensor

from afire.config import Config
from afire.errors import UserError
from afire.methods import METHODS, Method
from afire.methods.base import Progress
from afire.nn.residual import PATCH, Trunk, residual_config, residual_tensors
from afire.training.run_folder import MODEL, STATE, read_state
from afire.weights.bundle import Bundle, Holds, component_of
from afire.weights.files import misfit, read_tensors
from afire.weights.kinds import TrunkTensors, Weights

_ENCODER = "encoder."  # prefix of the tensors of a detector that looks through one encoder
_OWN_NETWORK = "network."  # prefix of the tensors of a detector's own network
_LONG_AFTER = 10**6  # epochs: behind any warm-up


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
