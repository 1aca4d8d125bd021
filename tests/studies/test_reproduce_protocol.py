"""Differences of protocol come from what was run."""

from __future__ import annotations

from pathlib import Path

from afire.config import Config, load_config, to_yaml
from afire.files import write_json, write_text
from afire.studies.reproduce.protocol import Difference, of_pretraining, of_seeds, of_settings


def write_run(folder: Path, config: Config, films: int, source: str, processes: int) -> Path:
    write_text(folder / "config.yaml", to_yaml(config))
    write_json(folder / "data.json", {"used": films, "films": films, "source": source, "hash": "h"})
    write_json(folder / "summary.json", {"processes": processes})
    return folder


def test_the_papers_own_run_differs_in_nothing(tmp_path: Path) -> None:
    assert of_pretraining(write_run(tmp_path, load_config("paper"), 81117, "MIMIC-CXR-JPG", 8)) == []
    assert of_seeds([0, 1, 2]) == []


def test_each_difference_has_both_sides(tmp_path: Path) -> None:
    config = load_config("paper", overrides=["training.epochs=100", "encoder.drop_path=0.1", "training.batch_size=128"])
    differences = of_pretraining(write_run(tmp_path, config, 1349, "childcxr", 2))
    assert differences == [
        Difference("pre-training films", "81,117 normal films of MIMIC-CXR-JPG", "1,349 normal films of childcxr"),
        Difference("encoder", "drop_path 0", "drop_path 0.1"),
        Difference("training", "epochs 800", "epochs 100"),
        Difference("films in a step", "512", "128"),
    ]


def test_how_a_step_is_computed_is_no_difference() -> None:
    config = load_config(
        "paper", overrides=["training.precision=fp32", "encoder.gradient_checkpointing=true", "training.accumulate=8"]
    )
    assert of_settings(config) == []
    assert of_seeds([0, 0]) == [Difference("seeds", "3", "1")]
