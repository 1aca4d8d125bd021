"""Which films a detector is tested on, how they were set aside, and that it has not seen them.

``official``     the test part of ``--split``, else of the manifest's own lists, else one drawn by patient (seed 0)
``all``          every film whose label is known, for a set that is for testing only
``chexpert250``  250 normal and 250 abnormal frontal PA films of CheXpert's training list, one a patient, as in SQUID
                 (Xiang et al., CVPR 2023): its official test list is too small. Their patients are kept from training,
                 which uses the normal PA films of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from afire.data.dataset import Films
from afire.data.manifest import SPLITS, Manifest
from afire.data.splits import Split, films_hash, make_split, stratified_order
from afire.errors import UserError
from afire.tasks.guard import check_no_leaks
from afire.tasks.runs import plan_runs
from afire.training.seen import films_seen

Rows = NDArray[np.int64]
Name = Literal["auto", "official", "chexpert250", "all"]
CHEXPERT_FILMS = 250  # of each class
_VAL_SHARE = 0.1
_CHEXPERT_SEED = 250


@dataclass(frozen=True)
class TestFilms:
    """Films of the test with a known label, how they were chosen, and the normal films that trivial rows may learn."""

    protocol: str
    sentence: str
    rows: Rows
    truth: NDArray[np.float64]  # (len(rows),): 1 abnormal, 0 normal
    normals: Rows  # of the training part
    split: Split | None  # what a detector fitted on this set should have been given

    __test__ = False  # its name is not pytest's business

    def hash(self, manifest: Manifest) -> str:
        return films_hash(manifest, {"test": self.rows})


def plan_test(manifest: Manifest, split: Split | None = None, protocol: Name = "auto") -> TestFilms:
    """The test films of a protocol; ``auto`` is ``official``."""
    if protocol == "chexpert250":
        if split is not None:
            raise UserError("--protocol chexpert250 draws its own split; leave out --split.")
        return _chexpert(manifest)
    if protocol == "all":
        if split is not None:
            raise UserError("--protocol all tests every film; leave out --split.")
        nobody = np.empty(0, np.int64)
        return _labelled(manifest, "all", "all labelled films", np.arange(len(manifest)), nobody, None)
    return _official(manifest, split)


def _official(manifest: Manifest, split: Split | None) -> TestFilms:
    listed = manifest.table["split"]
    if split is not None:
        rows, sentence = split.rows(manifest), f"test part of the split {split.hash[:12]}"
    elif (listed == "test").any():
        rows = {part: np.flatnonzero(listed == part) for part in SPLITS}
        sentence = "test part of the manifest's own lists"
    else:
        run = plan_runs(manifest, None, [0])[0]
        split, rows = run.split, dict(run.rows)
        sentence = "a fifth of the patients, drawn with seed 0 because the set has no lists"
    check_no_leaks(manifest, rows)
    if len(rows["test"]) == 0:
        raise UserError("there are no test films; give --split with a test part, or --protocol all.")
    return _labelled(manifest, "official", sentence, rows["test"], rows["train"], split)


def _labelled(
    manifest: Manifest, protocol: str, sentence: str, test: Rows, train: Rows, split: Split | None
) -> TestFilms:
    normal = manifest.table["normal"].to_numpy(np.float64)
    known = test[~np.isnan(normal[test])]
    truth = 1 - normal[known]
    for value, word in ((0, "normal"), (1, "abnormal")):
        if not (truth == value).any():
            raise UserError(f"no test film is labelled {word}; a detector is tested on normal and abnormal films.")
    return TestFilms(protocol, sentence, known, truth, train[normal[train] == 1], split)


def pa_only(manifest: Manifest) -> Manifest:
    """The manifest in which only PA films count as normal or not: others are neither fitted nor tested."""
    normal = manifest.table["normal"].where(manifest.table["view"] == "PA")
    return Manifest(manifest.table.assign(normal=normal), manifest.root, manifest.info)


def chexpert_split(manifest: Manifest) -> Split:
    """The 500 test patients, a tenth of the others for validation, the rest for training; the same in every run."""
    listed = manifest.table["split"] == "train"
    test = set(manifest.table["patient"].iloc[_chexpert_rows(manifest)])
    others = sorted(set(manifest.table["patient"][listed]) - test)
    order = stratified_order(manifest, others, _CHEXPERT_SEED, purpose="val of chexpert250")
    cut = max(1, round(_VAL_SHARE * len(order)))
    patients = {"train": order[cut:], "val": order[:cut], "test": sorted(test)}
    method = {"kind": "chexpert250", "films": CHEXPERT_FILMS, "seed": _CHEXPERT_SEED}
    return make_split(manifest, patients, "listed", method)


def _chexpert(manifest: Manifest) -> TestFilms:
    frontal = pa_only(manifest)
    split = chexpert_split(frontal)
    sentence = f"{CHEXPERT_FILMS} normal and {CHEXPERT_FILMS} abnormal PA films of the training list, as in SQUID"
    parts = split.rows(frontal)
    return _labelled(frontal, "chexpert250", sentence, _chexpert_rows(frontal), parts["train"], split)


def _chexpert_rows(manifest: Manifest) -> Rows:
    """The drawn films, in the order of rows: a shuffle by film name decides, not the order of the table."""
    table = manifest.table
    usable = (table["split"] == "train") & (table["view"] == "PA") & table["normal"].notna()
    order = table["image"][usable].sort_values().index.to_numpy()
    order = order[np.random.default_rng(_CHEXPERT_SEED).permutation(len(order))]
    first = table.loc[order].drop_duplicates("patient")  # one film a patient
    drawn = [first.index[first["normal"] == value][:CHEXPERT_FILMS] for value in (1.0, 0.0)]
    for found, word in zip(drawn, ("normal", "abnormal"), strict=True):
        if len(found) < CHEXPERT_FILMS:
            raise UserError(
                f"{len(found)} patients have {word} PA films in the training list, and --protocol chexpert250 needs "
                f"{CHEXPERT_FILMS}; is this CheXpert, built with `afire data build chexpert`?"
            )
    return np.sort(np.concatenate(drawn)).astype(np.int64)


def check_unseen(model: Path, films: Films, test: Rows, used: Sequence[Rows] = ()) -> None:
    """Refuse a detector that knows test films: by the films' keys in its folder, and by patient where ``used`` says."""
    seen = max(films_seen(folder, films, test) for folder in (model, model / "adapt"))
    if seen:
        raise UserError(
            f"{seen:,} of the {len(test):,} test films were used to fit {model}; fit it with a --split that sets them "
            "aside, and test it with the same --split."
        )
    if used:
        fitted = np.concatenate(list(used))
        check_no_leaks(films.manifest, {f"the films that fitted {model.name}": fitted, "the test": test})


def seen_in_pretraining(model: Path, films: Films, test: Rows) -> int:
    """How many test films the pre-training saw; 0 where that is not known."""
    return films_seen(model / "pretrain", films, test)
