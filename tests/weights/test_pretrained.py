from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from afire.errors import UserError
from afire.training.checkpoint import newest_checkpoint
from afire.weights.open import load_pretrained
from tests.figure_parts import make_run


def test_a_run_comes_back_whole(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", ["losses.teacher_temperature_epochs=4"], step=9)
    found = load_pretrained(run)
    checkpoint = newest_checkpoint(run)
    assert checkpoint is not None
    for name, tensor in checkpoint.model_tensors().items():
        assert torch.equal(found.model.state_dict()[name], tensor), name
    assert not found.model.training and found.name == "run"
    # Half of the warm-up (step 8 of 16) from 0.04 to 0.07.
    assert found.model.teacher_temperature == pytest.approx(0.055)
    assert load_pretrained(checkpoint.folder).hash == found.hash


def test_weights_alone_are_a_sentence(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with pytest.raises(UserError, match="random weights restore nothing"):
        load_pretrained("random")
    with pytest.raises(UserError, match="do not exist"):
        load_pretrained(tmp_path / "none")
    file = tmp_path / "alone.safetensors"
    save_file({"a": torch.zeros(1)}, file)
    with pytest.raises(UserError, match="weights alone"):
        load_pretrained(file)
    checkpoint = newest_checkpoint(run)
    assert checkpoint is not None
    tensors = load_file(checkpoint.folder / "model.safetensors")
    lost = tmp_path / "run" / "checkpoints" / "step-1"
    lost.mkdir()
    save_file({name: t for name, t in tensors.items() if "mask_token" not in name}, lost / "model.safetensors")
    with pytest.raises(UserError, match=r"lacks decoder\.mask_token"):
        load_pretrained(lost)
