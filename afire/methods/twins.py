"""What methods that compare views of a film share: a student, a teacher that follows it, and a queue of the past.

:class:`Twins` has the two networks; :class:`Queued` has keys of earlier films to tell a film from, and the loss that
does so (InfoNCE). Of the papers that begin here (MoCo v2, C2L, PCL, Adam), ours differs in two things. The queue knows
whose key it holds, so a film is never told from itself, which matters where the queue is as long as an epoch; and it
begins empty instead of with made-up keys. The teacher's momentum rises to 1 on a cosine, as for every method here.

Shapes: B films, N views, D width of the trunk, F width of a key, Q places of the queue.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from typing_extensions import Self

from afire.config import Config
from afire.methods.base import Keys, Losses, Method, Panel, Progress, Views, cosine, depth_draws
from afire.methods.crops import ViewSettings
from afire.methods.health import Health, effective_rank
from afire.nn import distributed
from afire.nn.memory import KeyQueue, follow_network, twin
from afire.nn.vit import ClusterLayer, VisionTransformer, at_least_float32, check_films, full_precision, initialise

Pool = Literal["mean", "class"]
HEALTH_FILMS = 64
SAME_KEYS = 0.99
"""Mean cosine between keys of different films from which on they are called the same."""


def pooled(tokens: Tensor, pool: Pool) -> Tensor:
    """Tokens (N, 1 + L, D), the class token first -> the vector (N, D) that stands for the image."""
    return tokens[:, 0] if pool == "class" else tokens[:, 1:].mean(dim=1)


class Branch(nn.Module):
    """An encoder, and a head on the one vector that stands for an image: the mean token or the class token."""

    def __init__(self, encoder: VisionTransformer, head: nn.Module, pool: Pool) -> None:
        super().__init__()
        self.encoder, self.head, self.pool = encoder, head, pool

    def pooled(self, images: Tensor, depth: Tensor | None = None) -> Tensor:
        """Normalised images (N, C, H, W) -> (N, D)."""
        return pooled(self.encoder(images, depth), self.pool)

    def forward(self, images: Tensor, depth: Tensor | None = None) -> Tensor:
        """Normalised images (N, C, H, W) -> what the head makes of them."""
        output: Tensor = self.head(self.pooled(images, depth))
        return output


class Projector(nn.Module):
    """Two layers and L2 normalisation: vectors (N, D) -> keys (N, F) of length one, in float32 at least."""

    def __init__(self, width: int, hidden: int, key_width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, key_width))

    def forward(self, vectors: Tensor) -> Tensor:
        return F.normalize(at_least_float32(self.mlp(vectors)), dim=-1)


class Twins(Method):
    """A student that learns and a teacher that follows it."""

    networks = ("student", "teacher")
    sections: ClassVar[tuple[str, ...]] = ()
    films_in: ClassVar[str] = "query"
    """The view that tells how many films there are and is shown first."""

    student: Branch
    teacher: Branch

    def make_twins(self, head: nn.Module, pool: Pool, *others: nn.Module) -> None:
        """The networks, with initial weights from the seed; ``others`` are trained beside the student."""
        config = self.config
        self.teacher_momentum = config.training.teacher_momentum
        self.student = Branch(VisionTransformer.from_config(config.encoder, config.image), head, pool)
        generator = torch.Generator().manual_seed(config.seed)
        for network in (self.student, *others):
            initialise(network, generator)
            for module in network.modules():
                if isinstance(module, ClusterLayer):
                    module.initialise(generator)
        self.teacher = twin(self.student)

    def train(self, mode: bool = True) -> Self:
        """As for any module, but the teacher is always in evaluation mode."""
        super().train(mode)
        self.teacher.eval()
        return self

    def depth(self, keys: Keys, views: int, like: Tensor) -> Tensor | None:
        """Draws of stochastic depth (B * views, blocks, 2) of the student, if there is any."""
        if not self.config.encoder.drop_path:
            return None
        return depth_draws(self.config.encoder.depth, keys.seed, keys.step, keys.rows, views).to(like.device)

    def check(self, images: Tensor) -> None:
        """A message when they are not films in [0, 1]."""
        check_films(images, self.config.image.channels, "images", values=self.config.run.check_images)

    def schedule(self, progress: Progress) -> Mapping[str, float]:
        """The teacher's momentum rises to 1 on a cosine."""
        self.teacher_momentum = cosine(self.config.training.teacher_momentum, 1.0, progress.step, progress.steps)
        return {"teacher_momentum": self.teacher_momentum}

    @torch.no_grad()
    def after_step(self, losses: Losses) -> None:
        """The teacher follows the student, parameters and buffers."""
        follow_network(self.teacher, self.student, self.teacher_momentum)

    @classmethod
    def trunk_prefix(cls, network: str | None = None) -> str:
        return f"{cls.network(network)}.encoder."


