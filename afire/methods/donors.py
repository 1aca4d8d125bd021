"""The films of a run that patches are cut from: looked up when it begins, and never saved with the weights."""

from __future__ import annotations

import torch
from torch import Tensor

from afire.lesions.pastes import Donors, donor_rows
from afire.methods.base import ReadFilms
from afire.nn.conv import shrunk

_READ = 64  # films at a time


def read_donors(rows: Tensor, count: int, seed: int, read: ReadFilms, side: int) -> Donors | None:
    """At most ``count`` films of ``rows`` to cut patches from, as the networks see them; None without any.

    Whoever keeps them keeps them outside of buffers: pixels of patients must not be saved with the weights.
    """
    indices = donor_rows(rows, count, seed)
    films = [shrunk(read(batch)[:, :1], side) for batch in torch.split(indices, _READ)] if len(indices) else []
    return Donors.of(torch.cat(films)) if films else None
