"""The phantom as a teacher: from its tokens an encoder learns to tell where anatomy and findings of drawn films lie.

A bank of phantoms is drawn when a run begins (:mod:`afire.data.phantom.bank`), and every view changes its film anew. A
linear head says for each cell of a token which parts of the anatomy and which findings cover it, and whether any
finding does; binary cross-entropy compares that with what was drawn. No film of a patient is needed. With
``options.afire`` the same encoder is the student of AFiRe on normal films at the same time.

Shapes: B films, L positions, D width, A parts of the anatomy, F kinds of findings, C = A + F + 1 maps, G x G cells.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from afire.config import Config, Section
from afire.data.phantom import ANATOMY, DISEASES, PhantomBank, RenewedBank
from afire.errors import UserError
from afire.lesions.augment import AugmentSettings, augmented
from afire.methods.afire import AFiRe
from afire.methods.base import ALL, Keys, Losses, Method, Outputs, Panel, Progress, ReadFilms, Views, depth_draws
from afire.methods.dense import cell_side, cells_of, dense_loss, highest_of_tokens, order, overlap
from afire.methods.health import Colour, Health, effective_rank
from afire.nn import distributed
from afire.nn.residual import Trunk, initialise_trunk, make_trunk
from afire.nn.vit import check_films, grid_of, initialise
from afire.processes import usable_cores

MAPS = len(ANATOMY) + len(DISEASES) + 1
_LUNGS, _HEART = slice(0, 6), ANATOMY.index("heart")
_FINDINGS = slice(len(ANATOMY), MAPS - 1)
_TEACHING = 0x7EAC0000
"""Added to the seed: no film of the bank is one of `afire data phantom`, whatever small number was its seed."""
_DRAWN_DEPTH = 0xD4A  # keeps stochastic depth on drawn films apart from that on lesioned ones
_HEALTH_FILMS = 64
_RARE = -2.0  # bias at the start: most maps cover little of a film


class PhantomAugment(AugmentSettings):
    """What is done to every drawn film at every view: poses, scanners and displays that were not drawn."""

    turn: float = Field(8.0, ge=0, le=180, description="largest turn either way, in degrees")
    zoom: float = Field(0.12, ge=0, lt=1, description="largest change of size either way, as a share")
    shift: float = Field(0.08, ge=0, lt=1, description="largest shift either way, as a share of the side")
    gamma: float = Field(0.4, ge=0, le=2, description="grey values to the power of up to exp(this), or its reciprocal")
    noise: float = Field(0.03, ge=0, le=1, description="largest deviation of Gaussian noise; the film's range is 1")
    stretch: float = Field(0.1, ge=0, lt=1, description="largest change of width, and of height by itself, as a share")
    contrast: float = Field(
        0.6, ge=0, lt=1, description="how far the slope of a smooth, rising grey curve leaves 1, either way"
    )
    shading: float = Field(0.1, ge=0, le=1, description="largest slow change of brightness across the film")
    unsharp: float = Field(1.0, ge=0, le=10, description="largest share of the fine detail that is added once more")


class PhantomSettings(Section):
    """Settings of teaching by phantoms."""

    films: int = Field(4000, ge=1, description="phantoms that are drawn when a run begins")
    normal_share: float = Field(0.5, ge=0, le=1, description="share of them without any finding")
    renewed: float = Field(0.0, ge=0, le=1, description="share of them that is drawn anew before every epoch")
    finer: int = Field(2, ge=1, le=16, description="cells along a token's side that the head tells apart")
    anatomy: float = Field(1.0, ge=0, description="weight of the anatomy's maps")
    findings: float = Field(2.0, ge=0, description="weight of the masks of findings, by kind")
    any_finding: float = Field(1.0, ge=0, description="weight of the mask of any finding")
    positive: float = Field(5.0, gt=0, description="how many times a cell counts that a finding covers")
    afire: float = Field(0.0, ge=0, description="weight of AFiRe's losses on the films of --data; 0: no such film")
    augment: PhantomAugment = Field(default_factory=PhantomAugment)

    @model_validator(mode="after")
    def _teaches(self) -> PhantomSettings:
        if not (self.anatomy or self.findings or self.any_finding):
            raise ValueError("anatomy, findings and any_finding all have weight 0: the phantoms would teach nothing")
        return self


@dataclass(frozen=True)
class _Maps:
    """Maps (B, C, G, G) by kind: what the head says about films, or the truth."""

    maps: Tensor

    @property
    def anatomy(self) -> Tensor:
        return self.maps[:, : len(ANATOMY)]

    @property
    def findings(self) -> Tensor:
        return self.maps[:, _FINDINGS]

    @property
    def any_finding(self) -> Tensor:
        return self.maps[:, -1:]


class PhantomTaught(Method):
    """An encoder and a linear head; beside them, if asked for, all of AFiRe with this encoder as its student."""

    networks = ("encoder",)
    sections: ClassVar[tuple[str, ...]] = AFiRe.sections
    any_trunk = True
    settings_type = PhantomSettings
    options: PhantomSettings
    afire: AFiRe | None

    def __init__(self, config: Config, generator: torch.Generator | None = None) -> None:
        """Initial weights come from ``generator``, or from ``config.seed`` without one."""
        super().__init__(config)
        options = self.options
        self.cell = cell_side(self.patch_size, options.finer, "options.finer")
        generator = generator or torch.Generator().manual_seed(config.seed)
        self._share(config, generator)
        self.head = nn.Linear(config.encoder.width, MAPS * options.finer**2)
        initialise(self.head, generator)
        nn.init.constant_(self.head.bias, _RARE)
        self._bank: RenewedBank | None = None
        self._rows = torch.zeros(1, dtype=torch.int64)

    def _share(self, config: Config, generator: torch.Generator) -> None:
        """The encoder, alone or as AFiRe's student.

        AFiRe itself is no submodule, its networks are: so the encoder has one name in a checkpoint, whether AFiRe is
        there or not.
        """
        afire: AFiRe | None = None
        if self.options.afire:
            if config.encoder.kind != "vit":
                raise UserError(
                    f"options.afire is {self.options.afire:g}, and AFiRe's student is a vision transformer, but "
                    f"encoder.kind is {config.encoder.kind}; set encoder.kind=vit or options.afire=0."
                )
            afire = AFiRe(config.model_copy(update={"method": "afire", "options": {}}), generator, self._likely_anatomy)
            self.encoder: Trunk = afire.student.encoder
            networks = {"student_head": afire.student.head, "teacher": afire.teacher, "bank": afire.bank}
            for name, network in {
                **networks,
                "decoder": afire.decoder,
                "lesion_classifier": afire.lesion_classifier,
                "normalise": afire.normalise,
            }.items():
                if network is not None:
                    self.add_module(name, network)
        else:
            self.encoder = make_trunk(config.encoder, config.image)
            initialise_trunk(self.encoder, generator)
        object.__setattr__(self, "afire", afire)

    def train(self, mode: bool = True) -> PhantomTaught:
        super().train(mode)
        if self.afire is not None:
            self.afire.train(mode)
        return self

    # A step of training

    @classmethod
    def own_films(cls, config: Config) -> int:
        """All of its films, unless AFiRe wants those of patients."""
        options = PhantomSettings.model_validate(config.options)
        return 0 if options.afire else options.films

    def begin_run(self, rows: Tensor, read: ReadFilms) -> None:
        """Draw the bank, the same on every process and after a resume, and begin what AFiRe needs.

        One that moves on with the epochs is drawn by the first :meth:`views`, which know the epoch.
        """
        options, config = self.options, self.config
        self._bank = RenewedBank(
            _TEACHING + config.seed,
            options.films,
            config.image.size,
            self.cell,
            max(1, usable_cores() // distributed.world_size()),
            options.normal_share,
            renewed=options.renewed,
            epochs=config.training.epochs,
        )
        self._rows = rows
        if not options.renewed:
            self._bank.at(0)
        if self.afire is not None:
            self.afire.begin_run(rows, read)

    def end_run(self) -> None:
        if self._bank is not None:
            self._bank.close()

    @torch.no_grad()
    def views(self, images: Tensor, keys: Keys) -> Views:
        """Drawn ``films`` (B, 1, S, S), what is on them as ``maps`` (B, C, G, G), and AFiRe's views of ``images``."""
        views = dict(self.afire.views(images, keys)) if self.afire is not None else {}
        films, maps = augmented(
            *self._films(keys, images.device),
            seed=keys.seed,
            epoch=keys.epoch,
            rows=keys.rows,
            settings=self.options.augment,
        )
        assert maps is not None
        maps = torch.cat([maps, maps[:, len(ANATOMY) :].amax(dim=1, keepdim=True)], dim=1)
        views |= {"films": films, "maps": maps}
        if self.config.encoder.drop_path > 0:
            depth = self.config.encoder.depth
            draws = depth_draws(depth, keys.seed ^ _DRAWN_DEPTH, keys.step, keys.rows)
            views["films_depth"] = draws.to(images.device)
        return views

    def _films(self, keys: Keys, device: torch.device) -> tuple[Tensor, Tensor]:
        """The phantoms that stand for the rows of an epoch: epoch after epoch they go through the bank in turn."""
        if self._bank is None:
            raise UserError("no phantom has been drawn yet: a run draws its bank when it begins (begin_run).")
        bank = self._bank.at(keys.epoch)
        place = torch.searchsorted(self._rows, keys.rows).clamp(max=len(self._rows) - 1)
        numbers = ((place + keys.epoch * len(self._rows)) % len(bank)).numpy()
        images = torch.from_numpy(bank.images[numbers]).to(device)
        both = (bank.anatomy[numbers], bank.findings[numbers])
        maps = torch.cat([torch.from_numpy(values).to(device) for values in both], dim=1)
        return images.float() / 255, maps.float() / 255

    def forward(self, views: Views) -> Outputs:
        """Views ``films`` and ``maps``, and those of AFiRe, if it is there."""
        outputs = dict(self.afire(views)) if self.afire is not None else {}
        tokens = self.encoder(self.normalise(views["films"]), views.get("films_depth"))[:, 1:]
        return {**outputs, "told": self._tell(tokens, self.grid), "maps": views["maps"]}

    def _likely_anatomy(self, images: Tensor) -> Tensor:
        """Images in [0, 1] -> how likely each part of the anatomy covers each cell, (B, A, G, G).

        By tokens of AFiRe's teacher: in training the student drops branches at random. Not by `encode`, which looks at
        the values of the images: a GPU would wait for that in every step.
        """
        assert self.afire is not None
        grid = grid_of(images.shape[-2], images.shape[-1], self.patch_size)
        tokens = self.afire.teacher.tokens(self.normalise(images))
        return _Maps(self._tell(tokens, grid).sigmoid()).anatomy

    def _tell(self, tokens: Tensor, grid: tuple[int, int]) -> Tensor:
        return cells_of(self.head(tokens), grid, self.options.finer)

    def losses(self, outputs: Outputs, turn: str = ALL) -> Losses:
        """Anatomy, findings, any finding; and AFiRe's, weighted by ``options.afire`` as one."""
        options, maps, truth = self.options, _Maps(outputs["told"]), _Maps(outputs["maps"])
        terms = torch.stack(
            [
                dense_loss(maps.anatomy, truth.anatomy),
                dense_loss(maps.findings, truth.findings, positive=options.positive),
                dense_loss(maps.any_finding, truth.any_finding, positive=options.positive),
            ]
        )
        terms = distributed.with_global_value(terms)
        factors = terms.new_tensor([options.anatomy, options.findings, options.any_finding])
        named = dict(zip(("anatomy", "findings", "any_finding"), terms.unbind(), strict=True))
        total = (factors * terms).sum()
        if self.afire is None:
            return Losses(named, total)
        beside = self.afire.losses(outputs, turn)
        return Losses({**named, **beside.terms}, total + options.afire * beside.total, beside.pending)

    def schedule(self, progress: Progress) -> Mapping[str, float]:
        """AFiRe's momentum and temperature, if it is there."""
        return {} if self.afire is None else self.afire.schedule(progress)

    def frozen(self, progress: Progress) -> Iterable[nn.Parameter]:
        return () if self.afire is None else self.afire.frozen(progress)

    def after_step(self, losses: Losses) -> None:
        if self.afire is not None:
            self.afire.after_step(losses)

    @property
    def views_per_film(self) -> int:
        return 1 + (self.afire.views_per_film if self.afire is not None else 0)

    def flops(self) -> float:
        """As for any learner, on a blank film, because the bank is not drawn yet."""
        drawn, rows = self._bank, self._rows
        self._bank = RenewedBank.holding(PhantomBank.blank(1, self.config.image.size, self.cell), self.cell)
        self._rows = torch.zeros(1, dtype=torch.int64)
        try:
            with nullcontext() if self.afire is None else self.afire.without_patches():
                return super().flops()
        finally:
            self._bank, self._rows = drawn, rows

    # How it goes

    @torch.no_grad()
    def health(self, views: Views, losses: Mapping[str, float]) -> Health:
        """Overlap of anatomy, order of findings, and whether tokens still have directions; then AFiRe's word."""
        films, truth = views["films"][:_HEALTH_FILMS], _Maps(views["maps"][:_HEALTH_FILMS])
        tokens = self.encode(films)
        maps = _Maps(self._tell(tokens, self.grid))
        own = _verdict(
            dice=overlap(maps.anatomy, truth.anatomy),
            auc=order(maps.any_finding, truth.any_finding),
            rank=effective_rank(tokens.flatten(0, 1)),
        )
        beside = self.afire.health(views, losses) if self.afire is not None else None
        if beside is None:
            return own
        worse = max(own, beside, key=lambda health: _COLOURS.index(health.colour))
        numbers = {**own.numbers, **{f"afire_{name}": number for name, number in beside.numbers.items()}}
        return Health(numbers, worse.colour, worse.reason, f"{own.shown}; {beside.shown}")

    @torch.no_grad()
    def panels(self, views: Views, count: int) -> list[Panel]:
        """Drawn films with lungs and heart, then findings, each as drawn and as told; and what AFiRe shows."""
        films, truth = views["films"][:count], _Maps(views["maps"][:count])
        predicted = _Maps(self._tell(self.encode(films), self.grid).sigmoid())
        shown = [Panel("drawn film", films)]
        for kind, picture in (("lungs and heart", _organs), ("any finding", lambda maps: maps.any_finding)):
            for whose, maps in (("drawn", truth), ("told", predicted)):
                shown.append(Panel(f"{kind}, {whose}", F.interpolate(picture(maps), films.shape[-2:]), "mask"))
        return [*shown, *(self.afire.panels(views, count) if self.afire is not None else ())]

    # What it can tell about films

    def starting_trunks(self) -> tuple[Trunk, ...]:
        """With AFiRe its teacher, too: at random it would teach noise until it has followed the student."""
        return (self.encoder, *((self.afire.teacher.encoder,) if self.afire is not None else ()))

    @classmethod
    def trunk_prefix(cls, network: str | None = None) -> str:
        return f"{cls.network(network)}."

    def readouts(self, images: Tensor) -> dict[str, Tensor]:
        """Probabilities ``anatomy`` (B, A, G, G), ``findings`` (B, F, G, G) and ``any_finding`` (B, 1, G, G)."""
        maps = _Maps(self.tell(images).sigmoid())
        return {"anatomy": maps.anatomy, "findings": maps.findings, "any_finding": maps.any_finding}

    def tell(self, images: Tensor) -> Tensor:
        """Images in [0, 1], of any size the patch divides -> logits (B, C, G, G): anatomy, findings, any finding."""
        check_films(images, self.config.image.channels, "images")
        return self._tell(self.encode(images), grid_of(images.shape[-2], images.shape[-1], self.patch_size))

    def finding_logits(self, tokens: Tensor, grid: tuple[int, int]) -> Tensor:
        """Image tokens (B, L, D) -> the highest logit (B, L) of any finding among the cells of each token."""
        logits = _Maps(self._tell(tokens, grid)).any_finding
        return highest_of_tokens(logits, self.options.finer)

    @property
    def restores(self) -> bool:
        return self.afire is not None and self.afire.restores

    def lesion_maps(self, images: Tensor) -> Tensor:
        return super().lesion_maps(images) if self.afire is None else self.afire.lesion_maps(images)

    def restore(self, images: Tensor, hidden: Tensor | None = None) -> Tensor:
        return super().restore(images, hidden) if self.afire is None else self.afire.restore(images, hidden)


_COLOURS: tuple[Colour, ...] = ("green", "amber", "red")


def _verdict(dice: float, auc: float, rank: float) -> Health:
    numbers = {"anatomy_dice": dice, "finding_auc": auc, "effective_rank": rank}
    shown = f"anatomy Dice {dice:.2f}, finding AUC {auc:.2f}, rank {rank:.0f}"
    if rank < 2:
        reason = f"collapse: the encoder's features have one direction left (effective rank {rank:.1f})"
        return Health(numbers, "red", reason, shown)
    if dice < 0.5:
        return Health(numbers, "amber", "the drawn anatomy is not followed yet", shown)
    if auc < 0.6:
        return Health(numbers, "amber", "drawn findings are not told from what is normal yet", shown)
    return Health(numbers, "green", "anatomy and findings of drawn films are told", shown)


def _organs(maps: _Maps) -> Tensor:
    """(B, 1, G, G): the heart in white, the lungs in grey."""
    lungs, heart = maps.anatomy[:, _LUNGS].amax(dim=1, keepdim=True), maps.anatomy[:, _HEART : _HEART + 1]
    return torch.maximum(heart, 0.5 * lungs)
