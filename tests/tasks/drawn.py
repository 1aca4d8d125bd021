"""A pack of small films that can be learnt in seconds: a bright spot is the finding, and its mask."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from PIL import Image

from afire.config import Config
from afire.data.manifest import make_manifest
from afire.data.pack import PackSettings, pack
from afire.data.rle import encode_rle
from afire.settings import load_config
from afire.tasks.experiment import Experiment

SIZE = 32
MODEL = ["image.size=32", "encoder.width=16", "encoder.depth=2", "encoder.heads=2", "encoder.patch_size=8"]
QUICK = ["training.batch_size=16", "training.epochs=3", "training.min_epoch_steps=1", "bootstrap=20"]


def draw_spots(folder: Path, count: int = 60) -> Path:
    """Dark noisy films, every other one with a spot; the second label is half unknown. Returns the pack's folder."""
    rng = np.random.default_rng(7)
    for name in ("films", "masks"):
        (folder / name).mkdir(parents=True)
    rows = []
    for number in range(count):
        film = rng.normal(0.3, 0.05, (SIZE, SIZE))
        mask, boxes = np.zeros((SIZE, SIZE), bool), []
        if number % 2:
            y, x = rng.integers(2, SIZE - 14, 2)
            boxes = [{"label": "Spot", "x": x / SIZE, "y": y / SIZE, "w": 12 / SIZE, "h": 12 / SIZE}]
            mask[y : y + 12, x : x + 12] = True
            film[mask] += 0.4
        _save(folder / "films" / f"{number:03d}.png", np.clip(film, 0, 1))
        _save(folder / "masks" / f"{number:03d}.png", mask)
        rows.append(
            {
                "image": f"films/{number:03d}.png",
                "normal": float(number % 2 == 0),
                "label:Spot": float(number % 2),
                "label:Doubt": float(number % 4 == 1) if number % 3 else float("nan"),
                "split": "test" if number >= count * 4 // 5 else "train",
                "mask": f"masks/{number:03d}.png",
                "meta:lungs": f"masks/{number:03d}.png" if number % 2 else "",
                "rle": encode_rle(mask),
                "boxes": json.dumps(boxes) if boxes else "",
            }
        )
    manifest = make_manifest(pd.DataFrame(rows), folder, {"mask": "spots"})
    pack(manifest, folder / "pack", PackSettings(size=SIZE), workers=1)
    return folder / "pack"


def _save(path: Path, values: np.ndarray) -> None:
    Image.fromarray((values * 255).astype(np.uint8)).save(path)


def smallest_model(overrides: Iterable[str] = ()) -> Config:
    return load_config("tiny", overrides=[*MODEL, *overrides])


def experiment(data: Path, out: Path, **changes: Any) -> Experiment:
    """One seed, random weights, all labels, unless ``changes`` say otherwise."""
    settings = {"weights": "random", "seeds": [0], "model": smallest_model(), "device": "cpu", "folders": {1.0: out}}
    return Experiment(data=data, **{**settings, **changes})
