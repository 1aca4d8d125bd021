"""Adam v2 (Taher, Gotway and Liang 2024): parts and wholes of the anatomy, each told from the other.

Written from the paper. As published: a whole is cut from a film; the student sees views of it at many scales around its
centre and says what the teacher says of the whole (localizability, which is DINO's loss); of the four quarters of the
whole that the student embeds, one head makes the teacher's embedding of the whole (composability); of the student's
embedding of the whole, another head makes the teacher's embeddings of the quarters (decomposability); both by the
squared error of unit vectors. Localizability is learnt alone first; wholes get smaller from stage to stage, each of
half the side of the one before.

Ours: the stages, and the time in which localizability is alone, are shares of one run with one schedule, and views are
the same in both, where the published first time has two wide views of the teacher, cut anywhere; each
decomposed quarter is brought to length one by itself; the embedding is the mean token by default, as the published
ConvNeXt averages its map; the head has 4,096 outputs by default.

Shapes: B films, V views, P parts, D width, K outputs.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from pydantic import Field, field_validator
from torch import Tensor, nn

from afire.config import Config
from afire.lesions.places import keyed, unit
from afire.methods.adam1 import stage_of
from afire.methods.base import ALL, Keys, Losses, Outputs, Panel, Phase, Views
from afire.methods.crops import CropSettings, crops, inside
from afire.methods.dino import DistillationSettings, Distilled, by_film
from afire.methods.health import Health
from afire.methods.twins import Pool, global_mean
from afire.nn.vit import at_least_float32, full_precision

_WHOLES = 0xADA2  # keeps the draws of places apart from those of the views
_WHOLE, _WIDE, _QUARTERS, _LOCAL = range(4)  # streams of draws; each local view has one of its own
_SIDE = 2  # parts along a side of a whole
_PARTS = _SIDE**2
_PART_FILMS = 16  # looked at for health
_SCALES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)  # shares of a whole's area between which local views lie
_SMALLEST_LEVEL = 6
ALONE, TOGETHER = "localizability", "all branches"


class Adam2Settings(DistillationSettings):
    """Settings of Adam v2 itself."""

    levels: tuple[int, ...] = Field(
        (0, 1, 2), min_length=1, description="by stage, how often the side of a whole is halved; 0 = the film"
    )
    alone: float = Field(0.25, ge=0, lt=1, description="share of the run in which localizability is learnt alone")
    local_views: int = Field(8, ge=1, le=8, description="local views of a whole, from the smallest scale up")
    localizability: float = Field(1.0, gt=0, description="weight of what the teacher says of the whole")
    composability: float = Field(1.0, ge=0, description="weight of parts to whole")
    decomposability: float = Field(1.0, ge=0, description="weight of whole to parts")
    pool: Pool = Field("mean", description="what stands for a view: the mean of its tokens, or the class token")
    whole: CropSettings = Field(
        CropSettings(area_min=1, aspect=1, mirror=0, turn=10, blur=0.1), description="views of a whole and its parts"
    )
    wide: CropSettings = Field(
        CropSettings(area_min=0.8, mirror=0, turn=10, blur=1.0), description="the student's wide view of a whole"
    )
    local: CropSettings = Field(
        CropSettings(aspect=1.5, mirror=0, turn=10), description="local views; their areas are given by their scales"
    )

    @field_validator("levels")
    @classmethod
    def _possible(cls, levels: tuple[int, ...]) -> tuple[int, ...]:
        for level in levels:
            if not 0 <= level <= _SMALLEST_LEVEL:
                raise ValueError(f"the side of a whole is halved 0 to {_SMALLEST_LEVEL} times, not {level}")
        return levels


def whole_boxes(level: int, keys: Keys) -> Tensor:
    """A box (B, 4) anywhere in each film, its side that of the film halved ``level`` times."""
    draws = unit(keyed(keys.seed ^ _WHOLES, keys.epoch, keys.rows, 1, 1))[:, 0, 0, :2]
    side = torch.full_like(draws, 0.5**level)
    return torch.cat([draws * (1 - side), side], dim=-1)


def part_boxes(count: int) -> Tensor:
    """The quarters (B, 4, 4) of a whole, row by row, in shares of it."""
    share = 1 / _SIDE
    quarters = [[column * share, row * share, share, share] for row in range(_SIDE) for column in range(_SIDE)]
    return torch.tensor(quarters).expand(count, -1, -1)


def agreement(output: Tensor, target: Tensor) -> Tensor:
    """Squared error (B,) between vectors (B, ..., D) brought to length one: the mean over all but the films."""
    with full_precision(output):
        first, second = (F.normalize(at_least_float32(vectors), dim=-1) for vectors in (output, target))
        return (first - second).square().flatten(1).mean(dim=1)


class Adam2(Distilled):
    """Student, teacher, centre, and heads that compose and decompose."""

    settings_type = Adam2Settings
    options: Adam2Settings
    films_in = "whole"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.begin_phase(TOGETHER)

    def beside(self) -> tuple[nn.Module, ...]:
        width = self.config.encoder.width
        self.compose = nn.Sequential(nn.Linear(_PARTS * width, width), nn.ReLU(), nn.Linear(width, width))
        self.decompose = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, _PARTS * width))
        return self.compose, self.decompose

    def phases(self) -> tuple[Phase, ...]:
        """Localizability alone, then all; where the weights of the others are 0, one phase."""
        epochs = self.config.training.epochs
        alone = min(round(self.options.alone * epochs), epochs - 1) if self.has_parts else epochs
        return Phase(ALONE, alone), Phase(TOGETHER, epochs - alone)

    @property
    def has_parts(self) -> bool:
        """Whether parts are learnt at any time."""
        return bool(self.options.composability or self.options.decomposability)

    def begin_phase(self, name: str) -> None:
        self._phase = name
        together = name == TOGETHER
        self.compose.requires_grad_(together and self.options.composability > 0)
        self.decompose.requires_grad_(together and self.options.decomposability > 0)

    def flops(self) -> float:
        """The mean over the epochs of both phases."""
        now, counted = self._phase, 0.0
        for phase in self.phases():
            if phase.epochs:
                self.begin_phase(phase.name)
                counted += super().flops() * phase.epochs / self.config.training.epochs
        self.begin_phase(now)
        return counted

    @torch.no_grad()
    def views(self, images: Tensor, keys: Keys) -> Views:
        """``whole`` and ``wide`` (B, C, S, S), ``local`` (B * V, C, s, s), and in its phase ``parts`` (B * P, ...)."""
        options, size = self.options, self.config.image.size
        level = options.levels[stage_of(keys.epoch, self.config.training.epochs, len(options.levels))]
        box_B4 = whole_boxes(level, keys)
        box_B14 = box_B4[:, None]

        def seen(settings: CropSettings, within: Tensor, stream: int, centred: bool = False) -> Tensor:
            views = within.shape[1]
            return crops(
                images,
                keys,
                views=views,
                size=size,
                settings=settings,
                within=within,
                stream=stream,
                centred=centred,
            )

        views = {
            "whole": seen(options.whole, box_B14, _WHOLE),
            "wide": seen(options.wide, box_B14, _WIDE, centred=True),
            "local": self._local_views(images, keys, box_B14),
        }
        if self._phase == TOGETHER:
            views["parts"] = seen(options.whole, inside(part_boxes(len(images)), box_B14), _QUARTERS)
        student = 2 + options.local_views + _PARTS
        depth = self.depth(keys, student, images)
        if depth is not None:
            draws = depth.view(len(images), student, *depth.shape[1:])
            ends = (0, 1, 2, 2 + options.local_views, student)
            for name, first, last in zip(("wide", "whole", "local", "parts"), ends[:-1], ends[1:], strict=True):
                views[f"{name}_depth"] = draws[:, first:last].flatten(0, 1)
        return views

    def _local_views(self, images: Tensor, keys: Keys, box_B14: Tensor) -> Tensor:
        """Views around the centre of the whole, each of a scale of its own."""
        local = []
        for number in range(self.options.local_views):
            low, high = _SCALES[number], _SCALES[number + 1]
            settings = self.options.local.model_copy(update={"area_min": low, "area_max": high})
            view = crops(
                images,
                keys,
                views=1,
                size=self.local_size,
                settings=settings,
                within=box_B14,
                stream=_LOCAL + number,
                centred=True,
            )
            local.append(view)
        return torch.stack(local, dim=1).flatten(0, 1)

    def forward(self, views: Views) -> Outputs:
        """Logits of the student (B, 1, K) and (B, V, K) and of the teacher (B, 1, K); in its phase, embeddings too."""
        self.check(views["whole"])
        films, student, teacher = len(views["whole"]), self.student, self.teacher
        whole, wide, local = (self.normalise(views[name]) for name in ("whole", "wide", "local"))
        outputs = {
            "student": student(wide, views.get("wide_depth"))[:, None],
            "local": by_film(student(local, views.get("local_depth")), films),
        }
        with torch.no_grad():
            embedding = teacher.pooled(whole)
            outputs["teacher"] = teacher.head(embedding)[:, None]
        if self._phase == TOGETHER:
            parts = self.normalise(views["parts"])
            if self.options.composability:
                own = by_film(student.pooled(parts, views.get("parts_depth")), films)
                outputs |= {"composed": self.compose(own.flatten(1)), "whole": embedding}
            if self.options.decomposability:
                decomposed = self.decompose(student.pooled(whole, views.get("whole_depth")))
                with torch.no_grad():
                    outputs["parts"] = by_film(teacher.pooled(parts), films)
                outputs["decomposed"] = decomposed.view_as(outputs["parts"])
        return outputs

    def losses(self, outputs: Outputs, turn: str = ALL) -> Losses:
        """Localizability, composability and decomposability; what is not learnt at the time is 0."""
        logits = torch.cat([outputs["student"], outputs["local"]], dim=1)
        pairs = torch.ones(1, logits.shape[1], device=logits.device)
        terms = {"localizability": self.distilled(logits, outputs["teacher"], pairs)}
        for name, output, target in (
            ("composability", "composed", "whole"),
            ("decomposability", "decomposed", "parts"),
        ):
            nothing = torch.zeros((), device=logits.device)
            learnt = output in outputs
            terms[name] = global_mean(agreement(outputs[output], outputs[target].detach())) if learnt else nothing
        options = self.options
        weights = (options.localizability, options.composability, options.decomposability)
        total = torch.stack([weight * term for weight, term in zip(weights, terms.values(), strict=True)]).sum()
        return Losses(terms, total, {"centre": self.new_centre(outputs["teacher"])})

    def health(self, views: Views, losses: Mapping[str, float]) -> Health:
        """As for DINO; and one film's parts should not all look the same to the teacher."""
        report = super().health(views, losses)
        if "parts" not in views or report.colour == "red":
            return report
        with torch.no_grad():
            parts = views["parts"][: _PART_FILMS * _PARTS]
            embedded = by_film(F.normalize(self.teacher.pooled(self.normalise(parts)), dim=-1), len(parts) // _PARTS)
        alike_B = torch.bmm(embedded, embedded.transpose(1, 2)).sum(dim=(1, 2)) - _PARTS
        alike = float(alike_B.mean()) / (_PARTS * (_PARTS - 1))
        numbers = {**report.numbers, "part_similarity": alike}
        shown = f"{report.shown}, parts alike {alike:.2f}"
        if alike > 0.999:
            return Health(numbers, "red", f"collapse: all parts of a whole look the same (cosine {alike:.4f})", shown)
        return Health(numbers, report.colour, report.reason, shown)

    def panels(self, views: Views, count: int) -> list[Panel]:
        """The whole, the student's wide view, the smallest and the largest local view, and the first part."""
        step = self.options.local_views
        panels = [
            Panel("whole", views["whole"][:count]),
            Panel("wide view", views["wide"][:count]),
            Panel("smallest local view", views["local"][::step][:count]),
            Panel("largest", views["local"][step - 1 :: step][:count]),
        ]
        if "parts" in views:
            panels.append(Panel("upper left part", views["parts"][::_PARTS][:count]))
        return panels

    @property
    def views_per_film(self) -> int:
        return 2 + self.options.local_views + (_PARTS if self.has_parts else 0)
