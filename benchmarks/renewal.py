"""What phantoms drawn anew cost (`options.renewed`): seconds of an epoch by the share, for docs/methods.md.

Each share in turn, several times over, so that other work on the machine meets all of them. The first epoch, whose
whole bank is drawn before it, is left out; the median of the others is printed, and its ratio to that with no film
drawn anew.

python benchmarks/renewal.py [--preset small|residual] [--films N] [--rounds R]
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from afire.methods.base import Keys
from afire.methods.phantom import PhantomTaught
from afire.settings import load_config

SHARES = (0.0, 0.1, 0.5, 1.0)
EPOCHS, BATCH = 3, 32


def epochs(preset: str, films: int, renewed: float) -> list[float]:
    """Seconds of each epoch of a short training after the first."""
    settings = ["method=phantom", f"options.films={films}", f"options.renewed={renewed}", f"training.epochs={EPOCHS}"]
    config = load_config(preset, overrides=settings)
    model = PhantomTaught(config).train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.begin_run(torch.arange(films), lambda rows: rows)
    blank, seconds = torch.zeros(BATCH, 1, config.image.size, config.image.size), []
    for epoch in range(EPOCHS):
        start = time.perf_counter()
        for first in range(0, films, BATCH):
            rows = torch.arange(first, min(first + BATCH, films))
            loss = model.losses(model(model.views(blank[: len(rows)], Keys(0, epoch, 0, rows)))).total
            optimiser.zero_grad()
            torch.autograd.backward(loss)
            optimiser.step()
        seconds.append(time.perf_counter() - start)
    model.end_run()
    return seconds[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="small")
    parser.add_argument("--films", type=int, default=960)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    found: dict[float, list[float]] = {share: [] for share in SHARES}
    for number in range(asked.rounds):
        for share in SHARES:
            found[share] += epochs(asked.preset, asked.films, share)
            print(f"round {number + 1}, {share:.0%}: {found[share][-1]:.1f} s", flush=True)
    held = statistics.median(found[0.0])
    print(f"{asked.preset}, {asked.films} films, {torch.get_num_threads()} threads")
    for share, seconds in found.items():
        median = statistics.median(seconds)
        print(f"{share:4.0%} drawn anew: {median:6.1f} s an epoch, {median / held:.2f} times")


if __name__ == "__main__":
    main()
