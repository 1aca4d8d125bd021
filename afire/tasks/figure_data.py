"""Which films a figure shows: a part that no training has seen, and a random draw from it that can be repeated.

Several weights side by side in one figure, each under a label.

What the decoder restores, with abnormal tokens hidden behind z_mask and with all of them seen.

Each film is shown twice: with synthetic lesions, and as it is with the same tokens hidden. Errors are measured against
the film without lesions, in grey levels between 0 and 1. N films, S pixels a side.

Nine places of the film as landmarks: do tokens know where they are, and is it by anatomy or by position?

Every token carries its position, so even random weights keep the nine apart on films as they lie. The second question
needs films that are moved: then a landmark's place shows another landmark's anatomy, and the nearest of the nine
centres says which of the two a token follows. N films, L tokens, D width, 9 landmarks row by row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from afire.config import Config
from afire.data.manifest import Manifest
from afire.data.pack import Films
from afire.data.splits import Split, films_hash
from afire.errors import UserError
from afire.lesions.synthesis import synthesize_keyed, token_labels
from afire.methods import Method
from afire.nn.vit import Grid, grid_of
from afire.progress import progress
from afire.tasks.features import data_content_hash, feature_batches
from afire.tasks.results import plan_runs
from afire.weights import RANDOM, Weights, open_weights

Part = Literal["test", "val", "train", "all"]
Rows = NDArray[np.int64]


def part_rows(films: Films, part: Part, split: Split | None = None) -> tuple[Rows, str | None]:
    """Rows of a part and the hash of the split it belongs to.

    The parts are those that the tasks use with seed 0: a split file's, else the manifest's lists, else a split drawn
    by patient. ``all`` is every film, for a set that is foreign to the weights.
    """
    if part == "all":
        return np.arange(len(films)), None
    run = plan_runs(films.manifest, split, [0])[0]
    return np.asarray(run.rows[part], np.int64), run.split.hash


def draw_rows(rows: Rows, most: int, generator: np.random.Generator) -> Rows:
    """At most ``most`` of ``rows``, each as likely as any other, in the order of the manifest."""
    if most < 1:
        raise UserError(f"--films {most} leaves nothing to draw; give at least 1.")
    return np.sort(generator.permutation(rows)[:most])


def describe_films(films: Films, name: str, part: str, split_hash: str | None, rows: Rows, of: int) -> dict[str, Any]:
    """What a figure's JSON says about its films: ``rows`` were drawn from ``of`` candidates."""
    return {
        "name": name,
        "hash": data_content_hash(films),
        "part": part,
        "split_hash": split_hash,
        "films": len(rows),
        "drawn_from": of,
        "films_hash": films_hash(films.manifest, {"figure": rows}),
        "size": films.size,
    }


def load_backbones(
    weights: Mapping[str, str | Path], config: Config | None = None, network: str | None = None, seed: int = 0
) -> dict[str, Weights]:
    """A backbone for each label. Runs bring their own settings; ``config`` is for random weights and foreign files.

    Without ``config``, random weights take the architecture of the first run beside them: the fair thing to compare.
    """
    if not weights:
        raise UserError("a figure needs at least one --weights.")
    opened = {label: open_weights(source, network=network, seed=seed) for label, source in weights.items()}
    if config is None:
        config = next((one.config for one in opened.values() if one.brings_settings), None)
    return {
        label: one if one.brings_settings else open_weights(weights[label], config, network=network, seed=seed)
        for label, one in opened.items()
    }


def describe_backbone(backbone: Weights) -> dict[str, Any]:
    """What a figure's JSON says about weights."""
    has_head = backbone.name != RANDOM and "head" in backbone.kind.sections
    return {
        "name": backbone.name,
        "hash": backbone.hash,
        "report": backbone.report,
        "network": backbone.network,
        "clusters": backbone.config.head.clusters if has_head else None,
        "width": backbone.config.encoder.width,
        "depth": backbone.config.encoder.depth,
        "image_size": backbone.config.image.size,
    }


