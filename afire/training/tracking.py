"""Where the numbers of a run go beside ``metrics.jsonl``: TensorBoard, Weights & Biases, MLflow; ``run.tracking``.

A run that is resumed goes on as the same run in W&B and MLflow: ``tracking.json`` in its folder keeps their names for
it. A service that cannot be reached when a run begins is an error; one that fails later is left with a message: the
numbers are in ``metrics.jsonl``, and days of training are worth more than a curve.
"""

from __future__ import annotations

import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from afire.errors import UserError
from afire.files import read_json, write_json
from afire.training.run_folder import flat

logger = logging.getLogger("afire")

PROJECT = "afire"
NAMES = "tracking.json"
_MLFLOW_SECONDS, _MLFLOW_NUMBERS = (
    5.0,
    500,
)  # between two messages to its server, which takes a thousand numbers at most
_MLFLOW_SETTINGS, _MLFLOW_TEXT = 100, 500  # settings in a message, characters of one


class Tracker(ABC):
    """One place that numbers go to."""

    name: str

    @abstractmethod
    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """The numbers of a step."""

    @abstractmethod
    def close(self, failed: bool) -> None:
        """The run is over, or it ``failed``."""


class TensorBoard(Tracker):
    """Files in ``RUN/tensorboard``."""

    name = "tensorboard"

    def __init__(self, out: Path, first_step: int, settings: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._board: Any = SummaryWriter(str(out / "tensorboard"), purge_step=first_step)

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        for name, value in numbers.items():
            self._board.add_scalar(name, value, step)

    def close(self, failed: bool) -> None:
        self._board.close()


class WeightsAndBiases(Tracker):
    """A run of the project ``afire``; whose account and which server, wandb's own settings say."""

    name = "wandb"

    def __init__(self, out: Path, first_step: int, settings: Mapping[str, Any]) -> None:
        wandb = _imported(self.name)
        run_id = _known(out, self.name) if first_step else None
        again = {"id": run_id, "resume": "allow"} if run_id else {}
        self._run = wandb.init(project=PROJECT, dir=str(out), name=out.name, config=dict(settings), **again)
        _remember(out, self.name, str(self._run.id))

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class MLflow(Tracker):
    """A run of the experiment ``afire``, at ``MLFLOW_TRACKING_URI``, else in a database in the folder of the run."""

    name = "mlflow"

    def __init__(self, out: Path, first_step: int, settings: Mapping[str, Any]) -> None:
        mlflow = _imported(self.name)
        self._mlflow = mlflow
        self._client = mlflow.MlflowClient(
            tracking_uri=os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{out}/mlflow.db"
        )
        self._waiting: list[Any] = []
        self._sent = time.monotonic()
        run_id = _known(out, self.name) if first_step else None
        if run_id is not None:
            self._run_id = run_id
            self._client.update_run(run_id, status="RUNNING")
            return
        self._run_id = str(self._client.create_run(self._experiment(), run_name=out.name).info.run_id)
        parameters = [mlflow.entities.Param(key, str(value)[:_MLFLOW_TEXT]) for key, value in flat(settings).items()]
        for start in range(0, len(parameters), _MLFLOW_SETTINGS):
            self._client.log_batch(self._run_id, params=parameters[start : start + _MLFLOW_SETTINGS])
        _remember(out, self.name, self._run_id)

    def _experiment(self) -> str:
        experiment = self._client.get_experiment_by_name(PROJECT)
        return str(experiment.experiment_id if experiment is not None else self._client.create_experiment(PROJECT))

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        now, metric = int(1000 * time.time()), self._mlflow.entities.Metric
        self._waiting += [metric(name, value, now, step) for name, value in numbers.items()]
        if len(self._waiting) >= _MLFLOW_NUMBERS or time.monotonic() - self._sent > _MLFLOW_SECONDS:
            self._send()

    def _send(self) -> None:
        """All that waits, in one message: a server far away would otherwise be waited for at every step."""
        self._client.log_batch(self._run_id, metrics=self._waiting)
        self._waiting, self._sent = [], time.monotonic()

    def close(self, failed: bool) -> None:
        self._send()
        self._client.set_terminated(self._run_id, "FAILED" if failed else "FINISHED")


TRACKERS: Mapping[str, type[Tracker]] = {kind.name: kind for kind in (TensorBoard, WeightsAndBiases, MLflow)}


class Trackers:
    """All places that a run's numbers go to."""

    def __init__(self, names: Sequence[str], out: Path, first_step: int, settings: Mapping[str, Any]) -> None:
        self._trackers: list[Tracker] = []
        for name in names:
            try:
                self._trackers.append(TRACKERS[name](out, first_step, settings))  # type: ignore[call-arg]
            except UserError:
                raise
            except Exception as error:  # whatever a service's client raises when it cannot begin
                raise UserError(f"run.tracking: {name} cannot begin ({error}); set it up, or leave it out.") from error

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        for tracker in list(self._trackers):
            try:
                tracker.log(numbers, step)
            except Exception as error:
                self._trackers.remove(tracker)
                logger.warning(
                    "%s fails (%s); from step %d on only metrics.jsonl has it all", tracker.name, error, step
                )

    def close(self, failed: bool) -> None:
        """Every one of them, whatever the others do."""
        for tracker in self._trackers:
            try:
                tracker.close(failed)
            except Exception as error:
                logger.warning("%s fails at the end (%s); metrics.jsonl has it all", tracker.name, error)


def require(names: Iterable[str]) -> None:
    """A message where the package of one of them is missing, before anything is written."""
    for name in names:
        _imported(name)


def _imported(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise UserError(
            f"run.tracking names {name}, but it is not installed; pip install 'afire[{name}]', or leave it out."
        ) from None


def _known(out: Path, name: str) -> str | None:
    """What a tracker called this run when it was begun."""
    return read_json(out / NAMES).get(name) if (out / NAMES).exists() else None


def _remember(out: Path, name: str, called: str) -> None:
    before = read_json(out / NAMES) if (out / NAMES).exists() else {}
    write_json(out / NAMES, {**before, name: called})
