"""What the networks say about films, computed once for all scores.

Shapes: B films, L positions, D width, P pixels of a patch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from afire.model import AFiRe
from afire.model.losses import surprise as surprise_of


@dataclass(frozen=True)
class Evidence:
    """One look at a batch of films. What the model has no part for is None."""

    tokens: Tensor  # (B, L, D) of the teacher
    surprise: Tensor | None  # (B, L): H(q, c_j) of the teacher's tokens
    student_surprise: Tensor | None  # (B, L)
    lesion: Tensor | None  # (B, L): logits of the token lesion classifier
    student_tokens: Tensor  # (B, L, D), kept for a second pass through the decoder
    patches: Tensor  # (B, L, P): the films themselves, in the decoder's normalised pixels
    restored: Tensor | None  # (B, L, P), with every token seen

    @property
    def error(self) -> Tensor:
        """d_j = |y_j - x_j|^2 of every position (B, L), summed over its pixels."""
        assert self.restored is not None
        return (self.restored - self.patches).square().sum(dim=-1)


def look(model: AFiRe, images: Tensor) -> Evidence:
    """Films (B, C, S, S) in [0, 1] -> what both networks and the decoder say; each runs once."""
    tokens = model.encode(images, "teacher")
    student_tokens = model.encode(images, "student")
    has_clusters = model.bank is not None and model.config.losses.contrast == "probability"
    return Evidence(
        tokens=tokens,
        surprise=surprise_of(model.assign_tokens(tokens, "teacher"), model.prototypes) if has_clusters else None,
        student_surprise=(
            surprise_of(model.assign_tokens(student_tokens, "student"), model.prototypes) if has_clusters else None
        ),
        lesion=(model.lesion_classifier(student_tokens).squeeze(-1) if model.lesion_classifier is not None else None),
        student_tokens=student_tokens,
        patches=model.patches(images),
        restored=model.decoder(student_tokens, None) if model.decoder is not None else None,
    )


def restore_behind(model: AFiRe, evidence: Evidence, hidden_BL: Tensor) -> Tensor:
    """Patches (B, L, P) as the decoder draws them when the tokens of ``hidden_BL`` are replaced by z_mask."""
    assert model.decoder is not None
    restored: Tensor = model.decoder(evidence.student_tokens, hidden_BL)
    return restored


def settle(model: AFiRe) -> AFiRe:
    """The model as it is after training: in evaluation mode, the teacher at its last temperature."""
    model.teacher_temperature = model.config.losses.teacher_temperature
    return model.eval().requires_grad_(False)


@torch.inference_mode()
def looks(model: AFiRe, images: Tensor) -> Evidence:
    """:func:`look` without gradients."""
    return look(model, images)
