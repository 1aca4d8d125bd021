"""The method of docs/methods.md: its code as it is printed pre-trains, resumes, and is read by what comes after."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import afire
from afire.cli import app
from afire.data.pack import PackedFilms
from afire.errors import UserError
from afire.methods import METHODS
from afire.methods.base import Keys, Method
from afire.settings import load_config
from tests.tasks.conftest import SMALLEST
from tests.training.conftest import draw_pack

PAGE = Path(__file__).parents[1] / "docs/methods.md"


@pytest.fixture(autouse=True)
def mirror(monkeypatch: pytest.MonkeyPatch) -> type[Method]:
    """The class that the page defines, registered by the line that the page gives."""
    code, line = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    names: dict[str, object] = {"__name__": "mirror"}
    exec(compile(code, str(PAGE), "exec", dont_inherit=True), names)
    registry = dict(METHODS)
    exec(compile(line, str(PAGE), "exec"), {**names, "METHODS": registry})
    assert registry.keys() - METHODS.keys() == {"mirror"}
    monkeypatch.setitem(METHODS, "mirror", registry["mirror"])
    return registry["mirror"]


def pretrain(data: Path, out: Path, *more: str) -> None:
    settings = [*SMALLEST, "training.epochs=4", "training.warmup_epochs=1", "training.batch_size=8"]
    settings += ["run.keep_checkpoints=100", "options.share=0.4"]
    words = ["pretrain", "--method", "mirror", "--preset", "tiny", "--data", str(data), "--out", str(out), *more]
    done = CliRunner().invoke(app, [*words, *(word for text in settings for word in ("--set", text))])
    assert done.exit_code == 0, done.output + repr(done.exception)


def test_it_pretrains_resumes_and_is_read(tmp_path: Path) -> None:
    data, whole, resumed = draw_pack(tmp_path / "data"), tmp_path / "whole", tmp_path / "resumed"
    pretrain(data, whole)
    pretrain(data, resumed)
    *_, newest = sorted((resumed / "checkpoints").iterdir())
    (newest / "state.json").unlink()  # as a kill while writing leaves it
    pretrain(data, resumed, "--resume")
    first, second = (load_file(run / "checkpoints" / newest.name / "model.safetensors") for run in (whole, resumed))
    assert all(torch.equal(first[name], second[name]) for name in first)
    losses = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert all(0 < record["mirror"] < 2 for record in losses if "mirror" in record) and len(losses) >= 12
    out = tmp_path / "features.parquet"
    done = CliRunner().invoke(app, ["embed", "--weights", str(whole), "--data", str(data), "--out", str(out)])
    assert done.exit_code == 0 and len(pd.read_parquet(out)) == 40
    model = afire.load(whole, "cpu")
    assert model.embed(PackedFilms(data).batch([0, 1])).shape == (2, 16)
    with pytest.raises(UserError, match="mirror"):
        model.restore(PackedFilms(data).batch([0, 1]))


def test_its_settings_are_printed_and_checked() -> None:
    shown = CliRunner().invoke(app, ["config", "--method", "mirror"])
    assert "share: 0.5  # share of the films that is mirrored" in shown.output and "prototypes" not in shown.output
    wrong = CliRunner().invoke(app, ["config", "--method", "mirror", "--set", "options.shore=0.2"])
    assert isinstance(wrong.exception, UserError) and "did you mean share" in str(wrong.exception)


def test_it_learns_where_left_is(mirror: type[Method]) -> None:
    """Films that are brighter on one side: after some steps, the encoder tells which were mirrored."""
    method = mirror(load_config("tiny", overrides=["method=mirror", *SMALLEST]))
    images = (
        torch.linspace(0, 1, 32) + 0.1 * torch.rand(32, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    ).clamp(0, 1)
    optimiser = torch.optim.AdamW(method.parameters(), lr=3e-3)
    values = []
    for epoch in range(40):
        loss = method.losses(method(method.views(images, Keys(0, epoch, epoch, torch.arange(32))))).total
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        values.append(loss.item())
    assert values[-1] < 0.2 < values[0]
