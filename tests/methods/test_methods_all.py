"""Every registered method, with settings that are drawn: it trains, is killed, goes on to the same bits, and is used.

What is asked of a method beside its own tests: a run that was killed in the middle of an epoch ends bit by bit as one
that was not, every trained parameter has a gradient, pieces of a batch give what the whole batch gives, the trunk has
timm's names, and a probe reads the run. AFIRE_DRAW=7 draws other settings.
"""

from __future__ import annotations

import functools
import json
import os
import random
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

import afire
from afire.cli import app
from afire.config import Config
from afire.data.pack import PackedFilms
from afire.methods import METHODS, Method, complete, make_method, unread
from afire.methods.base import Keys, Labels, Losses, Progress
from afire.nn.vit import Normalise, VisionTransformer, initialise
from afire.settings import load_config
from afire.training.journal import Journal
from tests import commands
from tests.tasks.drawn import draw_spots

DRAW = int(os.environ.get("AFIRE_DRAW", "0"))

SMALL = [
    "image.size=32",
    "encoder.width=16",
    "encoder.heads=2",
    "encoder.patch_size=8",
    "head.hidden=16",
    "head.bottleneck=8",
    "head.clusters=8",
    "decoder.width=16",
    "decoder.depth=1",
    "decoder.heads=2",
    "lesions.size_min=30",
    "training.batch_size=8",
    "training.epochs=3",
    "training.warmup_epochs=1",
    "run.keep_checkpoints=100",
    "run.checkpoint_minutes=1e-9",
    "run.picture_epochs=3",
]
QUEUE = {"options.queue": [5, 16, 40], "options.key_width": [4, 8], "options.hidden": [8], "options.pool": ["mean"]}
HEAD = {
    "options.outputs": [12, 24],
    "options.hidden": [8],
    "options.bottleneck": [6],
    "options.pool": ["mean", "class"],
}
SHARED = {
    "encoder.depth": [1, 2],
    "encoder.drop_path": [0, 0.3],
    "encoder.positions": ["sincos", "learned"],
    "image.channels": [1, 3],
    "image.normalise": ["film", "imagenet", "none"],
    "training.accumulate": [1, 2],
    "seed": [0, 1, 2],
}
OWN: dict[str, dict[str, list[object]]] = {
    "mae": {"options.mask_ratio": [0.5, 0.75]},
    "afire": {"lesions.views": [1, 2], "losses.lesion": [0, 0.5]},
    "moco": {**QUEUE, "options.temperature": [0.1, 0.5]},
    "c2l": {**QUEUE, "options.crop.mirror": [0, 0.5]},
    "pcl": {**QUEUE, "options.clusters": ["[2,4]", "[3]"], "options.warmup": [0, 0.1]},
    "adam1": {**QUEUE, "options.stages": ["[1,2,4]", "[1,3]"], "options.pruned_from": [0.5, 0.99]},
    "dino": {**HEAD, "options.local_views": [0, 2], "options.local_size": ["null", 8]},
    "adam2": {**HEAD, "options.local_views": [1, 3], "options.alone": [0, 0.4], "options.levels": ["[0,1]", "[1]"]},
    "genesis": {"options.paint": [0, 1], "options.inpaint": [0, 0.5], "options.shuffle": [0, 1]},
    "transvw": {"options.words": [3, 6], "options.films": [5, 80], "options.word_side": [0.3, 1]},
    "dira": {**QUEUE, "options.adversary_width": [2], "options.adversary_after": [0, 0.4]},
    "pcrl": {**QUEUE, "options.preservational": [1, 5]},
    "phantom": {"options.films": [16, 24]},
    "supervised": {"options.labels": ["[]", "[Spot]"], "options.pool": ["mean", "class"]},
}
"""Settings of their own that are drawn; a method that is not listed has none that need to be small."""


def drawn_settings(method: str, draw: int = DRAW) -> list[str]:
    rng = random.Random(f"{method} {draw}")
    chosen = {name: rng.choice(values) for name, values in {**SHARED, **OWN.get(method, {})}.items()}
    settings = [*SMALL, *(f"{name}={value}" for name, value in chosen.items())]
    return [text for text in settings if text.split(".")[0] not in unread(method)]


def drawn_config(method: str, draw: int = DRAW) -> Config:
    return load_config("tiny", overrides=[f"method={method}", *drawn_settings(method, draw)])


