"""Packs in shards: the films of one array, bit for bit, whoever packed them, and a finish that refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from afire.cli import app
from afire.cluster.shards import Shard, all_shards
from afire.data.manifest import Manifest, write_manifest
from afire.data.pack import PackedFilms, PackSettings, is_pack, pack, read_summary
from afire.data.shards import ShardedPack, begun_shards, pack_sharded
from afire.errors import ImageError, UserError
from tests.data.test_pack import draw, replace_film

SMALL = PackSettings(size=32)


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """40 films; read only."""
    return draw(tmp_path_factory.mktemp("films") / "films", 40)


@pytest.fixture(scope="module")
def whole(manifest: Manifest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The films in one array; read only."""
    folder = tmp_path_factory.mktemp("whole") / "pack"
    pack(manifest, folder, SMALL, workers=1)
    return folder


def sharded(manifest: Manifest, out: Path, count: int = 4, **changes: object) -> ShardedPack:
    return ShardedPack(manifest, out, SMALL, count, workers=1, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [1, 7, 64])
def test_shards_are_the_one_array(manifest: Manifest, whole: Path, tmp_path: Path, count: int) -> None:
    summary = pack_sharded(sharded(manifest, tmp_path / "pack", count))
    before = read_summary(whole)
    assert (summary.hash, summary.films, summary.shards) == (before.hash, 40, count)
    parts = [np.load(path) for path in sorted((tmp_path / "pack").glob("images-*.npy"))]
    assert len(parts) == count and np.array_equal(np.concatenate(parts), np.load(whole / "images.npy"))
    films, one = PackedFilms(tmp_path / "pack"), PackedFilms(whole)
    rows = np.random.default_rng(0).permutation(40)
    assert torch.equal(films.raw(rows), one.raw(rows)) and torch.equal(films[39], one[39])
    assert films.manifest.hash == one.manifest.hash
    loader = torch.utils.data.DataLoader(films, batch_size=8, num_workers=1)
    assert torch.equal(torch.cat(list(loader)), one.batch(range(40)))


def test_shards_are_mapped_when_they_are_asked_for(manifest: Manifest, tmp_path: Path) -> None:
    pack_sharded(sharded(manifest, tmp_path / "pack", 8))
    films = PackedFilms(tmp_path / "pack")
    assert films._images._mapped == {}  # type: ignore[union-attr]
    films.raw([0, 39])
    assert set(films._images._mapped) == {0, 7}  # type: ignore[union-attr]


def test_shards_one_by_one_in_any_order_then_the_finish(manifest: Manifest, whole: Path, tmp_path: Path) -> None:
    job = sharded(manifest, tmp_path / "pack")
    for shard in reversed(all_shards(4)):
        with pytest.raises(UserError, match="rows are missing"):
            job.finish()
        assert job.pack([shard]) == 10
    with pytest.raises(UserError, match="begun but not finished"):
        read_summary(tmp_path / "pack")
    assert is_pack(tmp_path / "pack") and begun_shards(tmp_path / "pack") == 4
    assert job.finish().hash == read_summary(whole).hash
    assert job.pack(all_shards(4)) == 0, "whole shards are skipped"


def test_only_the_shard_of_a_changed_or_damaged_film_is_packed_again(tmp_path: Path) -> None:
    films = draw(tmp_path / "films", 12)
    job = sharded(films, tmp_path / "pack")
    pack_sharded(job)
    replace_film(films, 4, by=5)
    assert job.pack(all_shards(4)) == 3
    data = tmp_path / "pack/images-00002-of-00004.npy"
    images = np.load(data, mmap_mode="r+")
    images[0, 3, 3] ^= 1
    images.flush()
    with pytest.raises(UserError, match="shards 2/4 are not what their records say"):
        job.finish()
    assert job.pack(all_shards(4)) == 3
    assert job.finish().hash == pack(films, tmp_path / "fresh", SMALL, workers=1).hash


def test_an_altered_film_is_refused_where_it_is_read(manifest: Manifest, tmp_path: Path) -> None:
    pack_sharded(sharded(manifest, tmp_path / "pack"))
    images = np.load(tmp_path / "pack/images-00003-of-00004.npy", mmap_mode="r+")
    images[2, 3, 3] ^= 1
    images.flush()
    films = PackedFilms(tmp_path / "pack")
    assert list(films.altered(range(40))) == [32]
    with pytest.raises(ImageError, match=r"film0032\.png \(row 32\) are not those that were packed"):
        films.raw([31, 32])


