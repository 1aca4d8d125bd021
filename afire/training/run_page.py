"""``README.md`` of a run: how it ended, on a page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from afire._version import __version__
from afire.config import Config
from afire.methods import METHODS


def run_page(config: Config, data: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    """The text of the page."""
    losses = ", ".join(f"{name} {value:.4f}" for name, value in summary["losses"].items())
    colour, reason = summary["health"]
    encoder, epochs = config.encoder, config.training.epochs
    is_method = config.method in METHODS  # else the networks are a detector's own, which need not read ``encoder``
    trains = "A pre-training run" if is_method else f"The training of a detector ({config.method})"
    command = "pretrain" if is_method else "detect fit"
    rows = {
        "data": f"{data['used']:,} normal films of {data['films']:,} ({data['source']}), hash `{data['hash'][:12]}`",
        "films": f"{config.image.size} px",
        "encoder": f"width {encoder.width}, depth {encoder.depth}, patch {encoder.patch_size}"
        + (", convolutional stem" if encoder.stem == "conv" else ""),
        "parameters": f"{summary['parameters']:,} trained",
        "losses at the end": losses,
        "health": f"{colour}: {reason}",
        "speed": f"{summary['images_per_second']:.1f} images/s on {summary['processes']} process(es)",
        "waiting for data": f"{summary['data_wait']:.1%} of the time",
        "bad films skipped": summary["bad_films"],
    }
    board = " and `tensorboard/`" if "tensorboard" in config.run.tracking else ""
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items() if is_method or name != "encoder")
    return f"""# {trains}, afire {__version__}

Status: **{summary["status"]}** at step {summary["step"]:,} of {summary["steps"]:,} (epoch {summary["epoch"]}/{epochs}).

| | |
|---|---|
{table}

- `config.yaml` every setting; `environment.json` versions, machine and commit; `data.json` which films
- `metrics.jsonl`{board} numbers by step; `pictures/` restorations and prototypes by epoch
- `checkpoints/` the newest checkpoints; go on with `afire {command} --resume` and the same arguments

Research software, not a medical device.
"""
