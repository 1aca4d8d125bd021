from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from afire.data.manifest import Manifest, make_manifest, task_labels
from afire.errors import UserError
from afire.tasks.evaluate import check_classes


def manifest(**columns: list[float]) -> Manifest:
    count = len(next(iter(columns.values())))
    table = pd.DataFrame({"image": [f"{i}.png" for i in range(count)]})
    for name, values in columns.items():
        table[name if name == "normal" else f"label:{name}"] = values
    return make_manifest(table, Path("films"))


NAN = float("nan")


def test_all_findings_by_default_and_unknown_stays_unknown() -> None:
    names, truth = task_labels(manifest(Mass=[1, 0, NAN], Nodule=[0, 1, 1]))
    assert names == ["Mass", "Nodule"]
    np.testing.assert_array_equal(truth, [[1, 0], [0, 1], [NAN, 1]])


def test_abnormal_is_not_normal_and_the_default_without_findings() -> None:
    names, truth = task_labels(manifest(normal=[1, 0, NAN]))
    assert names == ["abnormal"]
    np.testing.assert_array_equal(truth[:, 0], [0, 1, NAN])
    names, truth = task_labels(manifest(normal=[1, 0], Mass=[0, 1]), ["abnormal", "Mass"])
    np.testing.assert_array_equal(truth, [[0, 0], [1, 1]])


def test_mistakes_are_messages() -> None:
    films = manifest(Mass=[1, 0], Edema=[NAN, NAN])
    with pytest.raises(UserError, match="no label 'Mas'; did you mean Mass"):
        task_labels(films, ["Mas"])
    with pytest.raises(UserError, match="no film has a value for label Edema"):
        task_labels(films, ["Edema"])
    with pytest.raises(UserError, match=r"these films have no labels.*afire data build classes"):
        task_labels(manifest(normal=[NAN, NAN]))
    with pytest.raises(UserError, match="'Mass' more than once"):
        task_labels(films, ["Mass", "Mass"])


def test_one_class_is_refused_for_the_only_label_and_said_for_one_of_many() -> None:
    truth = np.array([[0, 1], [1, 1], [0, 1], [1, 0]], float)
    subsets = {"train": np.array([0, 1]), "test": np.array([2, 3])}
    with pytest.raises(UserError, match="Mass has 2 positive and 0 negative films in train"):
        check_classes(["Mass"], truth[:, 1:], subsets)
    assert check_classes(["Nodule"], truth[:, :1], subsets) == []
    (message,) = check_classes(["Nodule", "Mass"], truth, subsets)
    assert message == "label Mass has 2 positive and 0 negative films in train"
