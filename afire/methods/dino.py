"""DINO (Caron et al. 2021): a student that sees parts of a film says what a teacher says that sees all of it.

Written from the paper. As published: two global and several local views; the student sees all, the teacher the global
ones; both say a distribution over many outputs (three layers, L2 normalisation, a weight-normalised last layer that
keeps still in the first epochs); the teacher's is sharpened by a low temperature, which warms up, and centred by a
running mean over all processes, which together keep it from saying the same of every film; every pair of different
views is compared by cross-entropy. Local views are smaller pictures, whose positions are those of the whole picture,
interpolated.

Ours: hue and saturation mean nothing on grey films; the teacher's temperature stays at 0.04 unless a higher one is
asked for (0.07 is published for long runs), and its warm-up is a share of the run, not 30 epochs; 4,096 outputs by
default, not 65,536, for sets of thousands of films, not of a million.

Shapes: B films, V views, S of them the student's and T the teacher's, K outputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from pydantic import Field
from torch import Tensor, nn

from afire.config import Config, HeadConfig
from afire.errors import UserError
from afire.methods.base import ALL, Keys, Losses, Outputs, Panel, Progress, Views
from afire.methods.crops import CropSettings, ViewSettings, crops
from afire.methods.health import Health, effective_rank
from afire.methods.twins import HEALTH_FILMS, Pool, Twins, global_mean
from afire.nn import distributed
from afire.nn.vit import ProjectionHead, at_least_float32, full_precision

_FIRST, _SECOND, _LOCAL = range(3)  # streams of draws
_LOCAL_SHARE = 3 / 7  # 96 of 224 pixels, as published


class DistillationSettings(ViewSettings):
    """Settings of methods in which a student says what a teacher says."""

    outputs: int = Field(4096, ge=2, description="outputs that a view is distributed over; published: 65,536")
    hidden: int = Field(1024, ge=2, description="width of the head's two hidden layers; published: 2,048")
    bottleneck: int = Field(256, ge=2, description="width of the normalised feature before the outputs")
    student_temperature: float = Field(0.1, gt=0, description="of the student's softmax")
    teacher_temperature: float = Field(
        0.04, gt=0, description="of the teacher's softmax after its warm-up; published for long runs: 0.07"
    )
    teacher_temperature_start: float = Field(0.04, gt=0, description="of the teacher's softmax at the start")
    teacher_temperature_warmup: float = Field(0.3, ge=0, le=1, description="share of the run in which it warms up")
    centre_momentum: float = Field(0.9, ge=0, lt=1, description="share of the old centre that each step keeps")
    local_size: int | None = Field(
        None, ge=2, description="side of a local view in pixels; null = 3/7 of the film's, as published"
    )
    pool: Pool = Field("class", description="what stands for a view: the class token, or the mean of its tokens")


class DINOSettings(DistillationSettings):
    """Settings of DINO itself."""

    local_views: int = Field(8, ge=0, le=32, description="local views of a film")
    first: CropSettings = Field(CropSettings(area_min=0.4, blur=1.0), description="the first global view")
    second: CropSettings = Field(
        CropSettings(area_min=0.4, blur=0.1, solarise=0.2), description="the second global view"
    )
    local: CropSettings = Field(CropSettings(area_min=0.05, area_max=0.4), description="the local views")


def teacher_says(logits: Tensor, centre_K: Tensor, temperature: float) -> Tensor:
    """Logits (..., K), centred and sharpened, as probabilities in float32."""
    with full_precision(logits):
        return torch.softmax((at_least_float32(logits) - centre_K) / temperature, dim=-1)


def distillation_loss(logits_BSK: Tensor, says_BTK: Tensor, pairs_TS: Tensor, temperature: float) -> Tensor:
    """Cross-entropy (B,) between what the teacher says of its views and the student of its own, mean over ``pairs``."""
    with full_precision(logits_BSK):
        log_q = torch.log_softmax(at_least_float32(logits_BSK) / temperature, dim=-1)
        crossed_BTS = -torch.bmm(says_BTK.to(log_q), log_q.transpose(1, 2))
        return (crossed_BTS * pairs_TS.to(log_q)).sum(dim=(1, 2)) / pairs_TS.sum()


def by_film(views_N: Tensor, films: int) -> Tensor:
    """(B * V, ...) -> (B, V, ...)."""
    return views_N.view(films, -1, *views_N.shape[1:])


def local_side(config: Config, side: int | None) -> int:
    """The side of a local view, a multiple of the patch; a message when the one asked for is none."""
    size, patch = config.image.size, config.encoder.patch_size
    if side is None:
        return max(round(_LOCAL_SHARE * size / patch), 1) * patch
    if side % patch or side > size:
        raise UserError(
            f"options.local_size {side} is not a multiple of encoder.patch_size {patch} up to image.size {size}."
        )
    return side


class Distilled(Twins):
    """Twins of which the student says what the teacher says; the teacher is the one that is handed on."""

    networks = ("teacher", "student")
    options: DistillationSettings
    centre: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        options = self.options
        self.local_size = local_side(config, options.local_size)
        self.teacher_temperature = options.teacher_temperature_start
        shape = HeadConfig(
            form="shared", hidden=options.hidden, bottleneck=options.bottleneck, clusters=options.outputs
        )
        self.make_twins(ProjectionHead(config.encoder.width, 1, shape), options.pool, *self.beside())
        self.register_buffer("centre", torch.zeros(options.outputs))

    def beside(self) -> tuple[nn.Module, ...]:
        """Networks that learn with the student and that no teacher follows."""
        return ()

    def distilled(self, logits_BSK: Tensor, teacher_BTK: Tensor, pairs_TS: Tensor) -> Tensor:
        """The mean loss of the films of all processes."""
        says = teacher_says(teacher_BTK.detach(), self.centre, self.teacher_temperature)
        return global_mean(distillation_loss(logits_BSK, says, pairs_TS, self.options.student_temperature))

    def new_centre(self, teacher_BTK: Tensor) -> Tensor:
        """The centre (K,) after this step: the running mean of the teacher's logits of all processes."""
        mean = distributed.total(at_least_float32(teacher_BTK.detach()).mean(dim=(0, 1))) / distributed.world_size()
        return torch.lerp(mean, self.centre.to(mean), self.options.centre_momentum)

    def schedule(self, progress: Progress) -> Mapping[str, float]:
        """The teacher's momentum rises to 1 on a cosine, its temperature linearly to its end."""
        options, warming = self.options, self.options.teacher_temperature_warmup * progress.steps
        warm = min(progress.step / warming, 1.0) if warming else 1.0
        first, last = options.teacher_temperature_start, options.teacher_temperature
        self.teacher_temperature = first + (last - first) * warm
        return {**super().schedule(progress), "teacher_temperature": self.teacher_temperature}

    def frozen(self, progress: Progress) -> Iterable[nn.Parameter]:
        """The last layer of the student's head, in the first epochs."""
        if progress.step >= self.config.training.freeze_last_layer_epochs * progress.steps_per_epoch:
            return ()
        assert isinstance(self.student.head, ProjectionHead) and self.student.head.last_layer is not None
        return (self.student.head.last_layer.weight,)

    @torch.no_grad()
    def after_step(self, losses: Losses) -> None:
        """The teacher follows the student, and the centre moves."""
        super().after_step(losses)
        self.centre.copy_(losses.pending["centre"])

    @torch.no_grad()
    def health(self, views: Views, losses: Mapping[str, float]) -> Health:
        """The two known collapses: one output takes everything, or all outputs are equally likely for every film."""
        films = views[self.films_in][:HEALTH_FILMS]
        says = teacher_says(self.teacher(self.normalise(films)), self.centre, self.teacher_temperature)
        most = math.log(min(self.options.outputs, max(len(films), 2)))
        usage = float(torch.special.entr(says.mean(dim=0)).sum()) / most
        entropy = float(torch.special.entr(says).sum(dim=-1).mean()) / math.log(self.options.outputs)
        rank = effective_rank(self.encode(films).flatten(0, 1))
        numbers = {"effective_rank": rank, "usage_entropy": usage, "output_entropy": entropy}
        numbers |= {name: value for name, value in losses.items() if name != "total"}
        shown = f"rank {rank:.0f}, outputs in use {min(usage, 1):.0%}, entropy of a film {entropy:.0%}"
        rules = (
            ("red", rank < 2, f"collapse: the teacher's features have one direction left (effective rank {rank:.1f})"),
            ("red", len(films) > 1 and usage < 0.05, "collapse: one output takes every film; centre more"),
            ("red", entropy > 0.9995, "collapse: every film is spread evenly over all outputs; sharpen the teacher"),
            ("amber", entropy > 0.97, f"the teacher hardly tells outputs apart so far (entropy {entropy:.1%})"),
            ("amber", len(films) > 1 and usage < 0.3, f"few outputs are in use ({usage:.0%} of what films could use)"),
        )
        for colour, holds, reason in rules:
            if holds:
                return Health(numbers, colour, reason, shown)  # type: ignore[arg-type]
        return Health(numbers, "green", "films differ in what the teacher says of them", shown)


