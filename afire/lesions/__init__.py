"""Synthetic lesions on normal films, for a whole batch at once, and the token labels that follow from them.

lesioned, mask = synthesize(images, generator=g)            # or synthesize_keyed(images, seed=..., ...)
abnormal = token_labels(mask, patch_size=16)                # bool (B, L), True = abnormal
"""

from afire.config import LesionConfig
from afire.lesions.labels import token_labels
from afire.lesions.lungs import lung_field
from afire.lesions.otsu import otsu_threshold
from afire.lesions.synthesis import synthesize, synthesize_keyed

__all__ = ["LesionConfig", "lung_field", "otsu_threshold", "synthesize", "synthesize_keyed", "token_labels"]
