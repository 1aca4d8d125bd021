"""Structure and category loss, forward and backward, against Python loops over tokens.

    python benchmarks/losses.py --json losses.json

The plain loop indexes tokens by ``log_q[i, j]``; the backward pass of each index fills a (B, L, K) tensor with zeros.
It would take minutes, so it runs over a few positions and is scaled up to all of them. The best loop unbinds the
tensor once, works on matrix-vector products, and runs in full.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from figures import Figure, Findings, Table, digits
from timing import CLOCKS, interleaved, machine, peak_megabytes, report, seconds
from torch import Tensor

from afire.methods.equations import Contrast, category_loss, structure_loss


def plain_loop(log_q: Tensor, abnormal: Tensor, prototypes: Tensor, temperature: float, positions: int) -> Tensor:
    """Both losses, one normal token of the first ``positions`` at a time."""
    log_c = prototypes.clamp_min(1e-6).log()
    structure, category = [], []
    for i in range(log_q.shape[0]):
        for j in range(positions):
            if abnormal[i, j]:
                continue
            q = log_q[i, j].exp()
            to_prototypes = (q * log_c).sum(-1) / temperature
            structure.append(torch.logsumexp(to_prototypes, 0) - to_prototypes[j])
            to_tokens = (q * log_q[:, j]).sum(-1) / temperature
            negative = abnormal[:, j]
            pushed = (log_q[negative, j].exp() * log_c[j]).sum(-1) / temperature
            positives = torch.logsumexp(to_tokens[~negative], 0)
            category.append(torch.logsumexp(torch.cat([to_tokens, pushed]), 0) - positives)
    return torch.stack(structure).mean() + torch.stack(category).mean()


def best_loop(log_q: Tensor, abnormal: Tensor, prototypes: Tensor, temperature: float) -> Tensor:
    """Both losses, one normal token at a time, as fast as such a loop gets."""
    log_c = prototypes.clamp_min(1e-6).log()
    structure, category = [], []
    for j, (log_q_j, q_j) in enumerate(zip(log_q.unbind(1), log_q.exp().unbind(1), strict=True)):
        negative = abnormal[:, j]
        for i, q_ij in enumerate(q_j.unbind(0)):
            if negative[i]:
                continue
            to_prototypes = log_c @ q_ij / temperature
            structure.append(torch.logsumexp(to_prototypes, 0) - to_prototypes[j])
            to_tokens = log_q_j @ q_ij / temperature
            pushed = q_j[negative] @ log_c[j] / temperature
            positives = torch.logsumexp(to_tokens[~negative], 0)
            category.append(torch.logsumexp(torch.cat([to_tokens, pushed]), 0) - positives)
    return torch.stack(structure).mean() + torch.stack(category).mean()


def run(shape: tuple[int, int, int], plain_positions: int, rounds: int, clock_name: str) -> dict[str, Any]:
    B, L, K = shape
    few, clock = min(L, plain_positions), CLOCKS[clock_name]
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(B, L, K, generator=generator)).requires_grad_()
    abnormal = torch.rand(B, L, generator=generator) < 0.15
    prototypes = torch.softmax(2 * torch.randn(L, K, generator=generator), -1)
    gradients: dict[str, Tensor] = {}

    def ours() -> None:
        log_q = torch.log_softmax(logits, -1)
        contrast = Contrast(log_q, abnormal, prototypes, temperature=0.1, similarity="corrected")
        (gradients["ours"],) = torch.autograd.grad(structure_loss(contrast) + category_loss(contrast), logits)

    def best() -> None:
        loss = best_loop(torch.log_softmax(logits, -1), abnormal, prototypes, 0.1)
        (gradients["loop"],) = torch.autograd.grad(loss, logits)

    def plain() -> None:
        torch.autograd.grad(plain_loop(torch.log_softmax(logits, -1), abnormal, prototypes, 0.1, few), logits)

    before = peak_megabytes()
    ours()
    extra = peak_megabytes() - before
    times: dict[str, list[float]] = {"ours": [], "best": [], "plain": []}
    for _ in range(rounds):
        times["ours"] += interleaved({"ours": ours}, 5, clock)["ours"]
        times["best"].append(seconds(best, clock))
        times["plain"].append(seconds(plain, clock) * L / few)
    fastest = {name: min(values) for name, values in times.items()}
    return {
        "machine": machine(),
        "clock": clock_name,
        "shape": f"B={B} L={L} K={K}",
        "ours_seconds": round(fastest["ours"], 4),
        "best_loop_seconds": round(fastest["best"], 2),
        "plain_loop_seconds_scaled": round(fastest["plain"], 1),
        "times_faster_than_best_loop": round(fastest["best"] / fastest["ours"], 1),
        "times_faster_than_plain_loop": round(fastest["plain"] / fastest["ours"], 1),
        "extra_megabytes": round(extra, 1),
        "largest_gradient_difference": float((gradients["ours"] - gradients["loop"]).abs().max()),
        "largest_gradient": float(gradients["loop"].abs().max()),
    }


GOAL = 100.0  # times the plain loop


def measure(quick: bool = False) -> Findings:
    found = run((4, 8, 16), 2, 1, "wall") if quick else run((64, 196, 256), 2, 2, "wall")
    figures = [
        Figure(
            "structure and category loss, faster than a plain loop over tokens",
            found["times_faster_than_plain_loop"],
            goal=GOAL,
        ),
        Figure(
            "structure and category loss, faster than the best loop over tokens", found["times_faster_than_best_loop"]
        ),
    ]
    rows = [
        [name, digits(1000 * found[key])]
        for name, key in (
            ("`structure_loss` + `category_loss`", "ours_seconds"),
            ("best loop", "best_loop_seconds"),
            ("plain loop, scaled up", "plain_loop_seconds_scaled"),
        )
    ]
    difference = found["largest_gradient_difference"] / found["largest_gradient"]
    notes = [f"The gradients differ by at most {difference:.0e} of the largest."]
    return Findings(figures, [Table(found["shape"], ["forward and backward", "ms"], rows)], notes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--positions", type=int, default=196)
    parser.add_argument("--clusters", type=int, default=256)
    parser.add_argument("--plain-positions", type=int, default=2, help="positions that the plain loop runs over")
    parser.add_argument("--rounds", type=int, default=2, help="runs of the loops; five of ours beside each")
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall", help="cpu: on a busy machine, with one thread")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    shape = (options.batch, options.positions, options.clusters)
    report(run(shape, options.plain_positions, options.rounds, options.clock), options.json)


if __name__ == "__main__":
    main()
