"""What learns in the loop: networks, views, losses, and what is done around a step. The loop knows no more.

A pre-training method is one file with one class, and one line in :data:`afire.methods.METHODS`; a detector may bring
networks that learn in the same way. The loop calls, in this order:

    settled(config, films, labels)     once, before there are networks: settings that follow from the films
    begin_labels(labels)               once, also after a resume, where ``learns_from_labels`` says so
    begin_run(rows, read)              once, also after a resume: what is kept of films and of no checkpoint
    begin_phase(name)                  at the first step of a phase, also after a resume
    prepare(epoch, films)              before an epoch, where ``prepares`` says so: a pass over all films
    schedule(progress)                 before a step: temperatures, momenta; what it returns is logged
    views(images, keys)                all augmentation, on the device of the images, drawn by key alone
    outputs = self(views)              the networks; this is what DDP wraps
    losses(outputs, turn)              terms and total of a whole update; no side effects
    rests(turn, progress)              whether an optimiser leaves this step out
    frozen(progress)                   parameters whose gradient is dropped at this step
    after_step(losses)                 EMA, queues, prototypes
    health(views, losses)              at the end of an epoch
    end_run()                          once, after the last step, also of a run that is stopped or fails

Outputs have the films first, so that an update made in several pieces can be judged as one: the loop joins the
outputs of the pieces, asks for the losses once, and carries the gradient back piece by piece.

Shapes: B films, L positions, D width, P pixels of a patch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from afire.config import Config, Section
from afire.errors import UserError
from afire.lesions.places import Draw, keyed, unit
from afire.methods.health import Health
from afire.nn.residual import ResidualTrunk, Trunk
from afire.nn.vit import Block, Normalise, VisionTransformer, check_films, grid_of, layer_of, patchify, unpatchify
from afire.settings import validate

Views = Mapping[str, Tensor]
Outputs = Mapping[str, Tensor]
AllFilms = Callable[[], Iterator[tuple[Tensor, Tensor]]]  # images (B, 1, S, S) on the device, and their rows (B,)
ReadFilms = Callable[[Tensor], Tensor]  # rows (n,) of the manifest -> images (n, 1, S, S) in [0, 1] on the device
ALL = "all"
NUMBERS_PER_KEY = len(Draw)
_DEPTH = 0x5D0B7
"""Keeps the draws of stochastic depth apart from those of the lesions."""


class Keys(NamedTuple):
    """What every draw of a step follows from, so that it is the same on any number of processes."""

    seed: int
    epoch: int
    step: int
    rows: Tensor  # (B,) int64 on the CPU: rows of the manifest


class Progress(NamedTuple):
    """How far a run is: steps done, steps of the whole run, steps of an epoch."""

    step: int
    steps: int
    steps_per_epoch: int


class Phase(NamedTuple):
    """A stretch of epochs in which the same parameters are trained."""

    name: str
    epochs: int


@dataclass(frozen=True)
class Losses:
    """The losses of one update over the films of all processes.

    ``terms`` by name, not weighted; ``total`` is what ``backward`` is called on. ``pending`` is what
    :meth:`Method.after_step` takes in once the update is made, such as new prototypes or queue entries.
    """

    terms: Mapping[str, Tensor]
    total: Tensor
    pending: Mapping[str, Tensor] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Tensor:
        return self.terms[name]

    def as_floats(self) -> dict[str, float]:
        """Terms and total as numbers, with one wait for the device."""
        values = torch.stack([value.detach().float() for value in (*self.terms.values(), self.total)]).tolist()
        return dict(zip((*self.terms, "total"), values, strict=True))


class Labels(NamedTuple):
    """What is known of the films of a run, in the order of their rows."""

    names: tuple[str, ...]
    rows: Tensor  # (N,) int64: rows of the manifest, rising
    values: Tensor  # (N, names) 1, 0, or NaN where it is unknown


class Panel(NamedTuple):
    """A column of pictures (B, C, H, W): films in [0, 1], masks in [0, 1], or differences around 0."""

    title: str
    images: Tensor
    kind: Literal["film", "mask", "difference"] = "film"


class NoSettings(Section):
    """A method without settings of its own."""


class Learner(nn.Module, ABC):
    """Networks and how they learn, as the loop sees them; the module says in which order its parts are called.

    A pre-training method is one (:class:`Method`), and so are the networks of a detector that trains its own.
    """

    settings_type: ClassVar[type[Section]] = NoSettings
    """Its own settings: the group ``options``."""
    turns: ClassVar[tuple[str, ...]] = (ALL,)
    """Optimisers that take turns in a step, such as a network and its adversary."""
    prepares: ClassVar[bool] = False
    """Whether :meth:`prepare` wants to be called before every epoch."""
    learns_from_labels: ClassVar[bool] = False
    """Whether it learns from films with labels, and gets these labels, instead of normal films."""
    trains: ClassVar[bool] = True
    """Whether it learns at all; else a run ends before its first step, with the weights it was started from."""
    optimizer: ClassVar[Literal["adamw", "sgd"]] = "adamw"
    """What moves its parameters; ``sgd`` takes ``training.beta1`` as its momentum."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.options = validate(config.options, self.settings_type)

    @abstractmethod
    def views(self, images: Tensor, keys: Keys) -> Views:
        """Images (B, C, S, S) in [0, 1] on the device -> everything the networks look at. Carries no gradient."""

    @abstractmethod
    def forward(self, views: Views) -> Outputs:
        """The networks: outputs with the films (or equally many views of each) first."""

    @abstractmethod
    def losses(self, outputs: Outputs, turn: str = ALL) -> Losses:
        """Terms and total of a whole update. A collective call; changes nothing."""

    def schedule(self, progress: Progress) -> Mapping[str, float]:
        """Set what changes with the step, and give it by the names of its attributes, for the log and for bundles."""
        return {}

    def frozen(self, progress: Progress) -> Iterable[nn.Parameter]:
        """Parameters that keep still at this step; their gradient is dropped."""
        return ()

    def after_step(self, losses: Losses) -> None:
        """Move what the optimiser does not: EMA, queues, prototypes."""

    def phases(self) -> tuple[Phase, ...]:
        """Stretches of the run, in order; their epochs sum to ``training.epochs``."""
        return (Phase("train", self.config.training.epochs),)

    @classmethod
    def settled(cls, config: Config, films: int, labels: tuple[str, ...]) -> Config:
        """Settings that follow from how many films a run has and, where it learns from them, their labels' names.

        Called once when a run begins, and after a resume with the same outcome; what it says is saved with the run.
        """
        return config

    @classmethod
    def asked_labels(cls, config: Config) -> tuple[str, ...]:
        """The labels that it learns from; none stands for all that the films have."""
        return ()

    def begin_labels(self, labels: Labels) -> None:
        """The labels of the films of this run, before its first step, also of one that is resumed."""

    def begin_run(self, rows: Tensor, read: ReadFilms) -> None:
        """Before the first step of a run, also of one that is resumed: look up films of its ``rows`` (N,).

        For what a checkpoint must not hold, such as pixels of patients. The same on every process, and the same after
        a resume: it may depend on the settings and on the films, not on the weights.
        """

    def end_run(self) -> None:
        """After the last step, however a run ends: end what :meth:`begin_run` set going."""

    def begin_phase(self, name: str) -> None:
        """Freeze, thaw or reset networks; called again after a resume, before the weights are restored."""

    def prepare(self, epoch: int, films: AllFilms) -> None:
        """A pass over all films before an epoch; what it finds belongs into buffers, so that a resume has it."""

    def rests(self, turn: str, progress: Progress) -> bool:
        """Whether the optimiser ``turn`` leaves this step out, such as a generator while its critic catches up.

        Never all of them.
        """
        return False

    def share(self, turn: str) -> float:
        """Share of the steps in which ``turn`` does not rest, for what an update costs."""
        return 1.0

    def parameters_of(self, turn: str) -> Iterator[tuple[str, nn.Parameter]]:
        """Trainable parameters by name that ``turn`` updates."""
        return ((name, weight) for name, weight in self.named_parameters() if weight.requires_grad)

    def layers_behind(self, name: str) -> int:
        """How many layers of a trunk lie between a parameter and the trunk's end; 0 outside of trunks."""
        return 0

    def hold_blocks(self) -> None:
        """Let the first ``training.frozen_blocks`` blocks of its trunks keep their weights, where it has trunks."""

    def health(self, views: Views, losses: Mapping[str, float]) -> Health | None:
        """Numbers and a verdict on a batch of this process; None where there is nothing to judge by."""
        return None

    def panels(self, views: Views, count: int) -> list[Panel]:
        """What the training sees and makes of the first ``count`` films, for the pictures of an epoch; maybe none."""
        return []

    @property
    def views_per_film(self) -> int:
        """For the films per second of a run."""
        return 1

    @property
    def _no_split_modules(self) -> list[str]:
        """The name is accelerate's: the modules that FSDP gathers at once. What lies outside is gathered for a step."""
        return [Block.__name__] if any(isinstance(module, Block) for module in self.modules()) else []

    def flops(self) -> float:
        """Counted floating-point operations of one film in one update, forward and backward; the mean over a run."""
        image = torch.zeros(1, self.config.image.channels, self.config.image.size, self.config.image.size)
        image[..., ::2, ::3] = 0.5  # not blank: lesions need something to read
        image = image.to(next(self.parameters()).device)
        trained = {turn: [weight for _, weight in self.parameters_of(turn)] for turn in self.turns}
        counted = 0.0
        for turn in self.turns:
            train_only(turn, trained)
            # The plain form of attention: fused ones are not counted on every device.
            with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
                outputs = self(self.views(image, Keys(0, 0, 0, torch.zeros(1, dtype=torch.int64))))
                torch.autograd.grad(self.losses(outputs, turn).total, trained[turn], allow_unused=True)
            counted += self.share(turn) * float(counter.get_total_flops())
        train_only(None, trained)
        return counted