def test_a_film_that_cannot_be_read(tmp_path: Path) -> None:
    films = draw(tmp_path / "films", 12)
    good = films.path(7).read_bytes()
    films.path(7).write_bytes(good[:99])
    job = sharded(films, tmp_path / "pack")
    with pytest.raises(UserError, match=r"film0007\.png.*Whole shards are kept.*--on-error skip"):
        job.pack(all_shards(4))
    skipping = sharded(films, tmp_path / "pack", on_error="skip")
    summary = pack_sharded(skipping)
    assert summary.films == 11 and list(summary.skipped) == ["film0007.png"]
    assert str(tmp_path) not in (tmp_path / "pack/images-00002-of-00004.json").read_text(), "where films lie is private"
    in_one = pack(films, tmp_path / "one", SMALL, "skip", workers=1)
    assert (in_one.hash, in_one.skipped) == (summary.hash, summary.skipped)
    assert torch.equal(PackedFilms(tmp_path / "pack").batch(range(11)), PackedFilms(tmp_path / "one").batch(range(11)))
    films.path(7).write_bytes(good)
    assert job.pack(all_shards(4)) == 3 and job.finish().films == 12


def test_a_folder_holds_one_pack(manifest: Manifest, whole: Path, tmp_path: Path) -> None:
    sharded(manifest, tmp_path / "pack").pack([Shard(0, 4)])
    with pytest.raises(UserError, match="shards 4 there, 5 asked"):
        sharded(manifest, tmp_path / "pack", 5).pack([Shard(0, 5)])
    with pytest.raises(UserError, match="shards 4 there, None asked"):
        pack(manifest, tmp_path / "pack", SMALL, workers=1)
    with pytest.raises(UserError, match="shards None there, 4 asked"):
        sharded(manifest, whole).finish()
    with pytest.raises(UserError, match="in one array"):
        begun_shards(whole)
    with pytest.raises(UserError, match="holds no pack that was begun"):
        begun_shards(tmp_path / "none")
    (tmp_path / "theirs").mkdir()
    np.save(tmp_path / "theirs/images-00000-of-00004.npy", np.zeros(3))
    with pytest.raises(UserError, match=r"already holds images-00000-of-00004\.npy"):
        sharded(manifest, tmp_path / "theirs").pack([Shard(0, 4)])


def test_a_disk_that_is_not_mounted_is_one_message(manifest: Manifest, tmp_path: Path) -> None:
    pack_sharded(sharded(manifest, tmp_path / "pack", disks=(tmp_path / "a", tmp_path / "b")))
    assert len(PackedFilms(tmp_path / "pack")) == 40
    (tmp_path / "b").rename(tmp_path / "away")
    with pytest.raises(UserError, match=r"images-00001-of-00004\.npy and 1 more cannot be found; mount the disk"):
        PackedFilms(tmp_path / "pack")


def afire(*words: object) -> str:
    result = CliRunner().invoke(app, ["data", "pack", *map(str, words)])
    if isinstance(result.exception, UserError):
        return f"error: {result.exception}"
    assert result.exit_code == 0, result.output + str(result.exception)
    return result.output


def test_the_command(manifest: Manifest, whole: Path, tmp_path: Path) -> None:
    write_manifest(manifest, tmp_path / "films.parquet")
    words = ["--data", tmp_path / "films.parquet", "--out", tmp_path / "pack", "--size", 32, "--workers", 1]
    assert "holds no pack that was begun" in afire(*words, "--finish")
    assert "shard 1/3: 13 films packed" in afire(*words, "--shard", "1/3")
    assert "nothing to do" in afire(*words, "--shard", "1/3", "--shards", 3)
    assert "27 rows are missing" in afire(*words, "--finish")
    assert "packed 40 films of 32 px in 3 shards" in " ".join(afire(*words, "--shards", 3).split())
    assert read_summary(whole).hash[:12] in afire(*words, "--finish")
    assert "add --shards" in afire(*words, "--engine", "ray") and "add --engine ray" in afire(
        *words, "--address", "a:1"
    )


def test_a_full_disk_leaves_whole_shards_and_no_others(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=200k", "afire-test", str(disk)]
    if sys.platform != "linux" or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs root to mount a small file system")
    try:
        films = draw(tmp_path / "films", 80)
        job = ShardedPack(films, disk / "pack", PackSettings(size=64), 8, workers=1)
        with pytest.raises(OSError, match=r"No space left on device: .*images-0000"):
            job.pack(all_shards(8))
        assert not [path for path in (disk / "pack").iterdir() if path.name.startswith(".")]
        kept = len(list((disk / "pack").glob("*.json"))) - 1
        assert 1 <= kept < 8
        subprocess.run(["mount", "-o", "remount,size=8m", str(disk)], check=True)
        assert job.pack(all_shards(8)) == 10 * (8 - kept)
        assert job.finish().hash == pack(films, tmp_path / "whole", PackSettings(size=64), workers=1).hash
    finally:
        subprocess.run(["umount", str(disk)], check=True)
