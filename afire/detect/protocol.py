"""How detectors are tested: on which films, that they have not seen them, and beside which trivial detectors.

Trivial detectors use next to nothing: the size of the original file, how sharp the film is, or a thumbnail. A
learned score that does not beat them has shown nothing. Like the learned ones they see normal training films only, and
larger means more abnormal; each direction was fixed before any test film was looked at.

Protocols:

``official``     the test films of ``--split``, else of the manifest's own lists, else some drawn by patient (seed 0)
``all``          every film whose label is known, for a set that is for testing only
``chexpert250``  250 normal and 250 abnormal frontal PA films of CheXpert's training list, one a patient, as in SQUID
                 (Xiang et al., CVPR 2023): its official test list is too small. Their patients are kept from training,
                 which uses the normal PA films of the others.

Shapes: N films, P pixels of a thumbnail.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from afire.data.keys import BEHIND, FILMS, Seen, films_seen
from afire.data.manifest import SPLITS, Manifest
from afire.data.pack import Films
from afire.data.splits import Split, films_hash, make_split, stratified_order
from afire.errors import UserError
from afire.files import sha256_text
from afire.progress import progress
from afire.tasks.features import FEATURE_BATCH, laplacian_variance, size_features
from afire.tasks.guard import check_no_leaks
from afire.tasks.results import plan_runs

Floats = NDArray[np.float64]
Rows = NDArray[np.int64]

TRIVIAL = {
    "view": "AP films are more abnormal than PA films: who cannot stand is filmed lying",
    "metadata": "Mahalanobis distance of the original width and height (log) from those of normal films",
    "area": "minus the area of the original film: smaller is more abnormal",
    "blur": "minus the variance of the Laplacian at 128 px",
    "jpeg size": "minus the bytes of the JPEG file: smaller is more abnormal",
    "pixel gaussian": "mean squared deviation, in sd of normal films, of each pixel at 32 px; films standardised",
    "pca residual": "squared residual after 64 principal components of normal films at 32 px; films standardised",
    "pca mahalanobis": "Mahalanobis distance within 64 principal components of normals at 16 px; films standardised",
}
_BLUR_SIZE, _THUMBNAIL, _SMALL_THUMBNAIL, _COMPONENTS = 128, 32, 16, 64
_MOST_FIT_FILMS = 10_000  # 64 components of 1,024 pixels are settled long before
_NOTHING = 1e-9
_JPEG = (".jpg", ".jpeg")


@dataclass(frozen=True)
class Plain:
    """What the trivial detectors use, for N films; None where the data do not have it."""

    blur: Floats  # (N,)
    thumbnails: NDArray[np.float32]  # (N, 32 * 32), each of mean 0 and sd 1
    small_thumbnails: NDArray[np.float32]  # (N, 16 * 16)
    sides: Floats | None  # (N, 2): original width and height
    lying: Floats | None  # (N,): 1 for AP films, 0 for PA films
    file_bytes: Floats | None  # (N,)


def look_plainly(films: Films, rows: Rows) -> Plain:
    """One pass over the films."""
    blur, thumbnails, small = [], [], []
    with progress("trivial detectors", len(rows), "films") as bar:
        for start in range(0, len(rows), FEATURE_BATCH):
            images = films.batch(rows[start : start + FEATURE_BATCH])
            blur.append(_sharpness(images))
            thumbnails.append(_thumbnails(images, _THUMBNAIL))
            small.append(_thumbnails(images, _SMALL_THUMBNAIL))
            bar.advance(len(images))
    return Plain(
        torch.cat(blur).double().numpy(),
        torch.cat(thumbnails).numpy(),
        torch.cat(small).numpy(),
        _sides(films.manifest, rows),
        _lying(films.manifest, rows),
        _jpeg_bytes(films.manifest, rows),
    )


def trivial_scores(plain: Plain, fit: Rows) -> dict[str, Floats]:
    """Scores (N,) of each detector that the data allow; ``fit`` are the places of normal training films within N.

    Without any, only those detectors remain that need none.
    """
    recipes: dict[str, Callable[[], Floats | None]] = {
        "view": lambda: plain.lying,
        "metadata": lambda: _metadata(plain.sides, fit),
        "area": lambda: -plain.sides.prod(axis=1) if plain.sides is not None else None,
        "blur": lambda: -plain.blur,
        "jpeg size": lambda: -plain.file_bytes if plain.file_bytes is not None else None,
        "pixel gaussian": lambda: _pixel_gaussian(plain.thumbnails, fit),
        "pca residual": lambda: _pca(plain.thumbnails, fit)[0],
        "pca mahalanobis": lambda: _pca(plain.small_thumbnails, fit)[1],
    }
    scores = {}
    for name, score in recipes.items():
        if len(fit) < 2 and name in ("metadata", "pixel gaussian", "pca residual", "pca mahalanobis"):
            continue
        values = score()
        if values is not None:
            scores[name] = np.asarray(values, np.float64)
    return scores


def missing(plain: Plain, fit: Rows) -> list[str]:
    """Why a detector is not in the table, or tells nothing there."""
    reasons = []
    if plain.sides is None:
        reasons.append("no metadata and area rows: neither the manifest nor the files say the films' original size")
    elif (plain.sides == plain.sides[0]).all():
        width, height = plain.sides[0]
        reasons.append(f"all films are {width:g} x {height:g}: what the original sizes would give away is not known")
    if plain.file_bytes is None:
        reasons.append("no JPEG size row: not all films are there as JPEG files")
    if len(fit) < 2:
        reasons.append("no trivial rows that need normal training films: these data hold none")
    return reasons


def _metadata(sides: Floats | None, fit: Rows) -> Floats | None:
    if sides is None:
        return None
    logs = np.log(np.maximum(sides, 1))
    centred = logs - logs[fit].mean(axis=0)
    covariance = np.cov(centred[fit].T, bias=True) + _NOTHING * np.eye(2)
    distances: Floats = np.einsum("nd,de,ne->n", centred, np.linalg.inv(covariance), centred)
    return distances


def _pixel_gaussian(pixels_NP: NDArray[np.float32], fit: Rows) -> Floats:
    normal = pixels_NP[_thinned(fit)]
    deviation = (pixels_NP - normal.mean(axis=0)) / np.maximum(normal.std(axis=0), 1e-6)
    scores: Floats = np.square(deviation).mean(axis=1, dtype=np.float64)
    return scores


def _pca(pixels_NP: NDArray[np.float32], fit: Rows) -> tuple[Floats, Floats]:
    """Squared residual, and squared Mahalanobis distance within the components, (N,) each."""
    normal = pixels_NP[_thinned(fit)].astype(np.float64)
    mean = normal.mean(axis=0)
    centred = normal - mean
    values, vectors = np.linalg.eigh(centred.T @ centred / len(centred))
    count = min(_COMPONENTS, len(normal) - 1, pixels_NP.shape[1])
    values, vectors = values[::-1][:count], vectors[:, ::-1][:, :count]
    every = pixels_NP - mean
    inside = every @ vectors
    residual: Floats = np.square(every).sum(axis=1) - np.square(inside).sum(axis=1)
    distance: Floats = (np.square(inside) / np.maximum(values, _NOTHING)).sum(axis=1)
    return residual, distance


def _thinned(rows: Rows) -> Rows:
    return rows[:: max(1, -(-len(rows) // _MOST_FIT_FILMS))]


def _thumbnails(images: Tensor, side: int) -> Tensor:
    """(B, 1, S, S) -> (B, side * side), each film of mean 0 and sd 1."""
    flat = F.adaptive_avg_pool2d(images, side).flatten(1)
    centred = flat - flat.mean(dim=1, keepdim=True)
    return centred / centred.square().mean(dim=1, keepdim=True).sqrt().clamp_min(1e-6)


def _sharpness(images: Tensor) -> Tensor:
    """Variance of the Laplacian (B,), the film's edge included: frames and collimators there give sets away too."""
    at_most = F.adaptive_avg_pool2d(images, _BLUR_SIZE) if images.shape[-1] > _BLUR_SIZE else images
    return laplacian_variance(F.pad(at_most, (1, 1, 1, 1), mode="replicate"))


