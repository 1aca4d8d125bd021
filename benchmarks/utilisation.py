"""Achieved FLOP/s of ViT-B in training against the fastest matrix product of the same run. Goal: 0.70 or more.

    python benchmarks/utilisation.py [--profile] [--json FILE]

Encoder: forward, backward, clipping and AdamW of ViT-B/16 at 224 px. Step: the whole pre-training step with it. Both in
fp32 on all threads. FLOPs are those of the method (benchmarks/flops.py): what a kernel computes twice counts once. The
peak is the fastest of square products and of the products that ViT-B itself consists of, measured before and after
the networks, which are taken in turns; the fastest repetition counts on both sides. ``--profile`` prints where the time
goes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from figures import Figure, Findings, Table, digits
from flops import attention, attention_flops, flops, positions
from throughput import Step
from timing import interleaved, machine, report, seconds

from afire.config import Config
from afire.nn.vit import VisionTransformer, initialise
from afire.settings import load_config

GOAL = 0.70
SQUARES = (512, 1024, 2048, 3072)
TOKENS = 8 * 197
# (rows, inner, columns) of the products of a block: query-key-value, projection, the two layers of the MLP, and the
# gradient of the widest weight.
OWN_SHAPES = (
    (TOKENS, 768, 2304),
    (TOKENS, 768, 768),
    (TOKENS, 768, 3072),
    (TOKENS, 3072, 768),
    (768, TOKENS, 3072),
)
Shape = tuple[int, int, int]


def product_flops(shape: Shape, budget: float) -> float:
    """FLOP/s of the fastest product of this shape within ``budget`` seconds, three at least."""
    rows, inner, columns = shape
    left, right = torch.rand(rows, inner), torch.rand(inner, columns)
    out = torch.empty(rows, columns)
    torch.mm(left, right, out=out)
    times: list[float] = []
    end = time.perf_counter() + budget
    while len(times) < 3 or time.perf_counter() < end:
        times.append(seconds(lambda: torch.mm(left, right, out=out)))
    return 2 * rows * inner * columns / min(times)


def peaks(budget: float, squares: tuple[int, ...] = SQUARES) -> dict[Shape, float]:
    shapes = [(side, side, side) for side in squares] + list(OWN_SHAPES)
    return {shape: product_flops(shape, budget) for shape in shapes}


def encoder_of(config: Config) -> VisionTransformer:
    network = VisionTransformer.from_config(config.encoder, config.image)
    initialise(network, torch.Generator().manual_seed(0))
    return network.train()


class Encoder:
    """Training of the encoder alone, on images in memory."""

    def __init__(self, config: Config, batch: int, like: Encoder | None = None) -> None:
        self.network: VisionTransformer = like.network if like else encoder_of(config)
        self.optimizer: torch.optim.Optimizer = (
            like.optimizer if like else torch.optim.AdamW(self.network.parameters(), lr=1e-5, fused=True)
        )
        self.films = torch.randn(batch, config.image.channels, config.image.size, config.image.size)

    def __call__(self) -> None:
        torch.autograd.backward(self.network(self.films).square().mean())
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 3.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def works(config: Config, encoder_batches: tuple[int, ...], step_batch: int) -> dict[str, tuple[Any, int, float]]:
    """Name -> (function, batch, FLOPs of one call)."""
    found: dict[str, tuple[Any, int, float]] = {}
    first: Encoder | None = None
    fused = 3 * attention(config.encoder, positions(config) + 1)
    for batch in encoder_batches:
        encoder = Encoder(config, batch, first)
        first = first or encoder
        found[f"encoder, batch {batch}"] = (encoder, batch, flops(encoder) + fused * batch)
    step = Step("vit-b", step_batch)
    counted = flops(step) + attention_flops(config, step_batch, step_batch)
    found[f"pre-training step, batch {step_batch}"] = (step, step_batch, counted)
    return found


def run(repetitions: int, budget: float, encoder_batches: tuple[int, ...], step_batch: int) -> dict[str, Any]:
    config = load_config("paper", overrides=["lesions.views=1", "training.precision=fp32"])
    best = peaks(budget)
    result: dict[str, Any] = {"machine": machine(), "works": {}}
    todo = works(config, encoder_batches, step_batch)
    # Counting its FLOPs was the first, slow call of each. In turns: a slow minute of the machine meets all of them.
    times = interleaved({name: work for name, (work, _, _) in todo.items()}, repetitions)
    for name, (_, batch, counted) in todo.items():
        fastest = min(times[name])
        result["works"][name] = {"flops": counted, "seconds": fastest, "images/s": batch / fastest}
    best = {shape: max(speed, best[shape]) for shape, speed in peaks(budget).items()}
    shape = max(best, key=lambda one: best[one])
    result["peak, GFLOP/s"] = best[shape] / 1e9
    result["peak at"] = " x ".join(map(str, shape))
    result["products, GFLOP/s"] = {" x ".join(map(str, one)): speed / 1e9 for one, speed in best.items()}
    for work in result["works"].values():
        work["share of peak"] = work["flops"] / work["seconds"] / best[shape]
    return result


def measure(quick: bool = False) -> Findings:
    found = run(1, 0.0, (1,), 1) if quick else run(4, 0.3, (8, 16), 8)
    peak = found["peak, GFLOP/s"]
    figures = [
        Figure(f"FLOP/s / matrix-product peak, ViT-B {name}", work["share of peak"], "share", GOAL)
        for name, work in found["works"].items()
    ]
    rows = [
        [name, digits(work["images/s"]), digits(work["flops"] / work["seconds"] / 1e9), digits(work["share of peak"])]
        for name, work in found["works"].items()
    ]
    products = [[name, digits(speed), digits(speed / peak)] for name, speed in found["products, GFLOP/s"].items()]
    return Findings(
        figures,
        [
            Table("ViT-B/16, 224 px, fp32", ["work", "images/s", "GFLOP/s", "of the peak"], rows),
            Table("Matrix products", ["rows x inner x columns", "GFLOP/s", "of the peak"], products),
        ],
        [f"The peak of this run is {digits(peak)} GFLOP/s, at {found['peak at']}."],
    )


def print_profile(work: Callable[[], object]) -> None:
    work()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        work()
    print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=20, max_name_column_width=60))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--profile", action="store_true", help="where a pre-training step spends its time, instead")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.profile:
        print_profile(Step("vit-b", options.batch))
    else:
        report(run(options.repetitions, 0.3, (options.batch, 2 * options.batch), options.batch), options.json)


if __name__ == "__main__":
    main()
