"""What was opened, by kind: random weights and files of others; what afire wrote itself is in :mod:`afire.weights.own`.

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
from afire.methods import Method, make_method, method_type
from afire.nn.residual import Trunk, initialise_trunk, make_trunk
from afire.nn.vit import Normalise, VisionTransformer
from afire.settings import load_config
from afire.training.run_folder import MODEL
from afire.weights.architecture import TIMM, Architecture, Beside, plain_vit, read_architecture, read_beside, timm_model
from afire.weights.files import fill_encoder, find_encoder, read_tensors, tensor_hash

Loadable = TypeVar("Loadable", bound=nn.Module)
RANDOM = "random"


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
