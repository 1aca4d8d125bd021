"""The phantom: films that depend on seed and number only, diseases where their masks say, files that resume."""

from __future__ import annotations

import ast
import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy.ndimage import binary_dilation
from typer.testing import CliRunner

import afire.data.phantom as phantom_package
from afire.cli import app
from afire.data.manifest import read_manifest
from afire.data.phantom.anatomy import Pose, Thorax, draw_patient
from afire.data.phantom.diseases import DISEASES
from afire.data.phantom.film import PhantomFilm, draw_film, draw_findings, patient_of, split_of
from afire.data.phantom.physics import Curve, Frame
from afire.data.phantom.skeleton import tubes
from afire.data.phantom.write import MASK_BITS, write_phantom
from afire.errors import UserError
from tests import commands

SIZE = 64


def _same(one: PhantomFilm, other: PhantomFilm) -> bool:
    return (
        np.array_equal(one.image, other.image)
        and one.labels == other.labels
        and one.boxes == other.boxes
        and one.patient == other.patient
        and np.array_equal(one.lungs, other.lungs)
        and all(np.array_equal(one.masks[name], other.masks[name]) for name in one.masks)
    )


# ---------------------------------------------------------------- a film


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), index=st.integers(0, 10**6), size=st.sampled_from([32, 48, 64, 97]))
def test_any_film_is_complete_and_consistent(seed: int, index: int, size: int) -> None:
    film = draw_film(seed, index, size)
    assert film.image.shape == (size, size) and film.image.dtype == np.float32
    assert film.image.min() >= 0 and film.image.max() <= 1 and film.image.std() > 0.05
    assert film.lungs.dtype == bool and 0.05 < film.lungs.mean() < 0.6
    assert set(film.labels) == set(DISEASES)
    assert {name for name, present in film.labels.items() if present} == set(film.masks)
    assert film.normal == (not film.masks)
    assert film.view == "PA"
    assert [box.label for box in film.boxes] == list(film.masks)
    for box in film.boxes:
        mask = film.masks[box.label]
        assert mask.any()
        rows, columns = np.nonzero(mask)
        assert (box.x * size, box.y * size) == pytest.approx((columns.min(), rows.min()))
        assert ((box.x + box.w) * size, (box.y + box.h) * size) == pytest.approx((columns.max() + 1, rows.max() + 1))


@pytest.mark.parametrize("size", [32, 224])
@pytest.mark.parametrize("name", DISEASES)
def test_every_disease_can_be_asked_for(name: str, size: int) -> None:
    for index in range(4):
        film = draw_film(5, index, size, diseases=[name])
        assert [disease for disease, present in film.labels.items() if present] == [name]
        assert film.masks[name].any() and not film.masks[name].all()


def test_an_unknown_disease_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"Measles.*Nodule"):
        draw_film(0, 0, SIZE, diseases=["Measles"])


def test_a_film_depends_on_its_arguments_only() -> None:
    first = draw_film(3, 7, SIZE)
    np.random.default_rng(0).random(1000)
    draw_film(3, 8, SIZE)
    assert _same(first, draw_film(3, 7, SIZE))
    assert not np.array_equal(first.image, draw_film(4, 7, SIZE).image)
    assert not np.array_equal(first.image, draw_film(3, 8, SIZE).image)


@pytest.mark.parametrize("index", range(6))
def test_a_film_looks_alike_at_every_size(index: int) -> None:
    small, large = draw_film(2, index, 128), draw_film(2, index, 256)
    assert small.labels == large.labels
    shrunk = large.image.reshape(128, 2, 128, 2).mean(axis=(1, 3))
    assert np.corrcoef(small.image.ravel(), shrunk.ravel())[0, 1] > 0.99
    assert abs(small.lungs.mean() - large.lungs.mean()) < 0.01
    for name, mask in small.masks.items():
        coarse = large.masks[name].reshape(128, 2, 128, 2).mean(axis=(1, 3)) > 0.5
        assert (mask & coarse).sum() > 0.7 * (mask | coarse).sum()


def test_a_patient_keeps_the_anatomy_and_changes_pose() -> None:
    numbers = [patient_of(0, index) for index in range(60)]
    index = next(i for i in range(59) if numbers[i] == numbers[i + 1])
    one, two = (draw_film(0, i, SIZE, diseases=()) for i in (index, index + 1))
    assert one.patient == two.patient
    assert not np.array_equal(one.image, two.image)
    assert draw_patient(0, numbers[index]) == draw_patient(0, numbers[index + 1])
    assert draw_patient(0, 1) != draw_patient(0, 2)


