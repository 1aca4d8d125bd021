"""Settings of the tasks: presets, YAML that round-trips, mistakes in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import pytest

from afire.data.sources.chexpert import COMPETITION_LABELS
from afire.data.sources.nih import NIH_LABELS
from afire.errors import UserError
from afire.settings import to_yaml
from afire.tasks.settings import TASK_PRESETS, load_task_config

KINDS: tuple[Literal["finetune", "segment"], ...] = ("finetune", "segment")
EVERY = [(kind, preset) for kind in KINDS for preset in (None, *TASK_PRESETS[kind])]


@pytest.mark.parametrize(("kind", "preset"), EVERY)
def test_yaml_round_trips_and_explains_itself(
    kind: Literal["finetune", "segment"], preset: str | None, tmp_path: Path
) -> None:
    config = load_task_config(kind, preset)
    text = to_yaml(config)
    (tmp_path / "mine.yaml").write_text(text)
    assert load_task_config(kind, file=tmp_path / "mine.yaml") == config
    assert all("  # " in line for line in text.splitlines())


def test_presets_are_the_papers() -> None:
    nih, chexpert = load_task_config("finetune", "nih14"), load_task_config("finetune", "chexpert5")
    assert nih.labels == list(NIH_LABELS) and chexpert.labels == list(COMPETITION_LABELS)
    for config, rate in ((nih, 2e-4), (chexpert, 1e-4)):
        recipe = config.training
        assert (recipe.learning_rate, recipe.weight_decay, recipe.batch_size, recipe.patience) == (rate, 0.05, 128, 10)
    assert load_task_config("segment", "siim").masks.column == "rle"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("epochs=3", "did you mean training.epochs?"),
        ("masks.colum=x", "did you mean masks.column?"),
        ("decoder.finest=3", "finest 3 is not a power of two"),
        ("losses={dice: 0, cross_entropy: 0}", "there is nothing to learn"),
        ("choice.thresholds=[0.5, 1.5]", "thresholds lie between 0 and 1"),
        ("choice.min_areas=[-1]", "shares of the film"),
        ("training.layer_decay=2", "less than or equal to 1"),
    ],
)
def test_a_mistake_is_a_message(override: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        load_task_config("segment", None, None, [override])
    assert message in str(error.value)


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(UserError, match=r"did you mean nih14\?"):
        load_task_config("finetune", "nih15")
    with pytest.raises(UserError, match=r"[Pp]resets are siim, lungs"):
        load_task_config("segment", "nih14")


def test_a_label_may_hold_anything() -> None:
    names = ["Pleural Effusion", "it's: [odd]", "10"]
    assert load_task_config("finetune", overrides=[f"labels={json.dumps(names)}"]).labels == names
