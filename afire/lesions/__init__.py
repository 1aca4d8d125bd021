"""Synthetic lesions on normal films, for a whole batch at once, and the token labels that follow from them.

Knows images and their masks; knows no network and not who learns from them.

lesioned, mask = synthesize(images, generator=g)            # or synthesize_keyed(images, seed=..., ...)
abnormal = token_labels(mask, patch_size=16)                # bool (B, L), True = abnormal
"""

from afire.config import LesionConfig
from afire.lesions.places import lung_field, otsu_threshold
from afire.lesions.synthesis import lesion_shares, synthesize, synthesize_keyed, token_labels

__all__ = [
    "LesionConfig",
    "lesion_shares",
    "lung_field",
    "otsu_threshold",
    "synthesize",
    "synthesize_keyed",
    "token_labels",
]
