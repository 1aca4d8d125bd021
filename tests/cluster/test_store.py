"""Files of shards: whole or not there, by any number of writers, and a finish that names what is wrong."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from afire.cluster.shards import Shard, all_shards
from afire.cluster.store import WRITING, ShardStore, begun_count
from afire.errors import UserError

NAMES = [f"film{number:02d}.png" for number in range(10)]


def store_in(folder: Path, count: int = 4, **changes: Any) -> ShardStore:
    return ShardStore(folder, "part", ".txt", count, {"films": "ours", "shards": count}, NAMES, **changes)


def fill(store: ShardStore, shard: Shard, text: str = "") -> None:
    def write(path: Path) -> list[dict[str, Any]]:
        rows = store.rows(shard)
        path.write_text("".join(f"{row}{text}\n" for row in rows))
        return [{"row": row, "image": store.names[row]} for row in rows]

    store.write(shard, write)


def filled(folder: Path, count: int = 4) -> ShardStore:
    store = store_in(folder, count)
    for shard in all_shards(count):
        fill(store, shard)
    return store


def refusal(store: ShardStore) -> str:
    with pytest.raises(UserError) as error:
        store.finish("`again`")
    return str(error.value)


def test_a_shard_is_there_when_its_record_is(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    shard = Shard(1, 4)
    assert store.read(shard) is None

    def killed(path: Path) -> list[dict[str, Any]]:
        path.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.write(shard, killed)
    assert list(tmp_path.iterdir()) == []
    fill(store, shard)
    record = store.read(shard)
    assert record is not None and record["rows"] == [2, 5] and record["films"][0] == {"row": 2, "image": "film02.png"}
    assert {path.name for path in tmp_path.iterdir()} == {"part-00001-of-00004.txt", "part-00001-of-00004.json"}


@pytest.mark.parametrize("damage", ["cut", "altered", "gone", "no record", "record cut", "of other films"])
def test_a_damaged_shard_is_none(tmp_path: Path, damage: str) -> None:
    store, shard = filled(tmp_path), Shard(2, 4)
    data, record = store.data(shard), store.record(shard)
    text = data.read_text()
    if damage in ("cut", "altered"):
        data.write_text(text[:-1] if damage == "cut" else text.replace("5", "6"))
    elif damage == "gone":
        data.unlink()
    elif damage == "no record":
        record.unlink()
    elif damage == "record cut":
        record.write_text(record.read_text()[:-20])
    else:
        store = replace(store, identity={"films": "theirs", "shards": 4})
    assert store.read(shard) is None
    fill(store, shard)
    assert store.read(shard) is not None and data.read_text() == text


def test_finish_gives_all_rows_in_order_and_sweeps(tmp_path: Path) -> None:
    store = filled(tmp_path)
    left = tmp_path / f"{WRITING}part-00002-of-00004.txt-elsewhere-7-abc"
    left.write_text("what a killed process of another machine left")
    assert [entry["row"] for entry in store.finish("`again`")] == list(range(10))
    assert not left.exists() and begun_count(tmp_path, "part") == 4


def test_missing_rows_are_named(tmp_path: Path) -> None:
    store = filled(tmp_path)
    store.record(Shard(1, 4)).unlink()
    store.record(Shard(3, 4)).write_text("{")
    said = refusal(store)
    assert "6 rows are missing (film02.png, film03.png, film04.png and 3 more)" in said and "for 1/4, 3/4" in said


def test_doubled_rows_are_named(tmp_path: Path) -> None:
    store = filled(tmp_path)
    for path in (store.data, store.record):
        shutil.copy(path(Shard(0, 4)), path(Shard(3, 4)))
    said = refusal(store)
    assert "2 rows are there twice (film00.png, film01.png)" in said and "3 rows are missing (film07.png" in said


def test_foreign_rows_and_files_are_named(tmp_path: Path) -> None:
    store = filled(tmp_path)
    record = json.loads(store.record(Shard(0, 4)).read_text())
    record["films"][1]["image"] = "stranger.png"
    store.record(Shard(0, 4)).write_text(json.dumps(record))
    other = replace(store_in(tmp_path, 7), identity={"films": "theirs"})
    fill(other, Shard(2, 7))
    said = refusal(store)
    assert "files of something else (part-00002-of-00007.json) and 1 foreign rows (stranger.png)" in said
    assert "1 rows are missing (film01.png)" in said
    with pytest.raises(UserError, match="shards of different numbers"):
        begun_count(tmp_path, "part")


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    store = filled(tmp_path)
    store.data(Shard(2, 4)).write_text("something else")
    assert "shards 2/4 are not what their records say" in refusal(store)


def test_shards_may_lie_on_several_disks(tmp_path: Path) -> None:
    disks = (tmp_path / "one", tmp_path / "two")
    store = store_in(tmp_path / "out", disks=disks)
    for shard in all_shards(4):
        fill(store, shard)
    assert [len(list(disk.iterdir())) for disk in disks] == [2, 2]
    assert all(store.data(shard).is_symlink() for shard in all_shards(4))
    without = store_in(tmp_path / "out")  # whoever comes later need not know of the disks
    assert len(without.finish("`again`")) == 10
    fill(without, Shard(1, 4), " again")
    assert without.data(Shard(1, 4)).is_symlink() and " again" in next(disks[1].glob("*00001*")).read_text()


def test_many_writers_of_one_shard(tmp_path: Path) -> None:
    store, shard = store_in(tmp_path), Shard(0, 4)
    threads = [threading.Thread(target=fill, args=(store, shard)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.read(shard) is not None and len(list(tmp_path.iterdir())) == 2


def test_what_a_killed_process_left_is_removed_by_the_next_writer(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from afire.cluster.store import put\n"
        "put(Path(sys.argv[1]), lambda path: (path.write_text('half'), os.kill(os.getpid(), 9)))"
    )
    store, shard = store_in(tmp_path), Shard(0, 4)
    killed = subprocess.run([sys.executable, "-c", code, str(store.data(shard))], env={**os.environ})
    assert killed.returncode == -9 and len(list(tmp_path.glob(f"{WRITING}*"))) == 1
    fill(store, shard)
    assert not list(tmp_path.glob(f"{WRITING}*"))


def test_a_writer_whose_file_was_swept_away_finds_the_shard_whole(tmp_path: Path) -> None:
    store, shard = store_in(tmp_path), Shard(0, 4)

    def write(path: Path) -> list[dict[str, Any]]:
        rows = store.rows(shard)
        path.write_text("".join(f"{row}\n" for row in rows))
        filled(tmp_path).finish("`again`")  # others were faster, and their finish removes our file
        return [{"row": row, "image": store.names[row]} for row in rows]

    assert store.write(shard, write)["rows"] == [0, 2]
