"""SQUID: films are drawn from patterns of normal films at the same place, and a discriminator rates how real they look.

After the paper (Xiang et al., "SQUID: Deep Feature In-Painting for Unsupervised Anomaly Detection", CVPR 2023).
A film is cut into patches, and each is encoded alone. Every place of the film has a queue with the last normal patterns
seen there: a patch is replaced by a mix of the few that are most like it, and completed by attention to its neighbours,
replaced likewise (the in-painting block). A student decoder draws the film from that. A teacher decoder draws it
from the features themselves, and the student's features follow those of the teacher, so that it does not draw the same
film every time. A discriminator learns to tell the student's drawings from films. Abnormal films are drawn badly, and
that shows: a film's score is how far below that of normal films its drawing is rated, in standard deviations.

The few that are most like it: weights are a softmax, all but the largest are set to nothing, and the gradient is that
of the softmax as it was (the paper's Gumbel shrinkage, which draws nothing at random). While training, one place in
twenty keeps its own features (the masked shortcut).

Ours: group in place of batch normalisation; nearest-neighbour doubling; no skip connections, and so none of the memory
matrices that the authors' code has behind them; patches are joined before the decoders, not half-way; a patch attends
to those neighbours that exist, not to a frame of zeros; fewer channels. The score is not squeezed by a sigmoid, which
changes no order but ties what is far out.

Shapes: B films, N patches, D numbers of a pattern, M patterns in a queue, s x s pixels as the networks see them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from afire.config import Config, Section
from afire.detect.base import NormalFilms
from afire.detect.learned import (
    Examined,
    FilmLearner,
    LearnedConfig,
    LearnedDetector,
    TrainConfig,
    by_place,
    check_halvings,
    mean_square,
    restored_films,
)
from afire.methods.base import ALL, Keys, Losses, Outputs, Progress, Views, learns, uniform_draws
from afire.nn import distributed
from afire.nn.conv import CodeEncoder, ConvDecoder, ConvEncoder, deceiving_loss, initialise_conv, norm, telling_loss
from afire.nn.vit import at_least_float32, patchify, unpatchify
from afire.tasks.settings import DetectorConfig

_SHORTCUTS = 0x5011D  # keeps these draws apart from others of the same key
_HEADS = 8
_NO_SPREAD = 1e-6  # where all normal films are rated alike
SCORE = "discriminator"


class SQUIDSettings(Section):
    """Encoder, in-painting, decoders and discriminator."""

    side: int = Field(128, ge=32, description="films larger than this are shrunk to it, in pixels")
    cuts: int = Field(1, ge=1, le=3, description="times that a film is cut in two along each side: 1 = 2 x 2 patches")
    width: int = Field(16, ge=8, description="channels of the first stage; each of the four doubles them")
    items: int = Field(200, ge=1, description="patterns in the queue of each patch")
    nearest: int = Field(5, ge=1, description="patterns that a patch is mixed from")
    inpainted: float = Field(0.95, gt=0, le=1, description="share of places without the masked shortcut")
    critic_steps: int = Field(2, ge=1, description="updates of the discriminator for each of the other networks")
    restoration: float = Field(10.0, gt=0, description="weight of the student's squared error")
    teacher: float = Field(0.01, ge=0, description="weight of the teacher's squared error")
    distillation: float = Field(1e-3, ge=0, description="weight of the distance between student and teacher")
    adversarial: float = Field(5e-3, ge=0, description="weight of what the discriminator says")


class SQUIDConfig(LearnedConfig):
    """All settings of fitting the detector `squid`."""

    score: str = Field(SCORE, description="a score, several joined by +, or auto: chosen on held-out normals")
    train: TrainConfig = Field(
        TrainConfig(
            epochs=200,
            batch_size=16,
            learning_rate=1e-4,
            learning_rate_end=1e-5,
            weight_decay=1e-5,
            beta1=0.5,
            clip=0.0,
        ),
        description="as published",
    )
    squid: SQUIDSettings = Field(default_factory=SQUIDSettings)


def cut(images: Tensor, along: int) -> Tensor:
    """(B, C, S, S) -> patches (B, N, C, S / along, S / along), row by row; N = along²."""
    films, channels, side = images.shape[0], images.shape[1], images.shape[-1] // along
    return patchify(images, side).reshape(films, along**2, channels, side, side)


def joined(patches: Tensor, along: int) -> Tensor:
    """The way back of :func:`cut`."""
    return unpatchify(patches.flatten(2), patches.shape[-1], (along, along))


def each(network: nn.Module, patches: Tensor) -> Tensor:
    """A network's output for every patch (B, N, C, h, w), alone."""
    outputs: Tensor = network(patches.flatten(0, 1))
    return outputs.reshape(*patches.shape[:2], *outputs.shape[1:])


