"""Splits by patient: official lists, validation carved from train, nested label fractions, grouped folds.

A split is stored as lists of *patients*, so no patient can be in two subsets, and carries a hash of the films that
those patients bring. Result files quote that hash; two results with one hash were measured on the same films.

All random choices come from one idea, :func:`stratified_order`: a shuffled order of the patients in which every
prefix holds each finding in about its own share. A prefix is then a label fraction (so 1 % lies inside 10 %), a
validation or a test subset; cut into k equal pieces it gives the folds.

Manifests are joined here too, for a pre-training on more than one set: a split file of each may become its lists.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd

from afire.data.film import hash_patient
from afire.data.manifest import LABEL_PREFIX, SOURCE, SPLITS, Manifest, clean_paths, make_manifest
from afire.data.sources.disk import read_list
from afire.errors import UserError
from afire.files import making_sense_of, read_json, require_file, sha256_text, write_json

FORMAT = 1
Scope = Literal["all", "listed"]


@dataclass(frozen=True)
class Split:
    """Which patients are in which subset, how that was decided, and the hash of the films it means."""

    patients: Mapping[str, Sequence[str]]
    scope: Scope  # listed: only films to which the manifest gives a split; all: every film of these patients
    method: Mapping[str, Any]
    films: Mapping[str, int]
    hash: str

    def rows(self, manifest: Manifest) -> dict[str, np.ndarray]:
        """Row numbers of each subset in ``manifest``; refused when the films are not those the split was made for."""
        subsets = _rows(manifest, self.patients_in(manifest), self.scope)
        here = films_hash(manifest, subsets)
        if here != self.hash:
            counts = ", ".join(
                f"{subset} {len(rows)} instead of {self.films[subset]}" for subset, rows in subsets.items()
            )
            raise UserError(
                f"the split does not fit this manifest: its hash is {self.hash[:12]}, the films here give {here[:12]} "
                f"({counts}); make the split again with `afire data split`."
            )
        return subsets

    def patients_in(self, manifest: Manifest) -> dict[str, list[str]]:
        """The patients of each subset as ``manifest`` calls them: ids of earlier versions are hashes by now."""
        own = set(manifest.table["patient"])
        return {
            subset: [name if name in own else hash_patient(name) for name in members]
            for subset, members in self.patients.items()
        }


def films_hash(manifest: Manifest, subsets: Mapping[str, np.ndarray]) -> str:
    """Hash of the set of (subset, film) pairs; the order of rows does not matter."""
    images = manifest.table["image"].to_numpy()
    lines = sorted(f"{subset}\t{image}" for subset, rows in subsets.items() for image in images[rows])
    return sha256_text("\n".join(lines))


def official_split(manifest: Manifest, val_share: float = 0.1, seed: int = 0) -> Split:
    """The manifest's own split; a validation subset is carved from train where the lists have none."""
    _check_share(val_share, "validation")
    listed = manifest.table["split"]
    if not (listed == "train").any():
        raise UserError("the manifest lists no training films; give --test to draw a split at random by patient.")
    _refuse_crossing_patients(manifest)
    patients = {subset: _patients(manifest, listed == subset) for subset in SPLITS}
    if not patients["val"] and val_share > 0:
        order = stratified_order(manifest, patients["train"], seed, purpose="val")
        patients["val"], patients["train"] = _prefix(manifest, order, val_share, "listed")
    method = {"kind": "official", "val_share": val_share, "seed": seed}
    return make_split(manifest, patients, "listed", method)


def random_split(manifest: Manifest, val_share: float = 0.1, test_share: float = 0.2, seed: int = 0) -> Split:
    """Draw train, val and test by patient, stratified by label; the manifest's own split is not used."""
    return _drawn(manifest, _patients(manifest), "all", {"kind": "random"}, "test", val_share, test_share, seed)


def development_split(
    manifest: Manifest, val_share: float = 0.1, test_share: float = 0.25, seed: int = 0, of: Split | None = None
) -> Split:
    """Train, val and test drawn by patient from the training and validation subsets of a split, or the official ones.

    To choose settings by: the test films are in no subset of it, so nothing can be chosen on them.
    """
    kind, purpose = {"kind": "development"}, "development"
    if of is not None:
        of.rows(manifest)  # refused where it is of other films
        patients = of.patients_in(manifest)
        pool = sorted([*patients["train"], *patients["val"]])
        return _drawn(manifest, pool, of.scope, {**kind, "of": of.hash}, purpose, val_share, test_share, seed)
    listed = manifest.table["split"]
    if not (listed == "test").any() or not (listed == "train").any():
        raise UserError(
            "the manifest has no official training and test films; a development split keeps the official test films "
            "out, so list them, or draw a split with --test alone."
        )
    _refuse_crossing_patients(manifest)
    pool = _patients(manifest, listed.isin(["train", "val"]))
    return _drawn(manifest, pool, "listed", kind, purpose, val_share, test_share, seed)


