"""Detectors that train networks of their own on normal films, in the loop of every training.

Such a detector is one file: a :class:`~afire.methods.base.Learner` (its networks, views and losses), its settings, and
a :class:`LearnedDetector` that turns their outputs into scores and a map.
Training has checkpoints, can be resumed and stops on a signal as a pre-training does; a fit is made in one process. Its
folder is kept with the detector.

Shapes: B films of S x S pixels, L = rows x columns places of the heatmap, D width of a token, P depths of the trunk.
"""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor
from typing_extensions import Self

from afire.config import Config, LengthConfig, RunConfig, Section, TrainingConfig
from afire.detect.base import AnomalyDetector, Begin, FitTask, Look, NormalFilms, Subsets
from afire.detect.fit import batch_of, train_networks
from afire.detect.normals import Standard
from afire.errors import UserError
from afire.methods.base import AllFilms, Keys, Learner, Views
from afire.nn.conv import shrunk
from afire.nn.vit import Grid, Normalise, VisionTransformer, at_least_float32, grid_of, initialise
from afire.tasks.settings import DetectorConfig
from afire.training.pretraining import Start
from afire.weights import RANDOM, Weights, open_weights, pick_device

_LEAST_SD, _NOTHING = 0.01, 1e-12  # of a token's numbers, as a share of the usual one; and of all
CELL = 8  # pixels of a film in one place of the heatmap, along each side
_STANDARD_FILMS = 2048  # that settle what is usual at a place

logger = logging.getLogger("afire")


class TrainConfig(LengthConfig):
    """How a detector's own networks are trained: Adam, or AdamW where there is weight decay, on a cosine."""

    batch_size: int = Field(64, ge=1, description="films in one update, of all processes together")
    learning_rate: float = Field(1e-3, gt=0, description="at its peak; not scaled by anything")
    learning_rate_end: float = Field(1e-6, ge=0, description="learning rate at the end of the cosine")
    warmup_epochs: float = Field(0, ge=0, description="linear warm-up of the learning rate")
    weight_decay: float = Field(0.0, ge=0, description="constant; none on biases and norms")
    beta1: float = Field(0.9, ge=0, lt=1, description="Adam's memory of gradients")
    beta2: float = Field(0.999, gt=0, lt=1, description="Adam's memory of squared gradients")
    clip: float = Field(3.0, ge=0, description="gradient norm limit, 0 = none")
    accumulate: int = Field(1, ge=1, description="pieces of a batch; same result, less memory")
    precision: Literal["fp32", "bf16", "fp16"] = Field("fp32", description="arithmetic of the networks")


class LearnedConfig(DetectorConfig):
    """Settings of a detector that trains its own networks. A kind adds a group with its own name: its networks."""

    train: TrainConfig = Field(default_factory=TrainConfig)


@dataclass(frozen=True)
class Examined:
    """The networks' results for a batch of films."""

    scores: dict[str, Tensor]  # (B,) each, larger = more abnormal
    map: Tensor  # (B, L), larger = more abnormal; not standardised
    restored: Tensor | None = None  # (B, 1, S, S) in [0, 1]