def train_only(turn: str | None, trained: Mapping[str, Iterable[nn.Parameter]]) -> None:
    """Of the parameters that each turn updates, let only those of ``turn`` get gradients; None: all of them.

    A network that no parameter of gets a gradient is one that a learner may leave out of :meth:`Learner.forward`, see
    :func:`learns`.
    """
    for owner, parameters in trained.items():
        for parameter in parameters:
            parameter.requires_grad_(turn in (None, owner))


def learns(*networks: nn.Module) -> bool:
    """Whether the turn at hand trains any of the ``networks``."""
    return any(parameter.requires_grad for network in networks for parameter in network.parameters())


class Method(Learner):
    """A pre-training method: a learner with trunks that tasks start from."""

    networks: ClassVar[tuple[str, ...]]
    """Names of its trunks; the first is the one that is exported and that tasks start from."""
    sections: ClassVar[tuple[str, ...]]
    """Groups of settings that it reads beside image, encoder, training and run."""
    any_trunk: ClassVar[bool] = False
    """Whether its trunk may be a residual network, too, and not a vision transformer alone."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if config.encoder.kind != "vit" and not self.any_trunk:
            raise UserError(
                f"the method {config.method} pre-trains vision transformers, and encoder.kind is "
                f"{config.encoder.kind}; leave that out, or choose --method phantom."
            )
        self.normalise = Normalise(config.image)
        self.patch_size = config.encoder.patch_size
        self.grid = grid_of(config.image.size, config.image.size, self.patch_size)

    @classmethod
    @abstractmethod
    def trunk_prefix(cls, network: str | None = None) -> str:
        """Where the tensors of a trunk lie in the state dict, such as ``teacher.encoder.``."""

    def trunk(self, network: str | None = None) -> Trunk:
        """A trunk by name; without one the trunk that is exported."""
        trunk = self.get_submodule(self.trunk_prefix(network).rstrip("."))
        assert isinstance(trunk, VisionTransformer | ResidualTrunk)
        return trunk

    def starting_trunks(self) -> tuple[Trunk, ...]:
        """Those that begin with the weights of a start, the exported one first."""
        return tuple(self.trunk(network) for network in self.networks)

    def layers_behind(self, name: str) -> int:
        depth = len(self.trunk().blocks)
        for prefix in map(self.trunk_prefix, self.networks):
            if name.startswith(prefix):
                return depth + 1 - layer_of(name.removeprefix(prefix), depth)
        return 0

    def hold_blocks(self) -> None:
        depth, held = len(self.trunk().blocks), self.config.training.frozen_blocks
        if held > depth:
            raise UserError(f"training.frozen_blocks is {held}, but the encoder has {depth} blocks.")
        for network in self.networks if held else ():
            for name, weight in self.trunk(network).named_parameters():
                if layer_of(name, depth) <= held:
                    weight.requires_grad_(False)

    @classmethod
    def network(cls, name: str | None) -> str:
        """The name itself, or that of the exported trunk; a message when the method has no such trunk."""
        if name is None:
            return cls.networks[0]
        if name not in cls.networks:
            raise UserError(f"{cls.__name__} has no network {name!r}; it has {' and '.join(cls.networks)}.")
        return name

    @classmethod
    def own_films(cls, config: Config) -> int:
        """How many films it draws itself, so that a run needs none of anybody; 0 where it wants films of patients."""
        return 0

    def encode(self, images: Tensor, network: str | None = None) -> Tensor:
        """Images (B, C, H, W) in [0, 1], of any size the patch divides -> tokens (B, L, D).

        Their mean over L represents the film. The class token is left out; :meth:`trunk` gives it too.
        """
        check_films(images, self.config.image.channels, "images")
        tokens: Tensor = self.trunk(network)(self.normalise(images))
        return tokens[:, 1:].contiguous()  # once, instead of inside each layer that reads them

    def readouts(self, images: Tensor) -> dict[str, Tensor]:
        """What it tells about images (B, C, H, W) in [0, 1] beside tokens and restoration, by name."""
        return {}

    @property
    def restores(self) -> bool:
        """Whether there is a decoder."""
        return False

    def restore(self, images: Tensor, hidden: Tensor | None = None) -> Tensor:
        """Images in [0, 1] -> restored patches (B, L, P) of normalised pixels; compare with :meth:`patches`.

        ``hidden`` (B, L) are tokens that the decoder must not see.
        """
        raise UserError(f"weights of the method {self.config.method} have no decoder and restore nothing.")

    def lesion_maps(self, images: Tensor) -> Tensor:
        """Images in [0, 1] -> how likely each cell is to be part of a lesion (B, 1, G, G), in [0, 1]."""
        raise UserError(f"weights of the method {self.config.method} have no lesion classifier and map no lesions.")

    def patches(self, images: Tensor) -> Tensor:
        """Images in [0, 1] -> their patches (B, L, P) of normalised pixels."""
        return patchify(self.normalise(images), self.patch_size)

    def picture(self, patches: Tensor, like: Tensor) -> Tensor:
        """Patches (B, L, P) of normalised pixels -> images (B, C, H, W) in [0, 1], by the grey levels of ``like``."""
        grid = grid_of(like.shape[-2], like.shape[-1], self.patch_size)
        return self.normalise.undo(unpatchify(patches, self.patch_size, grid), like)


def cosine(start: float, end: float, step: int, steps: int) -> float:
    """Half a cosine from ``start`` at step 0 to ``end`` at the last of ``steps`` steps."""
    share = min(step / max(steps - 1, 1), 1.0)
    return end + 0.5 * (start - end) * (1 + math.cos(math.pi * share))


def depth_draws(blocks: int, seed: int, step: int, draws: Tensor, views: int = 1) -> Tensor:
    """Uniform numbers (B * views, blocks, 2) for stochastic depth, which follow from (seed, step, draw, view) alone."""
    slots = -(-2 * blocks // NUMBERS_PER_KEY)
    numbers = unit(keyed(seed ^ _DEPTH, step, draws, views, slots))
    return numbers.flatten(2)[:, :, : 2 * blocks].reshape(-1, blocks, 2)


def uniform_draws(count: int, seed: int, step: int, rows: Tensor) -> Tensor:
    """Numbers (B, count), uniform in [0, 1), that follow from (seed, step, row) alone."""
    slots = -(-count // NUMBERS_PER_KEY)
    return unit(keyed(seed, step, rows, 1, slots)).flatten(1)[:, :count]


def normal_draws(count: int, seed: int, step: int, rows: Tensor) -> Tensor:
    """Numbers (B, count) of a standard normal distribution that follow from (seed, step, row) alone."""
    half = -(-count // 2)
    length, angle = uniform_draws(2 * half, seed, step, rows).chunk(2, dim=1)  # Box and Muller's pairs
    radius = (-2 * torch.log1p(-length)).sqrt()
    angle = 2 * math.pi * angle
    return torch.cat([radius * angle.cos(), radius * angle.sin()], dim=1)[:, :count]


def count_parameters(model: nn.Module) -> dict[str, int]:
    """Parameters of each part and, last, how many of all are trained: ``{"student.encoder": ..., "trained": ...}``."""
    counts: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        levels = name.split(".")
        group = ".".join(levels[:2]) if levels[0] in ("student", "teacher") else levels[0]
        counts[group] = counts.get(group, 0) + parameter.numel()
    counts["trained"] = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return counts


def complete(config: Config, learner: type[Learner]) -> Config:
    """The settings with every default of the learner's own ``options`` filled in, as they are read back from a file."""
    options = validate(config.options, learner.settings_type).model_dump(mode="json")
    return config.model_copy(update={"options": options})
