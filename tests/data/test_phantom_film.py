"""A film of the phantom: it depends on seed and number only, and diseases are where their masks say."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.ndimage import binary_dilation

import afire.data.phantom as phantom_package
from afire.data.phantom.anatomy import draw_patient
from afire.data.phantom.diseases import DISEASES
from afire.data.phantom.film import PhantomFilm, draw_film, patient_of
from afire.data.phantom.style import PLAIN
from afire.errors import UserError

SIZE = 64
DARKER = ("Pneumothorax", "Emphysema")


def _same(one: PhantomFilm, other: PhantomFilm) -> bool:
    return (
        np.array_equal(one.image, other.image)
        and one.labels == other.labels
        and one.severity == other.severity
        and one.boxes == other.boxes
        and one.sitting == other.sitting
        and one.style == other.style
        and one.devices == other.devices
        and np.array_equal(one.anatomy, other.anatomy)
        and all(np.array_equal(one.masks[name], other.masks[name]) for name in one.masks)
    )


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), index=st.integers(0, 10**6), size=st.sampled_from([32, 48, 64, 97]))
def test_any_film_is_complete_and_consistent(seed: int, index: int, size: int) -> None:
    with np.errstate(divide="raise", invalid="raise"):
        film = draw_film(seed, index, size)
    assert film.image.shape == (size, size) and film.image.dtype == np.float32
    assert np.isfinite(film.image).all()
    assert film.image.min() >= 0 and film.image.max() <= 1 and film.image.std() > 0.05
    assert film.lungs.dtype == bool and 0.05 < film.lungs.mean() < 0.6
    assert set(film.labels) == set(DISEASES)
    assert {name for name, present in film.labels.items() if present} == set(film.masks) == set(film.severity)
    assert film.normal == (not film.masks)
    assert film.view in ("PA", "AP")
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


def test_what_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(UserError, match=r"Measles.*Nodule"):
        draw_film(0, 0, SIZE, diseases=["Measles"])
    for severity in (-0.1, 1.5, float("nan")):
        with pytest.raises(UserError, match="severity of"):
            draw_film(0, 0, SIZE, diseases=["Nodule"], severity=severity)


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
    assert small.labels == large.labels and small.devices == large.devices
    shrunk = large.image.reshape(128, 2, 128, 2).mean(axis=(1, 3))
    assert np.corrcoef(small.image.ravel(), shrunk.ravel())[0, 1] > 0.985
    coarse = large.anatomy.reshape(-1, 128, 2, 128, 2).mean(axis=(2, 4))
    assert np.abs(small.anatomy.mean(axis=(1, 2)) - coarse.mean(axis=(1, 2))).max() < 0.015
    for name, mask in small.masks.items():
        coarse = large.masks[name].reshape(128, 2, 128, 2).mean(axis=(1, 3)) > 0.5
        assert (mask & coarse).sum() > 0.7 * (mask | coarse).sum()


def test_a_patient_keeps_the_anatomy_and_changes_pose() -> None:
    numbers = [patient_of(0, index) for index in range(60)]
    index = next(i for i in range(59) if numbers[i] == numbers[i + 1])
    one, two = (draw_film(0, i, SIZE, diseases=()) for i in (index, index + 1))
    assert one.patient == two.patient and one.sitting.patient == two.sitting.patient
    assert one.sitting.pose != two.sitting.pose
    assert not np.array_equal(one.image, two.image)
    assert draw_patient(0, 1) != draw_patient(0, 2)


def test_bright_is_dense() -> None:
    """Lungs are dark, the abdomen below them is bright: as radiographs are shown."""
    for index in range(10):
        film = draw_film(1, index, SIZE, diseases=())
        below = film.image[film.where("diaphragm") & ~film.where("stomach bubble")]
        assert film.image[film.lungs].mean() + 0.1 < below.mean()


# ---------------------------------------------------------------- diseases


@pytest.mark.parametrize("name", DISEASES)
def test_a_disease_changes_the_film_where_its_mask_is(name: str) -> None:
    """Without scatter and processing, which spread any change, a film differs only at the mask."""
    for index in range(10):
        ill = draw_film(8, index, 128, diseases=[name], severity=0.7, style=PLAIN)
        well = draw_film(8, index, 128, diseases=(), style=PLAIN)
        change = ill.image - well.image
        near = binary_dilation(ill.masks[name], iterations=6)
        outside = np.abs(change[~near])
        assert outside.mean() < 0.0015 and np.quantile(outside, 0.99) < 0.04
        sign = -1 if name in DARKER else 1
        assert sign * change[ill.masks[name]].mean() > 0.003
        assert np.abs(change[ill.masks[name]]).mean() > 8 * outside.mean()


@pytest.mark.parametrize("name", DISEASES)
def test_processing_leaves_little_of_a_disease_far_from_it(name: str) -> None:
    for index in range(6):
        ill, well = draw_film(8, index, 128, diseases=[name]), draw_film(8, index, 128, diseases=())
        far = ~binary_dilation(ill.masks[name], iterations=12)
        assert np.quantile(np.abs(ill.image - well.image)[far], 0.99) < 0.12


@pytest.mark.parametrize("name", DISEASES)
def test_a_disease_is_seen_the_better_the_more_severe_it_is(name: str) -> None:
    seen = []
    for severity in (0.0, 0.5, 1.0):
        change = 0.0
        for index in range(5):
            ill = draw_film(4, index, 96, diseases=[name], severity=severity, style=PLAIN)
            change += float(np.abs(ill.image - draw_film(4, index, 96, diseases=(), style=PLAIN).image).sum())
        seen.append(change)
    assert 0 < seen[0] < seen[1] < seen[2]
    assert seen[0] < 0.5 * seen[2]


def test_severities_reach_from_subtle_to_severe() -> None:
    drawn = [value for index in range(200) for value in draw_film(1, index, 32, normal_share=0).severity.values()]
    assert min(drawn) < 0.08 and max(drawn) > 0.92 and 0.4 < np.mean(drawn) < 0.6


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
        ill = draw_film(6, index, 96, diseases=["Effusion"], style=PLAIN)
        well = draw_film(6, index, 96, diseases=(), style=PLAIN)
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


@pytest.mark.parametrize("name", ["Infiltration", "Cavity"])
def test_what_tuberculosis_does_is_mostly_high_up(name: str) -> None:
    high = 0
    for index in range(20):
        film = draw_film(3, index, SIZE, diseases=[name])
        lung_rows = np.flatnonzero(film.lungs.any(axis=1))
        high += np.nonzero(film.masks[name])[0].mean() < 0.5 * (lung_rows[0] + lung_rows[-1])
    assert high >= 13


@pytest.mark.parametrize("name", ["Edema", "Miliary", "Emphysema"])
def test_what_is_in_both_lungs_is_on_both_sides(name: str) -> None:
    for index in range(6):
        film = draw_film(3, index, SIZE, diseases=[name])
        right, left = (film.anatomy[start : start + 3].any(axis=0) for start in (0, 3))
        assert (film.masks[name] & right).any() and (film.masks[name] & left).any()


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


# ---------------------------------------------------------------- no shortcuts


def test_what_is_no_disease_does_not_depend_on_diseases() -> None:
    for index in range(40):
        ill, well = draw_film(2, index, 32, normal_share=0), draw_film(2, index, 32, normal_share=1)
        assert not ill.normal and well.normal
        assert (ill.devices, ill.style, ill.sitting) == (well.devices, well.style, well.sitting)


@pytest.mark.slow
def test_brightness_sharpness_and_devices_do_not_tell_the_sick() -> None:
    """No shortcut: neither grey level, sharpness, devices, age nor view separates normal films from the others."""
    from scipy.ndimage import laplace
    from sklearn.metrics import roc_auc_score

    films = [draw_film(12, index, SIZE) for index in range(240)]
    ill = [not film.normal for film in films]
    assert 0.35 < np.mean(ill) < 0.65
    for score in (
        [film.image.mean() for film in films],
        [film.image.std() for film in films],
        [laplace(film.image).var() for film in films],
        [len(film.devices) for film in films],
        [film.sitting.patient.years for film in films],
        [film.view == "AP" for film in films],
    ):
        assert 0.35 < roc_auc_score(ill, score) < 0.65