class DINO(Distilled):
    """Student, teacher and centre."""

    settings_type = DINOSettings
    options: DINOSettings
    films_in = "first"

    @torch.no_grad()
    def views(self, images: Tensor, keys: Keys) -> Views:
        """``first`` and ``second`` (B, C, S, S), ``local`` (B * V, C, s, s)."""
        options, size = self.options, self.config.image.size
        views = {
            "first": crops(images, keys, views=1, size=size, settings=options.first, stream=_FIRST),
            "second": crops(images, keys, views=1, size=size, settings=options.second, stream=_SECOND),
        }
        if options.local_views:
            views["local"] = crops(
                images,
                keys,
                views=options.local_views,
                size=self.local_size,
                settings=options.local,
                stream=_LOCAL,
            )
        depth = self.depth(keys, 2 + options.local_views, images)
        if depth is not None:
            draws = depth.view(len(images), -1, *depth.shape[1:])
            views["depth"], views["local_depth"] = draws[:, :2].flatten(0, 1), draws[:, 2:].flatten(0, 1)
        return views

    def forward(self, views: Views) -> Outputs:
        """Logits of the student (B, 2, K) and (B, V, K), and of the teacher (B, 2, K)."""
        self.check(views["first"])
        films = len(views["first"])
        both = self.normalise(torch.stack([views["first"], views["second"]], dim=1).flatten(0, 1))
        outputs = {"student": by_film(self.student(both, views.get("depth")), films)}
        with torch.no_grad():
            outputs["teacher"] = by_film(self.teacher(both), films)
        if "local" in views:
            local = self.student(self.normalise(views["local"]), views.get("local_depth"))
            outputs["local"] = by_film(local, films)
        return outputs

    def losses(self, outputs: Outputs, turn: str = ALL) -> Losses:
        """The one loss there is: the teacher's two views against all other views of the student."""
        logits = torch.cat([outputs[name] for name in ("student", "local") if name in outputs], dim=1)
        pairs = torch.ones(2, logits.shape[1], device=logits.device)
        pairs[[0, 1], [0, 1]] = 0  # not a view against itself
        loss = self.distilled(logits, outputs["teacher"], pairs)
        return Losses({"distillation": loss}, loss, {"centre": self.new_centre(outputs["teacher"])})

    def panels(self, views: Views, count: int) -> list[Panel]:
        """The two global views and the first of the local ones."""
        panels = [Panel("first global view", views["first"][:count]), Panel("second", views["second"][:count])]
        if "local" in views:
            step = self.options.local_views
            panels.append(Panel("a local view", views["local"][::step][:count]))
        return panels

    @property
    def views_per_film(self) -> int:
        return 2 + self.options.local_views
