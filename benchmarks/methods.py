"""One whole step of every pre-training method against its bare networks and optimiser, with the preset ``small``.

    python benchmarks/methods.py --method moco --method dino --clock cpu

Whole: views, networks, losses, backward, AdamW, and what moves after a step. Bare: the same networks on views that are
already drawn, backward from the mean of what they say, AdamW.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from figures import Findings, overhead
from timing import CLOCKS, machine, report, whole_and_bare

from afire.config import Config
from afire.methods import METHODS, complete, make_method
from afire.methods.base import Keys, Labels, train_only
from afire.settings import load_config

GOAL = 1.15
BATCH = 32
MEASURED = [name for name, kind in METHODS.items() if kind.trains]


def config_of(method: str, *overrides: str) -> Config:
    """The preset, with clusters that a batch of films can fill."""
    own = ["options.clusters=[4,8]"] if method == "pcl" else []
    return load_config("small", overrides=[f"method={method}", *own, *overrides])


def steps(config: Config, batch: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """The whole step and the bare one, on one model and its optimisers."""
    kind = METHODS[config.method]
    names = ("finding",) if kind.learns_from_labels else ()
    model = make_method(kind.settled(complete(config, kind), batch, names)).train()
    rows = torch.arange(batch)
    coarse = torch.rand(batch, 1, 14, 14, generator=torch.Generator().manual_seed(0))
    images = torch.nn.functional.interpolate(coarse, size=config.image.size, mode="bicubic").clamp(0, 1)
    if names:
        model.begin_labels(Labels(names, rows, (rows % 2).float()[:, None]))
    model.begin_run(rows, lambda some: images[some])
    if model.prepares:
        model.prepare(config.training.epochs - 1, lambda: iter([(images, rows)]))
    keys = Keys(0, 0, 0, rows)
    trained = {turn: [weight for _, weight in model.parameters_of(turn)] for turn in model.turns}
    optimisers = {turn: torch.optim.AdamW(weights, lr=1e-5, fused=True) for turn, weights in trained.items()}
    ready = model.views(images, keys)

    def finish(turn: str, loss: torch.Tensor) -> None:
        optimisers[turn].zero_grad()
        torch.autograd.backward(loss)
        optimisers[turn].step()

    def whole() -> None:
        for turn in model.turns:
            train_only(turn, trained)
            losses = model.losses(model(model.views(images, keys)), turn)
            finish(turn, losses.total)
        model.after_step(losses)

    def bare() -> None:
        for turn in model.turns:
            train_only(turn, trained)
            said = [output.float().mean() for output in model(ready).values() if output.requires_grad]
            finish(turn, torch.stack(said).sum())

    return whole, bare


def measure(quick: bool = False) -> Findings:
    if quick:
        small = ["image.size=64", "encoder.depth=1"]
        found = {name: whole_and_bare(steps(config_of(name, *small), 8), 1, CLOCKS["wall"]) for name in MEASURED}
    else:
        found = {name: whole_and_bare(steps(config_of(name), BATCH), 5, CLOCKS["wall"]) for name in MEASURED}
        found = {name: {**one, "goal": GOAL} for name, one in found.items()}
    return overhead(found, "method")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=MEASURED, action="append", help="default: all")
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall", help="cpu: on a busy machine, with one thread")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    clock = CLOCKS[options.clock]
    found = {
        name: whole_and_bare(steps(config_of(name), options.batch), options.repetitions, clock)
        for name in options.method or MEASURED
    }
    report({"machine": machine(), "clock": options.clock, **found}, options.json)


if __name__ == "__main__":
    main()
