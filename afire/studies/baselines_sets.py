"""The sets of a study: the one that methods learn from, and further ones on which their weights are measured too."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from afire.data.pack import open_films
from afire.data.splits import Split, read_split, write_split
from afire.detect.protocol import plan_test
from afire.errors import UserError
from afire.training.batches import labelled_training_rows, normal_training_rows

SPLIT = "split.json"
ALSO = "also"  # folder of what is measured on further sets
_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


@dataclass(frozen=True)
class StudySet:
    """The films of a study and facts about them."""

    data: Path
    split: Path | None  # None: the set's own lists
    normals: int  # normal training films, which all methods learn from but those that take labels
    labelled: int  # training films with labels, normal or not
    size: int
    masks: bool
    areas: bool  # the original sizes are known
    builder: str = ""
    name: str = ""  # of a further set, where trained weights are measured; the set that methods learn from has none

    @property
    def inputs(self) -> tuple[Path, ...]:
        """What steps take from outside: other films or another split make another study."""
        return tuple(path for path in (self.data, self.split) if path is not None)

    def place(self, folder: Path) -> Path:
        """Where results on these films lie below the folder of a row."""
        return folder / ALSO / self.name if self.name else folder


def open_study_set(
    data: Path, out: Path, split: Path | None = None, size: int = 128, name: str = "", option: str = "--data"
) -> StudySet:
    """The films and facts to plan with. A set without lists gets a split of ours, drawn with seed 0."""
    if not data.exists():
        raise UserError(f"{option} {data} does not exist; give a pack or a manifest.")
    films = open_films(data, size=size)
    manifest = films.manifest
    settled: Split | None = read_split(split) if split is not None else None
    if settled is None:
        test = plan_test(manifest)
        settled = test.split
        split = out / SPLIT if settled is not None else None
        if split is not None and settled is not None and not split.exists():
            write_split(settled, split)
    (normals, _), (labelled, _) = (
        choose(manifest, settled) for choose in (normal_training_rows, labelled_training_rows)
    )
    table = manifest.table
    masks = bool((table["mask"] != "").any()) if "mask" in table else False
    areas = "meta:orig_width" in table and bool(table["meta:orig_width"].notna().any())
    builder = str(manifest.info.get("builder", ""))
    return StudySet(data, split, len(normals), len(labelled), films.size, masks, areas, builder, name)


def named_set(text: str) -> tuple[str, Path]:
    """``NAME=PATH``, or a path whose last part is the set's name."""
    name, equals, path = text.partition("=")
    data = Path(path if equals else text)
    return name if equals else data.resolve().stem, data


def open_further_sets(texts: Sequence[str], out: Path, first: StudySet) -> list[StudySet]:
    """Sets on which the trained weights are measured too, each as :func:`named_set` reads it."""
    sets: dict[str, StudySet] = {}
    for text in texts:
        name, data = named_set(text)
        if not _SAFE_NAME.fullmatch(name):
            raise UserError(f"--also {text}: name the set with letters, digits, - and _, as in nih=packs/nih.")
        if name in sets or data.resolve() == first.data.resolve():
            raise UserError(f"--also {text}: this set is in the study already; leave it out or give it another name.")
        size = open_films(data, size=first.size).size if data.exists() else first.size
        if size != first.size:
            raise UserError(
                f"--also {text} holds films of {size} px, but --data of {first.size} px; pack one of them again."
            )
        sets[name] = open_study_set(data, out / ALSO / name, None, first.size, name, "--also")
    return list(sets.values())
