from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from afire.data.pack import PackedFilms
from afire.errors import UserError
from afire.methods.afire import AFiRe
from afire.tasks.pretrained import check_restores, restoration_errors, restore_films
from tests.figure_parts import PATCH, smallest

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model() -> AFiRe:
    return AFiRe(smallest()).eval()


def test_only_z_mask_hides_what_lies_below(model: AFiRe, films: PackedFilms) -> None:
    rows = np.array([0, 1, 4])
    restored = restore_films(model, films.batch(rows), rows, seed=0)
    assert restored.hidden.any(axis=(1, 2)).all() and restored.hidden.shape == (3, 4, 4)
    assert np.array_equal(restored.inputs["normal"], restored.truth)
    changed = np.abs(restored.inputs["lesioned"] - restored.truth) > 0
    assert changed.any(axis=(1, 2)).all()
    assert not np.allclose(restored.outputs["lesioned", "z_mask"], restored.outputs["lesioned", "all_seen"])
    again = restore_films(model, films.batch(rows[1:]), rows[1:], seed=0)  # other films beside it change nothing
    assert np.allclose(again.outputs["lesioned", "z_mask"], restored.outputs["lesioned", "z_mask"][1:], atol=1e-5)


def test_errors_equal_a_slow_mean_over_pixels(model: AFiRe, films: PackedFilms) -> None:
    rows = np.array([0, 1, 4, 5])
    errors = restoration_errors(model, films, rows, 0, CPU)
    shown = restore_films(model, films.batch(rows), rows, 0)
    for (name, way), values in errors.inside.items():
        picture = shown.inputs[name] if way == "untouched" else shown.outputs[name, way]
        for film in range(len(rows)):
            hidden = shown.hidden[film].repeat(PATCH, 0).repeat(PATCH, 1)
            square = (picture[film] - shown.truth[film]) ** 2
            assert values[film] == pytest.approx(square[hidden].mean(), rel=1e-4)
            assert errors.outside[name, way][film] == pytest.approx(square[~hidden].mean(), rel=1e-4, abs=1e-9)
    assert (errors.inside["normal", "untouched"] == 0).all() and (errors.inside["lesioned", "untouched"] > 0).all()


def test_a_model_that_cannot_restore_is_a_message(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="it has no decoder"):
        check_restores(AFiRe(smallest(["losses.restoration=0"])), "run")
    with pytest.raises(UserError, match="without z_mask"):
        check_restores(AFiRe(smallest(["decoder.mask_token=false"])), "run")
