"""PatchCore: how far each patch of a film is from the nearest one in a memory of normal patches.

Written from the paper (Roth et al., "Towards Total Recall in Industrial Anomaly Detection", CVPR 2022), for the tokens
of any trunk in place of a ResNet's feature maps. Nothing is trained. Tokens after two blocks in the middle of the
trunk are averaged over 3 x 3 neighbours and joined: the locally aware patch features. The memory is a coreset of those
of normal films, picked greedily so that no patch is far from it. A film's score is the distance of its farthest patch
from the memory, weighted by how lonely its nearest memory is among its neighbours.

Shapes: B films, L positions, D width of a feature, N candidates for the memory, M patches in it, b neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn
from typing_extensions import Self

from afire.config import Config, Section
from afire.detect.base import AnomalyDetector, FitTask, Look, NormalFilms, Subsets
from afire.detect.learned import blocks_of, random_trunk, trunk_weights
from afire.detect.normals import Fitted, Standard
from afire.errors import UserError
from afire.nn.residual import Trunk, make_trunk
from afire.nn.vit import Grid, Normalise
from afire.progress import progress
from afire.tasks.settings import DetectorConfig
from afire.weights import pick_device

SCORE = "patchcore"
_PROJECTED = 128  # dimensions in which the coreset is picked, as in the paper
_CHUNK = 2048  # memory patches compared at a time


class MemoryConfig(Section):
    """The memory of normal patches."""

    blocks: list[int] = Field(
        [], description="read the tokens after these blocks of the trunk; empty = after 1/2 and 3/4 of them"
    )
    neighbourhood: int = Field(3, ge=1, le=15, description="side of the square of tokens that are averaged; odd")
    share: float = Field(0.1, gt=0, le=1, description="share of the normal patches that the memory keeps")
    most: int = Field(10_000, ge=1, description="most patches in the memory")
    candidates: int = Field(
        100_000, ge=2, description="normal patches that the memory is picked from; of more, equally many of each film"
    )
    neighbours: int = Field(9, ge=1, description="b of the score's weight, the nearest memory included; 1 = no weight")

    @model_validator(mode="after")
    def _means_something(self) -> MemoryConfig:
        if self.neighbourhood % 2 == 0:
            raise ValueError(f"neighbourhood {self.neighbourhood} has no middle; use an odd number such as 3")
        if len(set(self.blocks)) < len(self.blocks):
            raise ValueError(f"blocks {self.blocks} name a block twice")
        if self.neighbours > self.most:
            raise ValueError(f"neighbours {self.neighbours} are more than the {self.most} patches of the memory")
        return self


class PatchCoreConfig(DetectorConfig):
    """All settings of fitting the detector `patchcore`."""

    patchcore: MemoryConfig = Field(default_factory=MemoryConfig)


class LocalPatches(nn.Module):
    """Films (B, C, S, S) in [0, 1] -> locally aware patch features (B, L, D)."""

    def __init__(self, encoder: Trunk, normalise: Normalise, config: MemoryConfig) -> None:
        super().__init__()
        self.encoder, self.normalise = encoder, normalise
        self.blocks = blocks_of(config.blocks, len(encoder.blocks), (1 / 2, 3 / 4), "patchcore")
        self.side = config.neighbourhood

    def forward(self, images: Tensor) -> Tensor:
        levels = self.encoder.levels(self.normalise(images), self.blocks)
        return torch.cat([around(tokens[:, 1:], self.encoder.grid, self.side) for tokens in levels], dim=-1)


def around(tokens_BLD: Tensor, grid: Grid, side: int) -> Tensor:
    """Each token as the mean of itself and its neighbours in a square; at the edge of those there are."""
    image = tokens_BLD.transpose(1, 2).reshape(tokens_BLD.shape[0], -1, *grid)
    pooled = F.avg_pool2d(image, side, stride=1, padding=side // 2, count_include_pad=False)
    return pooled.flatten(2).transpose(1, 2)


class Memory(Fitted):
    """A coreset of normal patch features, and the distance of other patches from it."""

    patches: Tensor  # (M, D), relative to ``centre``
    centre: Tensor  # (D,): distances are differences of large numbers without it
    neighbours: Tensor  # (M, b), int64: the nearest of each in the memory, itself first
    owner: Tensor  # (M,), int64: the film that each patch is of, in the order of the fit

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("patches", torch.zeros(0))
        self.register_buffer("centre", torch.zeros(0))
        self.register_buffer("neighbours", torch.zeros(0, dtype=torch.int64))
        # Only the fit needs the film of a patch.
        self.register_buffer("owner", torch.zeros(0, dtype=torch.int64), persistent=False)

    def fill(self, features_ND: Tensor, films_N: Tensor, config: MemoryConfig, seed: int) -> None:
        """Pick the coreset from the features of normal patches, each of one of ``films_N``."""
        count = min(config.most, max(1, round(config.share * len(features_ND))))
        if count < config.neighbours:
            raise UserError(
                f"the memory holds {count} of {len(features_ND):,} normal patches, fewer than patchcore.neighbours "
                f"{config.neighbours}; raise patchcore.share or patchcore.most, or give more normal films."
            )
        generator = torch.Generator().manual_seed(seed)
        self.centre = features_ND.mean(dim=0)
        centred = features_ND - self.centre
        indices = coreset(_project(centred, generator), count, generator)
        self.patches, self.owner = centred[indices], films_N.to(indices.device)[indices]
        self.neighbours = self._nearest_neighbours(config.neighbours)

    def _nearest_neighbours(self, count: int) -> Tensor:
        nearest = []
        for start in range(0, len(self.patches), _CHUNK):
            squares = _squared_distances(self.patches[start : start + _CHUNK], self.patches)
            squares.diagonal(offset=start).fill_(-1)  # itself first, also where another is its copy
            nearest.append(squares.topk(count, dim=1, largest=False).indices)
        return torch.cat(nearest)

    def forward(self, features_BLD: Tensor, own_B: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Distance (B, L) of each patch from its nearest memory, and which that is (B, L).

        With ``own_B``, the films' numbers in the fit, patches of the film itself do not count: else a film that filled
        the memory would be nearer to it than any new one.
        """
        centred = features_BLD - self.centre
        nearest, places = [], []
        for start in range(0, len(self.patches), _CHUNK):  # not all at once: B x L x M numbers are many
            squares = _squared_distances(centred, self.patches[start : start + _CHUNK])
            if own_B is not None:
                owner = self.owner[start : start + _CHUNK]
                squares = squares.masked_fill(own_B[:, None, None] == owner, float("inf"))
            values, indices = squares.min(dim=-1)
            nearest.append(values)
            places.append(indices + start)
        best, chunk = torch.stack(nearest).min(dim=0)
        place = torch.stack(places).gather(0, chunk[None]).squeeze(0)
        # Again as a difference: the product finds the nearest, but small distances only roughly.
        distance = (centred - self.patches[place]).square().sum(dim=-1).sqrt()
        return torch.where(best.isinf(), best, distance), place

    def film_score(self, features_BLD: Tensor, distance_BL: Tensor, place_BL: Tensor) -> Tensor:
        """(B,): the farthest patch's distance s*, times 1 - exp d(m*) / sum over the b neighbours m of m* of exp d(m).

        d is the distance of that patch. m* is its nearest memory, so the weight lies between 1 - 1/b and 1: it is
        largest where the neighbours of m* are far from the patch too, and m* itself is rare among normals.
        """
        farthest, position = distance_BL.max(dim=1)
        count = self.neighbours.shape[1]
        if count == 1:
            return farthest
        width = features_BLD.shape[-1]
        patch_BD = features_BLD.gather(1, position[:, None, None].expand(-1, 1, width)).squeeze(1) - self.centre
        nearest_B = place_BL.gather(1, position[:, None]).squeeze(1)
        support_BbD = self.patches[self.neighbours[nearest_B]]
        distances_Bb = (patch_BD[:, None] - support_BbD).square().sum(dim=-1).sqrt()
        return farthest * (1 - torch.softmax(distances_Bb, dim=1)[:, 0])


