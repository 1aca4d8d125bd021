"""Lesions for a batch, against a loop over pixels, NumPy film by film, and sampling the whole film for every lesion.

    python benchmarks/lesions.py --json lesions.json

Also their share of a training step: ViT-tiny/16 (192 wide, 12 deep, 3 heads), forward, backward, AdamW and teacher.
Every implementation draws the same lesions; the largest difference is printed with its time. What views of the other
sorts take, opacities and patches of 64 donors, is printed beside it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from figures import Figure, Findings, Table, digits
from reference import lesions as pixel_loop
from reference import lesions_numpy
from timing import interleaved, machine, report
from torch import Tensor
from torch.nn import functional

from afire.config import Config, LesionConfig
from afire.lesions.pastes import Donors
from afire.lesions.places import Draw, PixelPicker, keyed, otsu_threshold
from afire.lesions.synthesis import plan, synthesize_keyed, window_size
from afire.methods.afire import AFiRe

CONFIG = LesionConfig()


def draw_films(count: int, size: int) -> Tensor:
    """Films (count, 1, size, size) with 8-bit values: a bright body, two dark lungs, noise."""
    at = (torch.arange(size) + 0.5) / size
    x, y = at[None, :], at[:, None]
    lungs = (((x - 0.5).abs() - 0.2) / 0.14) ** 2 + ((y - 0.45) / 0.3) ** 2 < 1
    film = 0.05 + 0.7 * ((x - 0.5).abs() < 0.44) - 0.45 * lungs
    films = film + 0.08 * torch.randn(count, 1, size, size, generator=torch.Generator().manual_seed(0))
    films = (films.clamp(0, 1) * 255).round() / 255
    films[:, :, 0, 0], films[:, :, -1, -1] = 0.0, 1.0
    return films


def ours(films: Tensor) -> Tensor:
    lesioned, _ = synthesize_keyed(films, seed=0, epoch=0, indices=range(len(films)), config=CONFIG)
    return lesioned


def by_pixel(films: Tensor) -> Tensor:
    draws = keyed(0, 0, range(len(films)), 1, CONFIG.count_max).tolist()
    results = []
    for film, draw in zip(films[:, 0].double().tolist(), draws, strict=True):
        results.append(pixel_loop.add(film, pixel_loop.lesion_mask(film, draw[0], CONFIG)))
    return torch.tensor(results)[:, None]


def by_film(films: Tensor) -> Tensor:
    draws = keyed(0, 0, range(len(films)), 1, CONFIG.count_max).numpy()
    results = []
    for film, draw in zip(films[:, 0].double().numpy(), draws, strict=True):
        results.append(torch.from_numpy((film + lesions_numpy.lesion_mask(film, draw[0])).clip(0, 1)))
    return torch.stack(results)[:, None].float()


def by_whole_film(films: Tensor) -> Tensor:
    """As a batch, but every lesion is sampled over the whole film: the texture by grid_sample, then the outline."""
    size = films.shape[-1]
    gray = films[:, 0]
    highlighted = PixelPicker(gray > otsu_threshold(gray)[:, None, None])
    draws = keyed(0, 0, range(len(films)), 1, CONFIG.count_max)
    count = CONFIG.count_min + (draws[:, 0, 0, Draw.COUNT] * (CONFIG.count_max - CONFIG.count_min + 1) >> 24)
    every = plan(gray, highlighted, draws, CONFIG.model_copy(update={"count_min": CONFIG.count_max}))
    window = window_size(CONFIG, size, size)[0]
    at = torch.arange(size) + 0.5
    mask = torch.zeros_like(films)
    for slot in range(CONFIG.count_max):
        one = every.where(torch.arange(slot, len(every), CONFIG.count_max))
        u = (at - one.left[:, None]) * (2 / one.width[:, None]) - 1
        v = (at - one.top[:, None]) * (2 / one.height[:, None]) - 1
        inside = (u.abs() < 1)[:, None, :] & (v.abs() < 1)[:, :, None] & (slot < count)[:, None, None]
        delta = torch.exp(-(u.square()[:, None, :] + v.square()[:, :, None]) / CONFIG.gamma) * inside
        in_window = [((t + 1) * (window / 2) - 0.5).clamp(0, window - 1) for t in (u, v)]
        x = (in_window[0] + one.window_left[:, None]) * (2 / (size - 1)) - 1
        y = (in_window[1] + one.window_top[:, None]) * (2 / (size - 1)) - 1
        grid = torch.stack([x[:, None, :].expand_as(delta), y[:, :, None].expand_as(delta)], -1)
        texture = functional.grid_sample(films, grid, mode="bilinear", padding_mode="border", align_corners=True)
        mask += texture * (delta * one.amplitude[:, None, None])[:, None]
    return (films + mask.clamp(0, 1)).clamp(0, 1)


def of_other_sorts(films: Tensor) -> dict[str, Callable[[], object]]:
    """Drawing views that are all opacities, or all patches."""
    donors = Donors.of(draw_films(64, films.shape[-1]))

    def draw(config: LesionConfig) -> Tensor:
        return synthesize_keyed(films, seed=0, epoch=0, indices=range(len(films)), config=config, donors=donors)[0]

    sorts = {"opacities": LesionConfig(opacities=1.0), "patches": LesionConfig(pasted=1.0)}
    return {name: partial(draw, config) for name, config in sorts.items()}


def cpu_seconds(function: Callable[[], object]) -> float:
    """What one thread spent, whatever else the machine was doing."""
    start = time.process_time()
    function()
    return time.process_time() - start


def training_step(films: Tensor, size: int) -> Callable[[], object]:
    config = Config.model_validate(
        {
            "image": {"size": size},
            "encoder": {"width": 192, "depth": 12, "heads": 3},
            # The decoder of the preset `small`. The default one takes most of a step: lesions would look cheaper still.
            "decoder": {"width": 192, "depth": 2, "heads": 6},
        }
    )
    model = AFiRe(config).train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4)
    lesioned, mask = synthesize_keyed(films, seed=0, epoch=0, indices=range(len(films)), config=CONFIG)

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        losses = model.losses(model({"images": films, "lesioned": lesioned, "mask": mask}))
        torch.autograd.backward(losses.total)
        optimiser.step()
        model.after_step(losses)

    return step


def run(batch: int, size: int, rounds: int, loop_films: int, with_step: bool) -> dict[str, Any]:
    films = draw_films(batch, size)
    few = films[:loop_films]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the loops have one thread; so have all, until the training step
    expected = ours(films)
    differences = {
        "pixel loop": float((by_pixel(few) - expected[: len(few)]).abs().max()),
        "numpy": float((by_film(films) - expected).abs().max()),
        "whole film": float((by_whole_film(films) - expected).abs().max()),
    }
    functions: dict[str, Callable[[], object]] = {
        "ours": lambda: ours(films),
        "pixel loop": lambda: by_pixel(few),
        "numpy": lambda: by_film(films),
        "whole film": lambda: by_whole_film(films),
    }
    times = {name: [cpu_seconds(function) for _ in range(rounds)] for name, function in functions.items()}
    per_film = {name: min(taken) / batch for name, taken in times.items()}  # the least disturbed round
    per_film["pixel loop"] *= batch / len(few)
    others = {
        name: min(cpu_seconds(function) for _ in range(rounds)) / batch
        for name, function in of_other_sorts(films).items()
    }
    torch.set_num_threads(threads)
    result: dict[str, Any] = {"machine": machine(), "batch": batch, "size": size}
    for name, value in per_film.items():
        result[f"{name}: CPU ms per film"] = round(1000 * value, 3)
    for name, value in others.items():
        result[f"views of {name}: CPU ms per film"] = round(1000 * value, 3)
        result[f"views of {name}: times as long as the paper's lesions"] = round(value / per_film["ours"], 1)
    for name in differences:
        result[f"times faster than {name}"] = round(per_film[name] / per_film["ours"], 1)
        result[f"largest difference from {name}"] = differences[name]
    if with_step:
        step = training_step(films, size)
        step()
        both = interleaved({"lesions": lambda: ours(films), "step": step}, 2)
        result["training step: seconds"] = round(min(both["step"]), 2)
        result["lesions: % of a training step"] = round(100 * min(both["lesions"]) / min(both["step"]), 2)
    return result


GOALS = {"pixel loop": 100.0, "whole film": 10.0}
LARGEST_SHARE = 0.03  # of a training step


def measure(quick: bool = False) -> Findings:
    found = run(2, 32, 1, 1, with_step=True) if quick else run(64, 224, 5, 4, with_step=True)
    others = {
        "numpy": "NumPy film by film",
        "whole film": "the whole film for every lesion",
        "pixel loop": "a loop over pixels",
    }
    figures = [
        Figure(f"lesions of a batch, faster than {title}", found[f"times faster than {n}"], goal=GOALS.get(n))
        for n, title in others.items()
    ]
    share = found["lesions: % of a training step"] / 100
    figures.append(Figure("lesions, of a ViT-tiny training step", share, "%", LARGEST_SHARE, "at most"))
    rows = [
        [title, digits(found[f"{name}: CPU ms per film"])]
        for name, title in {"ours": "`synthesize_keyed`", **others}.items()
    ]
    table = Table(f"{found['batch']} films of {found['size']} px", ["lesions by", "CPU ms per film"], rows)
    difference = max(found[f"largest difference from {name}"] for name in others)
    return Findings(figures, [table], [f"All draw the same lesions: no pixel differs by more than {difference:.0e}."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--loop-films", type=int, default=4, help="films for the loop over pixels, which is slow")
    parser.add_argument("--no-step", action="store_true", help="leave out the training step")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = run(options.batch, options.size, options.rounds, options.loop_films, not options.no_step)
    report(found, options.json)


if __name__ == "__main__":
    main()
