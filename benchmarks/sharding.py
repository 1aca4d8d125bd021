"""What weights, gradients and moments need on each process, whole (ddp) and in parts (fsdp), for the large presets.

    python benchmarks/sharding.py [--processes 8] [--json FILE]

Counted, not measured, and the same everywhere: parameters grow by the same number with every block of the encoder, so
encoders of one and of two blocks tell those of any depth. Everything is float32, as afire keeps it; activations, which
encoder.gradient_checkpointing makes small, are left out.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from timing import report

from afire.methods.afire import AFiRe
from afire.nn.vit import Block
from afire.settings import changed, load_config

PRESETS = ("paper", "large", "huge")
FLOAT = 4
MOMENTS = 2  # of AdamW
AT_ONCE = 2  # blocks that are whole at the same time: the one at work, and the next on its way


@dataclass(frozen=True)
class Size:
    """Numbers of parameters."""

    trained: int  # the optimiser moves them
    all: int  # with the teacher's
    block: int  # the largest block
    outside: int  # of all blocks: FSDP gathers these for a whole step

    @property
    def whole(self) -> int:
        """Bytes on each process where each has everything."""
        return FLOAT * (self.all + self.trained * (1 + MOMENTS))

    def in_parts(self, processes: int) -> int:
        """Bytes on each process: its parts, and what is gathered at the worst moment, gradients included."""
        gathered = self.outside + AT_ONCE * self.block
        return self.whole // processes + 2 * FLOAT * gathered


def count(preset: str, depth: int) -> Size:
    """The preset with an encoder of ``depth`` blocks."""
    config = changed(load_config(preset), {"encoder": {"size": None, "depth": depth}})
    model = AFiRe(config)
    blocks = [
        sum(weight.numel() for weight in part.parameters()) for part in model.modules() if isinstance(part, Block)
    ]
    everything = sum(weight.numel() for weight in model.parameters())
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    return Size(trained, everything, max(blocks), everything - sum(blocks))


def size_of(preset: str) -> Size:
    """By two small encoders: what one block adds, it adds every time."""
    one, two, depth = count(preset, 1), count(preset, 2), load_config(preset).encoder.depth
    trained = one.trained + (depth - 1) * (two.trained - one.trained)
    return Size(trained, one.all + (depth - 1) * (two.all - one.all), two.block, two.outside)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    result: dict[str, Any] = {}
    for preset in PRESETS:
        size, encoder = size_of(preset), load_config(preset).encoder
        result[f"{preset} (ViT-{encoder.size}/{encoder.patch_size})"] = {
            "trained parameters, M": round(size.trained / 1e6, 1),
            "with the teacher, M": round(size.all / 1e6, 1),
            "ddp, GB/process": round(size.whole / 1e9, 1),
            f"fsdp on {options.processes}, GB/process": round(size.in_parts(options.processes) / 1e9, 1),
            "a checkpoint, GB": round(FLOAT * (size.all + MOMENTS * size.trained) / 1e9, 1),
        }
    report(result, options.json)


if __name__ == "__main__":
    main()