def list_split(manifest: Manifest, lists: Mapping[str, Path], val_share: float = 0.1, seed: int = 0) -> Split:
    """The split of list files: ``lists`` has the file of each subset, with a film's name first on every line.

    Names are those of the files, without folders. Films that the manifest does not have are left out, because a part of
    a set may be here; a film that is on no list goes with its patient. Without a list for validation, it is carved from
    train.
    """
    _check_share(val_share, "validation")
    of_film = {Path(image).name: row for row, image in enumerate(manifest.table["image"])}
    patient = manifest.table["patient"].to_numpy()
    patients: dict[str, list[str]] = {subset: [] for subset in SPLITS}
    counts: dict[str, dict[str, int]] = {}
    for subset, path in lists.items():
        names = _listed_names(path)
        rows = [of_film[name] for name in names if name in of_film]
        if not rows:
            raise UserError(
                f"none of the {len(names):,} films in {path} is in this manifest; a line begins with a file's name."
            )
        patients[subset] = sorted({str(patient[row]) for row in rows})
        counts[subset] = {"listed": len(names), "found": len(rows)}
    if "val" not in lists and val_share > 0:
        order = stratified_order(manifest, patients["train"], seed, purpose="val")
        patients["val"], patients["train"] = _prefix(manifest, order, val_share, "all")
    return make_split(
        manifest, patients, "all", {"kind": "lists", "lists": counts, "val_share": val_share, "seed": seed}
    )


def _listed_names(path: Path) -> list[str]:
    lines = read_list(require_file(path, "list of films"))
    names = [Path(line.replace(",", " ").split()[0]).name for line in lines]
    if not names:
        raise UserError(f"{path} names no film; it should have a file's name first on every line.")
    return names


def _drawn(
    manifest: Manifest,
    pool: Sequence[str],
    scope: Scope,
    kind: Mapping[str, str],
    purpose: str,
    val_share: float,
    test_share: float,
    seed: int,
) -> Split:
    """Test, then validation, then train, drawn from the patients in ``pool``."""
    _check_share(val_share, "validation")
    _check_share(test_share, "test")
    if val_share + test_share >= 1:
        raise UserError(f"validation {val_share} and test {test_share} together leave nothing to train on.")
    test, rest = _prefix(manifest, stratified_order(manifest, pool, seed, purpose), test_share, scope)
    order = stratified_order(manifest, rest, seed, purpose="val")
    val, train = _prefix(manifest, order, val_share / (1 - test_share), scope)
    method = {**kind, "val_share": val_share, "test_share": test_share, "seed": seed}
    return make_split(manifest, {"train": train, "val": val, "test": test}, scope, method)


def fold_splits(manifest: Manifest, folds: int, val_share: float = 0.1, seed: int = 0) -> list[Split]:
    """Grouped k-fold over all films: each patient is tested once; validation is carved from the other folds."""
    _check_share(val_share, "validation")
    order = stratified_order(manifest, _patients(manifest), seed, purpose="folds")
    if not 2 <= folds <= len(order):
        raise UserError(f"{folds} folds are not possible with {len(order)} patients; choose 2 to {len(order)}.")
    splits = []
    remaining: Sequence[str] = order
    for fold in range(folds):
        test, remaining = _prefix(manifest, remaining, 1 / (folds - fold), "all", leave=folds - fold - 1)
        rest = stratified_order(manifest, sorted(set(order) - set(test)), seed, purpose=f"val of fold {fold}")
        val, train = _prefix(manifest, rest, val_share, "all")
        method = {"kind": "folds", "folds": folds, "fold": fold, "val_share": val_share, "seed": seed}
        splits.append(make_split(manifest, {"train": train, "val": val, "test": test}, "all", method))
    return splits


def fraction_of(split: Split, manifest: Manifest, fraction: float, seed: int = 0) -> Split:
    """Keep a fraction of the training films, by patient. Smaller fractions lie inside larger ones of the same seed."""
    if not 0 < fraction <= 1:
        raise UserError(f"a label fraction lies between 0 and 100 %, not at {100 * fraction:g} %.")
    split.rows(manifest)
    patients = split.patients_in(manifest)
    order = stratified_order(manifest, patients["train"], seed, purpose="fraction")
    train, _ = _prefix(manifest, order, fraction, split.scope)
    method = {**split.method, "fraction": fraction, "fraction_seed": seed}
    return make_split(manifest, {**patients, "train": train}, split.scope, method)


