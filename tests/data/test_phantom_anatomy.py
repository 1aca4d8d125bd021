"""The phantom's maps are what was drawn; patients, views and styles differ as they do in hospitals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy.ndimage import binary_dilation

from afire.data.phantom.anatomy import Patient, Pose, draw_patient
from afire.data.phantom.film import ANATOMY, LUNGS, draw_film, sitting_of
from afire.data.phantom.objects import DEVICES
from afire.data.phantom.physics import Frame, Shadow, stream
from afire.data.phantom.style import PLAIN, Style, draw_style
from afire.data.phantom.thorax import Thorax

STANDING = Pose(breath=1, yaw=0, arm=0.5, shrug=0)
FILMS = [draw_film(1, index, 96, diseases=()) for index in range(24)]


def _adults() -> list[Patient]:
    patients = [draw_patient(1, number) for number in range(40)]
    return [patient for patient in patients if patient.young == 0]


def _heart(thorax: Thorax) -> np.ndarray:
    angle = np.linspace(-np.pi, np.pi, thorax.heart.table.size)
    return np.asarray(thorax.heart.centre[0] + thorax.heart.table * np.cos(angle))


# ---------------------------------------------------------------- maps


def test_every_film_has_every_part_but_the_bubble() -> None:
    for film in FILMS:
        assert film.anatomy.shape == (len(ANATOMY), 96, 96) and film.anatomy.dtype == bool
        missing = [name for name in ANATOMY if not film.where(name).any()]
        assert set(missing) <= {"stomach bubble"}
    bubbles = sum(film.where("stomach bubble").any() for film in FILMS)
    assert 10 <= bubbles < len(FILMS)


def test_lungs_heart_and_mediastinum_do_not_overlap() -> None:
    for film in FILMS:
        layers = np.stack([film.lungs, film.where("heart"), film.where("mediastinum"), film.where("diaphragm")])
        assert layers.sum(axis=0).max() == 1


def test_zones_partition_the_lungs() -> None:
    for film in FILMS:
        zones = film.anatomy[: len(LUNGS)]
        assert zones.sum(axis=0).max() == 1
        np.testing.assert_array_equal(zones.any(axis=0), film.lungs)
        for start in (0, 3):  # from top to bottom
            rows = [np.nonzero(zone)[0].mean() for zone in zones[start : start + 3]]
            assert rows == sorted(rows)


def test_sides_are_the_patients() -> None:
    for film in FILMS:
        right, left = (film.anatomy[start : start + 3].any(axis=0) for start in (0, 3))
        spine = np.nonzero(film.where("spine"))[1].mean()
        assert np.nonzero(right)[1].mean() < spine < np.nonzero(left)[1].mean()
        if film.where("stomach bubble").any():
            assert np.nonzero(film.where("stomach bubble"))[1].mean() > np.nonzero(right)[1].mean()


def test_the_heart_lies_mostly_to_the_patients_left() -> None:
    more = [
        (np.nonzero(film.where("heart"))[1] > np.nonzero(film.where("spine"))[1].mean()).mean()
        for film in FILMS
        if abs(film.sitting.pose.yaw) < 0.05
    ]
    assert np.mean(more) > 0.6 and min(more) > 0.45


def test_maps_lie_where_the_film_shows_the_part() -> None:
    """Bone is brighter than what surrounds it in the lung, the lung darker than heart and abdomen."""
    for index in range(12):
        plain = draw_film(1, index, 96, diseases=(), style=PLAIN)
        between = plain.lungs & ~binary_dilation(plain.where("ribs") | plain.where("clavicles"), iterations=1)
        on_rib = plain.lungs & plain.where("ribs") & ~plain.where("clavicles")
        if between.sum() > 50:
            assert plain.image[on_rib].mean() > plain.image[between].mean()
        assert plain.image[plain.where("heart")].mean() > plain.image[plain.lungs].mean() + 0.1
        if plain.where("stomach bubble").sum() > 20:
            around = binary_dilation(plain.where("stomach bubble"), iterations=4) & plain.where("diaphragm")
            if (around & ~plain.where("stomach bubble")).any():
                rim = plain.image[around & ~plain.where("stomach bubble")]
                assert plain.image[plain.where("stomach bubble")].mean() < rim.mean()


def test_what_shutters_hide_is_on_no_map() -> None:
    hidden = 0
    for index in range(40):
        film = draw_film(1, index, 64, diseases=(), style=PLAIN)
        corner = film.anatomy[:, :1].any() or film.anatomy[:, -1:].any()
        black = (film.image[0] == 0).mean() > 0.95 and (film.image[-1] == 0).mean() > 0.95
        hidden += black
        assert not (black and corner)
    assert hidden > 0


# ---------------------------------------------------------------- patients and views


def test_the_heart_bulges_to_the_image_right() -> None:
    for patient in _adults():
        outline = _heart(Thorax(patient, STANDING))
        assert outline.max() > 1.3 * -outline.min()
        assert 0.34 < (outline.max() - outline.min()) / (2 * patient.width) < 0.54


def test_a_large_heart_is_large() -> None:
    for patient in _adults()[:10]:
        outline = _heart(Thorax(patient, STANDING, enlarged=0.6))
        assert (outline.max() - outline.min()) / (2 * patient.width) == pytest.approx(0.6, abs=0.02)


def test_the_heart_is_larger_from_the_front() -> None:
    for patient in _adults()[:10]:
        wide = [np.ptp(_heart(Thorax(patient, replace(STANDING, view=view)))) for view in ("PA", "AP")]
        assert wide[1] / wide[0] == pytest.approx(1.14, abs=0.01)


def test_a_deep_breath_makes_long_lungs() -> None:
    patient = _adults()[0]
    frame = Frame(size=96, centre=(0, 2), extent=(40, 40), roll=0.0, yaw=0.0)
    area = [Thorax(patient, replace(STANDING, breath=cm)).look(*frame.grid).field.mean() for cm in (0.0, 2.0, 4.0)]
    assert area[0] > area[1] > area[2]


def test_children_are_drawn_as_children() -> None:
    patients = [draw_patient(0, number) for number in range(300)]
    small = [patient for patient in patients if patient.years < 6]
    adults = [patient for patient in patients if patient.years >= 18]
    assert 0.15 < 1 - len(adults) / len(patients) < 0.35 and len(small) > 20
    height = [np.mean([(p.dome - p.apex) / p.width for p in group]) for group in (small, adults)]
    assert height[0] < 0.9 * height[1]  # short, wide chests
    share = [np.mean([p.cardiothoracic for p in group]) for group in (small, adults)]
    assert share[0] > share[1] + 0.02  # with large hearts
    assert np.mean([p.rib_drop for p in small]) < np.mean([p.rib_drop for p in adults])  # and level ribs
    assert max(p.thymus for p in adults) < 0.01 < min(p.thymus for p in small)


def test_views_and_turns_are_those_of_the_young_and_the_ill_in_bed() -> None:
    sittings = [sitting_of(0, index) for index in range(400)]
    small = [s.view == "AP" for s in sittings if s.patient.years < 6]
    adults = [s.view == "AP" for s in sittings if s.patient.years >= 18]
    assert np.mean(small) > 0.7 and 0.15 < np.mean(adults) < 0.45
    turned = np.rad2deg([abs(s.pose.yaw) for s in sittings])
    assert turned.max() > 6 and np.median(turned) < 4
    assert 0.03 < np.mean([Thorax(s.patient, s.pose).bent for s in sittings]) < 0.25


def test_a_bent_spine_moves_the_mediastinum() -> None:
    patient = _adults()[0]
    frame = Frame(size=96, centre=(0, 2), extent=(40, 40), roll=0.0, yaw=0.0)
    x, _ = frame.grid
    aside = []
    for amplitude in (0.0, 3.0):
        thorax = Thorax(replace(patient, bend=(amplitude, 0.15, 0.5)), STANDING)
        aside.append(x[thorax.look(*frame.grid).middle].mean())
    assert abs(aside[1] - aside[0]) > 0.5


# ---------------------------------------------------------------- style and objects


def test_style_changes_grey_and_no_geometry() -> None:
    for index in range(6):
        drawn = draw_film(3, index, 64)
        other = draw_film(3, index, 64, style=draw_style(stream(99, "style", index)))
        assert np.abs(drawn.image - other.image).mean() > 0.005
        np.testing.assert_array_equal(drawn.anatomy, other.anatomy)
        assert drawn.boxes == other.boxes
        for name, mask in drawn.masks.items():
            np.testing.assert_array_equal(mask, other.masks[name])


@pytest.mark.parametrize(
    ("field", "low", "high", "measure"),
    [
        ("noise", 0.0, 0.012, lambda image: np.abs(np.diff(image)).mean()),
        ("edge", 0.0, 1.0, lambda image: np.abs(np.diff(image)).mean()),
        ("blur", 0.3, 0.0, lambda image: np.abs(np.diff(image)).mean()),
        ("shrunk", 0.45, 1.0, lambda image: np.abs(np.diff(image)).mean()),
        ("gamma", 1.5, 0.7, lambda image: image.mean()),
        ("latitude", 0.7, 0.0, lambda image: image.std()),
        ("background", 0.0, 0.15, lambda image: image.min()),
    ],
)
def test_each_style_does_what_its_name_says(field: str, low: float, high: float, measure) -> None:  # type: ignore[no-untyped-def]
    for index in (0, 4):
        less, more = (
            measure(draw_film(3, index, 128, diseases=(), style=Style(**{field: value})).image) for value in (low, high)
        )
        assert more > less


def test_every_device_leaves_a_trace_and_some_films_have_one() -> None:
    sitting = sitting_of(0, 0)
    frame = Frame(size=64, centre=(0, 2), extent=(40, 40), roll=0.0, yaw=0.0)
    for name, (_, draw) in DEVICES.items():
        shadow = Shadow(frame)
        draw(shadow, np.random.default_rng(0), Thorax(sitting.patient, sitting.pose))
        assert shadow.image().max() > 0.05, name
    worn = [bool(draw_film(0, index, 32).devices) for index in range(150)]
    assert 0.15 < np.mean(worn) < 0.5