def test_bright_is_dense() -> None:
    """Lungs are dark, the abdomen below them is bright: as radiographs are shown."""
    for index in range(10):
        film = draw_film(1, index, SIZE, diseases=())
        rows = np.flatnonzero(film.lungs.any(axis=1))
        below = film.image[min(rows[-1] + 3, SIZE - 3), SIZE // 3 : 2 * SIZE // 3]
        assert film.image[film.lungs].mean() + 0.15 < below.mean()


def test_the_heart_bulges_to_the_image_right() -> None:
    for number in range(20):
        thorax = Thorax(draw_patient(1, number), Pose(breath=1, yaw=0, arm=0.5, shrug=0))
        angle = np.linspace(-np.pi, np.pi, thorax.heart.table.size)
        outline = thorax.heart.centre[0] + thorax.heart.table * np.cos(angle)
        assert outline.max() > 1.3 * -outline.min()
        share = (outline.max() - outline.min()) / (2 * thorax.patient.width)
        assert 0.34 < share < 0.53


def test_a_large_heart_is_large() -> None:
    for number in range(10):
        pose = Pose(breath=1, yaw=0, arm=0.5, shrug=0)
        thorax = Thorax(draw_patient(1, number), pose, enlarged=0.6)
        across = thorax.heart.table * np.cos(np.linspace(-np.pi, np.pi, thorax.heart.table.size))
        assert (across.max() - across.min()) / (2 * thorax.patient.width) == pytest.approx(0.6, abs=0.02)


# ---------------------------------------------------------------- diseases


@pytest.mark.parametrize("name", DISEASES)
def test_a_disease_changes_the_film_where_its_mask_is(name: str) -> None:
    inside, outside = [], []
    for index in range(12):
        ill = draw_film(8, index, 128, diseases=[name])
        well = draw_film(8, index, 128, diseases=())
        change = np.abs(ill.image - well.image)
        near = binary_dilation(ill.masks[name], iterations=4)
        inside.append(change[ill.masks[name]].mean())
        outside.append(change[~near].mean())
        # nothing is left of a disease far from it but a little scattered light
        assert np.quantile(change[~near], 0.99) < 0.06
    assert np.mean(inside) > 0.02
    assert np.mean(inside) > 8 * np.mean(outside)


@pytest.mark.parametrize(("name", "sign"), [("Nodule", 1), ("Consolidation", 1), ("Effusion", 1), ("Pneumothorax", -1)])
def test_a_disease_is_denser_or_thinner_than_lung(name: str, sign: int) -> None:
    for index in range(10):
        ill, well = draw_film(8, index, 128, diseases=[name]), draw_film(8, index, 128, diseases=())
        mask = ill.masks[name] & well.lungs
        if mask.sum() > 10:
            assert sign * (ill.image - well.image)[mask].mean() > 0.005


def test_a_pneumothorax_has_no_vessel_markings() -> None:
    """Beyond the pleural line the film is smoother than the lung that was there."""
    rough = {"ill": 0.0, "well": 0.0}
    for index in range(12):
        ill, well = draw_film(4, index, 224, diseases=["Pneumothorax"]), draw_film(4, index, 224, diseases=())
        core = ill.masks["Pneumothorax"] & ~binary_dilation(~ill.masks["Pneumothorax"], iterations=2)
        for key, film in (("ill", ill), ("well", well)):
            detail = np.abs(np.diff(film.image, axis=0))[:, :-1][core[1:, :-1]]
            rough[key] += float(detail.sum()) / max(1, core.sum())
    assert rough["ill"] < rough["well"]


def test_an_effusion_lies_in_the_lower_lung_of_one_side_and_brightens_it() -> None:
    sides = set()
    for index in range(12):
        ill, well = draw_film(6, index, 96, diseases=["Effusion"]), draw_film(6, index, 96, diseases=())
        rows, columns = np.nonzero(ill.masks["Effusion"])
        lung_rows = np.flatnonzero(well.lungs.any(axis=1))
        assert rows.mean() > 0.5 * (lung_rows[0] + lung_rows[-1])
        on_left = columns.mean() < 48
        sides.add(on_left)
        half = np.s_[:, :48] if on_left else np.s_[:, 48:]
        other = np.s_[:, 48:] if on_left else np.s_[:, :48]
        change = ill.image - well.image
        assert change[half].sum() > 5 * np.abs(change[other]).sum()
    assert sides == {True, False}


def test_two_diseases_of_a_film_are_on_different_sides() -> None:
    for index in range(8):
        film = draw_film(9, index, SIZE, diseases=["Nodule", "Effusion"])
        nodule, fluid = (np.nonzero(film.masks[name])[1].mean() for name in ("Nodule", "Effusion"))
        assert (nodule < SIZE / 2) != (fluid < SIZE / 2)


def test_the_diseases_are_not_the_lesions_of_training() -> None:
    """A detector must not meet at test time what it was trained on: the phantom shares no code with the lesions."""
    for source in Path(phantom_package.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not [name for name in modules if "lesions" in name], source.name


@pytest.mark.slow
def test_brightness_and_sharpness_do_not_tell_the_sick() -> None:
    """No shortcut: neither mean grey level nor sharpness separates normal films from the others."""
    from scipy.ndimage import laplace
    from sklearn.metrics import roc_auc_score

    films = [draw_film(12, index, SIZE) for index in range(140)]
    ill = [not film.normal for film in films]
    assert 0.3 < np.mean(ill) < 0.7
    for score in (
        [film.image.mean() for film in films],
        [film.image.std() for film in films],
        [laplace(film.image).var() for film in films],
    ):
        assert 0.3 < roc_auc_score(ill, score) < 0.7


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
    found = [name for index in range(4000) for name in draw_findings(0, index, 0.5)]
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


# ---------------------------------------------------------------- geometry


def test_a_tube_casts_the_shadow_of_a_rod() -> None:
    frame = Frame(size=200, centre=(0, 0), extent=(20, 20), roll=0.1, yaw=0.0)
    line = np.array([[[-6.0, -3.0, 0.0], [6.0, 4.0, 0.0]]])
    shadow = tubes(frame, line, np.full((1, 2), 1.0))
    x, y = frame.grid
    direction = np.array([12, 7]) / np.hypot(12, 7)
    away = (x + 6) * direction[1] - (y + 3) * direction[0]
    along = (x + 6) * direction[0] + (y + 3) * direction[1]
    expected = 2 * np.sqrt(np.clip(1 - away**2, 0, None))
    core = (np.abs(away) < 0.8) & (along > 1) & (along < 12)
    assert np.abs(shadow - expected)[core].mean() < 0.08
    assert shadow[(np.abs(away) > 1.3)].max() == 0
    length = np.hypot(12, 7)
    assert shadow.sum() * (20 / 200) ** 2 == pytest.approx(np.pi * length, rel=0.03)  # volume is kept


def test_a_tube_beside_the_film_leaves_no_trace() -> None:
    frame = Frame(size=50, centre=(0, 0), extent=(10, 10), roll=0.0, yaw=0.0)
    assert tubes(frame, np.array([[[7.0, -20, 0], [7.0, 20, 0]]]), np.full((1, 2), 0.5)).max() == 0
    crossing = tubes(frame, np.array([[[-20.0, 0, 0], [20.0, 0, 0]]]), np.full((1, 2), 0.5))
    assert crossing[:20].max() == 0 and crossing[24:26].min() > 0.5


def test_a_frame_projects_back_to_its_grid() -> None:
    frame = Frame(size=17, centre=(1.0, -2.0), extent=(30, 40), roll=0.05, yaw=0.0)
    col, row = frame.project(*frame.grid)
    expected = np.arange(17)
    np.testing.assert_allclose(col, np.broadcast_to(expected, (17, 17)), atol=1e-3)
    np.testing.assert_allclose(row, np.broadcast_to(expected[:, None], (17, 17)), atol=1e-3)


def test_a_curve_is_scipys_monotone_cubic() -> None:
    from scipy.interpolate import PchipInterpolator

    at, values = [0.0, 1.0, 1.5, 4.0, 6.0], [0.0, 2.0, 2.1, 2.1, -1.0]
    inner = np.linspace(1.0, 4.0, 50)
    np.testing.assert_allclose(Curve(at, values)(inner), PchipInterpolator(at, values)(inner), atol=0.01)
    assert Curve(at, values)(-5.0) == values[0] and Curve(at, values)(9.0) == pytest.approx(values[-1])


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
    assert (table["view"] == "PA").all()
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
            flags = np.asarray(Image.open(mask_path))
            for name in DISEASES:
                expected = film.masks.get(name, np.zeros((SIZE, SIZE), bool))
                np.testing.assert_array_equal((flags & MASK_BITS[name]) > 0, expected)


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
    ],
)
def test_a_folder_with_another_phantom_is_refused(tmp_path: Path, changed: dict[str, float], message: str) -> None:
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
    assert settings_file["mask_bits"] == MASK_BITS


def test_shoulders_that_stand_high_are_drawn_too() -> None:
    """In this film the shoulders reach above the root of the neck, so two levels of the outline coincide."""
    with np.errstate(divide="raise", invalid="raise"):
        film = draw_film(5, 1493, 64)
    assert np.isfinite(film.image).all()
