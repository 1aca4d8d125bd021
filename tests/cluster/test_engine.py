"""Shards on a real Ray of this machine: tasks, actors, processes that die, messages, and who may listen."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from afire.cluster import engine
from afire.cluster.engine import do_shards
from afire.cluster.shards import Do, Shard, Where, Work, all_shards
from afire.errors import UserError
from afire.progress import _Silent


def forget_ray(patched: pytest.MonkeyPatch) -> None:
    """No variable of Ray for now; what is set meanwhile is forgotten too."""
    for name in (engine.MODE, engine.TOKEN, engine.TOKEN_PATH, engine._LOOPBACK_NODES):
        patched.setenv(name, "")
        patched.delenv(name)


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r'pip install "afire\[ray\]"'):
        do_shards(Work("", writer, {}), all_shards(2), Where("ray"))


def test_an_address_is_rays() -> None:
    with pytest.raises(UserError, match="add --engine ray"):
        Where("local", "here:6379")


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"RAY_AUTH_MODE": "disabled"}, "switches Ray's authentication off"),
        ({}, "there is no token for the Ray cluster at far:6379"),
        ({"RAY_AUTH_TOKEN": "secret"}, ""),
    ],
)
def test_a_cluster_is_not_asked_without_a_token(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variables: dict[str, str], sentence: str
) -> None:
    forget_ray(monkeypatch)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if sentence:
        with pytest.raises(UserError, match=sentence):
            engine.prepare("far:6379")
    else:
        engine.prepare("far:6379")
        assert os.environ["RAY_AUTH_MODE"] == "token" and engine._LOOPBACK_NODES not in os.environ


def test_loopback() -> None:
    assert all(map(engine.is_loopback, ("127.0.0.1:6379", "localhost:1", "[::1]:6379")))
    assert not any(map(engine.is_loopback, ("10.0.0.1:6379", "head:6379", "0.0.0.0:1")))


def test_ray_is_imported_only_when_asked_for() -> None:
    code = "import sys, afire.cli.data, afire.data.shards, afire.cluster.engine; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def writer(settings: Mapping[str, Any]) -> Do:
    """Writes the piece of a shard; may die, once or always, fail, or find the shard there."""
    folder = Path(settings["folder"])
    made = folder / f"made-{os.getpid()}"
    made.write_text("")

    def write(shard: Shard, piece: str) -> int:
        file = folder / f"shard-{shard.index}"
        if file.exists():
            return 0
        died = folder / f"died-{shard.index}"
        if settings.get("dies") == "always" or (shard.index in settings.get("dies", ()) and not died.exists()):
            died.write_text("")
            os._exit(1)
        if settings.get("full"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
        if settings.get("bad"):
            raise UserError("film7.png is not a film.")
        file.write_text(piece)
        return 5

    return write


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    if find_spec("ray") is None:  # not imported: what it reads then must be set before
        pytest.skip("needs afire[ray]")
    with pytest.MonkeyPatch.context() as patched:
        forget_ray(patched)
        with engine.connected(None, 2) as module:
            yield module


def run(ray: Any, folder: Path, keeps: bool, count: int = 4, **settings: object) -> int:
    work = Work("", writer, {"folder": str(folder), **settings}, lambda shard: f"piece {shard}", keeps)
    how = engine._on_actors if keeps else engine._as_tasks
    return how(ray, work, all_shards(count), 2, _Silent())


@pytest.mark.slow
@pytest.mark.parametrize("keeps", [False, True], ids=["tasks", "actors"])
def test_a_process_that_dies_is_replaced_and_a_whole_shard_is_skipped(ray: Any, tmp_path: Path, keeps: bool) -> None:
    assert run(ray, tmp_path, keeps, 6, dies=(1,)) == 30
    assert [(tmp_path / f"shard-{index}").read_text() for index in range(6)] == [f"piece {i}/6" for i in range(6)]
    assert (tmp_path / "died-1").exists()
    assert not keeps or len(list(tmp_path.glob("made-*"))) <= 3, "one model an actor, and one for the actor that died"
    (tmp_path / "shard-2").unlink()
    assert run(ray, tmp_path, False, 6) == 5


@pytest.mark.slow
def test_what_a_user_must_know_arrives_as_it_was_said(ray: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^film7\.png is not a film\.$"):
        run(ray, tmp_path, False, 1, bad=True)
    with pytest.raises(OSError, match=r"No space left on device: .*shard-") as error:
        run(ray, tmp_path, True, 1, full=True)
    assert error.value.errno == errno.ENOSPC


@pytest.mark.slow
def test_a_shard_that_kills_everybody_is_named(ray: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "RETRIES", 0)
    with pytest.raises(UserError, match="died again and again at shard 0/1"):
        run(ray, tmp_path, True, 1, dies="always")


@pytest.mark.slow
def test_nothing_listens_beyond_loopback(ray: Any) -> None:
    """Sockets of Ray's processes, which are children of this one, that wait for connections."""
    psutil = pytest.importorskip("psutil")
    family = [psutil.Process(), *psutil.Process().children(recursive=True)]
    addresses = set()
    for process in family:
        try:
            connections = process.net_connections(kind="inet")
        except psutil.Error:
            continue
        addresses |= {one.laddr.ip for one in connections if one.status == psutil.CONN_LISTEN}
    assert addresses and addresses <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
