"""Counting a manifest, and the paper's table of label combinations from its own numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from afire.data.manifest import Manifest, make_manifest
from afire.data.sources.chexpert import MIMIC_LABELS
from afire.data.stats import Combination, describe, label_combinations, merge_combinations

# The paper's table: which labels are 1, and how many films.
PAPER = [
    (("No Finding",), 69540),
    (("No Finding", "Support Devices"), 11577),
    ((), 11303),
    (("Lung Opacity",), 10123),
    (("Cardiomegaly",), 7679),
    (("Atelectasis",), 5525),
    (("Pleural Effusion",), 4922),
    (("Cardiomegaly", "Support Devices"), 4170),
    (("Lung Opacity", "Support Devices"), 3648),
    (("Atelectasis", "Pleural Effusion"), 3507),
    (("Atelectasis", "Support Devices"), 3205),
    (("Edema",), 3155),
    (("Pneumonia",), 3064),
    (("Support Devices",), 3022),
    (("Atelectasis", "Pleural Effusion", "Support Devices"), 2742),
    (("Atelectasis", "Lung Opacity"), 2594),
    (("Pleural Effusion", "Support Devices"), 2233),
    (("Lung Opacity", "Pneumonia"), 2191),
    (("Atelectasis", "Cardiomegaly", "Pleural Effusion", "Support Devices"), 2163),
    (("Lung Opacity", "Pleural Effusion"), 2079),
]


def small(root: Path) -> Manifest:
    box = json.dumps([{"label": "A", "x": 0, "y": 0, "w": 0.5, "h": 0.5}] * 2)
    return make_manifest(
        pd.DataFrame(
            {
                "image": list("abcdef"),
                "split": ["train", "train", "val", "test", "test", ""],
                "patient": ["1", "1", "2", "3", "1", "4"],
                "view": ["PA", "PA", "AP", "", "PA", "LATERAL"],
                "normal": [1, 0, math.nan, 1, 0, 0],
                "label:A": [0, 1, math.nan, 0, 1, 1],
                "label:B": [0, 1, 0, 0, math.nan, 0],
                "boxes": ["", box, "", "", "", ""],
                "mask": ["", "m.png", "", "", "", ""],
                "rle": ["", "", '{"size":[1,1],"runs":[]}', "", "", ""],
            }
        ),
        root,
    )


def test_counts(tmp_path: Path) -> None:
    found = describe(small(tmp_path))
    assert list(found.splits) == ["train", "val", "test", "none", "all"]
    train, total = found.splits["train"], found.splits["all"]
    assert (train.films, train.patients, train.normal, train.abnormal, train.unknown) == (2, 1, 1, 1, 0)
    assert (total.films, total.patients, total.normal, total.abnormal, total.unknown) == (6, 4, 2, 3, 1)
    label = found.labels["A"]["all"]
    assert (label.positive, label.negative, label.unknown, label.patients) == (3, 2, 1, 2)
    assert found.labels["B"]["test"].unknown == 1
    assert found.views == {"PA": 3, "AP": 1, "unknown": 1, "LATERAL": 1}
    assert found.films_per_patient == {"median": 1.0, "mean": 1.5, "most": 3.0}
    assert (found.boxes, found.masks) == (2, 2)
    assert found.crossing_patients == 1, "patient 1 is in train and test"


def test_combinations_are_shown_with_many_labels_or_on_request(tmp_path: Path) -> None:
    assert describe(small(tmp_path)).combinations == []
    asked = describe(small(tmp_path), combinations=True)
    assert asked.combinations == [Combination((), 3), Combination(("A",), 2), Combination(("A", "B"), 1)]
    assert asked.merged == [] and asked.distinct_combinations == 3
    assert describe(small(tmp_path), top=1, combinations=True).combinations == [Combination((), 3)]


def test_without_splits_there_is_one_part(tmp_path: Path) -> None:
    found = describe(make_manifest(pd.DataFrame({"image": ["a", "b"]}), tmp_path))
    assert list(found.splits) == ["all"] and found.labels == {} and found.splits["all"].unknown == 2


def test_json(tmp_path: Path) -> None:
    found = describe(small(tmp_path), combinations=True)
    read = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert read["splits"]["train"]["films"] == 2
    assert read["labels"]["A"]["all"]["positive"] == 3
    assert read["combinations"][1] == {"labels": ["A"], "films": 2}


def test_combinations_against_a_loop(tmp_path: Path) -> None:
    values = np.random.default_rng(0).choice([0.0, 1.0, np.nan], size=(500, 4))
    table = pd.DataFrame(values, columns=[f"label:{name}" for name in "ABCD"])
    manifest = make_manifest(table.assign(image=[f"{i}.png" for i in range(500)]), tmp_path)
    counted: dict[tuple[str, ...], int] = {}
    for row in values:
        names = tuple(name for name, value in zip("ABCD", row, strict=True) if value == 1)
        counted[names] = counted.get(names, 0) + 1
    found = label_combinations(manifest)
    assert {item.labels: item.films for item in found} == counted
    assert [item.films for item in found] == sorted(counted.values(), reverse=True)


@pytest.fixture(scope="module")
def paper(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """A manifest with as many films of each combination as the paper counts."""
    films = np.repeat(np.arange(len(PAPER)), [count for _, count in PAPER])
    rows = np.array([[float(label in present) for label in MIMIC_LABELS] for present, _ in PAPER])[films]
    rows[rows[:, MIMIC_LABELS.index("Fracture")] == 0, MIMIC_LABELS.index("Fracture")] = (
        np.nan
    )  # uncertain counts as absent
    table = pd.DataFrame(rows, columns=[f"label:{label}" for label in MIMIC_LABELS])
    table["image"] = [f"{i}.jpg" for i in range(len(table))]
    return make_manifest(table.sample(frac=1, random_state=0), tmp_path_factory.mktemp("mimic"))


def test_the_papers_table(paper: Manifest) -> None:
    found = describe(paper)
    assert [(item.labels, item.films) for item in found.combinations] == PAPER
    assert found.combinations[0].films + found.combinations[1].films == 81_117, "the paper's pre-training films"


def test_the_papers_table_without_support_devices(paper: Manifest) -> None:
    merged = describe(paper).merged
    assert merged[:3] == [
        Combination(("No Finding",), 81_117),
        Combination((), 14_325),
        Combination(("Lung Opacity",), 13_771),
    ]
    # The paper says 12. Its own rows give 13, or 12 when the films without any label are not counted as a category.
    assert len(merged) == 13
    assert sum(item.films for item in merged) == sum(films for _, films in PAPER)


def test_merging_keeps_all_films() -> None:
    merged = merge_combinations([Combination(("A", "S"), 3), Combination(("S",), 1), Combination(("A",), 2)], ["S"])
    assert merged == [Combination(("A",), 5), Combination((), 1)]
