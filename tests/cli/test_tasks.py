"""The commands that train on labels: from options to settings, and mistakes as messages."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from afire.cli import app
from afire.cli.tasks import task_settings
from afire.errors import UserError
from afire.settings import to_yaml
from afire.tasks.settings import load_task_config


def test_a_recipe_is_a_preset_or_a_file(tmp_path: Path) -> None:
    nih = load_task_config("finetune", "nih14")
    (tmp_path / "mine.yaml").write_text(to_yaml(nih))
    assert task_settings("finetune", "nih14", []) == task_settings("finetune", str(tmp_path / "mine.yaml"), []) == nih
    assert task_settings("segment", None, ["training.epochs=3"]).training.epochs == 3
    with pytest.raises(UserError, match="does not exist"):
        task_settings("segment", str(tmp_path / "none.yaml"), [])


def test_settings_of_a_task_are_printed_as_yaml(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    words = ["config", "--task", "segment", "--recipe", "lungs", "--set", "decoder.width=32", "--out", str(file)]
    assert CliRunner().invoke(app, words, catch_exceptions=False).exit_code == 0
    assert load_task_config("segment", file=file).decoder.width == 32
    for wrong in (["--recipe", "lungs"], ["--task", "segment", "--preset", "small"]):
        with pytest.raises(UserError, match=r"--recipe"):
            CliRunner().invoke(app, ["config", *wrong], catch_exceptions=False)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seeds", "a"], "--seeds 'a' is not a list of whole numbers"),
        (["--fraction", "0"], "--fraction '0' is not a list of percentages"),
        (["--recipe", "siim"], "there is no preset 'siim'"),
        (["--set", "trainin.epochs=3"], "did you mean training"),
        (["--set", "encoder.widht=3"], "did you mean encoder.width, of `afire pretrain`?"),
    ],
)
def test_mistakes_are_messages(words: list[str], message: str, tmp_path: Path) -> None:
    start = ["finetune", "--weights", "random", "--data", str(tmp_path), "--out", str(tmp_path / "out")]
    with pytest.raises(UserError) as error:
        CliRunner().invoke(app, [*start, *words], catch_exceptions=False)
    assert message in str(error.value)
