"""What the networks say about films, computed once for all scores.

Shapes: B films, L positions, D width, P pixels of a patch.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from afire.model import AFiRe
from afire.model.afire import Network
from afire.model.losses import surprise as surprise_of


class Evidence:
    """One look at a batch of films (B, C, S, S) in [0, 1]. Each network runs at most once, and only if it is asked.

    What the model has no part for is None.
    """

    def __init__(self, model: AFiRe, images: Tensor) -> None:
        self._model, self._images = model, images
        self._behind: tuple[Tensor, Tensor] | None = None
        self._has_clusters = model.bank is not None and model.config.losses.contrast == "probability"

    @cached_property
    def tokens(self) -> Tensor:
        """(B, L, D) of the teacher."""
        return self._model.encode(self._images, "teacher")

    @cached_property
    def student_tokens(self) -> Tensor:
        """(B, L, D)."""
        return self._model.encode(self._images, "student")

    @cached_property
    def surprise(self) -> Tensor | None:
        """(B, L): H(q, c_j) of the teacher's tokens."""
        return self._surprise(self.tokens, "teacher") if self._has_clusters else None

    @cached_property
    def student_surprise(self) -> Tensor | None:
        """(B, L)."""
        return self._surprise(self.student_tokens, "student") if self._has_clusters else None

    @cached_property
    def lesion(self) -> Tensor | None:
        """(B, L): logits of the token lesion classifier."""
        classifier = self._model.lesion_classifier
        return None if classifier is None else classifier(self.student_tokens).squeeze(-1)

    @cached_property
    def patches(self) -> Tensor:
        """(B, L, P): the films themselves, in the decoder's normalised pixels."""
        return self._model.patches(self._images)

    @cached_property
    def restored(self) -> Tensor | None:
        """(B, L, P), with every token seen."""
        return None if self._model.decoder is None else self._model.decoder(self.student_tokens, None)

    @property
    def error(self) -> Tensor:
        """d_j = |y_j - x_j|^2 of every position (B, L), summed over its pixels."""
        assert self.restored is not None
        return (self.restored - self.patches).square().sum(dim=-1)

    def behind(self, hidden_BL: Tensor) -> Tensor:
        """Patches (B, L, P) as the decoder draws them when the tokens of ``hidden_BL`` are replaced by z_mask.

        The last answer is kept: the score and the picture of a film hide the same tokens.
        """
        assert self._model.decoder is not None
        if self._behind is None or not torch.equal(self._behind[0], hidden_BL):
            self._behind = hidden_BL, self._model.decoder(self.student_tokens, hidden_BL)
        return self._behind[1]

    def _surprise(self, tokens: Tensor, network: Network) -> Tensor:
        return surprise_of(self._model.assign_tokens(tokens, network), self._model.prototypes)


def look(model: AFiRe, images: Tensor) -> Evidence:
    """Films (B, C, S, S) in [0, 1] -> what both networks and the decoder say of them."""
    return Evidence(model, images)


def settle(model: AFiRe) -> AFiRe:
    """The model as it is after training: in evaluation mode, the teacher at its last temperature."""
    model.teacher_temperature = model.config.losses.teacher_temperature
    return model.eval().requires_grad_(False)
