"""What all figures share: which films they are drawn from, and how these are named below the picture."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from afire.config import ImageConfig
from afire.data.dataset import Films, open_films
from afire.data.splits import Split
from afire.tasks.figure_films import Part, Rows, describe_films, draw_rows, part_rows


@dataclass(frozen=True)
class Source:
    """Films of a figure: a pack, manifest or folder, the part of it, the most films, and the seed of the draw."""

    data: Path
    root: Path | None = None
    split: Split | None = None
    part: Part = "test"
    most: int = 1000
    seed: int = 0

    def open(self, image: ImageConfig) -> Films:
        """The films as weights made for ``image`` want them."""
        return open_films(self.data, self.root, image.size, image.fit, image.voi)

    def rows(self, films: Films) -> tuple[Rows, str | None]:
        """All rows of the part, and the hash of the split."""
        return part_rows(films, self.part, self.split)

    def draw(self, rows: Rows) -> Rows:
        """At most :attr:`most` of ``rows``, drawn at random from the seed."""
        return draw_rows(rows, self.most, np.random.default_rng(self.seed))

    def record(
        self, films: Films, rows: Rows, of: int, split_hash: str | None, part: str | None = None
    ) -> dict[str, Any]:
        """What the figure's JSON says about its films."""
        found = describe_films(films, self.data.resolve().name, part or self.part, split_hash, rows, of)
        return {**found, "seed": self.seed}


_PART_WORDS = {"all": "", "train": "training ", "val": "validation "}


def as_source(source: Source | Path) -> Source:
    """A path alone is a source with everything else by default."""
    return source if isinstance(source, Source) else Source(source)


def films_text(record: dict[str, Any], what: str = "") -> str:
    """``300 of 624 test films of childcxr (drawn from seed 0)``."""
    part = _PART_WORDS.get(record["part"], f"{record['part']} ")
    kind = f"{what} " if what else ""
    of = record["drawn_from"]
    drawn = f"{record['films']:,}" if record["films"] == of else f"{record['films']:,} of {of:,}"
    seed = "" if record["films"] == of else f", drawn from seed {record['seed']}"
    return f"{drawn} {kind}{part}films of {record['name']}{seed}"