def run_here(*words: object) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.output + repr(done.exception)
    return done.output


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw_spots(tmp_path_factory.mktemp("films") / "data")


@pytest.fixture(scope="module", params=list(METHODS))
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def words(method: str, data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command of a run of this method, without its folder."""
    settings = drawn_settings(method)
    words = ["pretrain", "--method", method, "--preset", "tiny", "--data", str(data), "--device", "cpu"]
    words += [word for text in settings for word in ("--set", text)]
    if METHODS[method].trains:
        return words
    config = drawn_config(method)
    start = VisionTransformer.from_config(config.encoder, config.image)
    initialise(start, torch.Generator().manual_seed(9))
    file = tmp_path_factory.mktemp("start") / "vit.safetensors"
    save_file(start.state_dict(), file)
    return [*words, "--init", str(file)]


@pytest.fixture(scope="module")
def run(words: list[str], method: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp(method) / "run"
    run_here(*words, "--out", out)
    return out


def tensors(folder: Path) -> dict[str, Tensor]:
    model = load_file(folder / "model.safetensors")
    return model | {f"optimizer {key}": value for key, value in load_file(folder / "optimizer.safetensors").items()}


def kill_behind(step: int) -> None:
    """Kill this process in the step behind ``step``: weights, queues and centres have moved, nothing is saved."""
    record = Journal.step

    def killed(self: Journal, number: int, *arguments: object) -> None:
        if number > step:
            os.kill(os.getpid(), signal.SIGKILL)
        record(self, number, *arguments)  # type: ignore[arg-type]

    Journal.step = killed  # type: ignore[method-assign, assignment]


def test_a_run_that_was_killed_ends_bit_identical(run: Path, words: list[str], method: str, tmp_path: Path) -> None:
    *_, last = sorted((run / "checkpoints").iterdir())
    steps = int(last.name.removeprefix("step-"))
    assert json.loads((run / "summary.json").read_text())["status"] == "finished"
    if not METHODS[method].trains:
        assert steps == 0
        return
    again = tmp_path / "again"
    stop = steps - 2  # in the last epoch, after its pass over all films and behind all phases
    command = commands.start(*words, "--out", again, before=functools.partial(kill_behind, stop))
    assert command.end().code == -signal.SIGKILL
    assert max(int(folder.name.removeprefix("step-")) for folder in (again / "checkpoints").iterdir()) == stop
    run_here(*words, "--out", again, "--resume")
    whole, resumed = tensors(last), tensors(again / "checkpoints" / last.name)
    assert whole.keys() == resumed.keys()
    different = [name for name in whole if not torch.equal(whole[name], resumed[name])]
    assert not different, f"after step {stop}: {different[:5]}"


def test_its_numbers_and_health_are_written(run: Path, method: str) -> None:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "total" in record]
    health = [record for record in records if "health" in record]
    if not METHODS[method].trains:
        assert not steps and not health
        return
    assert all(torch.isfinite(torch.tensor(record["total"])) for record in steps) and len(steps) >= 9
    assert len(health) == 3
    assert all(record["health"] in ("green", "amber", "red") and record["health_reason"] for record in health)
    assert list((run / "pictures").glob("*.png")), "every method here has something to show"


def test_the_trunk_has_the_names_of_timm(run: Path, data: Path, method: str, tmp_path: Path) -> None:
    run_here("export", run, "--format", "timm", "--out", tmp_path / "timm")
    [file] = (tmp_path / "timm").glob("*.safetensors")
    names, config = load_file(file), drawn_config(method)
    assert {"cls_token", "pos_embed", "patch_embed.proj.weight", "blocks.0.attn.qkv.weight", "norm.weight"} <= {*names}
    model = afire.load(run, "cpu")
    images = PackedFilms(data).batch(range(3))
    assert model.embed(images).shape == (3, config.encoder.width)
    trunk = VisionTransformer.from_config(config.encoder, config.image).eval()
    trunk.load_state_dict({name: tensor for name, tensor in names.items() if not name.startswith("head")})
    torch.testing.assert_close(trunk(Normalise(config.image)(images))[:, 1:], model.encode(images))


def test_a_bundle_and_a_probe_take_it(run: Path, data: Path, tmp_path: Path) -> None:
    run_here("export", run, "--out", tmp_path / "bundle", "--licence", "mit")
    images = PackedFilms(data).batch(range(3))
    assert torch.equal(*(afire.load(each, "cpu").encode(images) for each in (run, tmp_path / "bundle")))
    words = ["probe", "--weights", run, "--data", data, "--no-cache", "--seeds", 0, "--labels", "Spot"]
    run_here(*words, "--out", tmp_path / "probe", "--device", "cpu")
    assert 0 <= json.loads((tmp_path / "probe/result.json").read_text())["metrics"]["auc"]["mean"] <= 1


# A step, without files


def made(method: str, draw: int, *overrides: str) -> Method:
    config = load_config("tiny", overrides=[f"method={method}", *drawn_settings(method, draw), *overrides])
    kind = METHODS[method]
    names = ("Spot", "Other") if kind.learns_from_labels else ()
    model = make_method(kind.settled(complete(config, kind), 16, names))
    if names:
        values = torch.rand(16, 2, generator=torch.Generator().manual_seed(1)).round()
        values[3, 0] = torch.nan
        model.begin_labels(Labels(names, torch.arange(16), values))
    model.begin_run(torch.arange(16), lambda rows: films()[rows])
    return model.train()


def films() -> Tensor:
    coarse = torch.rand(16, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    return torch.nn.functional.interpolate(coarse, size=(32, 32), mode="bicubic").clamp(0, 1)


def prepared(model: Method, epoch: int) -> None:
    if model.prepares:
        model.prepare(epoch, lambda: iter([(films(), torch.arange(16))]))
    model.schedule(Progress(2 * epoch, 6, 2))


def step(model: Method, epoch: int, batch: Tensor, pieces: int = 1) -> dict[str, Losses]:
    """The losses of every turn, with gradients added up."""
    keys = [Keys(model.config.seed, epoch, 2 * epoch, part) for part in batch.chunk(pieces)]
    said = {}
    for turn in model.turns:
        outputs = [model(model.views(films()[part.rows], part)) for part in keys]
        joined = {name: torch.cat([output[name] for output in outputs]) for name in outputs[0]}
        said[turn] = model.losses(joined, turn)
        said[turn].total.backward()
    return said


@pytest.mark.parametrize("draw", [1, 2])
def test_steps_leave_no_parameter_without_a_gradient(method: str, draw: int) -> None:
    model = made(method, draw)
    if not model.trains:
        assert model.flops() == 0
        return
    assert model.flops() > 0
    generator = torch.Generator().manual_seed(draw)
    optimisers = {
        turn: torch.optim.AdamW([weight for _, weight in model.parameters_of(turn)], lr=1e-3) for turn in model.turns
    }
    for epoch in range(3):
        prepared(model, epoch)
        for _ in range(2):
            losses = step(model, epoch, torch.randperm(16, generator=generator)[:8])
            missing = [
                name for name, weight in model.named_parameters() if weight.requires_grad and weight.grad is None
            ]
            assert not missing
            assert all(torch.isfinite(each.total) for each in losses.values())
            for optimiser in optimisers.values():
                optimiser.step()
                optimiser.zero_grad()
            model.after_step(list(losses.values())[-1])
    floats = {name: value for each in losses.values() for name, value in each.as_floats().items()}
    health = model.eval().health(model.views(films()[:8], Keys(0, 2, 5, torch.arange(8))), floats)
    assert health is not None and health.reason and all(torch.isfinite(torch.tensor([*health.numbers.values()])))


def test_pieces_give_what_the_whole_batch_gives(method: str) -> None:
    model = made(method, 3)
    if not model.trains:
        pytest.skip("it makes no updates")
    batch, gradients = torch.tensor([3, 9, 1, 12, 5, 0, 7, 14]), []
    for warm in (0, 1):
        prepared(model, warm)
        model.after_step(list(step(model, warm, batch).values())[-1])
    prepared(model, 2)
    for pieces in (1, 2, 4):
        model.zero_grad()
        losses = step(model, 2, batch, pieces)
        assert all(len(value) for each in losses.values() for value in each.pending.values())
        gradients.append({name: w.grad.clone() for name, w in model.named_parameters() if w.grad is not None})
    for other in gradients[1:]:
        for name, gradient in gradients[0].items():
            torch.testing.assert_close(other[name], gradient, rtol=1e-3, atol=1e-5)
