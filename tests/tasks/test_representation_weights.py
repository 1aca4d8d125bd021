"""Weights side by side in a figure."""

from __future__ import annotations

from pathlib import Path

import pytest

from afire.config import Config
from afire.errors import UserError
from afire.tasks.representation import describe_backbone, load_backbones
from tests.figure_parts import make_run


def test_random_weights_take_the_architecture_beside_them(smallest: Config, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no architecture"):
        _ = load_backbones({"random": "random"})["random"].trunk
    backbones = load_backbones({"a": "random", "b": "random"}, smallest, seed=3)
    assert list(backbones) == ["a", "b"] and backbones["a"].hash == backbones["b"].hash
    with pytest.raises(UserError, match="at least one"):
        load_backbones({})
    beside = load_backbones({"x": "random", "run": make_run(tmp_path / "run")}, seed=3)
    assert list(beside) == ["x", "run"] and beside["x"].config.encoder == beside["run"].config.encoder
    assert describe_backbone(beside["run"])["clusters"] == 6 and describe_backbone(beside["x"])["clusters"] is None