def beside(along: int) -> Tensor:
    """Which patches (N, N) lie next to each, also across a corner; none next to itself."""
    row, column = (torch.arange(along**2) // along), (torch.arange(along**2) % along)
    steps = torch.maximum((row[:, None] - row).abs(), (column[:, None] - column).abs())
    return steps == 1


def shrunken(likeness: Tensor, nearest: int) -> Tensor:
    """Likeness (..., M) -> weights that add up to one, of the ``nearest`` only; differentiated as a softmax."""
    soft = likeness.softmax(dim=-1)
    smallest = soft.topk(min(nearest, soft.shape[-1]), dim=-1).values[..., -1:]
    nearest_weights = torch.where(soft >= smallest, soft, 0.0)
    return soft + (nearest_weights / nearest_weights.sum(dim=-1, keepdim=True) - soft).detach()


class PatternQueues(nn.Module):
    """A queue of normal patterns for each patch: queries (B, N, D) -> mixes (B, N, D) of what the queues hold."""

    items: Tensor
    place: Tensor

    def __init__(self, patches: int, items: int, width: int, nearest: int) -> None:
        super().__init__()
        self.nearest = nearest
        self.register_buffer("items", torch.zeros(patches, items, width))
        self.register_buffer("place", torch.zeros((), dtype=torch.int64))  # where the next pattern goes

    def initialise(self, generator: torch.Generator) -> None:
        """Uniform noise, until normal patterns take its place."""
        bound = self.items.shape[-1] ** -0.5
        nn.init.uniform_(self.items, -bound, bound, generator=generator)

    def forward(self, queries: Tensor) -> Tensor:
        likeness_NBM = queries.transpose(0, 1) @ self.items.transpose(1, 2)
        mixes: Tensor = (shrunken(likeness_NBM, self.nearest) @ self.items).transpose(0, 1)
        return mixes

    @torch.no_grad()
    def push(self, patterns: Tensor) -> None:
        """Take in patterns (B, N, D), the oldest going first."""
        count = self.items.shape[1]
        newest = patterns[-count:].to(self.items)
        places = (self.place + torch.arange(len(newest), device=self.place.device)) % count
        self.items[:, places] = newest.transpose(0, 1)
        self.place.copy_((self.place + len(newest)) % count)


class Inpainting(nn.Module):
    """Features (B, N, C, h, h) of patches -> what normal films would have there, and the patterns (B, N, D)."""

    beside: Tensor

    def __init__(self, channels: int, side: int, along: int, items: int, nearest: int) -> None:
        super().__init__()
        inner = channels // 4
        width = inner * side**2
        self.shape = (inner, side, side)
        self.heads = max(count for count in range(1, _HEADS + 1) if width % count == 0)
        # One group: patches may be of one place, and groups of few numbers would leave little but their signs.
        self.squeeze = nn.Sequential(nn.Conv2d(channels, inner, 1), norm(inner, groups=1), nn.ReLU())
        self.expand = nn.Sequential(nn.Conv2d(inner, channels, 1), norm(channels, groups=1), nn.ReLU())
        self.memory = PatternQueues(along**2, items, width, nearest)
        self.ask, self.tell = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.attended, self.after_attention = nn.Linear(width, width), nn.LayerNorm(width)
        self.mix = nn.Sequential(nn.Linear(width, max(width // 4, 1)), nn.ReLU(), nn.Linear(max(width // 4, 1), width))
        self.after_mix = nn.LayerNorm(width)
        self.register_buffer("beside", beside(along), persistent=False)

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        patterns = each(self.squeeze, features).flatten(2)
        normal = self.memory(patterns)
        normal = F.relu(self.after_attention(self._from_neighbours(patterns, normal)) + normal)
        normal = F.relu(self.after_mix(self.mix(normal)) + normal)
        return each(self.expand, normal.reshape(*normal.shape[:2], *self.shape)), patterns

    def _from_neighbours(self, patterns: Tensor, normal: Tensor) -> Tensor:
        """Attention of each patch to the patches beside it, as drawn from memory; ``patterns`` are the queries."""
        queries = self.ask(patterns).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        keys, values = self.tell(normal).unflatten(-1, (self.heads, -1)).transpose(1, 2).chunk(2, dim=-1)
        mixture = F.scaled_dot_product_attention(queries, keys, values, attn_mask=self.beside)
        attended: Tensor = self.attended(mixture.transpose(1, 2).flatten(2))
        return attended


class SQUIDNetworks(FilmLearner):
    """Encoder, in-painting, student and teacher in one turn; the discriminator in the other."""

    settings_type = SQUIDSettings
    turns = ("discriminator", "generator")

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        assert isinstance(self.options, SQUIDSettings)
        self.settings = options = self.options
        widths = [options.width * 2**stage for stage in range(4)]
        self.side = check_halvings(config, options.side, max(len(widths) + options.cuts, 5), "squid")
        self.along = 2**options.cuts
        self.inner = self.side // self.along // 2 ** len(widths)
        self.encoder = ConvEncoder(1, widths)
        self.inpainting = Inpainting(widths[-1], self.inner, self.along, options.items, options.nearest)
        self.student, self.teacher = ConvDecoder(1, widths), ConvDecoder(1, widths)
        self.discriminator = CodeEncoder(1, [*widths, widths[-1]], self.side, 1)
        generator = torch.Generator().manual_seed(config.seed)
        initialise_conv(self, generator)
        self.inpainting.memory.initialise(generator)

    def rests(self, turn: str, progress: Progress) -> bool:
        return turn == "generator" and progress.step % self.settings.critic_steps != 0

    def share(self, turn: str) -> float:
        return 1 / self.settings.critic_steps if turn == "generator" else 1.0

    def parameters_of(self, turn: str) -> Iterator[tuple[str, nn.Parameter]]:
        for name, weight in self.named_parameters():
            if name.startswith("discriminator.") == (turn == "discriminator"):
                yield name, weight

    @torch.no_grad()
    def views(self, images: Tensor, keys: Keys) -> Views:
        """Films, and which places (B, N * h * h) of their features are in-painted."""
        places = self.along**2 * self.inner**2
        chances = uniform_draws(places, keys.seed ^ _SHORTCUTS, keys.step, keys.rows)
        inpainted = chances < self.settings.inpainted
        return {"images": self.as_inputs(images), "inpainted": inpainted.to(images.device)}

    def forward(self, views: Views) -> Outputs:
        """What the turn at hand needs: (B,) each, and the patterns (B, N, D)."""
        images = views["images"]
        features = each(self.encoder, cut(images, self.along))
        inpainted, patterns = self.inpainting(features)
        mask = views["inpainted"].view(-1, self.along**2, 1, self.inner, self.inner)
        student = self.student.levels(joined(torch.where(mask, inpainted, features), self.along))
        drawing = self.student.draw(student).tanh()
        outputs = {"fake": self.discriminator(drawing)[:, 0]}
        if learns(self.discriminator):
            outputs["real"] = self.discriminator(images)[:, 0]
        if learns(self.student):
            teacher = self.teacher.levels(joined(features.detach(), self.along))
            pairs = zip(student, teacher, strict=True)
            outputs["error"] = mean_square(drawing - images)
            outputs["teacher_error"] = mean_square(self.teacher.draw(teacher).tanh() - images)
            outputs["distillation"] = torch.stack(
                [mean_square(student_level - teacher_level) for student_level, teacher_level in pairs]
            ).sum(dim=0)
            outputs["patterns"] = patterns
        return outputs

    def draw(self, images: Tensor) -> Tensor:
        """Films (B, 1, s, s) as the student draws them from memory."""
        inpainted, _ = self.inpainting(each(self.encoder, cut(images, self.along)))
        drawing: Tensor = self.student(joined(inpainted, self.along))
        return drawing.tanh()

    def losses(self, outputs: Outputs, turn: str = ALL) -> Losses:
        def mean(values: Tensor) -> Tensor:
            return distributed.with_global_value(at_least_float32(values).mean())

        if turn == "discriminator":
            loss = distributed.with_global_value(telling_loss(outputs["real"], outputs["fake"]))
            return Losses({"discriminator": loss}, self.settings.adversarial * loss)
        terms = {name: mean(outputs[name]) for name in ("error", "teacher_error", "distillation")}
        terms["generator"] = distributed.with_global_value(deceiving_loss(outputs["fake"]))
        weights = self.settings
        total = weights.restoration * terms["error"] + weights.teacher * terms["teacher_error"]
        total = total + weights.distillation * terms["distillation"] + weights.adversarial * terms["generator"]
        return Losses(terms, total, {"patterns": distributed.gather(outputs["patterns"].detach())})

    def after_step(self, losses: Losses) -> None:
        if "patterns" in losses.pending:
            self.inpainting.memory.push(losses.pending["patterns"])


class SQUID(LearnedDetector):
    """A memory of what normal films have at each place, and a discriminator of what is drawn from it."""

    method = "squid"
    Settings = SQUIDConfig
    Networks = SQUIDNetworks
    published = "128 px, 2 x 2 patches, 200 epochs"
    published_epochs = 200
    meanings: ClassVar[Mapping[str, str]] = {
        SCORE: "how far below normal films the discriminator rates what the student draws, in standard deviations",
        "error": "squared error of what the student draws, mean over the film",
    }
    model: SQUIDNetworks
    mean: Tensor
    spread: Tensor

    def __init__(self, config: Config, settings: DetectorConfig) -> None:
        super().__init__(config, settings)
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("spread", torch.ones(()))

    def learn(self, normals: NormalFilms) -> None:
        """How the discriminator rates normal films as drawn: mean and standard deviation."""
        ratings = torch.cat(
            [
                self._rated(self.model.draw(self.model.as_inputs(self.prepared(images)))).double().cpu()
                for images in normals.batches("ratings of normal films")
            ]
        )
        self.mean.copy_(ratings.mean())
        self.spread.copy_(ratings.std(correction=0).clamp_min(_NO_SPREAD))

    def _rated(self, drawing: Tensor) -> Tensor:
        rating: Tensor = self.model.discriminator(drawing)[:, 0]
        return rating

    def examine(self, images: Tensor, restore: bool) -> Examined:
        inputs = self.model.as_inputs(images)
        drawing = self.model.draw(inputs)
        errors = (drawing - inputs).square()
        scores = {SCORE: (self.mean - self._rated(drawing)) / self.spread, "error": mean_square(drawing - inputs)}
        return Examined(scores, by_place(errors, self.grid), restored_films(drawing, images) if restore else None)