def _sides(manifest: Manifest, rows: Rows) -> Floats | None:
    try:
        return size_features(manifest, rows)[:, :2].astype(np.float64)
    except UserError:
        return None


def views_of(manifest: Manifest, rows: Rows) -> NDArray[np.object_]:
    """AP, PA or another word for each film."""
    views: NDArray[np.object_] = manifest.table["view"].to_numpy(dtype=object)[rows]
    return views


def _lying(manifest: Manifest, rows: Rows) -> Floats | None:
    """1 for AP, 0 for PA; None where a film is neither, or all are the same."""
    views = views_of(manifest, rows)
    if set(views.tolist()) != {"AP", "PA"}:
        return None
    lying: Floats = (views == "AP").astype(np.float64)
    return lying


def _jpeg_bytes(manifest: Manifest, rows: Rows) -> Floats | None:
    names = manifest.table["image"].iloc[rows].str.lower()
    if not names.str.endswith(_JPEG).all():
        return None
    try:
        return np.array([manifest.path(int(row)).stat().st_size for row in rows], np.float64)
    except OSError:
        return None


Name = Literal["auto", "official", "chexpert250", "all"]
CHEXPERT_FILMS = 250  # of each class
_VAL_SHARE = 0.1
_CHEXPERT_SEED = 250


