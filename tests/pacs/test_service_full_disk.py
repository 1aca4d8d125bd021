"""A disk that is really full: a small file system of its own under the spool, which needs root."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("pynetdicom")

from tests.pacs.films import dataset
from tests.pacs.peers import Pacs, StartService, store, wait_for
from tests.pacs.test_service import expected, identifying, is_idle

OUT_OF_RESOURCES = 0xA700


class Disk:
    """A file system of four megabytes, and a file that fills it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.ballast = folder, folder / "done" / "ballast.bin"

    def fill(self, leave: int = 0) -> None:
        """Until nothing but ``leave`` bytes is free."""
        with self.ballast.open("ab") as stream:
            for size in (1 << 16, 1 << 12):
                while self.free() - leave >= size:
                    stream.write(bytes(size))
                    stream.flush()

    def free(self) -> int:
        found = os.statvfs(self.folder)
        return found.f_bavail * found.f_frsize

    def clear(self) -> None:
        self.ballast.unlink()


@pytest.fixture  # before the service, which must end before it goes
def disk(tmp_path: Path) -> Iterator[Disk]:
    folder = tmp_path / "spool"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m,mode=700", "afire-test", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a file system cannot be mounted here")
    yield Disk(folder)
    subprocess.run(["umount", "--lazy", str(folder)], check=True, capture_output=True)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("afire.pacs.score._SECONDS_AFTER_A_FULL_DISK", 0.2)


def events(disk: Disk) -> list[str]:
    return [json.loads(line)["event"] for line in (disk.folder / "audit.jsonl").read_text().splitlines()]


def test_a_full_disk_turns_films_away_and_loses_nothing(
    disk: Disk, start_service: StartService, pacs: Pacs, model: Path
) -> None:
    service = start_service()
    assert store(service.port, dataset(0)) == [0]
    wait_for(lambda: is_idle(service) and len(pacs.kept) == 2)
    disk.fill()
    assert store(service.port, dataset(1), dataset(2)) == [OUT_OF_RESOURCES] * 2
    assert service.spool.counts()["incoming"] == 0 and service.look().alive
    assert not list((disk.folder / "incoming").iterdir()), "nothing half-written"
    disk.clear()
    assert store(service.port, dataset(1), dataset(2)) == [0, 0]
    wait_for(lambda: is_idle(service) and len(pacs.kept) == 6)
    assert set(pacs.ids()) == expected(model, range(3))
    assert "turned away" in events(disk) or "lines lost" in events(disk), "and it is told"
    assert identifying(disk.folder) == []


def test_a_disk_that_takes_the_film_and_not_its_results(
    disk: Disk, start_service: StartService, pacs: Pacs, model: Path
) -> None:
    service = start_service()
    disk.fill(leave=16 << 10)
    assert store(service.port, dataset(0)) == [0], "it is safe"
    wait_for(lambda: service.look().events.get("waiting for the disk", 0) >= 2)
    assert service.look().alive and service.spool.counts()["incoming"] == 1 and not pacs.kept
    assert not list((disk.folder / "scored").iterdir()), "what was written of the results is gone again"
    disk.clear()
    wait_for(lambda: is_idle(service) and len(pacs.kept) == 2)
    assert set(pacs.ids()) == expected(model, [0]) and service.look().alive


def test_results_leave_a_full_disk(disk: Disk, start_service: StartService, pacs: Pacs, model: Path) -> None:
    pacs.stop()
    service = start_service()
    assert store(service.port, dataset(0), dataset(1)) == [0, 0]
    wait_for(lambda: service.spool.counts()["outgoing"] == 2)
    disk.fill()
    pacs.start()
    wait_for(lambda: set(pacs.ids()) == expected(model, range(2)), 60)
    disk.fill()
    assert service.look().alive
    disk.clear()
    wait_for(lambda: is_idle(service), 60)
    assert len(pacs.kept) == 4, "each once"
    assert store(service.port, dataset(0)) == [0]
    assert service.look().events["duplicate"] == 1, "its delivery was recorded"
