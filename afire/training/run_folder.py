"""A run folder explains itself: settings, environment, code, data, metrics, and a page for people."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from afire._version import __version__
from afire.config import Config, Section, load_settings, to_yaml
from afire.errors import UserError
from afire.files import read_json, remove_unfinished, write_json, write_text
from afire.training.checkpoint import FOLDER as CHECKPOINTS
from afire.training.checkpoint import Checkpoint, newest_checkpoint

_PACKAGES = ("torch", "accelerate", "numpy", "safetensors", "pandas", "pydicom", "pillow")
CONFIG, DATA, ENVIRONMENT, METRICS, SUMMARY = (
    "config.yaml",
    "data.json",
    "environment.json",
    "metrics.jsonl",
    "summary.json",
)


@dataclass(frozen=True)
class RunFolder:
    """Where a run writes."""

    path: Path

    @property
    def exists(self) -> bool:
        """Whether a run was begun here."""
        return (self.path / CONFIG).exists()

    def begin(self, config: Section, data: Mapping[str, Any], resume: bool, force: bool) -> Checkpoint | None:
        """Start afresh, or return the checkpoint to go on from; refuse what would mix two runs."""
        if not resume:
            if self.exists:
                raise UserError(
                    f"{self.path} already holds a run; add --resume to go on with it, or choose another --out."
                )
            self._clear_litter()
            self._describe(config, data)
            return None
        if not self.exists:
            raise UserError(f"{self.path} holds no run to resume; leave --resume out to start one.")
        changes = self.changes(config, data)
        if changes and not force:
            raise UserError(
                f"the run in {self.path} was made with other settings ({'; '.join(changes)}); add --force to go on."
            )
        self._clear_litter()
        checkpoint = newest_checkpoint(self.path)
        if changes or checkpoint is None:
            self._describe(config, data)
        self._forget_after(checkpoint.step if checkpoint else 0)
        return checkpoint

    def changes(self, config: Section, data: Mapping[str, Any]) -> list[str]:
        """Settings and data that differ from those the run was begun with; the section `run` may change freely."""
        before = _flat(load_settings(type(config), [self.path / CONFIG]).model_dump(exclude={"run"}))
        now = _flat(config.model_dump(exclude={"run"}))
        found = [f"{key} was {before.get(key)}, is {now[key]}" for key in now if before.get(key) != now[key]]
        stored = read_json(self.path / DATA)
        for key, what in (("hash", "data's"), ("weights_hash", "weights'")):
            if stored.get(key) != data.get(key):
                found.append(f"the {what} hash was {str(stored.get(key))[:12]}, is {str(data.get(key))[:12]}")
        return found

    def _describe(self, config: Section, data: Mapping[str, Any]) -> None:
        write_json(self.path / DATA, dict(data))
        write_json(self.path / ENVIRONMENT, environment())
        write_text(self.path / CONFIG, to_yaml(config))  # last: its presence is what makes a folder a run

    def _clear_litter(self) -> None:
        """Remove what a killed run left half-written."""
        for folder in (self.path, self.path / CHECKPOINTS, self.path / "pictures"):
            remove_unfinished(folder)

    def _forget_after(self, step: int) -> None:
        """Drop metrics of steps that will be run again."""
        path = self.path / METRICS
        if not path.exists():
            return
        kept = []
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line)
            except (json.JSONDecodeError, KeyError):
                continue  # torn by a kill
        write_text(path, "".join(f"{line}\n" for line in kept))

    def finish(self, config: Config, data: Mapping[str, Any], summary: Mapping[str, Any]) -> None:
        """Write ``summary.json`` and the page."""
        write_json(self.path / SUMMARY, dict(summary))
        write_text(self.path / "README.md", _page(config, data, summary))


def environment() -> dict[str, Any]:
    """Versions, machine and code state; no user or host name."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "afire": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "gpus": devices,
        "packages": versions,
        "git": _git_state(),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _git_state() -> dict[str, Any] | None:
    """Commit of the code that runs, and whether it was changed since; None outside a checkout."""
    try:
        here = Path(__file__).parent
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()
        changed = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"],
            cwd=here,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit, "changed": bool(changed)}


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _page(config: Config, data: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    losses = ", ".join(f"{name} {value:.4f}" for name, value in summary["losses"].items())
    colour, reason = summary["health"]
    encoder, epochs = config.encoder, config.training.epochs
    rows = {
        "data": f"{data['used']:,} normal films of {data['films']:,} ({data['source']}), hash `{data['hash'][:12]}`",
        "encoder": f"width {encoder.width}, depth {encoder.depth}, patch {encoder.patch_size}, {config.image.size} px",
        "parameters": f"{summary['parameters']:,} trained",
        "losses at the end": losses,
        "health": f"{colour}: {reason}",
        "speed": f"{summary['images_per_second']:.1f} images/s on {summary['processes']} process(es)",
        "waiting for data": f"{summary['data_wait']:.1%} of the time",
        "bad films skipped": summary["bad_films"],
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return f"""# A pre-training run of afire {__version__}

Status: **{summary["status"]}** at step {summary["step"]:,} of {summary["steps"]:,} (epoch {summary["epoch"]}/{epochs}).

| | |
|---|---|
{table}

- `config.yaml` every setting; `environment.json` versions, machine and commit; `data.json` which films
- `metrics.jsonl` and `tensorboard/` numbers by step; `pictures/` restorations and prototypes by epoch
- `checkpoints/` the newest checkpoints; go on with `afire pretrain --resume` and the same arguments

Research software, not a medical device.
"""
