"""Lungs by Otsu's threshold, lungs that a network predicts, and the places that follow: numbers for docs/methods.md.

On drawn films everything is known: how far the lungs that Otsu's threshold finds overlap with those that were drawn
(Dice at 56 x 56 cells), and how often a token gets another place than by the drawn anatomy. Part of that is how places
are told, not how lungs are found: so the frame of the drawn lungs alone stands beside it. The built-in network, which
learnt from drawn films of another seed, predicts the same.

With --films and --masks, radiographs and lung masks of the same names, spread evenly over the folder, both are compared
with the masks: Dice, and the mean distance of the edges of a film's frame, as a share of its side.

With --run, a pre-training with prototypes.lungs=predicted, the places that it gives drawn films by its own predictions.

python benchmarks/lungs.py [--count N] [--films FOLDER --masks FOLDER] [--run RUN]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from afire.data.decode import fit_square, read_film
from afire.data.phantom import ANATOMY, draw_batch
from afire.detect.base import detector_folder, load_detector
from afire.detect.taught import KINDS, Finder
from afire.lesions.frames import TYPICAL_LUNGS, anatomy_places, chest_frame, chest_places, places_in
from afire.lesions.places import lung_depth
from afire.methods.phantom import PhantomTaught
from afire.weights import open_weights
from afire.weights.hub import BUILTIN

SIDE, FIELD = 128, 56
TOKENS = (16, 16)
PLACES = (16, 16)
_LUNGS = 6  # the first parts of the anatomy


def pooled(images: Tensor) -> Tensor:
    return F.adaptive_avg_pool2d(images, FIELD)


def otsu(images: Tensor) -> Tensor:
    """(B, 56, 56) lungs of films (B, 1, S, S)."""
    return lung_depth(pooled(images)[:, 0]) > 0


def likely_anatomy(images: Tensor) -> Tensor:
    """(B, A, 16, 16) by the built-in network."""
    detector = load_detector(detector_folder(BUILTIN))
    assert isinstance(detector.model, Finder)
    with torch.no_grad():
        logits = [detector.model.place_logits(batch) for batch in torch.split(images, 50)]
    return torch.cat(logits)[:, 1 + KINDS :].sigmoid()


def predicted(anatomy: Tensor) -> Tensor:
    lungs = anatomy[:, :_LUNGS].sum(dim=1, keepdim=True)
    return F.interpolate(lungs, (FIELD, FIELD), mode="bilinear")[:, 0] > 0.5


def dice(one: Tensor, other: Tensor) -> Tensor:
    """(B,) of fields (B, H, W)."""
    both = (one & other).sum(dim=(1, 2))
    return 2 * both / (one.sum(dim=(1, 2)) + other.sum(dim=(1, 2))).clamp_min(1)


def told(name: str, found: Tensor, truth: Tensor) -> str:
    values = dice(found, truth).double()
    low = (values < 0.8).double().mean()
    return f"{name}: Dice {values.mean():.3f}, median {values.median():.3f}, below 0.8 in {low:.1%} of {len(values)}"


def apart(one: Tensor, other: Tensor, columns: int = PLACES[1]) -> str:
    down, across = (one // columns - other // columns).abs(), (one % columns - other % columns).abs()
    far = torch.maximum(down, across)
    some, more = (far > 0).double().mean(), (far > 1).double().mean()
    return f"another place for {some:.1%} of the tokens, by 2 cells or more for {more:.1%}"


def on_drawn_films(count: int, normal_share: float) -> None:
    batch = draw_batch(31, range(count), SIDE, normal_share=normal_share)
    images, truth = torch.from_numpy(batch.images), torch.from_numpy(batch.anatomy).float()
    lungs = pooled(truth[:, :_LUNGS].sum(dim=1, keepdim=True))[:, 0] > 0.5
    likely = likely_anatomy(images)
    known, _ = anatomy_places(truth, TOKENS, PLACES)
    by_network, has_lungs = anatomy_places(likely, TOKENS, PLACES)
    print(f"{count} drawn films of {SIDE} px, {normal_share:.0%} normal, against what was drawn ({len(ANATOMY)} maps)")
    print(told("  Otsu", otsu(images), lungs) + "; " + apart(chest_places(images, TOKENS, PLACES), known))
    print(told("  built-in network", predicted(likely), lungs) + "; " + apart(by_network, known))
    by_frame = places_in(chest_frame(lungs), TOKENS, PLACES, TYPICAL_LUNGS)
    print(f"  by the frame of the drawn lungs alone: {apart(by_frame, known)}")
    print(f"  two lungs in the network's maps: {has_lungs.double().mean():.1%}")


def on_radiographs(films: Path, masks: Path, count: int) -> None:
    every = sorted(path for path in films.iterdir() if list(masks.glob(f"{path.stem}*")))
    names = [every[number * len(every) // count] for number in range(count)]
    read = [fit_square(read_film(path)[0], SIDE) for path in names]
    fields = [fit_square(read_film(next(masks.glob(f"{path.stem}*")))[0], FIELD) for path in names]
    images, lungs = torch.from_numpy(np.stack(read))[:, None], torch.from_numpy(np.stack(fields)) > 0.5
    likely = likely_anatomy(images)
    print(f"{len(names)} radiographs, against masks")
    frame = chest_frame(lungs)
    for name, found in (("  Otsu", otsu(images)), ("  built-in network", predicted(likely))):
        edges = [(one - other).abs().mean() for one, other in zip(chest_frame(found), frame, strict=True)]
        print(f"{told(name, found, lungs)}; edges of the frame off by {torch.stack(edges).mean():.3f}")
    print(f"  two lungs in the network's maps: {anatomy_places(likely, TOKENS, PLACES)[1].double().mean():.1%}")


def on_its_own(run: Path, count: int) -> None:
    model = open_weights(run).method.eval()
    assert isinstance(model, PhantomTaught) and model.afire is not None and model.afire.anatomy is not None
    batch = draw_batch(31, range(count), model.config.image.size, normal_share=1.0)
    images, grid = torch.from_numpy(batch.images), model.grid
    known, _ = anatomy_places(torch.from_numpy(batch.anatomy).float(), grid, grid)
    with torch.no_grad():
        has_lungs = anatomy_places(model.afire.anatomy(images), grid, grid)[1].double().mean()
    own = model.afire.places(images)
    assert own is not None
    print(f"{count} drawn films, all normal, {grid[0]} x {grid[1]} places, by {run.name}")
    print(f"  Otsu: {apart(chest_places(images, grid, grid), known, grid[1])}")
    print(f"  its own maps, which have two lungs in {has_lungs:.1%}: {apart(own, known, grid[1])}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--films", type=Path)
    parser.add_argument("--masks", type=Path)
    parser.add_argument("--run", type=Path)
    asked = parser.parse_args()
    for normal_share in (1.0, 0.0):
        on_drawn_films(asked.count, normal_share)
    if asked.films is not None and asked.masks is not None:
        on_radiographs(asked.films, asked.masks, asked.count)
    if asked.run is not None:
        on_its_own(asked.run, asked.count)


if __name__ == "__main__":
    main()
