"""Where numbers go: TensorBoard for real, W&B and MLflow as stand-ins, and MLflow for real where it is installed."""

from __future__ import annotations

import json
import logging
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from afire.config import Config
from afire.data.pack import PackedFilms
from afire.errors import UserError
from afire.settings import load_config, to_yaml
from afire.training import pretrain
from afire.training.tracking import MLflow

MakeConfig = Callable[..., Config]
ALL = "run.tracking=tensorboard,wandb,mlflow"


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Modules that note what the real ones would send."""
    seen = SimpleNamespace(wandb=[], mlflow={}, begun=[], refuse=False)

    class Run:
        id = "w1"

        def log(self, numbers: dict[str, float], step: int) -> None:
            if seen.refuse:
                raise OSError("no route to host")
            seen.wandb.append((step, numbers))

        def finish(self, exit_code: int) -> None:
            seen.wandb.append(exit_code)

    def init(**words: Any) -> Run:
        seen.begun.append(words)
        return Run()

    class Metric(NamedTuple):
        key: str
        value: float
        timestamp: int
        step: int

    class Param(NamedTuple):
        key: str
        value: str

    class Client:
        def __init__(self, tracking_uri: str) -> None:
            seen.uri = tracking_uri

        def get_experiment_by_name(self, name: str) -> None:
            assert name == "afire"

        def create_experiment(self, name: str) -> str:
            return "7"

        def create_run(self, experiment: str, run_name: str) -> SimpleNamespace:
            assert experiment == "7" and run_name == "run"
            seen.mlflow["m1"] = {"status": "RUNNING", "metrics": [], "params": {}}
            return SimpleNamespace(info=SimpleNamespace(run_id="m1"))

        def update_run(self, run_id: str, status: str) -> None:
            seen.mlflow[run_id]["status"] = status

        def log_batch(
            self, run_id: str, metrics: list[Metric] | None = None, params: list[Param] | None = None
        ) -> None:
            assert len(metrics or ()) <= 1000 and len(params or ()) <= 100, "what a server takes in one message"
            seen.mlflow[run_id]["metrics"] += metrics or []
            seen.mlflow[run_id]["params"].update(params or [])

        def set_terminated(self, run_id: str, status: str) -> None:
            assert seen.mlflow[run_id]["status"] == "RUNNING"
            seen.mlflow[run_id]["status"] = status

    entities = SimpleNamespace(Metric=Metric, Param=Param)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=Client, entities=entities))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return seen


def steps(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_every_number_goes_everywhere_and_a_resumed_run_goes_on(
    packed: Path, smallest: MakeConfig, tmp_path: Path, stand_ins: SimpleNamespace
) -> None:
    films, out = PackedFilms(packed), tmp_path / "run"
    config = smallest(ALL, "run.keep_checkpoints=9")
    pretrain(config, films, out)
    expected = {(row["step"], name, value) for row in steps(out) for name, value in row.items() if type(value) is float}
    run = stand_ins.mlflow["m1"]
    assert {(each.step, each.key, each.value) for each in run["metrics"]} == expected and len(expected) > 100
    assert run["status"] == "FINISHED" and run["params"]["training.epochs"] == "3" and len(run["params"]) > 60
    assert stand_ins.uri == f"sqlite:///{out}/mlflow.db"
    *logged, code = stand_ins.wandb
    assert {(step, *pair) for step, numbers in logged for pair in numbers.items()} == expected and code == 0
    assert list((out / "tensorboard").iterdir())
    shutil.rmtree(sorted((out / "checkpoints").iterdir())[-1])
    pretrain(config, films, out, resume=True)
    assert stand_ins.mlflow.keys() == {"m1"} and run["status"] == "FINISHED"
    assert [words.get("id") for words in stand_ins.begun] == [None, "w1"]


def test_a_service_that_fails_later_does_not_end_the_run(
    packed: Path, smallest: MakeConfig, tmp_path: Path, stand_ins: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    stand_ins.refuse = True
    with caplog.at_level(logging.WARNING, "afire"):
        result = pretrain(smallest("run.tracking=wandb", "training.epochs=1"), PackedFilms(packed), tmp_path / "run")
    assert result.status == "finished" and len(steps(tmp_path / "run")) == 6
    assert [record.message for record in caplog.records] == [
        "wandb fails (no route to host); from step 1 on only metrics.jsonl has it all"
    ]
    assert not (tmp_path / "run/tensorboard").exists()
    assert "tensorboard" not in (tmp_path / "run/README.md").read_text()


def test_a_missing_package_is_said_before_anything_is_written(
    packed: Path, smallest: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(UserError, match=r"names mlflow, but it is not installed; pip install 'afire\[mlflow\]'"):
        pretrain(smallest("run.tracking=mlflow"), PackedFilms(packed), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_service_that_cannot_begin_is_an_error(
    packed: Path, smallest: MakeConfig, tmp_path: Path, stand_ins: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MLflow, "_experiment", lambda self: 1 / 0)
    with pytest.raises(UserError, match=r"run\.tracking: mlflow cannot begin \(division by zero\)"):
        pretrain(smallest("run.tracking=mlflow"), PackedFilms(packed), tmp_path / "run")


@pytest.mark.parametrize(
    ("text", "names"),
    [("mlflow", ("mlflow",)), ("tensorboard, wandb", ("tensorboard", "wandb")), ("[]", ()), ("[wandb]", ("wandb",))],
)
def test_names(text: str, names: tuple[str, ...], tmp_path: Path) -> None:
    config = load_config(overrides=[f"run.tracking={text}"])
    assert config.run.tracking == names
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert load_config(file=tmp_path / "config.yaml") == config


def test_a_name_that_nobody_knows() -> None:
    with pytest.raises(UserError, match=r"run\.tracking\.0 is 'tensorbord', but input should be 'tensorboard'"):
        load_config(overrides=["run.tracking=tensorbord"])


def test_the_old_setting_still_counts(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "afire"):
        assert load_config(overrides=["run.wandb=false"]) == Config()
        assert not caplog.records
        config = load_config(overrides=["run.wandb=true"])
    assert config.run.tracking == ("tensorboard", "wandb") and "wandb: " not in to_yaml(config)
    assert [record.message for record in caplog.records] == ["run.wandb is now run.tracking=tensorboard,wandb."]


def test_mlflow_itself(packed: Path, smallest: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    films, out = PackedFilms(packed), tmp_path / "run"
    config = smallest("run.tracking=mlflow", "run.keep_checkpoints=9")
    pretrain(config, films, out)
    shutil.rmtree(sorted((out / "checkpoints").iterdir())[-1])
    pretrain(config, films, out, resume=True)
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{out}/mlflow.db")
    [run] = client.search_runs([client.get_experiment_by_name("afire").experiment_id])
    assert run.info.status == "FINISHED" and run.data.params["encoder.patch_size"] == "8"
    history = {each.step: each.value for each in client.get_metric_history(run.info.run_id, "total")}
    assert history == {row["step"]: row["total"] for row in steps(out) if "total" in row}
