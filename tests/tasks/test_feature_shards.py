"""Features in shards are the file of one process, byte for byte; a finish without all of them is refused."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from tests.tasks.test_cli import ENCODER, afire


def sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("name", ["f.parquet", "tokens.npz"])
def test_any_number_of_shards_gives_the_same_bytes(packed: Path, tmp_path: Path, name: str) -> None:
    words = ["embed", "--weights", "random", "--data", packed, *ENCODER]
    words += ["--pool", "tokens"] if name == "tokens.npz" else ["--part", "train"]
    afire(*words, "--out", tmp_path / f"whole-{name}")
    for count in (1, 2, 5):
        out = tmp_path / f"{count}-{name}"
        assert "features" in afire(*words, "--out", out, "--shards", count)
        if name.endswith(".npz"):  # a zip archive keeps the time of its making
            with np.load(out) as one, np.load(tmp_path / f"whole-{name}") as other:
                assert all(np.array_equal(one[key], other[key]) for key in other.files)
        else:
            assert sha(out) == sha(tmp_path / f"whole-{name}")
        assert not (tmp_path / f"{out.name}.shards").exists()


def test_shards_one_by_one_then_the_finish(packed: Path, tmp_path: Path) -> None:
    words = ["embed", "--weights", "random", "--data", packed, *ENCODER, "--out", tmp_path / "f.parquet"]
    assert "holds no shards" in afire(*words, "--finish")
    assert "shard 1/2: 56 films" in afire(*words, "--shard", "1/2")
    assert "64 rows are missing (film000.png" in afire(*words, "--finish") and not (tmp_path / "f.parquet").exists()
    assert "nothing to do" in afire(*words, "--shard", "1/2")
    afire(*words, "--shard", "0/2")
    other_pool = [*words, "--pool", "class"]
    assert "files of something else" in afire(*other_pool, "--finish")
    assert "120 x 16 features" in afire(*words, "--finish")
    assert "already exists" in afire(*words, "--shard", "0/2")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--engine", "ray"], "add --shards"),
        (["--finish", "--shard", "0/2"], "leave out --shard"),
        (["--shard", "2/2"], "counted from 0"),
    ],
)
def test_mistakes(packed: Path, tmp_path: Path, more: list[str], message: str) -> None:
    words = ["embed", "--weights", "random", "--data", packed, *ENCODER, "--out", tmp_path / "f.parquet"]
    assert message in afire(*words, *more)
    assert list(tmp_path.iterdir()) == []
