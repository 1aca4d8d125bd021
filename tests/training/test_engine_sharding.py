"""Weights in parts: two processes that share them equal one that has them all, and a run may change how it shares."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from functools import partialmethod
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from afire.config import Config
from afire.data.pack import PackedFilms
from afire.errors import UserError
from afire.methods import METHODS
from afire.methods.base import AllFilms, Losses
from afire.nn.distributed import in_parts, leave, part_like, whole, world_size
from afire.nn.memory import own_part
from afire.settings import load_config
from afire.training import pretrain
from afire.training.engine import make_accelerator
from tests import commands
from tests.methods.test_base import AdversarialInPhases, Phased
from tests.training.conftest import SMALLEST, draw_pack
from tests.training.test_pretrain_processes import final

pytestmark = pytest.mark.slow

SHARDED = "training.shard=fsdp"
# Twelve steps. Depth 2: blocks are gathered one by one. Pictures: one process alone runs the networks.
AFIRE = ("training.epochs=4", "encoder.depth=2", "losses.lesion=0.5", "lesions.views=2", "run.picture_epochs=2")
MAE = ("training.epochs=4", "encoder.depth=2", "method=mae", "encoder.drop_path=0.2")


def words(pack: Path, out: Path, *settings: str) -> list[str]:
    unread = ("head.", "lesions.") if "method=mae" in settings else ()
    chosen = [text for text in (*SMALLEST, *settings) if not text.startswith(unread)]
    sets = [word for text in chosen for word in ("--set", text)]
    return ["pretrain", "--data", str(pack), "--out", str(out), "--preset", "tiny", *sets]


def rows(out: Path) -> list[dict[str, float]]:
    """Losses, rates and the gradient norm of every step, without what the clock said."""
    clock = ("images_per_second", "data_wait")
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{key: record[key] for key in record if key not in clock} for record in records if "total" in record]


def assert_equal(one: Path, two: Path) -> None:
    """Within float error: losses and gradient norms of all steps, weights, teacher, prototypes and moments."""
    for first, second in zip(rows(one), rows(two), strict=True):
        assert first == pytest.approx(second, rel=1e-4, abs=1e-5)
    assert_close(final(one), final(two))


def assert_close(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor], rounding: float = 2e-5) -> None:
    assert expected.keys() == found.keys()
    for key, value in expected.items():
        assert value.dtype == found[key].dtype
        if "qkv.bias" in key or key == "queue":  # of the keys' bias the gradient is noise; a queue of one process
            continue
        torch.testing.assert_close(
            value, found[key], rtol=1e-3, atol=rounding, msg=lambda text, key=key: f"{key}: {text}"
        )


@pytest.mark.parametrize(
    ("settings", "more"),
    [
        (AFIRE, ("encoder.gradient_checkpointing=true",)),
        (MAE, ("training.accumulate=2",)),
    ],
    ids=["afire, blocks computed again", "mae, in two pieces"],
)
def test_two_sharded_processes_equal_one(
    packed: Path, tmp_path: Path, settings: tuple[str, ...], more: tuple[str, ...]
) -> None:
    commands.run(*words(packed, tmp_path / "one", *settings))
    ended = commands.run_processes(2, *words(packed, tmp_path / "two", *settings, SHARDED, *more))
    assert "Warning" not in ended[0].stderr + ended[1].stderr
    assert_equal(tmp_path / "one", tmp_path / "two")
    assert json.loads((tmp_path / "two/summary.json").read_text())["processes"] == 2


class Looking(Phased):
    """A phase with the trunk frozen, then one that trains it; before each epoch, a pass of it over all films."""

    def prepare(self, epoch: int, films: AllFilms) -> None:
        with torch.no_grad():
            means = torch.cat([self.encode(images).mean(dim=(1, 2)) for images, _ in films()])
        self.mean.copy_(means.mean())  # type: ignore[operator]

    def after_step(self, losses: Losses) -> None:
        """Where several processes train, each has a part of every weight, and about half of them all."""
        mine = sum(own_part(weight).numel() for weight in self.parameters())
        everything = sum(weight.numel() for weight in self.parameters())
        assert all(in_parts(weight) == (world_size() > 1) for weight in self.parameters())
        assert mine == everything or (world_size() == 2 and 0.45 < mine / everything < 0.55)


SPECIAL = {"looking": Looking, "in_phases": AdversarialInPhases}
COMPILED = ("encoder.gradient_checkpointing=true", "training.compile=true")
RUNS = {  # settings, what is set beside them where weights are sharded, and how far the two may differ
    "looking": (("method=looking",), (), 2e-5),
    "in_phases": (("method=in_phases", "training.precision=bf16"), (), 5e-3),
    "afire": (("lesions.views=2",), COMPILED, 2e-5),
}


def train_special(rank: int, folder: str, port: int) -> None:
    """All runs one after the other in one process: accelerate must not remember the one before."""
    torch.set_num_threads(1)
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update({**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
    METHODS.update(SPECIAL)
    # Traced and differentiated as ever, but run without the minutes that a C++ compiler takes.
    torch.nn.Module.compile = partialmethod(torch.nn.Module.compile, backend="aot_eager")  # type: ignore[assignment]
    for name, (settings, sharded, _) in RUNS.items():
        overrides = [*SMALLEST, "training.epochs=2", "encoder.depth=2", *settings, SHARDED, *sharded]
        pretrain(load_config("tiny", overrides=overrides), PackedFilms(Path(folder) / "pack"), Path(folder) / name)
    leave()


def test_phases_turns_passes_and_compiled_blocks(
    tmp_path: Path, smallest: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = draw_pack(tmp_path / "data").rename(tmp_path / "pack")
    commands.fork_processes(2, train_special, str(tmp_path), commands.free_port())
    for name, method in SPECIAL.items():
        monkeypatch.setitem(METHODS, name, method)
    for name, (settings, _, rounding) in RUNS.items():
        config = smallest("training.epochs=2", "encoder.depth=2", *settings)
        pretrain(config, PackedFilms(pack), tmp_path / f"one {name}")
        assert_close(final(tmp_path / f"one {name}"), final(tmp_path / name), rounding)


def test_a_run_goes_on_whole_in_copies_and_in_parts(packed: Path, tmp_path: Path) -> None:
    """One checkpoint format: each epoch of a run is done in another way, and the end is that of one process."""
    settings, moved = ("training.epochs=4", "run.keep_checkpoints=100"), tmp_path / "moved"
    commands.run(*words(packed, tmp_path / "whole", *settings))
    shutil.copytree(tmp_path / "whole", moved)
    for epoch, (processes, shard) in enumerate([(2, "fsdp"), (2, "ddp"), (1, "none")], start=1):
        for newer in sorted((moved / "checkpoints").glob("step-*"))[epoch:]:
            shutil.rmtree(newer)
        again = [*words(packed, moved, *settings, f"training.shard={shard}"), "--resume"]
        if processes == 1:
            commands.run(*again)
        else:
            commands.run_processes(processes, *again)
    assert_equal(tmp_path / "whole", moved)


def test_a_loss_that_is_not_finite_leaves_whole_weights(packed: Path, tmp_path: Path) -> None:
    settings = (SHARDED, "training.learning_rate=1e30", "training.clip=0", "training.warmup_epochs=0")
    ended = commands.run_processes(2, *words(packed, tmp_path / "run", *settings), expect=2)
    assert all("is not finite at step" in process.stderr for process in ended)
    state = tmp_path / "run/failure/state"
    assert json.loads((state / "state.json").read_text())["processes"] == 2
    assert load_file(state / "model.safetensors")["student.encoder.cls_token"].shape == (1, 1, 16)


def test_several_processes_must_be_asked_for(packed: Path, tmp_path: Path) -> None:
    ended = commands.run_processes(2, *words(packed, tmp_path / "run", "training.shard=none"), expect=2)
    assert "training.shard=none trains on one process, but 2 were started" in ended[0].stderr
    assert not (tmp_path / "run").exists()


def test_one_process_has_nothing_to_share(
    packed: Path, tmp_path: Path, smallest: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    films = PackedFilms(packed)
    for shard in ("none", "ddp", "fsdp"):
        pretrain(smallest("training.epochs=1", f"training.shard={shard}"), films, tmp_path / shard)
    for shard in ("none", "fsdp"):
        expected, found = final(tmp_path / "ddp"), final(tmp_path / shard)
        assert all(torch.equal(expected[key], found[key]) for key in expected)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(UserError, match=r"accelerate was set up for FSDP, but training\.shard is ddp"):
        make_accelerator("fp32", "cpu")


def test_what_is_not_in_parts_stays_as_it_is() -> None:
    tensor = torch.rand(3, 2)
    assert not in_parts(tensor) and own_part(tensor) is tensor and whole(tensor) is tensor
    assert part_like(tensor, torch.zeros(3, 2)) is tensor
