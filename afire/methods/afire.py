"""AFiRe: a student that sees lesions, a teacher that sees none, prototypes of every place, and a decoder.

Shapes: B films, V views (lesioned versions) of each, L positions and as many places, D width, K clusters, P pixels of a
patch, G x G cells that the lesion classifier tells apart. Rows i*V ... i*V + V-1 of the lesioned images belong to film
i.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from afire.config import Config
from afire.errors import UserError
from afire.lesions import lesion_shares, synthesize_keyed, token_labels
from afire.lesions.augment import moved
from afire.lesions.frames import chest_places
from afire.lesions.pastes import Donors
from afire.methods.base import (
    ALL,
    Keys,
    Losses,
    Method,
    Outputs,
    Panel,
    Progress,
    ReadFilms,
    Views,
    cosine,
    depth_draws,
)
from afire.methods.dense import cell_side, cells_of, dense_loss, highest_of_tokens, order
from afire.methods.donors import read_donors
from afire.methods.equations import (
    Contrast,
    PrototypeBank,
    category_loss,
    place_mean,
    position_mean,
    restoration_loss,
    sinkhorn,
    structure_loss,
    surprise,
    token_log_probabilities,
)
from afire.methods.health import Health, measure, place_entropy, place_nats, with_information
from afire.nn import distributed
from afire.nn.memory import follow_network, twin
from afire.nn.vit import (
    ClusterLayer,
    Decoder,
    Grid,
    ProjectionHead,
    VisionTransformer,
    check_films,
    grid_of,
    initialise,
    is_exporting,
    patchify,
)

Network = Literal["teacher", "student"]
_HEALTH_FILMS = 64


class Branch(nn.Module):
    """An encoder and, if the token losses are on, its projection head: what student and teacher both have."""

    def __init__(self, encoder: VisionTransformer, head: ProjectionHead | None) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = head

    def tokens(self, images: Tensor, depth: Tensor | None = None) -> Tensor:
        """Normalised images (B, C, H, W) -> image tokens (B, L, D)."""
        with_class_token: Tensor = self.encoder(images, depth)
        return with_class_token[:, 1:].contiguous()  # once, instead of inside each layer that reads them


class AFiRe(Method):
    """The whole method. ``losses = model.losses(model(views))``, then ``losses.total.backward()``.

    Only what the weights in ``config.losses`` ask for exists: without restoration no decoder, without the token losses
    no head and no prototypes. So every trainable parameter has a gradient in every step, which DDP relies on.
    """

    networks = ("teacher", "student")
    sections = ("lesions", "head", "decoder", "prototypes", "losses")

    def __init__(
        self,
        config: Config,
        generator: torch.Generator | None = None,
        anatomy: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Initial weights come from ``generator``, or from ``config.seed`` without one.

        ``anatomy`` predicts from images (B, C, H, W) how likely each part of it covers each cell (B, A, G, G).
        """
        super().__init__(config)
        self.anatomy = anatomy if config.prototypes.lungs == "predicted" else None
        if config.prototypes.lungs == "predicted" and anatomy is None:
            raise UserError(
                "prototypes.lungs is predicted, and nothing in the method afire predicts anatomy; choose --method "
                "phantom --set options.afire=1, whose head learns it from drawn films, or set prototypes.lungs=otsu."
            )
        losses = config.losses
        encoder = VisionTransformer.from_config(config.encoder, config.image)
        self.teacher_temperature = (
            losses.teacher_temperature_start if losses.teacher_temperature_epochs else losses.teacher_temperature
        )
        self.teacher_momentum = config.training.teacher_momentum
        positions, pixels = self.grid[0] * self.grid[1], config.image.channels * self.patch_size**2
        self.student = Branch(encoder, self._make_head(positions))
        self.decoder = (
            Decoder(encoder.width, pixels, self.grid, config.decoder, config.encoder.gradient_checkpointing)
            if losses.restoration
            else None
        )
        self.lesion_cell = cell_side(self.patch_size, losses.lesion_finer, "losses.lesion_finer")
        self.lesion_classifier = nn.Linear(encoder.width, losses.lesion_finer**2) if losses.lesion else None
        self.bank = self._make_bank(positions)
        self.donors: Donors | None = None  # no buffers: see read_donors
        self._initialise(generator or torch.Generator().manual_seed(config.seed))
        self.teacher = twin(self.student)

    def _make_head(self, positions: int) -> ProjectionHead | None:
        losses = self.config.losses
        if not (losses.structure or losses.category):
            return None
        return ProjectionHead(self.config.encoder.width, positions, self.config.head, self.has_clusters)

    def _make_bank(self, positions: int) -> PrototypeBank | None:
        config = self.config
        if self.student.head is None or not config.prototypes.enabled:
            return None
        width = config.head.clusters if self.has_clusters else config.head.bottleneck
        return PrototypeBank(positions, width, config.prototypes.momentum, self.by_anatomy)

    def _initialise(self, generator: torch.Generator) -> None:
        initialise(self, generator)
        for module in self.modules():
            if isinstance(module, Decoder | ClusterLayer):
                module.initialise(generator)

    def train(self, mode: bool = True) -> AFiRe:
        """As for any module, but the teacher is always in evaluation mode."""
        super().train(mode)
        self.teacher.eval()
        return self

    # A step of training

    def begin_run(self, rows: Tensor, read: ReadFilms) -> None:
        """Look up the normal films that patches are cut from, if any are pasted."""
        lesions, size = self.config.lesions, self.config.image.size
        if lesions.pasted:
            self.donors = read_donors(rows, lesions.donors, self.config.seed, read, size)

    @torch.no_grad()
    def views(self, images: Tensor, keys: Keys) -> Views:
        """The images, the same with lesions, the lesions' masks, and the draws of stochastic depth, if any."""
        config = self.config
        if config.prototypes.move:
            images = moved(images, config.prototypes.move, seed=keys.seed, epoch=keys.epoch, rows=keys.rows)
        lesioned, mask = synthesize_keyed(
            images,
            seed=keys.seed,
            epoch=keys.epoch,
            indices=keys.rows,
            config=config.lesions,
            donors=self.donors,
            check_values=config.run.check_images,
        )
        views = {"images": images, "lesioned": lesioned, "mask": mask}
        # Predicted ones are asked for in `forward`, where sharded weights are whole.
        if self.student.head is not None and self.by_anatomy and self.anatomy is None:
            views["place"] = self._places(images)
        if config.encoder.drop_path > 0:
            draws = depth_draws(config.encoder.depth, keys.seed, keys.step, keys.rows, config.lesions.views)
            views["depth"] = draws.to(images.device)
        return views

    def forward(self, views: Views) -> Outputs:
        """Views ``images`` (B, C, H, W) in [0, 1], ``lesioned`` (B*V, C, H, W), ``mask`` (B*V, 1, H, W).

        With places in the chest also ``place`` (B, L), those of the ``images`` unless others are known.
        """
        self._check(views)
        images, abnormal = self.normalise(views["images"]), token_labels(views["mask"], self.patch_size)
        tokens = self.student.tokens(self.normalise(views["lesioned"]), views.get("depth"))
        outputs = {"abnormal": abnormal}
        if self.decoder is not None:
            outputs["restored"] = self.decoder(tokens, abnormal)
            outputs["target"] = patchify(images, self.patch_size)
        if self.lesion_classifier is not None:
            outputs["lesion"] = self.lesion_cells(tokens, self.grid)
            outputs["lesion_share"] = self._lesion_shares(views["mask"], abnormal)
        if self.student.head is not None:
            outputs["student"] = self._project(self.student, tokens, self.config.losses.student_temperature)
            if self.training or self.bank is None:
                outputs["teacher"] = self._teacher_says(images)
            if self.by_anatomy or "place" in views:
                outputs["place"] = self._place_of(views)
        return outputs

    def _lesion_shares(self, mask: Tensor, abnormal: Tensor) -> Tensor:
        """What the lesion classifier is to say, (B, 1, G, G): the token's label, or which share of a cell is lesion."""
        if self.config.losses.lesion_finer == 1:
            return abnormal.view(-1, 1, *self.grid).to(mask)
        return lesion_shares(mask, self.lesion_cell)

    @torch.no_grad()
    def _teacher_says(self, images: Tensor) -> Tensor:
        """Logits (B, L, K) of normal images, or unit features in the feature ablation."""
        head = self.teacher.head
        assert head is not None
        tokens = self.teacher.tokens(images)
        says: Tensor = head(tokens) if self.has_clusters else head.features(tokens)
        return says

    def losses(self, outputs: Outputs, turn: str = ALL) -> Losses:
        """Structure, category, restoration and lesion losses; a loss that is switched off is 0.

        In training mode the targets are the prototypes as this step moves them; :meth:`after_step` stores them.
        """
        weights, abnormal = self.config.losses, outputs["abnormal"]
        structure = category = restoration = lesion = torch.zeros((), device=abnormal.device)
        pending: dict[str, Tensor] = {}
        if "restored" in outputs:
            by_view = (len(outputs["target"]), -1, abnormal.shape[1])
            restoration = restoration_loss(
                outputs["restored"].view(*by_view, outputs["restored"].shape[-1]),
                outputs["target"][:, None],
                abnormal.view(by_view),
                abnormal_weight=weights.abnormal_weight,
            )
        if "lesion" in outputs:
            lesion = dense_loss(outputs["lesion"], outputs["lesion_share"])
        # Last, because here processes wait for each other, and once more when its backward begins: right after.
        if "student" in outputs:
            prototypes = self._targets(outputs, pending)
            contrast = Contrast(
                outputs["student"],
                abnormal,
                prototypes,
                temperature=weights.temperature,
                similarity=weights.similarity if self.has_clusters else "cosine",
                place=self._of_views(outputs.get("place"), len(abnormal)),
            )
            if weights.structure and weights.category:
                _ = contrast.scores_LBL, contrast.images  # in this order: one product and one exchange serve both
            if weights.structure:
                structure = structure_loss(contrast)
            if weights.category:
                category = category_loss(contrast, abnormal_consistency=weights.abnormal_consistency)
        terms = distributed.with_global_value(torch.stack([structure, category, restoration, lesion]))
        factors = terms.new_tensor([weights.structure, weights.category, weights.restoration, weights.lesion])
        named = dict(zip(("structure", "category", "restoration", "lesion"), terms.unbind(), strict=True))
        return Losses(named, (factors * terms).sum(), pending)

    @torch.no_grad()
    def _targets(self, outputs: Outputs, pending: dict[str, Tensor]) -> Tensor:
        """This step's prototypes (L, K): the bank after the teacher's word on the images of all processes."""
        if "teacher" not in outputs:
            return self.prototypes
        says = outputs["teacher"]
        if self.has_clusters:
            # All tokens of all positions in one matrix: balanced per position, every prototype would be uniform.
            iterations = self.config.prototypes.sinkhorn_iterations
            says = sinkhorn(says.flatten(0, 1), self.teacher_temperature, iterations).view_as(says)
        tokens: Tensor | None = None
        if "place" in outputs:
            mean, tokens = place_mean(says, outputs["place"], self.grid[0] * self.grid[1])
            mean = torch.where(tokens[:, None] > 0, mean, 1 / mean.shape[1])  # nothing is known of a place without any
            pending["place_tokens"] = tokens
        else:
            mean = position_mean(says)
        if self.bank is None:
            return mean
        pending["prototypes"] = self.bank.moved(mean, tokens)
        return pending["prototypes"]

    @staticmethod
    def _of_views(place_BL: Tensor | None, views: int) -> Tensor | None:
        """The places of lesioned images: lesions move nothing, so they are those of the film."""
        return None if place_BL is None else place_BL.repeat_interleave(views // len(place_BL), 0)

    def _project(self, branch: Branch, tokens: Tensor, temperature: float) -> Tensor:
        """Tokens (B, L, D) -> log-probabilities (B, L, K), or unit features in the feature ablation."""
        head = branch.head
        if head is None:
            raise UserError("this model has no head: its structure and category losses have weight 0.")
        return token_log_probabilities(head(tokens), temperature) if self.has_clusters else head.features(tokens)

    def _check(self, views: Views) -> None:
        """A message when the views do not belong together."""
        images, lesioned, mask = views["images"], views["lesioned"], views["mask"]
        channels, size = self.config.image.channels, self.config.image.size
        for name, some in (("images", images), ("lesioned images", lesioned)):
            check_films(some, channels, name, values=self.config.run.check_images)
        if images.shape[-2:] != (size, size):
            height, width = images.shape[-2:]
            raise UserError(f"images are {height} x {width} pixels, but the model was made for {size} x {size}.")
        count, rest = divmod(len(lesioned), len(images))
        if rest or count == 0 or lesioned.shape[1:] != images.shape[1:]:
            raise UserError(
                f"lesioned images {tuple(lesioned.shape)} are not whole sets of views of images {tuple(images.shape)}."
            )
        if mask.shape != (len(lesioned), 1, size, size):
            raise UserError(f"mask {tuple(mask.shape)} should be {(len(lesioned), 1, size, size)}.")

    def flops(self) -> float:
        with self.without_patches():
            return super().flops()

    @contextmanager
    def without_patches(self) -> Iterator[None]:
        """For counting operations: which views get patches is drawn, and networks see nothing of that."""
        config = self.config
        self.config = config.model_copy(update={"lesions": config.lesions.model_copy(update={"pasted": 0.0})})
        try:
            yield
        finally:
            self.config = config

    def schedule(self, progress: Progress) -> Mapping[str, float]:
        """The teacher's momentum (lambda) rises to 1 on a cosine, its temperature (tau_t) linearly to its end."""
        losses = self.config.losses
        self.teacher_momentum = cosine(self.config.training.teacher_momentum, 1.0, progress.step, progress.steps)
        warming = losses.teacher_temperature_epochs * progress.steps_per_epoch
        warm = min(progress.step / warming, 1.0) if warming else 1.0
        first, last = losses.teacher_temperature_start, losses.teacher_temperature
        self.teacher_temperature = first + (last - first) * warm
        return {"teacher_momentum": self.teacher_momentum, "teacher_temperature": self.teacher_temperature}

    def frozen(self, progress: Progress) -> Iterable[nn.Parameter]:
        """The student's cluster directions, in the first epochs."""
        head = self.student.head
        if progress.step >= self.config.training.freeze_last_layer_epochs * progress.steps_per_epoch:
            return ()
        return () if head is None or head.last_layer is None else (head.last_layer.weight,)

    @torch.no_grad()
    def after_step(self, losses: Losses) -> None:
        """Store the prototypes, and let the teacher follow the student, parameters and buffers."""
        if self.bank is not None and "prototypes" in losses.pending:
            self.bank.store(losses.pending["prototypes"], losses.pending.get("place_tokens"))
        follow_network(self.teacher, self.student, self.teacher_momentum)

    @torch.no_grad()
    def health(self, views: Views, losses: Mapping[str, float]) -> Health | None:
        """Of some films of a batch; None for models without clusters or prototypes."""
        if self.bank is None or not self.has_clusters:
            return None
        step = self.views_per_film
        images = views["images"][:_HEALTH_FILMS]
        lesioned, mask = (views[name][: _HEALTH_FILMS * step : step] for name in ("lesioned", "mask"))
        seen = self.encode(lesioned, "student")
        student = self.assign_tokens(seen, "student").exp()
        tokens = self.encode(images, "teacher")
        teacher = self.assign_tokens(tokens, "teacher").exp()
        labels = token_labels(mask, self.patch_size)
        health = measure(student, teacher, tokens, labels, self.prototypes, losses["structure"]).report()
        weights, places = self.config.losses, len(self.prototypes)
        place = self._place_of(views)[:_HEALTH_FILMS] if self.by_anatomy else None
        lesion_auc: float | None = None
        if self.lesion_classifier is not None:
            lesion_auc = order(self.lesion_cells(seen, self.grid), self._lesion_shares(mask, labels))
        return with_information(
            health,
            nats=math.log(places) if place is None else place_nats(place, places),
            structure=losses["structure"] if weights.structure else None,
            category=losses.get("category") if weights.category else None,
            lesion_auc=lesion_auc,
            left_open=None if place is None else place_entropy(place, places),
        )

    @torch.no_grad()
    def panels(self, views: Views, count: int) -> list[Panel]:
        """Normal, lesions, lesioned; restored, and what that took away; the map of lesions as drawn and as told."""
        if self.decoder is None and self.lesion_classifier is None:
            return []
        step, images = self.views_per_film, views["images"][:count]
        lesioned, mask = (views[name][: count * step : step] for name in ("lesioned", "mask"))
        labels = token_labels(mask, self.patch_size)
        shown = [Panel("normal", images), Panel("lesion mask", mask, "mask"), Panel("lesioned", lesioned)]
        if self.decoder is not None:
            restored = self.picture(self.restore(lesioned, labels), like=images)
            shown.append(Panel("restored", restored))
            shown.append(Panel("lesioned − restored", lesioned - restored, "difference"))
        if self.lesion_classifier is not None:
            maps = {"drawn": self._lesion_shares(mask, labels), "told": self.lesion_maps(lesioned)}
            for whose, cells in maps.items():
                shown.append(Panel(f"lesion map, {whose}", F.interpolate(cells, mask.shape[-2:]), "mask"))
        return shown

    @property
    def views_per_film(self) -> int:
        return self.config.lesions.views

    # What it can tell about films

    @property
    def has_clusters(self) -> bool:
        """Whether tokens are compared by cluster probabilities; in the feature ablation there are none."""
        return self.config.losses.contrast == "probability"

    @property
    def by_anatomy(self) -> bool:
        """Whether prototypes are those of places in the chest, and not of positions."""
        return self.config.prototypes.place == "anatomy"

    def places(self, images: Tensor) -> Tensor | None:
        """Images in [0, 1], of any size the patch divides -> the place (B, L) of every token, by each film's lungs;
        None where it is the token's position."""
        if not self.by_anatomy:
            return None
        if is_exporting():
            raise UserError(
                "prototypes of places in the chest (prototypes.place is anatomy) cannot be asked in a graph: lungs are "
                "found by steps that depend on the film; choose a score without surprise, or export a bundle."
            )
        return self._places(images)

    @torch.no_grad()
    def _places(self, images: Tensor) -> Tensor:
        tokens = grid_of(images.shape[-2], images.shape[-1], self.patch_size)
        return chest_places(images, tokens, self.grid, self.anatomy(images) if self.anatomy is not None else None)

    def _place_of(self, views: Views) -> Tensor:
        return views["place"] if "place" in views else self._places(views["images"])

    @property
    def prototypes(self) -> Tensor:
        """C (L, K)."""
        if self.bank is None:
            raise UserError("this model keeps no prototypes: they, or both token losses, are switched off.")
        return self.bank.prototypes

    @classmethod
    def trunk_prefix(cls, network: str | None = None) -> str:
        return f"{cls.network(network)}.encoder."

    def assign(self, images: Tensor, network: Network = "teacher", temperature: float | None = None) -> Tensor:
        """Images in [0, 1] -> log q (B, L, K), by softmax at the network's own temperature unless one is given.

        Not by Sinkhorn, whose answer for a film depends on the films beside it.
        """
        return self.assign_tokens(self.encode(images, network), network, temperature)

    def assign_tokens(self, tokens: Tensor, network: Network = "teacher", temperature: float | None = None) -> Tensor:
        """As :meth:`assign`, for image tokens (B, L, D) that :meth:`encode` of the same network gave."""
        if not self.has_clusters:
            raise UserError("this model contrasts features (losses.contrast is feature) and has no clusters.")
        own = self.teacher_temperature if network == "teacher" else self.config.losses.student_temperature
        return self._project(self.teacher if network == "teacher" else self.student, tokens, temperature or own)

    def lesion_cells(self, tokens: Tensor, grid: Grid) -> Tensor:
        """Image tokens (B, L, D) of the student -> logits (B, 1, G, G) of the lesion classifier, cell by cell."""
        if self.lesion_classifier is None:
            raise UserError("this model has no lesion classifier: losses.lesion is 0.")
        return cells_of(self.lesion_classifier(tokens), grid, self.config.losses.lesion_finer)

    def lesion_logits(self, images: Tensor, network: Network = "student") -> Tensor:
        """Images in [0, 1] -> the highest logit (B, L) of any lesion among the cells of each token."""
        return highest_of_tokens(self._lesion_cells_of(images, network), self.config.losses.lesion_finer)

    def lesion_maps(self, images: Tensor) -> Tensor:
        """As for any method; a cell is a token, or with ``losses.lesion_finer`` a part of one."""
        return self._lesion_cells_of(images, "student").sigmoid()

    def _lesion_cells_of(self, images: Tensor, network: Network) -> Tensor:
        grid = grid_of(images.shape[-2], images.shape[-1], self.patch_size)
        return self.lesion_cells(self.encode(images, network), grid)

    def readouts(self, images: Tensor) -> dict[str, Tensor]:
        """``log_q`` (B, L, K), ``surprise`` (B, L), ``lesion_logits`` (B, L) and ``lesion_map`` (B, 1, G, G) in [0, 1],
        where there are networks for them."""
        readouts = {}
        if self.teacher.head is not None and self.has_clusters:
            readouts["log_q"] = self.assign(images)
            if self.bank is not None:
                readouts["surprise"] = surprise(readouts["log_q"], self.prototypes, self.places(images))
        if self.lesion_classifier is not None:
            cells = self._lesion_cells_of(images, "student")
            readouts["lesion_logits"] = highest_of_tokens(cells, self.config.losses.lesion_finer)
            readouts["lesion_map"] = cells.sigmoid()
        return readouts

    @property
    def restores(self) -> bool:
        return self.decoder is not None

    def restore(self, images: Tensor, hidden: Tensor | None = None) -> Tensor:
        """As for any method; ``hidden`` tokens (B, L) stand behind z_mask, without them every token is seen."""
        if self.decoder is None:
            raise UserError("this model has no decoder: losses.restoration is 0.")
        grid = grid_of(images.shape[-2], images.shape[-1], self.patch_size)
        restored: Tensor = self.decoder(self.encode(images, "student"), hidden, grid)
        return restored