Pictures = NDArray[np.float32]
Floats = NDArray[np.float64]
BATCH = 32
INPUTS = ("lesioned", "normal")
WAYS = ("z_mask", "all_seen", "untouched")  # untouched: the input itself, as if nothing were restored


@dataclass(frozen=True)
class Restored:
    """Films (N, S, S) in [0, 1]: the truth, what went in, what came out; and the hidden tokens (N, rows, columns)."""

    truth: Pictures
    inputs: dict[str, Pictures]
    outputs: dict[tuple[str, str], Pictures]  # (input, way)
    hidden: NDArray[np.bool_]


@dataclass(frozen=True)
class Errors:
    """Mean squared errors (N,) of each (input, way) inside the hidden tokens and outside; NaN where there are none."""

    inside: dict[tuple[str, str], Floats]
    outside: dict[tuple[str, str], Floats]


def check_restores(model: Method, name: str) -> None:
    """A message when the model cannot restore, or has no z_mask to compare with."""
    if not model.restores:
        raise UserError(f"{name} was pre-trained without restoration: it has no decoder.")
    if not model.config.decoder.mask_token:
        raise UserError(
            f"{name} was pre-trained without z_mask (decoder.mask_token is false): there is nothing to compare."
        )


@torch.inference_mode()
def restore_films(model: Method, images: Tensor, rows: Rows, seed: int) -> Restored:
    """Restore films (N, 1, S, S) in both ways. A film's lesions follow from ``seed`` and its row alone."""
    lesions = model.config.lesions.model_copy(update={"views": 1})
    lesioned, mask = synthesize_keyed(images, seed=seed, epoch=0, indices=rows.tolist(), config=lesions)
    hidden = token_labels(mask, model.patch_size)
    inputs = {"lesioned": lesioned, "normal": images}
    outputs = {}
    for name, films in inputs.items():
        for way, abnormal in (("z_mask", hidden), ("all_seen", None)):
            # Normalised by the clean film's numbers, which are those the decoder learnt to answer in.
            outputs[name, way] = _grey(model.picture(model.restore(films, abnormal), like=images))
    grid = grid_of(images.shape[-2], images.shape[-1], model.patch_size)
    return Restored(
        _grey(images),
        {name: _grey(films) for name, films in inputs.items()},
        outputs,
        hidden.view(-1, *grid).cpu().numpy(),
    )


def restoration_errors(model: Method, films: Films, rows: Rows, seed: int, device: torch.device) -> Errors:
    """The errors of many films."""
    model = model.to(device)
    inside: dict[tuple[str, str], list[Floats]] = {(name, way): [] for name in INPUTS for way in WAYS}
    outside: dict[tuple[str, str], list[Floats]] = {key: [] for key in inside}
    with progress("restoring", len(rows), "films") as bar:
        for start in range(0, len(rows), BATCH):
            some = rows[start : start + BATCH]
            found = restore_films(model, films.batch(some).to(device), some, seed)
            hidden = np.kron(found.hidden, np.ones((1, model.patch_size, model.patch_size), np.bool_))
            for name, way in inside:
                picture = found.inputs[name] if way == "untouched" else found.outputs[name, way]
                error = (picture.astype(np.float64) - found.truth) ** 2
                inside[name, way].append(_mean_where(error, hidden))
                outside[name, way].append(_mean_where(error, ~hidden))
            bar.advance(len(some))
    return Errors(
        {key: np.concatenate(values) for key, values in inside.items()},
        {key: np.concatenate(values) for key, values in outside.items()},
    )


def _mean_where(values: Floats, where: NDArray[np.bool_]) -> Floats:
    count = where.sum(axis=(1, 2))
    total = (values * where).sum(axis=(1, 2))
    means: Floats = np.divide(total, count, out=np.full(len(total), np.nan), where=count > 0)
    return means


def _grey(films: Tensor) -> Pictures:
    grey: Pictures = films.float().mean(dim=1).cpu().numpy()
    return grey


LANDMARKS = (
    "upper left", "upper middle", "upper right",
    "middle left", "centre", "middle right",
    "lower left", "lower middle", "lower right",
)  # fmt: skip


