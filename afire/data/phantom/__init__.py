"""Procedurally drawn frontal chest films with five diseases: data to try everything on, without anyone's films.

A film is composed as path lengths through body, lung, bone and vessels and then exposed, so shadows lie on top of each
other as in a radiograph. It depends on seed and number only.

Knows anatomy and exposure; knows no other set and no network.
"""

from afire.data.manifest import Box
from afire.data.phantom.diseases import DISEASES
from afire.data.phantom.film import PhantomFilm, draw_film, draw_findings, split_of
from afire.data.phantom.write import MASK_BITS, write_phantom

__all__ = ["DISEASES", "MASK_BITS", "Box", "PhantomFilm", "draw_film", "draw_findings", "split_of", "write_phantom"]
