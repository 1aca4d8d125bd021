"""Facts about a film that need no look at what it shows, as columns from which a label might be guessed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd

from afire.data.manifest import META_PREFIX

Group = Literal["file", "pixels", "demographics", "other"]
"""``file``: how the film was made and stored (size, bytes, bits, view), which should know nothing of disease.
``pixels``: summaries of the grey values; disease may move them a little. ``demographics``: age and sex, which may
truly go with disease. ``other``: numbers of the manifest whose meaning only the user knows."""


@dataclass(frozen=True)
class Feature:
    """A column of facts: ``name`` in words, ``values`` one for each film (text for a category)."""

    name: str
    group: Group
    values: pd.Series

    @property
    def is_category(self) -> bool:
        """Whether the values are names, not numbers."""
        return not pd.api.types.is_numeric_dtype(self.values)


def film_features(table: pd.DataFrame, measured: pd.DataFrame) -> list[Feature]:
    """All facts that vary between the films; ``table`` is the manifest's, ``measured`` has the same rows.

    ``meta:orig_width`` and ``meta:orig_height`` are the size before someone resized the films. Where they are missing
    the stored size stands for them.
    """
    readable = measured["error"] == ""
    facts = [*_size_features(table, measured), *_file_features(table, measured), *_meta_features(table)]
    features = [Feature(name, group, values.where(readable)) for name, group, values in facts]
    return [feature for feature in features if feature.values.nunique(dropna=True) > 1]


Facts = list[tuple[str, Group, pd.Series]]


def _size_features(table: pd.DataFrame, measured: pd.DataFrame) -> Facts:
    stored = _sizes("stored", measured["width"], measured["height"])
    if {"meta:orig_width", "meta:orig_height"} <= set(table.columns):
        width, height = (pd.to_numeric(table[f"meta:orig_{side}"], errors="coerce") for side in ("width", "height"))
        original = _sizes("original", width.fillna(measured["width"]), height.fillna(measured["height"]))
        return original + stored[:2]  # area and aspect would only say once more what the original ones say
    return [(name.removeprefix("stored "), group, values) for name, group, values in stored]


def _sizes(which: str, width: pd.Series, height: pd.Series) -> Facts:
    width, height = width.astype("float64"), height.astype("float64")
    return [
        (f"{which} width", "file", width),
        (f"{which} height", "file", height),
        (f"{which} area", "file", width * height),
        (f"{which} aspect", "file", width / height.where(height > 0)),
    ]


def _file_features(table: pd.DataFrame, measured: pd.DataFrame) -> Facts:
    view = table["view"].where(table["view"] != "", measured["file_view"])
    return [
        ("file size", "file", measured["file_bytes"].astype("float64")),
        ("bit depth", "file", measured["bits"].astype("float64")),
        ("file format", "file", measured["file_kind"].where(measured["file_kind"] != "").astype("object")),
        ("view", "file", view.where(view != "").astype("object")),
        ("brightness", "pixels", measured["brightness"]),
        ("contrast", "pixels", measured["contrast"]),
        ("sharpness", "pixels", measured["sharpness"]),
    ]


# The size before resizing is used above; the row in a pack says where a film is kept, not what it is.
_NOT_FACTS = ("orig_width", "orig_height", "pack_row")


def _meta_features(table: pd.DataFrame) -> Facts:
    facts: Facts = []
    for column in table.columns:
        name = str(column).removeprefix(META_PREFIX)
        if not str(column).startswith(META_PREFIX) or name in _NOT_FACTS:
            continue
        values = table[column]
        if name == "sex":
            facts.append(("sex", "demographics", values.where(values.notna() & (values != "")).astype("object")))
            continue
        # Text is left out: it often is the label in other words (a subtype, a report).
        numbers = pd.to_numeric(values, errors="coerce").astype("float64").replace([np.inf, -np.inf], np.nan)
        if numbers.notna().any():
            facts.append((name, "demographics" if name == "age" else "other", numbers))
    return facts