@dataclass(frozen=True)
class Places:
    """Rows and columns of the nine tokens, and how many tokens lie from one to the next."""

    rows: tuple[int, int, int]
    columns: tuple[int, int, int]
    spacing: tuple[int, int]

    def tokens(self, grid: Grid) -> list[int]:
        """Numbers of the nine tokens, row by row."""
        return [row * grid[1] + column for row in self.rows for column in self.columns]


@dataclass(frozen=True)
class Following:
    """What tokens of moved films are nearest to: the landmark at their place, that of their anatomy, others; shares."""

    place: float
    anatomy: float
    other: float


def landmark_places(grid: Grid) -> Places:
    """Nine equally spaced tokens around the middle of a grid of tokens."""
    if min(grid) < 3:
        raise UserError(
            f"nine landmarks need a grid of at least 3 x 3 tokens, but these films have {grid[0]} x {grid[1]}."
        )
    (first_row, down), (first_column, across) = _spread(grid[0]), _spread(grid[1])
    rows = (first_row, first_row + down, first_row + 2 * down)
    columns = (first_column, first_column + across, first_column + 2 * across)
    return Places(rows, columns, (down, across))


def _spread(side: int) -> tuple[int, int]:
    step = (side - 1) // 3 or 1
    return (side - 1 - 2 * step) // 2, step


def landmark_tokens(
    backbone: Weights, films: Films, rows: Rows, tokens: Sequence[int], device: torch.device | None = None
) -> NDArray[np.float32]:
    """The tokens (N, 9, D) of the landmarks."""
    return np.concatenate(
        [batch[:, list(tokens)] for batch in feature_batches(backbone, films, rows, "tokens", device)]
    )


class ShiftedFilms:
    """Films moved by whole pixels; what leaves on one side comes in on the other, so that grey levels stay."""

    def __init__(self, films: Films, down: int, right: int) -> None:
        self.films, self.down, self.right = films, down, right
        self.manifest: Manifest = films.manifest
        self.size, self.fit, self.voi = films.size, films.fit, films.voi

    def __len__(self) -> int:
        return len(self.films)

    def __getitem__(self, row: int) -> torch.Tensor:
        return self.batch([row])[0]

    def batch(self, rows: Sequence[int] | np.ndarray) -> torch.Tensor:
        return torch.roll(self.films.batch(rows), (self.down, self.right), dims=(-2, -1))


def following(
    backbone: Weights,
    films: Films,
    rows: Rows,
    places: Places,
    tokens_N9D: NDArray[np.float32],
    device: torch.device | None = None,
) -> Following:
    """Move films one landmark to the right, then one down, and see which landmark's centre each token is nearest to."""
    grid = (films.size // backbone.config.encoder.patch_size,) * 2
    patch = backbone.config.encoder.patch_size
    numbers = np.arange(9).reshape(3, 3)
    moves = (
        (0, places.spacing[1] * patch, numbers[:, 1:].ravel(), numbers[:, :-1].ravel()),
        (places.spacing[0] * patch, 0, numbers[1:].ravel(), numbers[:-1].ravel()),
    )
    mean, std = tokens_N9D.mean(axis=(0, 1)), tokens_N9D.std(axis=(0, 1)) + 1e-8
    centres_9D = _unit(((tokens_N9D - mean) / std).mean(axis=0))
    counts = np.zeros(3)
    for down, right, shown, anatomy in moves:
        moved = landmark_tokens(backbone, ShiftedFilms(films, down, right), rows, places.tokens(grid), device)
        nearest = (_unit((moved[:, shown] - mean) / std) @ centres_9D.T).argmax(axis=-1)
        at_place, of_anatomy = nearest == shown, nearest == anatomy
        counts += [at_place.sum(), of_anatomy.sum(), (~at_place & ~of_anatomy).sum()]
    place, by_anatomy, other = (counts / counts.sum()).tolist()
    return Following(place, by_anatomy, other)


def _unit(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    unit: NDArray[np.float32] = vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-8)
    return unit