@dataclass(frozen=True)
class TestFilms:
    """Films of the test with a known label, how they were chosen, and the normal films that trivial rows may learn."""

    protocol: str
    message: str
    rows: Rows
    truth: NDArray[np.float64]  # (len(rows),): 1 abnormal, 0 normal
    normals: Rows  # for training
    split: Split | None  # what a detector fitted on this set should have been given
    own_labels: bool = False  # they are not those of the manifest

    __test__ = False  # not a test, whatever pytest makes of its name

    def hash(self, manifest: Manifest) -> str:
        """Of the films; and of their labels, where the manifest does not decide them."""
        films = films_hash(manifest, {"test": self.rows})
        if not self.own_labels:
            return films
        labels = zip(manifest.table["image"].to_numpy()[self.rows], self.truth, strict=True)
        return sha256_text("\n".join([films, *sorted(f"{image}\t{truth:g}" for image, truth in labels)]))


def plan_test(manifest: Manifest, split: Split | None = None, protocol: Name = "auto") -> TestFilms:
    """The test films of a protocol; ``auto`` is ``official``."""
    if protocol == "chexpert250":
        if split is not None:
            raise UserError("--protocol chexpert250 draws its own split; leave out --split.")
        return _chexpert(manifest)
    if protocol == "all":
        if split is not None:
            raise UserError("--protocol all tests every film; leave out --split.")
        no_films = np.empty(0, np.int64)
        return _labelled(manifest, "all", "all labelled films", np.arange(len(manifest)), no_films, None)
    return _official(manifest, split)


def _official(manifest: Manifest, split: Split | None) -> TestFilms:
    listed = manifest.table["split"]
    if split is not None:
        rows, message = split.rows(manifest), f"test films of the split {split.hash[:12]}"
    elif (listed == "test").any():
        rows = {subset: np.flatnonzero(listed == subset) for subset in SPLITS}
        message = "test films of the manifest's own lists"
    else:
        run = plan_runs(manifest, None, [0])[0]
        split, rows = run.split, dict(run.rows)
        message = "a fifth of the patients, drawn with seed 0 because the set has no lists"
    check_no_leaks(manifest, rows)
    if len(rows["test"]) == 0:
        raise UserError("there are no test films; give --split with test films, or --protocol all.")
    return _labelled(manifest, "official", message, rows["test"], rows["train"], split)


def _labelled(
    manifest: Manifest, protocol: str, message: str, test: Rows, train: Rows, split: Split | None
) -> TestFilms:
    normal = manifest.table["normal"].to_numpy(np.float64)
    labelled = test[~np.isnan(normal[test])]
    truth = 1 - normal[labelled]
    for value, word in ((0, "normal"), (1, "abnormal")):
        if not (truth == value).any():
            raise UserError(f"no test film is labelled {word}; a detector is tested on normal and abnormal films.")
    return TestFilms(protocol, message, labelled, truth, train[normal[train] == 1], split)


