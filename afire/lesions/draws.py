"""Where lesions get their chance from: 24-bit integers, from a generator or from a key.

Draws are integers, not floats, so that "the k-th of n pixels" is exact integer arithmetic: the same lesion on every
device, whatever the batch around it.

Shapes: B images, V views, S lesion slots, D = len(Draw) draws for each lesion.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

DRAW_BITS = 24  # what a float32 holds exactly

# Constants of splitmix64 (Steele, Lea and Flood 2014), as the signed integers torch knows.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_A = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_B = 0x94D049BB133111EB - (1 << 64)


class Draw(IntEnum):
    """What each random number of a lesion decides. Append only: the order is part of what a seed means."""

    COUNT = 0  # lesions in the film; read from slot 0 only
    TEXTURE = 1  # which highlighted pixel the texture window is centred on
    WINDOW_X = 2  # where the window lies in a film without highlight
    WINDOW_Y = 3
    WIDTH = 4
    HEIGHT = 5
    AMPLITUDE = 6
    PLACE_X = 7
    PLACE_Y = 8
    LUNG = 9  # which lung pixel the lesion is centred on
    ANGLE = 10
    KIND = 11  # texture or haze
    PHASE = 12  # of the first of the outline's harmonics; the others follow
    PHASE_3 = 13
    PHASE_4 = 14
    PHASE_5 = 15


def drawn(shape: tuple[int, int, int], generator: torch.Generator) -> Tensor:
    """Draws (B, V, S, D) from a generator, on the generator's device; ``shape`` is (B, V, S)."""
    return torch.randint(0, 1 << DRAW_BITS, (*shape, len(Draw)), generator=generator, device=generator.device)


def keyed(seed: int, epoch: int, indices: Tensor | Sequence[int], views: int, slots: int) -> Tensor:
    """Draws (B, V, S, D) that depend on nothing but (seed, epoch, sample index, view).

    A key opens a splitmix64 stream and the n-th number of that stream is the key of the next level:
    seed -> epoch -> sample -> view -> slot -> draw. A slot's draws therefore do not depend on how many slots there
    are. Computed on the CPU, so that every device sees the same numbers.
    """
    samples = torch.as_tensor(indices, dtype=torch.int64, device="cpu")
    key = nth_of_stream(torch.tensor(_signed(seed)), torch.tensor(_signed(epoch)))
    for level in (samples, torch.arange(views), torch.arange(slots), torch.arange(len(Draw))):
        key = nth_of_stream(key.unsqueeze(-1), level)
    return _shift_right(key, 64 - DRAW_BITS)


def nth_of_stream(state: Tensor, n: Tensor) -> Tensor:
    """The ``n``-th number of the splitmix64 stream that starts at ``state``; int64, wrapping around."""
    mixed = state + (n + 1) * _GOLDEN
    mixed = (mixed ^ _shift_right(mixed, 30)) * _MIX_A
    mixed = (mixed ^ _shift_right(mixed, 27)) * _MIX_B
    return mixed ^ _shift_right(mixed, 31)


def _shift_right(value: Tensor, bits: int) -> Tensor:
    """Logical shift: int64's own ``>>`` would drag the sign along."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    """A Python integer as the int64 with the same low 64 bits."""
    low = value & ((1 << 64) - 1)
    return low - (1 << 64) if low >> 63 else low


def below(draw: Tensor, limit: Tensor | int) -> Tensor:
    """Uniform integer in [0, limit), exact; 0 where ``limit`` is 0."""
    return (draw * limit) >> DRAW_BITS


def unit(draw: Tensor) -> Tensor:
    """Uniform float32 in [0, 1)."""
    return draw.to(torch.float32) * 2.0**-DRAW_BITS
