"""How many films a detector's domain check refuses: from its own dataset and foreign ones. The table of docs/detect.md.

python benchmarks/detect_domain.py PACK [PACK ...]

The domain is fitted on the normal training films of a pack and applied to its test films, the same rotated, inverted
and cropped, and the films of the other packs. Photos are crops of the two in scikit-learn; hands are drawn.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFilter
from torch import Tensor
from torch.nn.functional import interpolate

from afire.data.pack import PackedFilms
from afire.detect.normals import Domain, rank_pictures

SIZE, MOST = 128, 400


def subsets(folder: Path) -> dict[str, Tensor]:
    """Normal training films, normal and other test films; a set without a split is halved."""
    films = PackedFilms(folder)
    table = films.manifest.table
    normal = table["normal"].to_numpy(float) == 1
    train, test = (table["split"].to_numpy() == name for name in ("train", "test"))
    if not test.any():
        train = np.random.default_rng(0).random(len(table)) < 0.5
        test = ~train
    rows = {"train": train & normal, "normal test films": test & normal, "test films with findings": test & ~normal}
    return {name: films.batch(np.flatnonzero(chosen)) for name, chosen in rows.items()}


def cropped(films: Tensor, rng: np.random.Generator, low: float, high: float) -> Tensor:
    size = films.shape[-1]

    def crop(film: Tensor) -> Tensor:
        side = int(size * rng.uniform(low, high))
        top, left = (int(edge) for edge in rng.integers(0, size - side, 2))
        return interpolate(film[None, :, top : top + side, left : left + side], size=(size, size), mode="bilinear")[0]

    return torch.stack([crop(film) for film in films])


def photos(rng: np.random.Generator) -> Tensor:
    from sklearn.datasets import load_sample_images

    found = []
    for picture in load_sample_images().images:
        grey = torch.from_numpy(picture.mean(axis=2).astype(np.float32) / 255)[None, None]
        for _ in range(60):
            side = int(rng.integers(120, min(grey.shape[2:])))
            top, left = int(rng.integers(0, grey.shape[2] - side)), int(rng.integers(0, grey.shape[3] - side))
            found.append(
                interpolate(grey[..., top : top + side, left : left + side], size=(SIZE, SIZE), mode="area")[0]
            )
    return torch.stack(found)


def hand(rng: np.random.Generator) -> Tensor:
    """Fingers with bright bones on a dark ground."""
    image = Image.new("L", (256, 256), int(rng.integers(5, 40)))
    draw = ImageDraw.Draw(image)
    flesh = int(rng.integers(90, 150))
    right, down = (int(shift) for shift in rng.integers(-20, 20, 2))
    draw.rounded_rectangle((85 + right, 130 + down, 175 + right, 255), 30, fill=flesh)
    for x, length, angle in ((70, 60, -25), (95, 105, -8), (122, 115, 0), (150, 105, 8), (180, 80, 20)):
        turn = np.radians(angle)
        line = (x + right, 140 + down, x + right + length * np.sin(turn), 140 + down - length * np.cos(turn))
        draw.line(line, fill=flesh, width=22)
        draw.line(line, fill=min(255, flesh + 80), width=9)
    turned = image.rotate(float(rng.uniform(-25, 25))).filter(ImageFilter.GaussianBlur(2)).resize((SIZE, SIZE))
    return torch.from_numpy(np.asarray(turned, np.float32) / 255)[None]


def changes(rng: np.random.Generator) -> dict[str, Callable[[Tensor], Tensor]]:
    return {
        "inverted": lambda films: 1 - films,
        "on their side": lambda films: films.rot90(1, (2, 3)),
        "upside down": lambda films: films.rot90(2, (2, 3)),
        "mirrored": lambda films: films.flip(3),
        "a third to three fifths of the film": lambda films: cropped(films, rng, 0.3, 0.6),
        "four fifths of the film": lambda films: cropped(films, rng, 0.8, 0.85),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("packs", nargs="*", type=Path, help="packs of real films; without any there is nothing to do")
    sets = {folder.name: subsets(folder) for folder in parser.parse_args().packs}
    rng = np.random.default_rng(1)
    strange = {"photos": photos(rng), "drawn hands": torch.stack([hand(rng) for _ in range(100)])}
    strange["noise"] = torch.from_numpy(rng.random((100, 1, SIZE, SIZE), np.float32))
    for name, films in sets.items():
        domain = Domain.of(rank_pictures(films.pop("train")))
        print(f"{name}: likeness of at least {domain.least_likeness:.2f}, gain of at most {domain.most_gain:.2f}")
        together = torch.cat(list(films.values()))
        some = together[torch.from_numpy(rng.permutation(len(together))[:MOST])]
        shown = {**films, **{how: change(some) for how, change in changes(rng).items()}, **strange}
        shown |= {f"films of {other}": torch.cat([*sets[other].values()][-2:]) for other in sets if other != name}
        for what, images in shown.items():
            refused = float(np.mean([bool(found) for found in domain.objections(images)]))
            print(f"  {refused:6.1%} of {len(images):4d}  {what}")


if __name__ == "__main__":
    main()