def make_split(
    manifest: Manifest, patients: Mapping[str, Sequence[str]], scope: Scope, method: Mapping[str, Any]
) -> Split:
    """A :class:`Split` of given patients, with its counts and hash; a patient in two subsets is refused."""
    owner: dict[str, str] = {}
    for subset, members in patients.items():
        for patient in members:
            if owner.setdefault(patient, subset) != subset:
                raise UserError(f"patient {patient} would be in {owner[patient]} and in {subset}.")
    rows = _rows(manifest, patients, scope)
    if len(rows["train"]) == 0:
        raise UserError("the split leaves no film to train on; use a smaller validation or test share.")
    films = {subset: len(indices) for subset, indices in rows.items()}
    ordered = {subset: sorted(members) for subset, members in patients.items()}
    return Split(ordered, scope, dict(method), films, films_hash(manifest, rows))


def write_split(split: Split, path: Path) -> None:
    """Write a split as JSON."""
    write_json(
        path,
        {
            "format": FORMAT,
            "hash": split.hash,
            "method": dict(split.method),
            "scope": split.scope,
            "films": dict(split.films),
            "patients": {subset: list(members) for subset, members in split.patients.items()},
        },
    )


def check_same_split(split: Split, path: Path) -> None:
    """Refuse to replace another split: results that were made with it would no longer say on which films."""
    earlier = read_split(path).hash if path.exists() else split.hash
    if earlier != split.hash:
        raise UserError(f"{path} holds another split ({earlier[:12]}); choose another --out or delete it.")


def read_split(path: Path) -> Split:
    """Read what :func:`write_split` wrote."""
    raw = read_json(require_file(path, "split"))
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise UserError(f"{path} is not a split file of format {FORMAT}; make it with `afire data split`.")
    with making_sense_of(path, "make the split again with `afire data split`"):
        patients = {subset: [str(patient) for patient in raw["patients"][subset]] for subset in SPLITS}
        films = {subset: int(raw["films"][subset]) for subset in SPLITS}
        if raw["scope"] not in get_args(Scope):
            raise ValueError(f"scope {raw['scope']!r}")
        return Split(patients, raw["scope"], dict(raw["method"]), films, str(raw["hash"]))


def stratified_order(manifest: Manifest, patients: Sequence[str], seed: int, purpose: str) -> list[str]:
    """A random order of ``patients`` in which every prefix has about the same share of each finding.

    Each patient belongs to the stratum of the rarest finding in any of their films. Within a stratum of n patients
    the shuffled r-th stands at (r + u) / n with one random u in [0, 1) for the stratum: systematic sampling, so a
    prefix of share f holds floor or ceil of f * n of them. The order depends on the seed and the purpose, not on
    the order of rows.
    """
    strata = _strata(manifest)
    by_stratum: dict[str, list[str]] = {}
    for patient in sorted(patients):
        by_stratum.setdefault(strata[patient], []).append(patient)
    position: dict[str, float] = {}
    for stratum, members in sorted(by_stratum.items()):
        rng = np.random.default_rng(_entropy(seed, purpose, stratum))
        offset = rng.random()
        for rank, index in enumerate(rng.permutation(len(members))):
            position[members[index]] = (rank + offset) / len(members)
    return sorted(position, key=lambda patient: (position[patient], patient))


def _entropy(seed: int, *names: str) -> list[int]:
    return [seed, *(int(sha256_text(name)[:8], 16) for name in names)]


def _strata(manifest: Manifest) -> dict[str, str]:
    """Each patient's rarest finding, or whether they are normal, as the name of their stratum."""
    table = manifest.table
    columns = [name for name in table.columns if name.startswith(LABEL_PREFIX)]
    has = table[columns].eq(1.0).groupby(table["patient"], sort=True).any()
    normal = table["normal"].groupby(table["patient"], sort=True).min()
    stratum = normal.map({1.0: "normal", 0.0: "abnormal"}).fillna("unknown").astype("object")
    # From common to rare: the rarest finding is written last and stays.
    for name in has.sum().sort_values(ascending=False, kind="stable").index:
        stratum[has[name]] = name
    return {str(patient): str(name) for patient, name in stratum.items()}


