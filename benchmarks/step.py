"""One whole step of pre-training against its bare networks and optimiser.

    python benchmarks/step.py --json step.json

Whole: lesions, student and teacher, Sinkhorn, prototypes, all losses, backward, AdamW, EMA of the teacher.
Bare: encoder, head and decoder of the student forward and backward, encoder and head of the teacher forward, AdamW.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from figures import Findings, overhead
from timing import CLOCKS, Clock, machine, report, whole_and_bare

from afire.config import Config
from afire.methods.afire import AFiRe
from afire.methods.base import Keys
from afire.settings import load_config

CASES: dict[str, tuple[int, Config, float]] = {
    "base_batch_8": (8, load_config("paper", overrides=["lesions.views=1"]), 1.10),
    "tiny_batch_32": (32, load_config(overrides=["encoder.size=tiny"]), 1.20),
}


def steps(config: Config, batch: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """The whole step and the bare one, on one model and one optimiser."""
    generator = torch.Generator().manual_seed(0)
    model = AFiRe(config).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    coarse = torch.rand(batch, 1, 14, 14, generator=generator)
    images = torch.nn.functional.interpolate(coarse, size=config.image.size, mode="bicubic").clamp(0, 1)
    films = model.normalise(images)
    keys = Keys(0, 0, 0, torch.arange(batch))

    def finish(loss: torch.Tensor) -> None:
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        optimiser.step()

    def whole() -> None:
        losses = model.losses(model(model.views(images, keys)))
        finish(losses.total)
        model.after_step(losses)

    def bare() -> None:
        assert model.student.head is not None and model.teacher.head is not None and model.decoder is not None
        with torch.no_grad():
            model.teacher.head(model.teacher.tokens(films))
        tokens = model.student.tokens(films)
        finish(model.student.head(tokens).mean() + model.decoder(tokens).mean())

    return whole, bare


def run(case: str, repetitions: int, clock: Clock) -> dict[str, Any]:
    batch, config, goal = CASES[case]
    return whole_and_bare(steps(config, batch), repetitions, clock) | {"goal": goal}


def measure(quick: bool = False) -> Findings:
    if quick:
        small = load_config("small", overrides=["image.size=64"])
        results = {"preset small, batch 2": whole_and_bare(steps(small, 2), 1, CLOCKS["wall"])}
    else:
        labels = {"base_batch_8": "ViT-B, batch 8", "tiny_batch_32": "ViT-tiny, batch 32"}
        results = {label: run(case, 3, CLOCKS["wall"]) for case, label in labels.items()}
    return overhead(results, "model")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=list(CASES), action="append", help="default: all")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall", help="cpu: on a busy machine, with one thread")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    clock = CLOCKS[options.clock]
    results = {case: run(case, options.repetitions, clock) for case in options.case or CASES}
    report({"machine": machine(), "clock": options.clock, **results}, options.json)


if __name__ == "__main__":
    main()
