"""The phantom as a dataset: who is on which film, and files that resume."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from typer.testing import CliRunner

from afire.cli import app
from afire.data.manifest import read_manifest
from afire.data.phantom.diseases import DISEASES
from afire.data.phantom.film import draw_film, draw_findings, patient_of, split_of
from afire.data.phantom.write import MASK_NUMBERS, mask_of, numbered, write_phantom
from afire.errors import UserError
from tests import commands

SIZE = 64


# ---------------------------------------------------------------- who is on which film


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), normal_share=st.floats(0, 1))
def test_findings_follow_the_normal_share(seed: int, normal_share: float) -> None:
    found = [draw_findings(seed, index, normal_share) for index in range(200)]
    assert abs(np.mean([not diseases for diseases in found]) - normal_share) < 0.2
    assert all(len(diseases) <= 2 and len(set(diseases)) == len(diseases) for diseases in found)


def test_all_films_can_be_normal_or_ill() -> None:
    assert not any(draw_findings(0, index, 1.0) for index in range(100))
    assert all(draw_findings(0, index, 0.0) for index in range(100))


def test_every_disease_is_about_as_frequent() -> None:
    found = [name for index in range(8000) for name in draw_findings(0, index, 0.0)]
    counts = [found.count(name) for name in DISEASES]
    assert min(counts) > 0.8 * max(counts)


@pytest.mark.parametrize("seed", range(5))
def test_patients_have_several_films_and_one_split(seed: int) -> None:
    numbers = [patient_of(seed, index) for index in range(1200)]
    assert numbers == sorted(numbers)
    films = np.bincount(numbers)
    assert films.min() >= 1 and 2 < films.mean() < 3 and films.max() <= 8
    shares = {part: np.mean([split_of(seed, n) == part for n in range(500)]) for part in ("train", "val", "test")}
    assert shares == pytest.approx({"train": 0.7, "val": 0.1, "test": 0.2}, abs=0.02)


@pytest.mark.parametrize("seed", range(8))
def test_a_small_phantom_has_all_three_splits(seed: int) -> None:
    assert {split_of(seed, patient_of(seed, index)) for index in range(48)} == {"train", "val", "test"}


# ---------------------------------------------------------------- files


def _bytes(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.png"))}


def test_a_phantom_is_a_dataset(tmp_path: Path) -> None:
    manifest = write_phantom(tmp_path / "p", 30, SIZE, 3, workers=1)
    again = read_manifest(tmp_path / "p" / "manifest.parquet")
    assert again.hash == manifest.hash and len(again) == 30
    assert again.labels == list(DISEASES)
    table = again.table
    assert (table["normal"] == (table[[f"label:{name}" for name in DISEASES]].sum(axis=1) == 0)).all()
    assert table.groupby("patient")["split"].nunique().max() == 1
    assert set(table["view"]) == {"PA", "AP"}
    assert table.groupby("patient")["meta:age"].nunique().max() == 1 and table["meta:age"].between(0, 90).all()
    for row in range(len(again)):
        film = draw_film(3, row, SIZE)
        image = np.asarray(Image.open(again.path(row)))
        assert image.shape == (SIZE, SIZE) and image.dtype == np.uint8
        np.testing.assert_array_equal(image, np.rint(film.image * 255))
        lungs = np.asarray(Image.open(tmp_path / "p" / table["meta:lungs"][row]))
        np.testing.assert_array_equal(lungs, film.lungs * 255)
        boxes = json.loads(table["boxes"][row] or "[]")
        assert [box["label"] for box in boxes] == list(film.masks)
        mask_path = again.mask_path(row)
        assert (mask_path is None) == film.normal
        if mask_path is not None:
            pixels = np.asarray(Image.open(mask_path))
            for name in DISEASES:
                expected = film.masks.get(name, np.zeros((SIZE, SIZE), bool))
                np.testing.assert_array_equal(mask_of(pixels, name), expected)


@pytest.mark.slow
def test_films_do_not_depend_on_count_or_workers(tmp_path: Path) -> None:
    write_phantom(tmp_path / "few", 20, 32, 1, workers=1)
    write_phantom(tmp_path / "many", 40, 32, 1, workers=2)
    few, many = _bytes(tmp_path / "few"), _bytes(tmp_path / "many")
    assert len(few) > 40 and few.items() <= many.items()
    small, large = (read_manifest(tmp_path / name / "manifest.parquet").table for name in ("few", "many"))
    assert small.equals(large.iloc[:20])


def test_a_rerun_replaces_only_what_is_missing_or_truncated(tmp_path: Path) -> None:
    out = tmp_path / "p"
    manifest = write_phantom(out, 24, 32, 1, workers=1)
    before = _bytes(out)
    ill = int(np.flatnonzero(manifest.table["mask"] != "")[0])
    (out / "images/000002.png").unlink()
    (out / manifest.table["mask"][ill]).unlink()
    (out / "lungs/000005.png").write_bytes(before["lungs/000005.png"][:40])
    (out / "manifest.parquet").unlink()
    kept = out / "images/000009.png"
    stamp = kept.stat().st_mtime_ns
    assert write_phantom(out, 24, 32, 1, workers=1).hash == manifest.hash
    assert _bytes(out) == before
    assert kept.stat().st_mtime_ns == stamp


def test_a_larger_count_adds_films(tmp_path: Path) -> None:
    write_phantom(tmp_path / "p", 6, 32, 1, workers=1)
    first = _bytes(tmp_path / "p")
    assert len(write_phantom(tmp_path / "p", 10, 32, 1, workers=1)) == 10
    assert first.items() <= _bytes(tmp_path / "p").items()
    with pytest.raises(UserError, match="10 films, more than 6"):
        write_phantom(tmp_path / "p", 6, 32, 1)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs process groups")
def test_a_killed_run_continues_to_the_same_bytes(tmp_path: Path) -> None:
    out, count = tmp_path / "killed", 150
    words = ["data", "phantom", "--count", count, "--size", 64, "--seed", 1, "--workers", 1, "--quiet"]
    command = commands.start(*words, "--out", out)
    command.wait_until(lambda: len(list(out.glob("images/[0-9]*.png"))) >= 10)
    command.kill()
    done = len(list(out.glob("images/[0-9]*.png")))
    assert 10 <= done < count and not (out / "manifest.parquet").exists()
    (out / "images" / ".part-left.png").write_bytes(b"truncated")
    resumed = write_phantom(out, count, 64, 1, workers=1)
    assert not list(out.rglob(".part-*"))
    for row in (0, done - 1, done, count - 1):
        expected = np.rint(draw_film(1, row, 64).image * 255)
        np.testing.assert_array_equal(np.asarray(Image.open(resumed.path(row))), expected)
    assert len(resumed) == count


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seed": 2}, "seed 1, not 2"),
        ({"size": 64}, "size 32, not 64"),
        ({"normal_share": 0.2}, "normal_share 0.5, not 0.2"),
        ({"findings": ["Mass"]}, r"findings .*, not \['Mass'\]"),
    ],
)
def test_a_folder_with_another_phantom_is_refused(tmp_path: Path, changed: dict[str, object], message: str) -> None:
    write_phantom(tmp_path / "p", 2, 32, 1, workers=1)
    arguments = {"size": 32, "seed": 1, **changed}
    with pytest.raises(UserError, match=message):
        write_phantom(tmp_path / "p", 2, workers=1, **arguments)  # type: ignore[arg-type]


def test_a_folder_with_other_things_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="not empty"):
        write_phantom(tmp_path, 2, 32, 1)
    with pytest.raises(UserError, match="is a file"):
        write_phantom(tmp_path / "thesis.txt", 2, 32, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize(
    ("count", "size", "seed", "normal_share", "message"),
    [
        (0, 64, 0, 0.5, "at least 1"),
        (-3, 64, 0, 0.5, "-3 films"),
        (4, 31, 0, 0.5, "from 32"),
        (4, 99999, 0, 0.5, "to 2048"),
        (4, 64, -1, 0.5, "seed -1"),
        (4, 64, 0, 1.5, "normal share of 1.5"),
        (4, 64, 0, float("nan"), "normal share of nan"),
    ],
)
def test_impossible_settings_are_refused(
    tmp_path: Path, count: int, size: int, seed: int, normal_share: float, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        write_phantom(tmp_path / "p", count, size, seed, normal_share=normal_share)
    assert not (tmp_path / "p").exists()


def test_a_users_mistake_is_one_message_and_exit_code_2(tmp_path: Path) -> None:
    ended = commands.run("data", "phantom", "--out", tmp_path / "p", "--count", 0, expect=2)
    assert "at least 1" in ended.stderr
    assert not (tmp_path / "p").exists()


def test_the_command_writes_a_contact_sheet_and_counts(tmp_path: Path) -> None:
    out = tmp_path / "p"
    arguments = ["--count", "30", "--size", "48", "--seed", "2", "--workers", "1", "--out", str(out)]
    result = CliRunner().invoke(app, ["data", "phantom", *arguments])
    assert result.exit_code == 0, result.output
    for word in ("normal", *DISEASES, "train", "30"):
        assert word in result.output
    with Image.open(out / "contact_sheet.png") as sheet:
        assert sheet.width > 1000 and sheet.height > 300
    settings_file = json.loads((out / "phantom.json").read_text())
    assert (settings_file["count"], settings_file["size"], settings_file["seed"]) == (30, 48, 2)
    assert settings_file["mask_numbers"] == MASK_NUMBERS


def test_two_findings_on_one_pixel_are_both_kept() -> None:
    first, second = np.zeros((2, 4, 4), bool)
    first[:3], second[1:] = True, True
    for name, other in (("Nodule", "Emphysema"), ("Miliary", "Edema")):
        pixels = numbered({name: first, other: second})
        np.testing.assert_array_equal(mask_of(pixels, name), first)
        np.testing.assert_array_equal(mask_of(pixels, other), second)
        assert not mask_of(pixels, "Cavity").any()


def test_an_earlier_edition_is_not_continued(tmp_path: Path) -> None:
    write_phantom(tmp_path / "p", 2, 32, 1, workers=1)
    file = tmp_path / "p" / "phantom.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "version": 1}))
    with pytest.raises(UserError, match="version 1, not 2"):
        write_phantom(tmp_path / "p", 4, 32, 1, workers=1)


def test_only_the_findings_asked_for_are_drawn(tmp_path: Path) -> None:
    manifest = write_phantom(tmp_path / "p", 20, 32, 1, workers=1, normal_share=0.2, findings=["Mass", "Effusion"])
    assert manifest.labels == ["Effusion", "Mass"]
    assert manifest.table["label:Mass"].sum() > 3 and manifest.table["label:Effusion"].sum() > 3
    for findings, message in (([], "at least one"), (["Measles"], "Measles")):
        with pytest.raises(UserError, match=message):
            write_phantom(tmp_path / "q", 20, 32, 1, findings=findings)
    assert not (tmp_path / "q").exists()


def test_films_of_one_style_are_the_same_chests(tmp_path: Path) -> None:
    """A style changes grey values, no anatomy; scanned films have less fine detail than digital ones."""
    manifests = {
        style: write_phantom(tmp_path / style, 12, SIZE, 3, 1, style=style) for style in ("digital", "scanned")
    }
    tables = [manifest.table.drop(columns=["boxes"]) for manifest in manifests.values()]
    assert tables[0].equals(tables[1])

    def films(style: str, kind: str = "images") -> np.ndarray:
        return np.stack([np.asarray(Image.open(path)) for path in sorted((tmp_path / style / kind).glob("*.png"))])

    np.testing.assert_array_equal(films("digital", "lungs"), films("scanned", "lungs"))
    detail = {style: np.abs(np.diff(films(style).astype(float), n=2)).mean() for style in manifests}
    assert detail["scanned"] < detail["digital"]
    with pytest.raises(UserError, match="holds a phantom with style digital, not any; choose another folder"):
        write_phantom(tmp_path / "digital", 12, SIZE, 3, 1)
    write_phantom(tmp_path / "any", 4, SIZE, 3, 1)
    with pytest.raises(UserError, match="holds a phantom with style any, not scanned"):
        write_phantom(tmp_path / "any", 4, SIZE, 3, 1, style="scanned")