class QueueSettings(ViewSettings):
    """Settings that methods with a queue of keys share."""

    temperature: float = Field(0.2, gt=0, description="of the softmax over a film's own key and those of others")
    queue: int = Field(4096, ge=1, description="keys of earlier films to tell a film from; published: 65,536")
    key_width: int = Field(128, ge=2, description="width of a key")
    hidden: int = Field(512, ge=2, description="width of the projector's hidden layer; published: that of the trunk")
    pool: Pool = Field("mean", description="what stands for a film: the mean of its tokens, or the class token")


def info_nce(
    query_BF: Tensor, positive_BF: Tensor, negatives_QF: Tensor, counts_BQ: Tensor, temperature: float
) -> Tensor:
    """-log of the share that a query's own key has among its own and all negatives that count; (B,), in float32.

    All are of length one. A query that no negative counts for has loss 0.
    """
    with full_precision(query_BF):
        query_BF = at_least_float32(query_BF)
        own = (query_BF * positive_BF.to(query_BF)).sum(dim=-1, keepdim=True)
        others = (query_BF @ negatives_QF.to(query_BF).T).masked_fill(~counts_BQ, -torch.inf)
        logits = torch.cat([own, others], dim=1) / temperature
        return torch.logsumexp(logits, dim=1) - logits[:, 0]


def global_mean(losses_B: Tensor) -> Tensor:
    """The mean over the films of all processes, of which each has equally many."""
    return distributed.with_global_value(losses_B.mean())


class Queued(Twins):
    """Twins that tell a film's own key from those of earlier films."""

    options: QueueSettings

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        options = self.options
        self.make_twins(Projector(config.encoder.width, options.hidden, options.key_width), options.pool)
        self.queue = KeyQueue(options.queue, options.key_width)

    def told_apart(self, query_BF: Tensor, positive_BF: Tensor, counts_BQ: Tensor) -> Tensor:
        """InfoNCE of each query (B,) against the queue."""
        return info_nce(query_BF, positive_BF, self.queue.keys, counts_BQ, self.options.temperature)

    @torch.no_grad()
    def after_step(self, losses: Losses) -> None:
        """The teacher follows, and the keys of this step take the place of the oldest."""
        super().after_step(losses)
        self.queue.push(losses.pending["keys"], losses.pending["owners"])

    @torch.no_grad()
    def look(self, views: Views) -> dict[str, float]:
        """What health is judged by: directions in use, how alike keys are, and whether queries find their own."""
        shown = {name: view[:HEALTH_FILMS] for name, view in views.items()}
        query, key = (
            network(self.normalise(shown[name])) for network, name in ((self.student, "query"), (self.teacher, "key"))
        )
        films = len(key)
        alike = ((key @ key.T).sum() - films) / max(films * (films - 1), 1)
        own = (query @ key.T).argmax(dim=1) == torch.arange(films, device=key.device)
        rank = effective_rank(self.encode(shown["query"]).flatten(0, 1))
        return {"effective_rank": rank, "key_similarity": float(alike), "found": float(own.float().mean())}

    def health(self, views: Views, losses: Mapping[str, float]) -> Health:
        """The known collapse: all films get one key, and there is nothing left to tell apart."""
        numbers = {**self.look(views), **self.more_numbers(losses)}
        films = min(len(views[self.films_in]), HEALTH_FILMS)
        rank, alike, own = (numbers[name] for name in ("effective_rank", "key_similarity", "found"))
        shown = f"rank {rank:.0f}, keys alike {alike:.2f}, own film found {own:.0%}"
        for colour, holds, reason in (
            ("red", rank < 2, f"collapse: the features have one direction left (effective rank {rank:.1f})"),
            ("red", films > 1 and alike > SAME_KEYS, f"collapse: all films have the same key (cosine {alike:.3f})"),
            *self.more_rules(numbers),
            ("amber", films > 4 and own < 2 / films, "queries find their own film no better than by chance so far"),
        ):
            if holds:
                return Health(numbers, colour, reason, shown)  # type: ignore[arg-type]
        return Health(numbers, "green", "films are told apart by their views", shown)

    def more_numbers(self, losses: Mapping[str, float]) -> dict[str, float]:
        """Further numbers that a method is judged by."""
        return {name: value for name, value in losses.items() if name != "total"}

    def more_rules(self, numbers: Mapping[str, float]) -> list[tuple[str, bool, str]]:
        """A method's own failures: colour, whether it holds, and the reason; the first that holds is said."""
        return []

    def panels(self, views: Views, count: int) -> list[Panel]:
        """What the two networks were shown of a film."""
        return [Panel(name, views[name][:count]) for name in ("query", "key")]

    @property
    def views_per_film(self) -> int:
        return 2
