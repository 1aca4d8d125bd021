"""AFiRe: student, teacher, prototypes, decoder, and the losses of one step.

Shapes: B films, V views (lesioned versions) of each, L positions, D width, K clusters, P pixels of a patch.
Rows i*V ... i*V + V-1 of the lesioned films belong to film i.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from afire.config import Config
from afire.errors import UserError
from afire.lesions.synthesis import token_labels
from afire.methods.equations import (
    PrototypeBank,
    category_loss,
    lesion_loss,
    position_mean,
    restoration_loss,
    sinkhorn,
    structure_loss,
    token_losses,
)
from afire.nn import distributed
from afire.nn.layers import ClusterLayer, Decoder, Normalise, ProjectionHead, check_films
from afire.nn.vit import VisionTransformer, grid_of, initialise, patchify, unpatchify

Network = Literal["teacher", "student"]


@dataclass(frozen=True)
class Losses:
    """The losses of one step over the films of all processes; a loss that is switched off is 0.

    ``total`` is the weighted sum to call ``backward`` on. ``diagnostics`` are detached by-products for the health of
    a run: ``abnormal_share`` (), and with cluster probabilities ``student_mean`` and ``teacher_mean`` (L, K), the mean
    assignment at each position in this process's batch and in the global one, and ``student_entropy`` () of a token.
    """

    structure: Tensor
    category: Tensor
    restoration: Tensor
    lesion: Tensor
    total: Tensor
    diagnostics: Mapping[str, Tensor] = field(default_factory=dict)

    def as_floats(self) -> dict[str, float]:
        """The losses as numbers, with one wait for the device."""
        names = ("structure", "category", "restoration", "lesion", "total")
        values = torch.stack([getattr(self, name).detach().float() for name in names]).tolist()
        return dict(zip(names, values, strict=True))


class Branch(nn.Module):
    """An encoder and, if the token losses are on, its projection head: what student and teacher both have."""

    def __init__(self, encoder: VisionTransformer, head: ProjectionHead | None) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = head

    def tokens(self, films: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Normalised films (B, C, H, W) -> image tokens (B, L, D)."""
        with_class_token: Tensor = self.encoder(films, generator)
        return with_class_token[:, 1:].contiguous()  # once, instead of inside each layer that reads them


