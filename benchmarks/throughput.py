"""Images per second of a pre-training step against the batch size.

    python benchmarks/throughput.py [--case small|vit-b] [--repetitions N] [--json FILE]

A step is lesions, teacher, student, head, decoder, losses, backward, clipping, AdamW and the teacher's EMA, on
images in memory. All batch sizes in alternation, the fastest of each.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import torch
from figures import Figure, Findings, Table, digits
from timing import interleaved, machine, report

from afire.methods.afire import AFiRe
from afire.methods.base import Keys, Losses
from afire.settings import load_config
from afire.training.engine import make_optimizer


class Case(NamedTuple):
    label: str
    preset: str
    settings: tuple[str, ...]
    batches: tuple[int, ...]


CASES = {
    "small": Case("preset small, 128 px", "small", ("image.size=128",), (1, 4, 16, 32, 64)),
    "vit-b": Case("ViT-B, 224 px", "paper", ("lesions.views=1", "training.precision=fp32"), (1, 4, 8)),
}


class Step:
    """One complete step of a case on a batch in memory."""

    def __init__(self, case: str, batch: int, like: Step | None = None) -> None:
        """``like`` shares its model and optimiser, because memory does not allow for two of ViT-B."""
        _, preset, settings, _ = CASES[case]
        self.config = load_config(preset, overrides=list(settings))
        self.model: AFiRe = like.model if like else AFiRe(self.config).train()
        self.optimizer: torch.optim.Optimizer = (
            like.optimizer if like else make_optimizer(self.model.parameters_of("all"), self.config.training)
        )
        size = self.config.image.size
        self.images = torch.rand(batch, 1, size, size, generator=torch.Generator().manual_seed(0))
        self.keys = Keys(0, 0, 0, torch.arange(batch))

    def forward(self) -> Losses:
        return self.model.losses(self.model(self.model.views(self.images, self.keys)))

    def __call__(self) -> None:
        losses = self.forward()
        torch.autograd.backward(losses.total)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.training.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.model.after_step(losses)


def run(case: str, batches: tuple[int, ...], repetitions: int) -> dict[int, float]:
    """Images per second at each batch size."""
    first = Step(case, batches[0])
    steps = {str(batch): Step(case, batch, like=first) for batch in batches}
    interleaved(steps, 1)
    times = interleaved(steps, repetitions)
    return {batch: batch / min(times[str(batch)]) for batch in batches}


def measure(quick: bool = False) -> Findings:
    figures, tables = [], []
    for name in ("small",) if quick else CASES:
        case = CASES[name]
        batches = (1, 2) if quick else case.batches
        speeds = run(name, batches, 1 if quick else 2)
        largest, one = max(batches), min(batches)
        figures.append(Figure(f"images/s, batch {largest} / batch {one}, {case.label}", speeds[largest] / speeds[one]))
        rows = [[str(batch), digits(speed), f"{digits(speed / speeds[one])} ×"] for batch, speed in speeds.items()]
        tables.append(Table(case.label, ["batch", "images/s", f"to batch {one}"], rows))
    return Findings(figures, tables)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=list(CASES), action="append", help="default: all")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result: dict[str, Any] = {"machine": machine()}
    for case in options.case or CASES:
        speeds = run(case, CASES[case].batches, options.repetitions)
        result[f"{CASES[case].label}, images/s"] = {batch: round(speed, 2) for batch, speed in speeds.items()}
    report(result, options.json)


if __name__ == "__main__":
    main()
