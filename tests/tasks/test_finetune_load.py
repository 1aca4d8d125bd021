from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from afire.errors import UserError
from afire.tasks.finetune import load_classifier
from tests.figure_parts import LABELS, draw_boxed_pack, make_finetuning


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    return make_finetuning(folder / "finetuned", draw_boxed_pack(folder, 16))


def test_a_result_and_its_run_are_the_same_classifier(result: Path) -> None:
    whole, run = load_classifier(result), load_classifier(result / "seed-0")
    assert whole.hash == run.hash and whole.run == run.run == "seed-0"
    assert whole.labels == LABELS and not whole.model.training
    assert whole.test_images == [f"{number:03d}.png" for number in range(8, 16)]


def test_what_is_no_fine_tuning_is_a_message(result: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        load_classifier(tmp_path / "nothing")
    with pytest.raises(UserError, match="no run seed-7; its runs are seed-0"):
        load_classifier(result, "seed-7")
    copy = tmp_path / "copy"
    shutil.copytree(result, copy)
    (copy / "seed-0" / "model.safetensors").unlink()
    with pytest.raises(UserError, match="weights of the run were removed"):
        load_classifier(copy)
    raw = json.loads((copy / "result.json").read_text())
    (copy / "result.json").write_text(json.dumps({**raw, "task": "probe"}))
    with pytest.raises(UserError, match="result of probe, not of a fine-tuning"):
        load_classifier(copy)


def test_several_results_are_a_question(result: Path) -> None:
    both = result.parent / "both"
    for name in ("10pct", "100pct"):
        shutil.copytree(result, both / name)
    with pytest.raises(UserError, match="holds 2 results"):
        load_classifier(both)