def balanced_by_view(manifest: Manifest, test: TestFilms) -> TestFilms:
    """The test films with as many normal ones as abnormal ones of each view, so that the view gives nothing away.

    Within a view all films of the smaller class stay, and as many of the larger one, drawn with seed 0.
    """
    views, generator = views_of(manifest, test.rows), np.random.default_rng([0, 7])
    subsets: list[Rows] = []
    for view in sorted({str(view) for view in views if view in ("AP", "PA")}):
        classes = [np.flatnonzero((views == view) & (test.truth == value)) for value in (0, 1)]
        count = min(map(len, classes))
        subsets += [generator.permutation(places)[:count] for places in classes]
    places = np.sort(np.concatenate(subsets)) if subsets else np.empty(0, np.int64)
    if len(places) == 0:
        raise UserError("--balance view: no view has normal and abnormal test films; does the manifest say the views?")
    message = f"{test.message}, views balanced"
    return replace(test, message=message, rows=test.rows[places], truth=test.truth[places])


def pa_only(manifest: Manifest) -> Manifest:
    """The manifest in which only PA films count as normal or not: others are neither fitted nor tested."""
    normal = manifest.table["normal"].where(manifest.table["view"] == "PA")
    return Manifest(manifest.table.assign(normal=normal), manifest.root, manifest.info)


def chexpert_split(manifest: Manifest) -> Split:
    """The 500 test patients, a tenth of the others for validation, the rest for training; the same in every run."""
    listed = manifest.table["split"] == "train"
    test = set(manifest.table["patient"].iloc[_chexpert_rows(manifest)])
    other_patients = sorted(set(manifest.table["patient"][listed]) - test)
    order = stratified_order(manifest, other_patients, _CHEXPERT_SEED, purpose="val of chexpert250")
    cut = max(1, round(_VAL_SHARE * len(order)))
    patients = {"train": order[cut:], "val": order[:cut], "test": sorted(test)}
    method = {"kind": "chexpert250", "films": CHEXPERT_FILMS, "seed": _CHEXPERT_SEED}
    return make_split(manifest, patients, "listed", method)


def _chexpert(manifest: Manifest) -> TestFilms:
    frontal = pa_only(manifest)
    split = chexpert_split(frontal)
    message = f"{CHEXPERT_FILMS} normal and {CHEXPERT_FILMS} abnormal PA films of the training list, as in SQUID"
    train = split.rows(frontal)["train"]
    return _labelled(frontal, "chexpert250", message, _chexpert_rows(frontal), train, split)


def _chexpert_rows(manifest: Manifest) -> Rows:
    """The drawn films, in the order of rows: a shuffle by film name decides, not the order of the table."""
    table = manifest.table
    usable = (table["split"] == "train") & (table["view"] == "PA") & table["normal"].notna()
    order = table["image"][usable].sort_values().index.to_numpy()
    order = order[np.random.default_rng(_CHEXPERT_SEED).permutation(len(order))]
    films = table.loc[order].drop_duplicates("patient")  # one film a patient
    classes = [films.index[films["normal"] == value][:CHEXPERT_FILMS] for value in (1.0, 0.0)]
    for patients, word in zip(classes, ("normal", "abnormal"), strict=True):
        if len(patients) < CHEXPERT_FILMS:
            raise UserError(
                f"{len(patients)} patients have {word} PA films in the training list, and --protocol chexpert250 needs "
                f"{CHEXPERT_FILMS}; is this CheXpert, built with `afire data build chexpert`?"
            )
    return np.sort(np.concatenate(classes)).astype(np.int64)


def check_unseen(model: Path, films: Films, test: Rows, fitted: Rows | None = None) -> Seen:
    """Refuse a detector with test films among the keys in its folder, or with their patients in the rows ``fitted``.

    Otherwise it has seen none of them, or this is unknown.
    """
    seen = films_seen([model, model / "adapt"], films, test)
    if seen.answer == "seen":
        raise UserError(
            f"{seen.seen:,} of the {seen.films:,} test films were used to fit {model}; fit it with a --split that sets "
            "them aside, and test it with the same --split."
        )
    if fitted is not None:
        check_no_leaks(films.manifest, {f"the films that fitted {model.name}": fitted, "the test": test})
    return seen


def seen_in_pretraining(model: Path, films: Films, test: Rows, from_random: bool) -> Seen:
    """Which test films the pre-training behind a detector saw; none where it started ``from_random`` weights."""
    if from_random and not (model / BEHIND / FILMS).is_file():
        return Seen(len(test))
    return films_seen(model / BEHIND, films, test)
