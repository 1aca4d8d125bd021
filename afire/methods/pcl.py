"""PCL, prototypical contrastive learning (Li, Zhou, Xiong and Hoi 2021): MoCo whose films are also drawn to clusters.

Written from the paper. As published: MoCo's loss, and before every epoch a pass over all films (E step) in which the
teacher's keys of the films as they are form clusters by k-means, several numbers of them at once. A film's query is
drawn to the prototype of its own cluster and away from all others (ProtoNCE), with a temperature for each cluster that
grows with its spread; the loss is the mean over the clusterings. In the first epochs there is MoCo's loss alone. A
cluster of one film takes the largest spread there is, extreme ones are cut off at the 10th and 90th of a hundred, and
their mean is the temperature of MoCo's loss.

Ours, beside what :mod:`afire.methods.twins` says: far fewer clusters, for thousands of films; all other prototypes are
negatives, not a sample of them; the warm-up is a share of the run.

Shapes: N films of the run, B of the batch, M clusterings, K clusters of one of them, F width of a key.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from pydantic import Field, field_validator
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from afire.config import Config
from afire.errors import UserError
from afire.methods.base import ALL, AllFilms, Keys, Losses, Outputs, ReadFilms, Views
from afire.methods.moco import MoCo, MoCoSettings
from afire.methods.twins import global_mean
from afire.nn.memory import kmeans
from afire.nn.vit import at_least_float32, full_precision

UNKNOWN = -1
"""The cluster of a film that no pass has seen."""
_SMALL = 10.0  # as published: keeps the spread of small clusters from being small
_EXTREMES = (0.1, 0.9)


class PCLSettings(MoCoSettings):
    """Settings of PCL itself."""

    clusters: tuple[int, ...] = Field(
        (32, 64, 128), min_length=1, description="clusters of each clustering; published: 25, 50 and 100 thousand"
    )
    warmup: float = Field(0.1, ge=0, le=1, description="share of the epochs, rounded up, without prototypes")
    prototypes: float = Field(1.0, ge=0, description="weight of the loss against prototypes; published: 1")
    films: int = Field(0, ge=0, description="films of the run; filled in when it begins")

    @field_validator("clusters")
    @classmethod
    def _several(cls, clusters: tuple[int, ...]) -> tuple[int, ...]:
        if min(clusters) < 2:
            raise ValueError(f"a clustering has at least 2 clusters, not {min(clusters)}")
        return clusters


def spreads(points_NF: Tensor, centres_KF: Tensor, nearest_N: Tensor, temperature: float) -> Tensor:
    """The temperature (K,) of each cluster: how far its points lie from its centre, scaled to a mean."""
    clusters = len(centres_KF)
    member_NK = (nearest_N[:, None] == torch.arange(clusters, device=nearest_N.device)).to(points_NF)
    distance_N = (points_NF - centres_KF[nearest_N]).norm(dim=1)
    count_K = member_NK.sum(dim=0)
    spread = (distance_N @ member_NK) / (count_K * (count_K + _SMALL).log()).clamp_min(1)
    spread = torch.where(count_K > 1, spread, spread.max())
    low, high = torch.quantile(spread, torch.tensor(_EXTREMES, device=spread.device, dtype=spread.dtype)).tolist()
    spread = spread.clamp(low, high)
    mean = spread.mean()
    # Where all films have the same key nothing is spread: every cluster then has the mean temperature.
    return torch.where(mean > 0, temperature * spread / mean.clamp_min(1e-12), temperature)


def prototype_loss(query_BF: Tensor, prototypes_KF: Tensor, temperatures_K: Tensor, own_B: Tensor) -> Tensor:
    """-log of the share that a query's own prototype has among all; (B,), 0 where its cluster is unknown."""
    with full_precision(query_BF):
        logits = at_least_float32(query_BF) @ prototypes_KF.to(query_BF.device).T / temperatures_K
        known = own_B != UNKNOWN
        own = logits.gather(1, own_B.clamp_min(0)[:, None])[:, 0]
        return (torch.logsumexp(logits, dim=1) - own) * known