class AFiRe(nn.Module):
    """The whole method. ``losses = model(images, lesioned, mask)``, then ``losses.total.backward()``.

    Only what the weights in ``config.losses`` ask for exists: without restoration no decoder, without the token losses
    no head and no prototypes. So every trainable parameter has a gradient in every step, which DDP relies on.
    ``teacher_temperature`` (tau_t) is an attribute for the training loop to move.
    """

    def __init__(self, config: Config, generator: torch.Generator | None = None) -> None:
        """Initial weights come from ``generator``, or from ``config.seed`` without one."""
        super().__init__()
        self.config = config
        losses = config.losses
        encoder = VisionTransformer.from_config(config.encoder, config.image)
        self.normalise = Normalise(config.image)
        self.patch_size, self.grid = encoder.patch_size, encoder.grid
        self.teacher_temperature = (
            losses.teacher_temperature_start if losses.teacher_temperature_epochs else losses.teacher_temperature
        )
        positions, pixels = self.grid[0] * self.grid[1], config.image.channels * self.patch_size**2
        self.student = Branch(encoder, self._make_head(positions))
        self.decoder = (
            Decoder(encoder.width, pixels, self.grid, config.decoder, config.encoder.gradient_checkpointing)
            if losses.restoration
            else None
        )
        self.lesion_classifier = nn.Linear(encoder.width, 1) if losses.lesion else None
        self.bank = self._make_bank(positions)
        self._initialise(generator or torch.Generator().manual_seed(config.seed))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False).eval()

    def _make_head(self, positions: int) -> ProjectionHead | None:
        losses = self.config.losses
        if not (losses.structure or losses.category):
            return None
        clusters = losses.contrast == "probability"
        return ProjectionHead(self.config.encoder.width, positions, self.config.head, clusters)

    def _make_bank(self, positions: int) -> PrototypeBank | None:
        config = self.config
        if self.student.head is None or not config.prototypes.enabled:
            return None
        width = config.head.clusters if config.losses.contrast == "probability" else config.head.bottleneck
        return PrototypeBank(positions, width, config.prototypes.momentum)

    def _initialise(self, generator: torch.Generator) -> None:
        initialise(self, generator)
        for part in self.modules():
            if isinstance(part, Decoder | ClusterLayer):
                part.initialise(generator)

    def train(self, mode: bool = True) -> AFiRe:
        """As for any module, but the teacher is always in evaluation mode."""
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(
        self, images: Tensor, lesioned: Tensor, mask: Tensor, generator: torch.Generator | None = None
    ) -> Losses:
        """Films (B, C, H, W) in [0, 1], the same with lesions (B*V, C, H, W), their masks (B*V, 1, H, W).

        In training mode the prototypes move first and are then the targets of this step. ``generator`` draws the
        stochastic depth. With several processes this is a collective call: all of them make it, with equal B and V.
        """
        views = self._check(images, lesioned, mask)
        weights = self.config.losses
        films = self.normalise(images)
        abnormal = token_labels(mask, self.patch_size)
        tokens = self.student.tokens(self.normalise(lesioned), generator)
        structure = category = restoration = lesion = tokens.new_zeros((), dtype=torch.float32)
        diagnostics = {"abnormal_share": abnormal.float().mean()}
        if self.decoder is not None:
            by_view = (len(films), views, abnormal.shape[1])
            restored_BVLP = self.decoder(tokens, abnormal).view(*by_view, -1)
            target_B1LP = patchify(films, self.patch_size)[:, None]
            abnormal_BVL = abnormal.view(by_view)
            restoration = restoration_loss(restored_BVLP, target_B1LP, abnormal_BVL, weights.abnormal_weight)
        if self.lesion_classifier is not None:
            lesion = lesion_loss(self.lesion_classifier(tokens).squeeze(-1), abnormal)
        # Last, because here processes wait for each other, and once more when its backward begins: right after.
        if self.student.head is not None:
            structure, category = self._contrast(films, tokens, abnormal, diagnostics)
        terms = distributed.with_global_value(torch.stack([structure, category, restoration, lesion]))
        factors = terms.new_tensor([weights.structure, weights.category, weights.restoration, weights.lesion])
        return Losses(terms[0], terms[1], terms[2], terms[3], (factors * terms).sum(), diagnostics)

    def _contrast(
        self, films: Tensor, tokens: Tensor, abnormal: Tensor, diagnostics: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Structure and category loss of student tokens (B*V, L, D) against the prototypes of the teacher."""
        config = self.config.losses
        student = self._project(self.student, tokens, config.student_temperature)
        prototypes = self._prototypes(films, diagnostics)
        if config.contrast == "probability":
            _describe(student.detach(), diagnostics)
        similarity = "cosine" if config.contrast == "feature" else config.similarity
        common = (student, abnormal, prototypes, config.temperature, similarity)
        zero = torch.zeros((), device=tokens.device)
        if config.structure and config.category:
            return token_losses(*common, config.abnormal_consistency)
        if config.structure:
            return structure_loss(*common), zero
        return zero, category_loss(*common, config.abnormal_consistency)

    def _project(self, branch: Branch, tokens: Tensor, temperature: float) -> Tensor:
        """Tokens (B, L, D) -> log-probabilities (B, L, K), or unit features in the feature ablation."""
        head = branch.head
        if head is None:
            raise UserError("this model has no head: its structure and category losses have weight 0.")
        if self.config.losses.contrast == "feature":
            return head.features(tokens)
        logits: Tensor = head(tokens)
        return torch.log_softmax(logits / temperature, dim=-1)

    @torch.no_grad()
    def _prototypes(self, films: Tensor, diagnostics: dict[str, Tensor]) -> Tensor:
        """This step's targets (L, K): the bank after it has taken in the teacher's view of ``films``."""
        if self.bank is not None and not self.training:
            return self.bank.prototypes
        tokens, head = self.teacher.tokens(films), self.teacher.head
        assert head is not None
        if self.config.losses.contrast == "feature":
            mean = position_mean(head.features(tokens))
        else:
            logits: Tensor = head(tokens)
            # All tokens of all positions in one matrix: balanced per position, every prototype would be uniform.
            balanced = sinkhorn(
                logits.flatten(0, 1), self.teacher_temperature, self.config.prototypes.sinkhorn_iterations
            )
            mean = diagnostics["teacher_mean"] = position_mean(balanced.view_as(logits))
        return mean if self.bank is None else self.bank.update(mean)

    def _check(self, images: Tensor, lesioned: Tensor, mask: Tensor) -> int:
        """V, the number of views; a sentence when the three do not belong together."""
        channels, size = self.config.image.channels, self.config.image.size
        check_films(images, channels, "images")
        check_films(lesioned, channels, "lesioned images")
        if images.shape[-2:] != (size, size):
            height, width = images.shape[-2:]
            raise UserError(f"images are {height} x {width} pixels, but the model was made for {size} x {size}.")
        views, rest = divmod(len(lesioned), len(images))
        if rest or views == 0 or lesioned.shape[1:] != images.shape[1:]:
            raise UserError(
                f"lesioned images {tuple(lesioned.shape)} are not whole sets of views of images {tuple(images.shape)}."
            )
        if mask.shape != (len(lesioned), 1, size, size):
            raise UserError(f"mask {tuple(mask.shape)} should be {(len(lesioned), 1, size, size)}.")
        return views

    @torch.no_grad()
    def update_teacher(self, momentum: float) -> None:
        """Teacher = momentum * teacher + (1 - momentum) * student, parameters and buffers, in one fused pass."""
        teacher = [*self.teacher.parameters(), *self.teacher.buffers()]
        student = [*self.student.parameters(), *self.student.buffers()]
        torch._foreach_lerp_(teacher, student, 1 - momentum)

    def last_layer_parameters(self) -> list[nn.Parameter]:
        """The student's cluster directions, which a training loop keeps still at first by dropping their gradient."""
        head = self.student.head
        return [] if head is None or head.last_layer is None else [head.last_layer.weight]

    @property
    def prototypes(self) -> Tensor:
        """C (L, K)."""
        if self.bank is None:
            raise UserError("this model keeps no prototypes: they, or both token losses, are switched off.")
        return self.bank.prototypes

    def encode(self, images: Tensor, network: Network = "teacher") -> Tensor:
        """Films (B, C, H, W) in [0, 1], of any size the patch divides -> image tokens (B, L, D).

        Their mean over L represents the film. The class token is left out; ``student.encoder`` gives it too.
        """
        check_films(images, self.config.image.channels, "images")
        return self._branch(network).tokens(self.normalise(images))

    def assign(self, images: Tensor, network: Network = "teacher", temperature: float | None = None) -> Tensor:
        """Films in [0, 1] -> log q (B, L, K), by softmax at the network's own temperature unless one is given.

        Not by Sinkhorn, whose answer for a film depends on the films beside it.
        """
        return self.assign_tokens(self.encode(images, network), network, temperature)

    def assign_tokens(self, tokens: Tensor, network: Network = "teacher", temperature: float | None = None) -> Tensor:
        """As :meth:`assign`, for image tokens (B, L, D) that :meth:`encode` of the same network gave."""
        if self.config.losses.contrast == "feature":
            raise UserError("this model contrasts features (losses.contrast is feature) and has no clusters.")
        own = self.teacher_temperature if network == "teacher" else self.config.losses.student_temperature
        return self._project(self._branch(network), tokens, temperature or own)

    def lesion_logits(self, images: Tensor, network: Network = "student") -> Tensor:
        """Films in [0, 1] -> logits (B, L) of the token lesion classifier, which learnt on the student's tokens."""
        if self.lesion_classifier is None:
            raise UserError("this model has no lesion classifier: losses.lesion is 0.")
        logits: Tensor = self.lesion_classifier(self.encode(images, network))
        return logits.squeeze(-1)

    def restore(self, images: Tensor, abnormal: Tensor | None = None) -> Tensor:
        """Films in [0, 1] -> restored patches (B, L, P) of normalised pixels; compare with :meth:`patches`.

        ``abnormal`` (B, L) hides tokens behind z_mask; without it every token is seen.
        """
        if self.decoder is None:
            raise UserError("this model has no decoder: losses.restoration is 0.")
        grid = grid_of(images.shape[-2], images.shape[-1], self.patch_size)
        restored: Tensor = self.decoder(self.encode(images, "student"), abnormal, grid)
        return restored

    def patches(self, images: Tensor) -> Tensor:
        """Films in [0, 1] -> their patches (B, L, P) of normalised pixels: what :meth:`restore` should give."""
        return patchify(self.normalise(images), self.patch_size)

    def picture(self, patches: Tensor, like: Tensor) -> Tensor:
        """Patches (B, L, P) -> films (B, C, H, W) in [0, 1], undoing the normalisation of the films ``like``."""
        grid = grid_of(like.shape[-2], like.shape[-1], self.patch_size)
        return self.normalise.undo(unpatchify(patches, self.patch_size, grid), like)

    def _branch(self, network: Network) -> Branch:
        return self.teacher if network == "teacher" else self.student


def _describe(log_q: Tensor, diagnostics: dict[str, Tensor]) -> None:
    """By-products of the student's log q (B, L, K) that cost one pass over it."""
    q = log_q.exp()
    diagnostics["student_mean"] = q.mean(dim=0)
    diagnostics["student_entropy"] = -torch.dot(q.flatten(), log_q.flatten()) / (len(q) * q.shape[1])


def count_parameters(model: nn.Module) -> dict[str, int]:
    """Parameters of each part and, last, how many of all are trained: ``{"student.encoder": ..., "trained": ...}``."""
    counts: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        part = ".".join(parts[:2]) if parts[0] in ("student", "teacher") else parts[0]
        counts[part] = counts.get(part, 0) + parameter.numel()
    counts["trained"] = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return counts
