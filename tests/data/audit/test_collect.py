"""Measuring a whole manifest: cache, broken films, and films that kill their reader."""

from __future__ import annotations

import os
from pathlib import Path

import pandas as pd
import pytest

from afire.data.audit import collect
from afire.data.audit.collect import MeasurementCache, as_table, measure_manifest, run_jobs
from afire.data.audit.measure import Measurement, measure_film
from afire.data.manifest import make_manifest
from tests.data.audit.drawing import draw_set


class Counter:
    """Counts what is measured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.images: list[str] = []

        def run(jobs: list[collect.Job], workers: int) -> list[Measurement]:
            self.images += [image for _, image in jobs]
            return [measure_film(Path(path), image) for path, image in jobs]

        monkeypatch.setattr(collect, "run_jobs", run)


def test_rows_follow_the_manifest(tmp_path: Path) -> None:
    manifest = draw_set(tmp_path, 5)
    turned = make_manifest(manifest.table.iloc[::-1], tmp_path)
    assert measure_manifest(turned, None, 1)["image"].tolist() == turned.table["image"].tolist()


def test_a_second_run_measures_only_what_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest, cache, counter = draw_set(tmp_path, 4), tmp_path / "out" / "m.parquet", Counter(monkeypatch)
    first = measure_manifest(manifest, cache, 1)
    assert len(counter.images) == 4
    second = measure_manifest(manifest, cache, 1)
    assert len(counter.images) == 4
    pd.testing.assert_frame_equal(first, second)
    os.utime(tmp_path / "film002.png", ns=(1, 1))
    measure_manifest(manifest, cache, 1)
    assert counter.images[4:] == ["film002.png"]


def test_films_that_could_not_be_read_are_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest, cache, counter = draw_set(tmp_path, 3), tmp_path / "m.parquet", Counter(monkeypatch)
    whole = (tmp_path / "film001.png").read_bytes()
    (tmp_path / "film001.png").write_bytes(whole[:60])
    assert (measure_manifest(manifest, cache, 1)["error"] != "").tolist() == [False, True, False]
    (tmp_path / "film001.png").write_bytes(whole)
    assert (measure_manifest(manifest, cache, 1)["error"] == "").all()
    assert counter.images[3:] == ["film001.png"]


@pytest.mark.parametrize("content", [b"", b"not parquet at all"])
def test_a_broken_cache_is_an_empty_one(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.parquet").write_bytes(content)
    assert MeasurementCache(tmp_path / "m.parquet").get(tmp_path / "a.png", "a.png") is None


def test_measurements_of_another_version_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest, cache, counter = draw_set(tmp_path, 2), tmp_path / "m.parquet", Counter(monkeypatch)
    measure_manifest(manifest, cache, 1)
    monkeypatch.setattr("afire.data.audit.collect.VERSION", 999)
    measure_manifest(manifest, cache, 1)
    assert len(counter.images) == 4


def test_what_was_measured_survives_an_interruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest, cache = draw_set(tmp_path, 4), tmp_path / "m.parquet"

    def run(jobs: list[collect.Job], workers: int):  # type: ignore[no-untyped-def]
        for path, image in jobs[:2]:
            yield measure_film(Path(path), image)
        raise KeyboardInterrupt

    monkeypatch.setattr(collect, "run_jobs", run)
    with pytest.raises(KeyboardInterrupt):
        measure_manifest(manifest, cache, 1)
    counter = Counter(monkeypatch)
    measure_manifest(manifest, cache, 1)
    assert counter.images == ["film002.png", "film003.png"]


def test_a_link_out_of_the_root_is_reported_not_followed(tmp_path: Path) -> None:
    outside = draw_set(tmp_path / "outside", 1)
    manifest = draw_set(tmp_path / "root", 2)
    (tmp_path / "root" / "film001.png").unlink()
    (tmp_path / "root" / "film001.png").symlink_to(outside.path(0))
    errors = measure_manifest(manifest, None, 1)["error"].tolist()
    assert errors[0] == ""
    assert "link" in errors[1]
    assert str(tmp_path) not in errors[1]


def test_hashes_of_64_bits_fit_the_table() -> None:
    table = as_table([Measurement("a", phash=2**64 - 1), Measurement("b", phash=0)])
    assert table["phash"].tolist() == [2**64 - 1, 0]


def measure_or_die(path: Path, image: str) -> Measurement:
    """Stands for a decoder with a segmentation fault."""
    if image in ("film040.png", "film075.png"):
        os._exit(11)
    return Measurement(image)


@pytest.mark.slow
def test_films_that_kill_their_process_are_named_and_the_rest_is_measured() -> None:
    jobs = [(f"film{number:03d}.png", f"film{number:03d}.png") for number in range(100)]
    found = list(run_jobs(jobs, 2, measure_or_die))
    assert sorted(one.image for one in found) == [image for _, image in jobs]
    assert [one.image for one in found if one.error] == ["film040.png", "film075.png"]
