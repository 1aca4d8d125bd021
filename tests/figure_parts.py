"""What tests of figures start from: a pack with boxes, a pre-training run and a fine-tuning, all without training."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from PIL import Image
from safetensors.torch import save_file

from afire.config import Config
from afire.data.manifest import make_manifest
from afire.data.pack import PackedFilms, PackSettings, pack
from afire.methods.afire import AFiRe
from afire.nn.vit import Normalise, VisionTransformer, initialise
from afire.settings import load_config, to_yaml
from afire.tasks.experiment import MODEL
from afire.tasks.features import data_content_hash
from afire.tasks.finetune import Classifier
from afire.tasks.results import Estimate, Result, RunResult, write_result
from afire.training.run_folder import CONFIG, save_checkpoint

SIZE, PATCH = 32, 8
SETTINGS = [
    "image.size=32",
    "encoder.width=16",
    "encoder.depth=2",
    "encoder.heads=2",
    "encoder.patch_size=8",
    "head.hidden=16",
    "head.bottleneck=8",
    "head.clusters=6",
    "decoder.width=16",
    "decoder.depth=1",
    "decoder.heads=2",
    "lesions.size_min=40",
]
LABELS = ["Spot", "Haze"]


def draw_boxed_pack(folder: Path, count: int = 80) -> Path:
    """Films with a bright spot or a haze, or normal ones; two films a patient; the last half is for testing."""
    rng = np.random.default_rng(5)
    (folder / "films").mkdir(parents=True)
    rows = []
    for number in range(count):
        film = rng.normal(0.3, 0.05, (SIZE, SIZE))
        kind = number % 4  # 0, 1 normal; 2 spot; 3 haze
        boxes = []
        if kind >= 2:
            y, x = rng.integers(0, SIZE - 12, 2)
            film[y : y + 12, x : x + 12] += 0.5 if kind == 2 else 0.2
            where = {"x": x / SIZE, "y": y / SIZE, "w": 12 / SIZE, "h": 12 / SIZE}
            boxes = [{"label": LABELS[kind - 2], **where}, {"label": "Unheard", **where}]
        name = f"{number:03d}.png"
        Image.fromarray((np.clip(film, 0, 1) * 255).astype(np.uint8)).save(folder / "films" / name)
        rows.append(
            {
                "image": name,
                "patient": f"p{number // 2:03d}",
                "normal": float(kind < 2),
                "split": "train" if number < count // 2 else "test",
                "label:Spot": float(kind == 2),
                "label:Haze": float(kind == 3),
                "boxes": json.dumps(boxes) if boxes else "",
            }
        )
    pack(make_manifest(pd.DataFrame(rows), folder / "films"), folder / "pack", PackSettings(size=SIZE), workers=1)
    return folder / "pack"


def smallest(overrides: Iterable[str] = ()) -> Config:
    return load_config("tiny", overrides=[*SETTINGS, *overrides])


def make_run(folder: Path, overrides: Iterable[str] = (), step: int = 8) -> Path:
    """The folder of a run whose weights were never trained; prototypes are random rows that sum to one."""
    config = smallest(overrides)
    model = AFiRe(config)
    if model.bank is not None:
        rows = torch.rand(model.bank.prototypes.shape, generator=torch.Generator().manual_seed(1))
        model.bank.prototypes.copy_(rows / rows.sum(1, keepdim=True))
    optimizer = torch.optim.AdamW(model.parameters())
    folder.mkdir(parents=True)
    save_checkpoint(folder, model, [optimizer], {"step": step, "steps_per_epoch": 4}, keep=1)
    (folder / CONFIG).write_text(to_yaml(config), encoding="utf-8")
    return folder


def make_finetuning(folder: Path, data: Path, seed: int = 0, auc: float = 0.7) -> Path:
    """A result folder as `afire finetune` leaves it, of a classifier that was never trained."""
    films, config = PackedFilms(data), smallest()
    generator = torch.Generator().manual_seed(seed)
    encoder = VisionTransformer.from_config(config.encoder, config.image)
    initialise(encoder, generator)
    model = Classifier(encoder, Normalise(config.image), np.full(len(LABELS), 0.5), generator)
    (folder / "seed-0").mkdir(parents=True)
    save_file(model.state_dict(), folder / "seed-0" / MODEL)
    one = Estimate(auc, float("nan"), auc - 0.1, auc + 0.1, [auc])
    table = films.manifest.table
    test = table[table["split"] == "test"]
    predictions = pd.DataFrame({"run": "seed-0", "part": "test", "image": test["image"], "patient": test["patient"]})
    result = Result(
        task="finetune",
        method="fine-tuned",
        name=f"classifier {seed}",
        data={"name": data.name, "hash": data_content_hash(films)},
        split_hash="s" * 64,
        test_hash="t" * 64,
        weights={"name": "random weights", "hash": "w" * 64, "report": "drawn"},
        labels=LABELS,
        fraction=1.0,
        config={"encoder": config.encoder.model_dump(), "image": config.image.model_dump()},
        runs=[RunResult("seed-0", 0, None, "s", "w", {"test": len(test)}, {}, {"auc": auc})],
        metrics={"auc": one},
        per_label={label: {"auc": one} for label in LABELS},
        environment={},
        command=["afire"],
    )
    write_result(folder, result, predictions)
    return folder
