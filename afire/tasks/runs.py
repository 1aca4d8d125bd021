"""The runs of an experiment: one for each seed (and fold), with the split each of them uses.

What a seed may change is decided here, for all tasks alike:

- a split file fixes all parts for every seed;
- the manifest's own lists fix the test part. Where they have no validation part, each seed carves its own from train;
- without lists, the test part is drawn once (always from seed 0) and each seed carves its own validation part;
- a label fraction keeps a part of train that each seed draws for itself;
- folds are drawn once (seed 0); each seed repeats all of them.

So the test films never depend on the seed. Exact copies of a film count as one patient when a part is drawn here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from afire.data.manifest import SPLITS, Manifest
from afire.data.splits import (
    Scope,
    Split,
    films_hash,
    fold_splits,
    fraction_of,
    make_split,
    official_split,
    random_split,
)
from afire.errors import UserError
from afire.files import sha256_text
from afire.tasks.guard import check_no_leaks, film_digests, group_copies

_VAL_SHARE = 0.1


@dataclass(frozen=True)
class Run:
    """One training and testing: its seed, its fold (or None), and the rows of its parts."""

    seed: int
    fold: int | None
    split: Split
    rows: Mapping[str, NDArray[np.int64]]

    @property
    def name(self) -> str:
        return f"seed-{self.seed}" if self.fold is None else f"seed-{self.seed}-fold-{self.fold}"


def plan_runs(
    manifest: Manifest, split: Split | None, seeds: Sequence[int], fraction: float = 1.0, folds: int = 0
) -> list[Run]:
    """The runs for all seeds and folds, checked for leaks between their parts. ``fraction`` is in (0, 1]."""
    if len(set(seeds)) < len(seeds) or not seeds:
        raise UserError("--seeds needs at least one seed, and each only once, as in --seeds 0,1,2.")
    if folds and split is not None:
        raise UserError("--folds and --split exclude each other: every fold brings its own parts.")
    runs = []
    digests = film_digests(manifest)
    grouped = group_copies(manifest, digests)
    if split is None and not folds:
        # Before copies are grouped: one that crosses the official lists is to be named as a copy, not as a patient.
        listed = {part: np.flatnonzero(manifest.table["split"] == part) for part in SPLITS}
        check_no_leaks(manifest, listed, digests)
    for seed in seeds:
        for fold, base in enumerate(_splits(manifest, grouped, split, seed, folds)):
            rows = base.rows(manifest)
            _check_parts(base)
            check_no_leaks(manifest, rows, digests)
            if fraction < 1:
                base = fraction_of(base, manifest, fraction, seed)
                rows = base.rows(manifest)
            runs.append(Run(seed, fold if folds else None, base, rows))
    return runs


def _check_parts(split: Split) -> None:
    for part in SPLITS:
        if split.films[part] == 0:
            raise UserError(f"the split has no {part} films; make one that has with `afire data split`.")


def _splits(manifest: Manifest, grouped: Manifest, split: Split | None, seed: int, folds: int) -> list[Split]:
    """The splits of one seed, drawn on ``grouped`` (copies are one patient) and told in the manifest's own patients."""
    if split is not None:
        return [split]
    if folds:
        drawn = fold_splits(grouped, folds, _VAL_SHARE)
        return [_ungroup(manifest, grouped, one, "all", one.method) for one in drawn]
    if (manifest.table["split"] == "train").any():
        carved = official_split(grouped, _VAL_SHARE, seed)
        return [_ungroup(manifest, grouped, carved, "listed", carved.method)]
    test = random_split(grouped, _VAL_SHARE, seed=0)
    carved = official_split(_list_parts(grouped, test), _VAL_SHARE, seed)
    return [_ungroup(manifest, grouped, carved, "all", {**test.method, "val_seed": seed})]


def _list_parts(manifest: Manifest, split: Split) -> Manifest:
    """The manifest with ``split``'s test part listed as test and everything else as train."""
    listed = np.where(manifest.table["patient"].isin(list(split.patients["test"])), "test", "train")
    return Manifest(manifest.table.assign(split=listed), manifest.root, manifest.info)


def _ungroup(manifest: Manifest, grouped: Manifest, split: Split, scope: Scope, method: Mapping[str, Any]) -> Split:
    """A split of grouped patients as a split of the manifest's own."""
    own, group = manifest.table["patient"], grouped.table["patient"]
    patients = {part: sorted(own[group.isin(list(members))].unique()) for part, members in split.patients.items()}
    return make_split(manifest, patients, scope, method)


def joint_hash(hashes: Sequence[str]) -> str:
    """One hash for the runs of an experiment: the hash itself where all are equal."""
    return hashes[0] if len(set(hashes)) == 1 else sha256_text("\n".join(hashes))


def split_hash(runs: Sequence[Run]) -> str:
    """What two results must share to be comparable: the films of all parts of all runs."""
    return joint_hash([run.split.hash for run in runs])


def test_hash(manifest: Manifest, runs: Sequence[Run]) -> str:
    """Hash of the test films alone."""
    return joint_hash([films_hash(manifest, {"test": run.rows["test"]}) for run in runs])
