"""Procedurally drawn frontal chest films with fourteen diseases: to try everything on, and to teach with, without
anyone's films.

A film is composed as path lengths through body, lung, bone and vessels and then exposed, so shadows lie on top of each
other as in a radiograph. It depends on seed and number only, and comes with exact maps of its anatomy and findings.

Knows anatomy and exposure; knows no other set and no network.
"""

from afire.data.manifest import Box
from afire.data.phantom.bank import PhantomBank, PhantomBatch, draw_batch
from afire.data.phantom.diseases import DISEASES
from afire.data.phantom.film import ANATOMY, PhantomFilm, draw_film, draw_findings, split_of
from afire.data.phantom.renewal import RenewedBank
from afire.data.phantom.style import Style
from afire.data.phantom.write import MASK_NUMBERS, mask_of, write_phantom

__all__ = [
    "ANATOMY",
    "DISEASES",
    "MASK_NUMBERS",
    "Box",
    "PhantomBank",
    "PhantomBatch",
    "PhantomFilm",
    "RenewedBank",
    "Style",
    "draw_batch",
    "draw_film",
    "draw_findings",
    "mask_of",
    "split_of",
    "write_phantom",
]
