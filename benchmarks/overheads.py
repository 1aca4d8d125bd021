"""Common overheads of a training step compared with afire's implementation, at the size of ViT-B.

    python benchmarks/overheads.py [--json FILE]

The optimiser: fused, against torch's foreach and its loop over parameters. The teacher's EMA: one call, against a
loop. Attention, forward and backward: on views of one product, against contiguous copies of query, key and value. In
alternation, the fastest of each. A complete pre-training step of 8 films puts them in proportion. Memory: complete
steps of the preset small, keeping freed memory and using huge pages as the command line does, against Python's
default, in separate alternating processes.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from figures import Figure, Findings, Table, digits
from throughput import Step
from timing import interleaved, machine, report, seconds
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

Works = dict[str, Callable[[], object]]


def optimisers(shapes: list[torch.Size]) -> Works:
    def make(fused: bool | None = None, foreach: bool | None = None) -> Callable[[], object]:
        parameters = [torch.zeros(shape, requires_grad=True) for shape in shapes]
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 1e-3)
        return torch.optim.AdamW(parameters, lr=1e-5, fused=fused, foreach=foreach).step

    return {"fused": make(fused=True), "foreach": make(foreach=True), "loop": make(foreach=False)}


def averages(shapes: list[torch.Size]) -> Works:
    teacher, student = ([torch.zeros(shape) for shape in shapes] for _ in range(2))

    def loop() -> None:
        for old, new in zip(teacher, student, strict=True):
            old.mul_(0.99).add_(new, alpha=0.01)

    return {"one call": lambda: torch._foreach_lerp_(teacher, student, 0.01), "loop": loop}


def attentions(batch: int, tokens: int, width: int, heads: int) -> Works:
    product = torch.randn(batch, tokens, 3 * width, requires_grad=True)

    def attend(prepare: Callable[[Tensor], Tensor]) -> Callable[[], object]:
        def work() -> None:
            parts = product.view(batch, tokens, 3, heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
            query, key, value = (prepare(part) for part in parts)
            mixed = scaled_dot_product_attention(query, key, value)
            torch.autograd.grad(mixed.transpose(1, 2).reshape(batch, tokens, width).sum(), product)

        return work

    return {"views": attend(lambda part: part), "copies": attend(Tensor.contiguous)}


def step_here(steps: int) -> dict[str, float]:
    """In a process of :func:`memory_ways`: milliseconds, kernel milliseconds and page faults of a step."""
    step = Step("small", 32)
    step()
    step()
    before, taken = resource.getrusage(resource.RUSAGE_SELF), [seconds(step) for _ in range(steps)]
    after = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "ms": 1000 * median(taken),
        "kernel ms": 1000 * (after.ru_stime - before.ru_stime) / steps,
        "page faults": (after.ru_minflt - before.ru_minflt) / steps,
    }


def memory_ways(rounds: int, steps: int) -> dict[str, dict[str, float]]:
    """Medians over rounds of what a step costs with memory kept and without."""
    default = {"THP_MEM_ALLOC_ENABLE": "0", "GLIBC_TUNABLES": ""}  # what keep_freed_memory leaves alone
    found: dict[str, list[dict[str, float]]] = {"kept, huge pages": [], "default": []}
    for _ in range(rounds):
        for way, several in found.items():
            command = [sys.executable, __file__, "--step-here", str(steps)]
            environment = {**os.environ, **(default if way == "default" else {})}
            done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
            several.append(json.loads(done.stdout.splitlines()[-1]))
    return {way: {key: median(one[key] for one in several) for key in several[0]} for way, several in found.items()}


def run(case: str, batch: int, repetitions: int) -> dict[str, Any]:
    """Milliseconds of each way, ours first, and of a whole step."""
    step = Step(case, batch)
    encoder = step.config.encoder
    trained = [parameter.shape for parameter in step.model.parameters() if parameter.requires_grad]
    averaged = [parameter.shape for parameter in step.model.teacher.parameters()]
    tokens = (step.config.image.size // encoder.patch_size) ** 2 + 1
    groups = {
        "AdamW": optimisers(trained),
        "EMA of the teacher": averages(averaged),
        "attention of a block": attentions(batch, tokens, encoder.width, encoder.heads),
    }
    step()
    result: dict[str, Any] = {"machine": machine(), "step": min(seconds(step) for _ in range(2)) * 1000}
    for name, works in groups.items():
        interleaved(works, 1)
        result[name] = {way: 1000 * min(taken) for way, taken in interleaved(works, repetitions).items()}
    return result


def measure(quick: bool = False) -> Findings:
    found = run("small", 2, 1) if quick else run("vit-b", 8, 7)
    figures, rows = [], []
    for name in list(found)[2:]:
        ours, *others = found[name].items()
        rows.append([name, f"{ours[0]} (afire)", digits(ours[1]), "", f"{digits(100 * ours[1] / found['step'])} %"])
        for way, taken in others:
            share = f"{digits(100 * taken / found['step'])} %"
            rows.append([name, way, digits(taken), f"{digits(taken / ours[1])} ×", share])
            figures.append(Figure(f"{name}, {ours[0]} faster than {way}", taken / ours[1]))
    title = f"A whole step takes {digits(found['step'])} ms"
    columns = ["work", "way", "ms", "to afire's way", "of a step"]
    tables = [Table(title, columns, rows)]
    memory = memory_ways(1 if quick else 3, 1 if quick else 10)
    kept, default = memory.values()
    figures.append(Figure("a step of `small`, keeping memory, faster than the default", default["ms"] / kept["ms"]))
    lines = [[way, *(digits(value) for value in values.values())] for way, values in memory.items()]
    tables.append(Table("A step of the preset small, 32 films, by memory management", ["memory", *kept], lines))
    return Findings(figures, tables)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--step-here", type=int, help=argparse.SUPPRESS)  # a process of memory_ways
    options = parser.parse_args()
    if options.step_here:
        print(json.dumps(step_here(options.step_here)))
        return
    found = run("vit-b", options.batch, options.repetitions)
    report({**found, "memory of a step": memory_ways(3, 10)}, options.json)


if __name__ == "__main__":
    main()