def _squared_distances(queries: Tensor, keys_MD: Tensor) -> Tensor:
    """(..., D) and (M, D) -> (..., M), as one matrix product."""
    products = queries @ keys_MD.T
    squares = queries.square().sum(dim=-1, keepdim=True) + keys_MD.square().sum(dim=-1) - 2 * products
    return squares.clamp_min(0)


def _project(features_ND: Tensor, generator: torch.Generator) -> Tensor:
    """To few dimensions by random directions, which keep distances nearly as they are (Johnson and Lindenstrauss)."""
    width = features_ND.shape[1]
    if width <= _PROJECTED:
        return features_ND
    directions = torch.randn(width, _PROJECTED, generator=generator) / math.sqrt(_PROJECTED)
    return features_ND @ directions.to(features_ND)


def coreset(points_ND: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Indices (count,) of points that leave no other far away: each next is the one farthest from all before it.

    The first is drawn. The greedy answer to the k-centre problem is at most twice as far as the best one.
    """
    indices = torch.empty(count, dtype=torch.int64, device=points_ND.device)
    indices[0] = int(torch.randint(len(points_ND), (1,), generator=generator))
    squares = points_ND.square().sum(dim=1)
    nearest = torch.full_like(squares, float("inf"))
    with progress("picking the memory", count, "patches") as bar:
        for step in range(count):
            point = points_ND[indices[step]]
            # |x - p|^2, of which the rounding must not make a point that was chosen the farthest.
            distance = squares - 2 * (points_ND @ point) + point.square().sum()
            nearest = torch.minimum(nearest, distance)
            nearest[indices[step]] = -float("inf")
            if step + 1 < count:
                indices[step + 1] = nearest.argmax()
            bar.advance(1)
    return indices


class PatchCore(AnomalyDetector):
    """A trunk and a memory of the patches of normal films."""

    method = "patchcore"
    takes = "trunk"
    any_trunk = True
    Settings = PatchCoreConfig
    meanings: ClassVar[Mapping[str, str]] = {
        SCORE: "distance of the film's farthest patch from a memory of normal patches, weighted by its neighbourhood"
    }
    model: LocalPatches

    def __init__(self, encoder: Trunk, config: Config, settings: PatchCoreConfig) -> None:
        model = LocalPatches(encoder, Normalise(config.image), settings.patchcore)
        super().__init__(model, config, encoder.grid, settings)
        self.memory, self.standard = Memory(), Standard()

    @classmethod
    def build(cls, config: Config, settings: DetectorConfig) -> Self:
        assert isinstance(settings, PatchCoreConfig)
        return cls(make_trunk(config.encoder, config.image), config, settings)

    @classmethod
    def start(cls, task: FitTask, subsets: Subsets) -> Self:
        assert isinstance(task.settings, PatchCoreConfig)
        return cls(trunk_weights(task).trunk, task.config, task.settings).to(pick_device(task.device))

    @classmethod
    def remarks(cls, task: FitTask) -> Iterator[str]:
        yield from random_trunk(cls.method, task)

    @torch.no_grad()
    def fit(self, normals: NormalFilms) -> None:
        """One pass fills the memory, a second gives the standard of distances at each position."""
        assert isinstance(self.settings, PatchCoreConfig)
        config, seed = self.settings.patchcore, self.settings.seed
        self.memory.fill(*self._candidates(normals, config.candidates, seed), config, seed)
        distances, start = [], 0
        for images in normals.batches("distances of normal films"):
            numbers = torch.arange(start, start + len(images), device=self.device)
            distances.append(self.memory(self.model(self.prepared(images)), numbers)[0].cpu())
            start += len(images)
        maps_NL = torch.cat(distances)
        # The one film of a memory that holds no other is infinitely far from it.
        self.standard.fit(maps_NL[maps_NL.isfinite().all(dim=1)])
        self.standard.to(self.device)

    def _candidates(self, normals: NormalFilms, limit: int, seed: int) -> tuple[Tensor, Tensor]:
        """Features (N, D) of normal patches and the film of each (N,): all patches, or equally many of each film."""
        generator = torch.Generator().manual_seed(seed)
        positions = self.grid[0] * self.grid[1]
        per_film = min(positions, max(1, limit // len(normals)))
        features = []
        for images in normals.batches("patches of normal films"):
            features_BLD = self.model(self.prepared(images))
            sample = (
                torch.rand(len(images), positions, generator=generator).argsort(dim=1)[:, :per_film].sort(dim=1).values
            )
            places = sample.to(self.device)[:, :, None].expand(-1, -1, features_BLD.shape[-1])
            features.append(features_BLD.gather(1, places))
        return torch.cat(features).flatten(0, 1), torch.arange(len(normals)).repeat_interleave(per_film)

    def look(self, images: Tensor, names: Sequence[str] | None, restore: bool) -> Look:
        features = self.model(images)
        distances, places = self.memory(features)
        score = self.memory.film_score(features, distances, places)
        return Look({SCORE: score}, self.standard(distances))