def _prefix(
    manifest: Manifest, order: Sequence[str], share: float, scope: Scope, leave: int = 0
) -> tuple[list[str], list[str]]:
    """Cut ``order`` where the films before the cut come closest to ``share`` of all.

    At least one patient is before the cut if the share is not 0, and at least ``leave`` patients behind it.
    """
    if share <= 0 or not order:
        return [], list(order)
    table = manifest.table if scope == "all" else manifest.table[manifest.table["split"] != ""]
    per_patient = table["patient"].value_counts()
    films = np.cumsum(per_patient.reindex(list(order), fill_value=0).to_numpy())
    cut = min(int(np.abs(films - share * films[-1]).argmin()) + 1, len(order) - leave)
    return list(order[:cut]), list(order[cut:])


def _rows(manifest: Manifest, patients: Mapping[str, Sequence[str]], scope: Scope) -> dict[str, np.ndarray]:
    usable = np.ones(len(manifest), bool) if scope == "all" else (manifest.table["split"] != "").to_numpy()
    column = manifest.table["patient"]
    return {
        subset: np.flatnonzero(column.isin(list(patients.get(subset, ()))).to_numpy() & usable) for subset in SPLITS
    }


def _patients(manifest: Manifest, keep: pd.Series | None = None) -> list[str]:
    column = manifest.table["patient"]
    return sorted((column if keep is None else column[keep]).unique())


def _refuse_crossing_patients(manifest: Manifest) -> None:
    listed = manifest.table[manifest.table["split"] != ""]
    subsets = listed.groupby("patient")["split"].unique()
    crossing = subsets[subsets.str.len() > 1]
    if len(crossing):
        raise UserError(
            f"{len(crossing)} patients are in more than one split (patient {crossing.index[0]}: "
            f"{' and '.join(sorted(crossing.iloc[0]))}); fix the manifest, or give --test to draw a split by patient."
        )


def _check_share(share: float, what: str) -> None:
    if not 0 <= share < 1:
        raise UserError(f"the {what} share lies between 0 and 1, not at {share:g}.")


def listed_as(manifest: Manifest, split: Split) -> Manifest:
    """The manifest with a split file's subsets as its lists; films that are in no subset have an empty split."""
    table = manifest.table.copy()
    table["split"] = ""
    for subset, rows in split.rows(manifest).items():
        table.loc[rows, "split"] = subset
    return Manifest(table, manifest.root, {**manifest.info, "split": split.hash})


def join_manifests(manifests: Mapping[str, Manifest]) -> Manifest:
    """The films of all ``manifests``, by name, under the folder that all their roots share.

    Patients are told apart by the set's name: ``12`` of one set is not ``12`` of another. A finding that a set does not
    label is unknown in its films, not absent. Official splits, boxes and masks stay.
    """
    if len(manifests) < 2:
        raise UserError("joining needs two manifests or more; give --data once for each.")
    for name, manifest in manifests.items():
        if SOURCE in manifest.table:
            raise UserError(f"{name} is itself joined; join the sets that it was made of.")
    root = _common_root(manifests)
    tables = [_moved(name, manifest, root) for name, manifest in manifests.items()]
    table = pd.concat(tables, ignore_index=True)
    info = {
        "dataset": "joined",
        "sources": [
            {"name": name, "films": len(manifest), "hash": manifest.hash} for name, manifest in manifests.items()
        ],
        "normal": "; ".join(
            f"{name}: {manifest.info.get('normal', 'not said')}" for name, manifest in manifests.items()
        ),
    }
    return make_manifest(table, root, info)


def _common_root(manifests: Mapping[str, Manifest]) -> Path:
    roots = {name: manifest.root.resolve() for name, manifest in manifests.items()}
    try:
        common = Path(os.path.commonpath(list(roots.values())))
    except ValueError:  # different drives
        common = Path(Path.cwd().anchor)
    if common == Path(common.anchor):
        places = ", ".join(f"{name} in {root}" for name, root in roots.items())
        raise UserError(f"the films share no folder ({places}); move or link them below one folder and build again.")
    return common


def _moved(name: str, manifest: Manifest, root: Path) -> pd.DataFrame:
    """The table of one set with paths from the common root and patients that carry the set's name."""
    table = manifest.table.copy()
    prefix = manifest.root.resolve().relative_to(root).as_posix()
    for column in ("image", "mask"):
        moved = clean_paths(prefix + "/" + table[column], column) if prefix != "." else table[column]
        table[column] = moved.where(table[column] != "", "")
    table["patient"] = name + ":" + manifest.table["patient"]
    table[SOURCE] = name
    return table