class PCL(MoCo):
    """Student, teacher, queue, and prototypes."""

    settings_type = PCLSettings
    options: PCLSettings
    prepares = True
    assigned: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        options = self.options
        for number, clusters in enumerate(options.clusters):
            self.register_buffer(f"prototypes{number}", torch.zeros(clusters, options.key_width))
            self.register_buffer(f"temperatures{number}", torch.full((clusters,), options.temperature))
        # Which cluster each film is in: kept, because a resume in the middle of an epoch cannot find it again.
        self.register_buffer("assigned", torch.full((options.films, len(options.clusters)), UNKNOWN))
        self.rows: Tensor | None = None

    @classmethod
    def settled(cls, config: Config, films: int, labels: tuple[str, ...]) -> Config:
        """The number of films is a setting: what is kept of each of them has a place in the weights."""
        most = max(cls.settings_type.model_validate(config.options).clusters)
        if most > films:
            raise UserError(
                f"options.clusters asks for {most} clusters, but there are {films} films; ask for fewer, such as "
                f"--set options.clusters=[{max(films // 16, 2)}]."
            )
        options: dict[str, Any] = {**config.options, "films": films}
        return config.model_copy(update={"options": options})

    @property
    def warmup_epochs(self) -> int:
        """Epochs without prototypes."""
        return math.ceil(self.options.warmup * self.config.training.epochs)

    def begin_run(self, rows: Tensor, read: ReadFilms) -> None:
        self.rows = rows

    @torch.no_grad()
    def prepare(self, epoch: int, films: AllFilms) -> None:
        """Clusters of all films, as the teacher sees them; none in the first epochs."""
        if epoch < self.warmup_epochs or not self.options.prototypes:
            return
        keys = torch.cat([at_least_float32(self.teacher(self.normalise(images))) for images, _ in films()])
        if len(keys) != len(self.assigned):
            raise UserError(f"options.films is {len(self.assigned)}, but the run has {len(keys)}; leave it out.")
        for number, clusters in enumerate(self.options.clusters):
            generator = torch.Generator().manual_seed(self.config.seed * 1_000_003 + epoch * 1_009 + number)
            centres, nearest = kmeans(keys, clusters, generator)
            prototypes = torch.nn.functional.normalize(centres, dim=1)
            self.get_buffer(f"prototypes{number}").copy_(prototypes)
            temperatures = spreads(keys, centres, nearest, self.options.temperature)
            self.get_buffer(f"temperatures{number}").copy_(temperatures)
            self.assigned[:, number] = nearest

    @torch.no_grad()
    def views(self, images: Tensor, keys: Keys) -> Views:
        """As for MoCo, and the cluster of each film in each clustering, (B, M)."""
        return {**super().views(images, keys), "clusters": self._clusters_of(keys.rows).to(images.device)}

    def _clusters_of(self, rows_B: Tensor) -> Tensor:
        if self.rows is None or not len(self.assigned):
            return torch.full((len(rows_B), len(self.options.clusters)), UNKNOWN)
        return self.assigned[torch.searchsorted(self.rows, rows_B).to(self.assigned.device)]

    def forward(self, views: Views) -> Outputs:
        return {**super().forward(views), "clusters": views["clusters"]}

    def losses(self, outputs: Outputs, turn: str = ALL) -> Losses:
        """MoCo's loss, and that against prototypes, which is 0 until there are any."""
        plain = super().losses(outputs)
        of_each = [
            prototype_loss(
                outputs["query"],
                self.get_buffer(f"prototypes{number}"),
                self.get_buffer(f"temperatures{number}"),
                outputs["clusters"][:, number],
            )
            for number in range(len(self.options.clusters))
        ]
        prototypes = global_mean(torch.stack(of_each).mean(dim=0))
        terms = {**plain.terms, "prototypes": prototypes}
        return Losses(terms, plain.total + self.options.prototypes * prototypes, plain.pending)

    def flops(self) -> float:
        """An update of a film, and the teacher's look at it before every epoch but the first ones."""
        epochs = self.config.training.epochs
        passes = (epochs - self.warmup_epochs) / epochs if self.options.prototypes else 0.0
        image = torch.zeros(1, self.config.image.channels, self.config.image.size, self.config.image.size)
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            self.teacher(self.normalise(image.to(self.assigned.device)))
        return super().flops() + passes * float(counter.get_total_flops())

    def more_numbers(self, losses: Mapping[str, float]) -> dict[str, float]:
        """As for all, and the share of films in the largest cluster."""
        known = self.assigned[:, 0][self.assigned[:, 0] != UNKNOWN]
        largest = float(torch.bincount(known).max() / len(known)) if len(known) else 0.0
        return {**super().more_numbers(losses), "largest_cluster": largest}

    def more_rules(self, numbers: Mapping[str, float]) -> list[tuple[str, bool, str]]:
        """Where nearly all films are in one cluster, prototypes draw everything together."""
        largest = numbers["largest_cluster"]
        return [
            ("red", largest > 0.9, f"collapse: {largest:.0%} of the films are in one cluster"),
            ("amber", largest > 0.5, f"{largest:.0%} of the films are in one cluster"),
        ]
