"""Keys of films of earlier steps, kept to be compared with: a ring of fixed size in buffers, so that a resume has it.

Shapes: Q places, N new keys, B queries, F width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from afire.nn import distributed

NOBODY = -1
"""The owner of a place that was never filled."""


class KeyQueue(nn.Module):
    """The newest Q keys and whose they are; the oldest make room.

    A place that was not filled yet counts for nothing, so that nothing needs to be made up for the first steps.
    """

    keys: Tensor
    owners: Tensor
    pointer: Tensor

    def __init__(self, places: int, width: int) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(places, width))
        self.register_buffer("owners", torch.full((places,), NOBODY))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.long))

    def __len__(self) -> int:
        return len(self.owners)

    def others(self, owners_B: Tensor) -> Tensor:
        """Which places (B, Q) hold the key of another owner than each of ``owners_B``."""
        owners_B = owners_B.to(self.owners.device)
        return (self.owners != owners_B[:, None]) & (self.owners != NOBODY)

    @torch.no_grad()
    def push(self, keys_NF: Tensor, owners_N: Tensor) -> None:
        """Keep new keys, the same on every process; of more than fit, the last."""
        count, places = len(keys_NF), len(self)
        at = (self.pointer + torch.arange(count, device=self.pointer.device)) % places
        at, keys_NF, owners_N = at[-places:], keys_NF[-places:], owners_N[-places:]
        self.keys[at] = keys_NF.to(self.keys)
        self.owners[at] = owners_N.to(self.owners)
        self.pointer.copy_((self.pointer + count) % places)


def of_all(keys_BF: Tensor, owners_B: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and owners of all processes, in order of rank, without gradient: what every process pushes."""
    return distributed.gather(keys_BF.detach()), distributed.gather(owners_B)