class LearnedDetector(AnomalyDetector):
    """A detector with networks of its own.

    A kind names its ``Networks``, its settings (whose group ``method`` holds those of the networks) and
    :meth:`examine`; where something is to be kept of normal films once the networks are trained, :meth:`learn`.
    """

    takes: ClassVar[Begin] = "nothing"
    Networks: ClassVar[type[Learner]]
    published: ClassVar[str]
    """Of the paper: data size, length and network, in a few words, for tables."""
    published_epochs: ClassVar[int]
    model: Learner

    def __init__(self, config: Config, settings: DetectorConfig) -> None:
        networks = self.Networks(config)
        super().__init__(networks, config, self.grid_of(config), settings)
        self.standard = Standard()

    @classmethod
    def grid_of(cls, config: Config) -> Grid:
        """Rows and columns of the heatmap."""
        side = max(1, config.image.size // CELL)
        return side, side

    @classmethod
    def build(cls, config: Config, settings: DetectorConfig) -> Self:
        return cls(config, settings)

    @classmethod
    def start(cls, task: FitTask, subsets: Subsets) -> Self:
        config = cls.config_of(task.config, task.settings, len(subsets.fit))
        detector = cls(config, task.settings)
        trained = train_networks(task, subsets, config, cls.Networks, cls.first_weights(task))
        detector.model.load_state_dict(trained.tensors)
        detector.config = trained.config
        return detector.to(pick_device(task.device))

    @classmethod
    def length(cls, pretrained: bool) -> str:
        return "train.epochs"

    @classmethod
    def training_flops(cls, config: Config, settings: DetectorConfig) -> float:
        return cls.Networks(cls.config_of(config, settings)).flops()

    @classmethod
    def config_of(cls, config: Config, settings: DetectorConfig, films: int | None = None) -> Config:
        """The settings of the training: those of the detector in the form that the loop reads."""
        assert isinstance(settings, LearnedConfig)
        recipe = settings.train
        batch = batch_of(recipe.batch_size, films or recipe.batch_size, recipe.accumulate)
        training = TrainingConfig(
            epochs=recipe.epochs,
            film_views_min=recipe.film_views_min,
            minutes=recipe.minutes,
            **batch,
            # The loop scales by batch / 256; this undoes it.
            learning_rate=recipe.learning_rate * 256 / batch["batch_size"],
            learning_rate_end=min(recipe.learning_rate_end, recipe.learning_rate),
            warmup_epochs=recipe.warmup_epochs,
            weight_decay=recipe.weight_decay,
            weight_decay_end=recipe.weight_decay,
            beta1=recipe.beta1,
            beta2=recipe.beta2,
            clip=recipe.clip,
            precision=recipe.precision,
        )
        changes = {
            "method": cls.method,
            "seed": settings.seed,
            "training": training,
            "options": getattr(settings, cls.method).model_dump(),
            "run": RunConfig(picture_epochs=0, probe_epochs=0, keep_checkpoints=1),
        }
        return config.model_copy(update=changes)

    @classmethod
    def first_weights(cls, task: FitTask) -> Start | None:
        """What gives the networks their first weights; None: they are drawn from the seed."""
        return None

    @abstractmethod
    def examine(self, images: Tensor, restore: bool) -> Examined:
        """Films (B, C, S, S) in [0, 1] on the device -> scores and map; with ``restore`` the restored films too."""

    def learn(self, normals: NormalFilms) -> None:
        """Keep what :meth:`examine` needs from normal films; nothing, for most."""

    @torch.no_grad()
    def fit(self, normals: NormalFilms) -> None:
        self.learn(normals)
        maps = [
            self.examine(self.prepared(images), restore=False).map.cpu()
            for images in normals.batches("maps of normal films", _STANDARD_FILMS)
        ]
        self.standard.fit(torch.cat(maps))
        self.standard.to(self.device)

    def look(self, images: Tensor, names: Sequence[str] | None, restore: bool) -> Look:
        examined = self.examine(images, restore)
        scores = {name: score for name, score in examined.scores.items() if names is None or name in names}
        return Look(scores, self.standard(examined.map), examined.restored)


class FilmLearner(Learner):
    """Networks that look at whole films, shrunk to their ``side``, and draw them."""

    side: int

    def as_inputs(self, images: Tensor) -> Tensor:
        """Films (B, C, S, S) as the networks see them: one channel, shrunk, in [-1, 1]."""
        return shrunk(images[:, :1], self.side) * 2 - 1

    def views(self, images: Tensor, keys: Keys) -> Views:
        """The films alone."""
        return {"images": self.as_inputs(images)}


class TrunkLearner(Learner):
    """Networks on the trunk of given weights. It is frozen; a kind that adapts it unfreezes what it trains.

    The trunk stays in evaluation mode: its stochastic depth was for the pre-training.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.normalise = Normalise(config.image)
        self.trunk = VisionTransformer.from_config(config.encoder, config.image)
        initialise(self.trunk, torch.Generator().manual_seed(config.seed))  # until given weights take their place
        self.trunk.eval().requires_grad_(False)

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.trunk.eval()
        return self

    def views(self, images: Tensor, keys: Keys) -> Views:
        return {"images": images}


class LevelSettings(Section):
    """Settings of networks on several depths of a trunk."""

    blocks: list[int] = Field([], description="read the tokens after these blocks of the trunk; empty = the usual ones")


class LevelLearner(TrunkLearner):
    """Networks on the tokens of a trunk at several depths, number by number in sd of normal films.

    Tokens grow from block to block, and in some trunks a few of their numbers are a hundred times as large as the
    others: without a standard, those alone would count.
    """

    settings_type = LevelSettings
    prepares = True
    usual: ClassVar[Sequence[float]]
    """After these shares of the blocks tokens are read, unless the settings say where."""
    token_mean: Tensor  # (P, 1, D) over places and normal films
    token_sd: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        assert isinstance(self.options, LevelSettings)
        self.after = blocks_of(self.options.blocks, len(self.trunk.blocks), self.usual, config.method)
        shape = (len(self.after), 1, self.trunk.width)
        self.register_buffer("token_mean", torch.zeros(shape))
        self.register_buffer("token_sd", torch.ones(shape))

    @torch.no_grad()
    def prepare(self, epoch: int, films: AllFilms) -> None:
        """The standard, before the first update."""
        if epoch > 0:
            return
        count, total, squares = 0, torch.zeros(()), torch.zeros(())
        for images, _ in films():
            tokens_BPLD = self._tokens(images).cpu().double()
            count += tokens_BPLD.shape[0] * tokens_BPLD.shape[2]
            total = total + tokens_BPLD.sum(dim=(0, 2))
            squares = squares + tokens_BPLD.square().sum(dim=(0, 2))
        mean = total / count
        sd = (squares / count - mean.square()).clamp_min(0).sqrt()
        usual = sd.median(dim=1, keepdim=True).values
        self.token_mean.copy_(mean[:, None])
        # What hardly ever differs between films would be noise made large.
        self.token_sd.copy_(torch.maximum(sd, _LEAST_SD * usual).clamp_min(_NOTHING)[:, None])

    def tokens(self, images: Tensor) -> Tensor:
        """Films (B, C, S, S) in [0, 1] -> tokens (B, P, L, D) in sd of normal films. Carries no gradient."""
        return (self._tokens(images) - self.token_mean) / self.token_sd

    @torch.no_grad()
    def _tokens(self, images: Tensor) -> Tensor:
        levels = self.trunk.levels(self.normalise(images), self.after)
        return at_least_float32(torch.stack([tokens[:, 1:] for tokens in levels], dim=1))


class OnTrunk(LearnedDetector):
    """A detector that starts from the trunk of given weights, such as a pre-training's or ImageNet's."""

    takes = "trunk"
    Networks: ClassVar[type[TrunkLearner]]
    model: TrunkLearner

    @classmethod
    def grid_of(cls, config: Config) -> Grid:
        """That of the trunk's tokens."""
        return grid_of(config.image.size, config.image.size, config.encoder.patch_size)

    @classmethod
    def first_weights(cls, task: FitTask) -> Start:
        weights = trunk_weights(task)

        def start(learner: TrunkLearner) -> None:
            learner.trunk.load_state_dict(weights.trunk.state_dict())

        return start

    @classmethod
    def remarks(cls, task: FitTask) -> Iterator[str]:
        yield from random_trunk(cls.method, task)


def trunk_weights(task: FitTask) -> Weights:
    """The weights that the task names; random ones follow from its seed."""
    if task.pretrained is not None:
        return task.pretrained
    weights = open_weights(task.init or RANDOM, task.config, seed=task.settings.seed)
    if task.init is not None:
        logger.info("%s: %s", weights.name, weights.report)
    return weights


def random_trunk(method: str, task: FitTask) -> Iterator[str]:
    """A warning where a detector that needs a pre-trained trunk gets none."""
    if task.pretrained is None and task.init is None:
        yield (
            f"{method} was published with a trunk pre-trained on ImageNet, and this one has random weights: expect "
            "less of it; give --weights, a file of a ViT or a pre-training run"
        )


def blocks_of(blocks: Sequence[int], depth: int, shares: Sequence[float], method: str) -> list[int]:
    """After how many of ``depth`` blocks tokens are read, rising: ``blocks``, else after these shares of them."""
    for block in blocks:
        if not 1 <= block <= depth:
            raise UserError(f"{method}.blocks has {block}, but the trunk has the blocks 1 to {depth}.")
    return sorted(set(blocks) or {math.ceil(share * depth) for share in shares})


def by_place(pixels_B1SS: Tensor, grid: Grid) -> Tensor:
    """A value for every pixel -> the mean of each place (B, L)."""
    return F.adaptive_avg_pool2d(pixels_B1SS, grid).flatten(1)


def mean_square(differences: Tensor) -> Tensor:
    """(B, ...) -> the mean of the squares of each film (B,)."""
    return at_least_float32(differences).flatten(1).square().mean(dim=1)


def check_halvings(config: Config, side: int, times: int, method: str) -> int:
    """The side of films as the networks see them, at most ``side``; refused where it cannot be halved ``times``."""
    pixels = min(config.image.size, side)
    if pixels % 2**times:
        raise UserError(
            f"{method} halves a film {times} times, which {pixels} px do not allow; use films whose side is a multiple "
            f"of {2**times}, or another {method}.side."
        )
    return pixels


def restored_films(drawing: Tensor, images: Tensor) -> Tensor:
    """What was drawn in [-1, 1] at the networks' size -> films in [0, 1] at the size of ``images``."""
    unit = ((drawing + 1) / 2).clamp(0, 1)
    if unit.shape[-1] == images.shape[-1]:
        return unit
    return F.interpolate(unit, size=images.shape[-2:], mode="bilinear", align_corners=False)
