"""Checkpoints: whole or not there, the newest whole one is found, a full disk costs nothing."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from afire.config import Config
from afire.errors import UserError
from afire.methods.afire import AFiRe
from afire.training import run_folder as module
from afire.training.journal import run_page
from afire.training.run_folder import (
    RunFolder,
    environment,
    newest_checkpoint,
    read_checkpoint,
    restore,
    save_checkpoint,
)


def trained(steps: int = 2) -> tuple[nn.Module, torch.optim.AdamW]:
    torch.manual_seed(steps)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(steps):
        model(torch.randn(5, 3)).sum().backward()
        optimizer.step()
    return model, optimizer


def test_what_is_restored_trains_on_bit_by_bit(tmp_path: Path) -> None:
    model, optimizer = trained()
    save_checkpoint(tmp_path, model, [optimizer], {"step": 2}, keep=2)
    other_file = tmp_path / "other"
    other_file.touch()
    assert {path.stat().st_mode for path in tmp_path.glob("checkpoints/*/*")} == {other_file.stat().st_mode}
    other, other_optimizer = trained(0)
    checkpoint = newest_checkpoint(tmp_path)
    assert checkpoint is not None and checkpoint.step == 2
    restore(checkpoint, other, [other_optimizer])
    batch = torch.randn(5, 3)
    for network, optim in ((model, optimizer), (other, other_optimizer)):
        optim.zero_grad()
        network(batch).pow(2).sum().backward()
        optim.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    model, optimizer = trained()
    for step in (1, 2, 10):
        save_checkpoint(tmp_path, model, [optimizer], {"step": step}, keep=2)
    assert [path.name for path in sorted((tmp_path / "checkpoints").iterdir())] == ["step-00000002", "step-00000010"]


@pytest.mark.parametrize("damage", ["truncate", "no state", "no model"])
def test_a_truncated_checkpoint_never_pushes_out_a_whole_one(tmp_path: Path, damage: str) -> None:
    model, optimizer = trained()
    newest = save_checkpoint(tmp_path, model, [optimizer], {"step": 9}, keep=1)
    if damage == "truncate":
        weights = newest / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-5])
    else:
        (newest / ("state.json" if damage == "no state" else "model.safetensors")).unlink()
    for step in (5, 6):  # the run went on from an older checkpoint
        save_checkpoint(tmp_path, model, [optimizer], {"step": step}, keep=1)
        assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [f"step-{step:08d}"]
    assert newest_checkpoint(tmp_path) is not None


@pytest.mark.parametrize("damage", ["truncate", "flip", "no state", "torn state", "altered state", "no model"])
def test_a_torn_checkpoint_is_passed_over(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = trained()
    save_checkpoint(tmp_path, model, [optimizer], {"step": 1}, keep=5)
    newest = save_checkpoint(tmp_path, model, [optimizer], {"step": 2}, keep=5)
    weights = newest / "model.safetensors"
    if damage == "truncate":
        weights.write_bytes(weights.read_bytes()[:-5])
    elif damage == "flip":
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content)
    elif damage == "no state":
        (newest / "state.json").unlink()
    elif damage == "torn state":
        (newest / "state.json").write_text('{"format": 1, "st')
    elif damage == "altered state":
        state = (newest / "state.json").read_text()
        (newest / "state.json").write_text(state.replace('"step": 2', '"step": 6'))  # one bit
    else:
        weights.unlink()
    found = newest_checkpoint(tmp_path)
    assert found is not None and found.step == 1 and "step-00000002" in caplog.text


@pytest.mark.parametrize("number", [0.1, 1e-300, 3, None, [1.5, {"x": "ü"}], {3: 4.0}])
def test_a_state_is_what_was_written_and_those_of_earlier_versions_are_read(tmp_path: Path, number: object) -> None:
    model, optimizer = trained()
    folder = save_checkpoint(tmp_path, model, [optimizer], {"step": 1, "number": number}, keep=1)
    written = json.loads((folder / "state.json").read_text())
    assert read_checkpoint(folder).state == {key: value for key, value in written.items() if key != "digest"}
    (folder / "state.json").write_text(json.dumps({**written, "number": "other"}))
    with pytest.raises(UserError, match=r"state\.json is not what was written: its digest differs"):
        read_checkpoint(folder)
    del written["digest"]
    (folder / "state.json").write_text(json.dumps(written))
    assert read_checkpoint(folder).step == 1


def test_a_disk_that_fills_up_leaves_the_previous_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained()
    save_checkpoint(tmp_path, model, [optimizer], {"step": 1}, keep=1)

    def full(tensors: object, path: Path) -> None:
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "save_file", full)
    with pytest.raises(UserError, match=r"No space left on device; step-00000001 is whole"):
        save_checkpoint(tmp_path, model, [optimizer], {"step": 2}, keep=1)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]
    assert read_checkpoint(tmp_path / "checkpoints/step-00000001").step == 1


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    model, optimizer = trained()
    (tmp_path / "checkpoints").mkdir(mode=0o500)
    with pytest.raises(UserError, match="cannot write the checkpoint"):
        save_checkpoint(tmp_path, model, [optimizer], {"step": 2}, keep=1)


def test_another_architecture_is_a_sentence(tmp_path: Path, smallest: Callable[..., Config]) -> None:
    model, optimizer = trained()
    save_checkpoint(tmp_path, model, [optimizer], {"step": 1}, keep=1)
    other = AFiRe(smallest())
    found = newest_checkpoint(tmp_path)
    assert found is not None
    with pytest.raises(UserError, match="does not fit this model"):
        restore(found, other, [torch.optim.AdamW(other.parameters())])


def test_what_others_keep_in_the_folder_is_not_overwritten(tmp_path: Path, smallest: Callable[..., Config]) -> None:
    (tmp_path / "README.md").write_text("my project")
    with pytest.raises(UserError, match=r"already holds README\.md"):
        RunFolder(tmp_path).begin(smallest(), {"hash": "x"}, resume=False, force=False)
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]


def test_a_folder_in_use_is_let_go_when_the_run_ends(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run"), RunFolder(tmp_path / "run") as folder:
        folder.hold()
        with pytest.raises(UserError, match=r"another process is writing the run in .*run; wait"):
            RunFolder(tmp_path / "run").hold()
        raise UserError("no run")
    assert not (tmp_path / "run").exists()


def test_the_command_is_kept_without_the_folders_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [
        "--data",
        "/home/jane/films",
        "--out=/home/jane/a=b/run",
        "--set",
        "x=~jane/y",
        "--init",
        "C:\\Users\\jane\\z",
    ]
    monkeypatch.setattr(sys, "argv", ["/usr/bin/afire", "pretrain", *words, "films/pack", "a/b=c"])
    expected = ["--data", ".../films", "--out=.../run", "--set", "x=.../y", "--init", ".../z", "films/pack", "a/b=c"]
    assert environment()["command"] == ["afire", "pretrain", *expected]


@pytest.mark.parametrize("method", ["afire", "mae", "aeu"])
def test_the_page_speaks_of_an_encoder_where_there_is_one(
    tmp_path: Path, smallest: Callable[..., Config], method: str
) -> None:
    """A detector that trains networks of its own does not read the settings of the encoder."""
    data = {"used": 3, "films": 5, "source": "films", "hash": "ab" * 32}
    counts = {"step": 2, "steps": 2, "epoch": 1, "parameters": 10, "processes": 1, "bad_films": 0}
    measured = {"losses": {"total": 0.5}, "health": ["-", "not measured"], "images_per_second": 1.0, "data_wait": 0.0}
    config = smallest().model_copy(update={"method": method})
    summary = {**counts, **measured, "status": "finished"}
    RunFolder(tmp_path).finish(run_page(config, data, summary), summary)
    page = (tmp_path / "README.md").read_text(encoding="utf-8")
    pretraining = method != "aeu"
    assert ("| encoder | width 16" in page) == ("# A pre-training run" in page) == pretraining
    assert f"| films | {config.image.size} px |" in page
    assert ("afire pretrain --resume" if pretraining else "afire detect fit --resume") in page
