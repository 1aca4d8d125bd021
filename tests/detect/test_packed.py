"""A detector over a pack: the same files in any number of shards, every film once, and clear refusals."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from afire.cli import app
from afire.data.manifest import read_manifest
from afire.data.pack import PackedFilms, PackSettings, pack
from afire.data.shards import ShardedPack, pack_sharded
from afire.detect.base import AnomalyDetector
from afire.errors import UserError


def run(*words: object) -> str:
    result = CliRunner().invoke(app, ["detect", "run", *map(str, words), "--device", "cpu"])
    if isinstance(result.exception, UserError):
        return f"error: {result.exception}"
    assert result.exit_code == 0, result.output + str(result.exception)
    return result.output


def tree(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_any_number_of_shards_and_processes_gives_the_same_files(packed: Path, model: Path, tmp_path: Path) -> None:
    manifest = read_manifest(packed / "manifest.parquet")
    pack_sharded(ShardedPack(manifest, tmp_path / "pack", PackSettings(size=32), 7, workers=1))
    words = ("--model", model, "--batch", 8)
    said = run("--data", packed, *words, "--out", tmp_path / "one")
    assert "120 films" in said
    run("--data", tmp_path / "pack", *words, "--out", tmp_path / "many", "--shards", 5, "--workers", 3)
    one = tree(tmp_path / "one")
    assert one == tree(tmp_path / "many")
    assert {"results.csv", "results.json", "results.jsonl", "report.html", "legend.png"} <= set(one)
    films = json.loads(one["results.json"])["films"]
    assert len({film["file"] for film in films}) == 120 and all((film["overlay_picture"] in one) for film in films[:5])
    lines = [json.loads(line) for line in one["results.jsonl"].decode().splitlines()[1:]]
    assert [line["number"] for line in lines] == list(range(120))


def test_scores_are_those_of_the_detector(packed: Path, model: Path, detector: AnomalyDetector, tmp_path: Path) -> None:
    run("--data", packed, "--model", model, "--out", tmp_path / "out", "--no-pictures")
    lines = [json.loads(line) for line in (tmp_path / "out/results.jsonl").read_text().splitlines()[1:]]
    scores = detector.score(PackedFilms(packed).batch(range(32))).score
    np.testing.assert_allclose([line["score"] for line in lines[:32]], scores, rtol=1e-5)
    assert not (tmp_path / "out/pictures").exists() and not (tmp_path / "out/shards").exists()


def test_shards_one_by_one_then_the_finish(packed: Path, model: Path, tmp_path: Path) -> None:
    words = ("--data", packed, "--model", model, "--out", tmp_path / "out", "--no-pictures")
    assert "holds no shards" in run(*words, "--finish")
    assert "shard 1/2: 56 films scored" in run(*words, "--shard", "1/2")
    assert "nothing to do" in run(*words, "--shard", "1/2")
    assert "64 rows are missing (film000.png" in run(*words, "--finish")
    assert not (tmp_path / "out/results.json").exists()
    run(*words, "--shard", "0/2")
    assert "120 films" in run(*words, "--finish")
    assert "already holds results.jsonl; add --force" in run(*words)
    assert "120 films" in run(*words, "--force")


def test_an_altered_film_is_listed_and_the_others_are_scored(packed: Path, model: Path, tmp_path: Path) -> None:
    manifest = read_manifest(packed / "manifest.parquet")
    pack(manifest, tmp_path / "pack", PackSettings(size=32), workers=1)
    images = np.load(tmp_path / "pack/images.npy", mmap_mode="r+")
    images[3, 3, 3] ^= 1
    images.flush()
    run("--data", tmp_path / "pack", "--model", model, "--out", tmp_path / "out", "--no-pictures")
    text = (tmp_path / "out/results.json").read_text()
    unread = [film for film in json.loads(text)["films"] if film["status"] == "unreadable"]
    assert [film["file"] for film in unread] == ["film003.png"] and "not those that were packed" in unread[0]["reason"]
    assert str(tmp_path) not in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "give either films to score"),
        (("FOLDER", "--data", "PACK"), "give either films to score"),
        (("FOLDER", "--shard", "0/2"), "are for packs"),
        (("--data", "PACK", "--dicom-out", "sc"), "needs DICOM files"),
        (("--data", "OTHER"), "films of 48 px, the detector takes 32 px"),
    ],
)
def test_mistakes(packed: Path, model: Path, tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    other = tmp_path / "other"
    if "OTHER" in words:
        manifest = read_manifest(packed / "manifest.parquet")
        pack(manifest.where(manifest.table["split"] == "test"), other, PackSettings(size=48), workers=1)
    places = {"FOLDER": packed.parent / "films", "PACK": packed, "OTHER": other}
    given = [places.get(word, word) for word in words]
    assert message in run(*given, "--model", model, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()
