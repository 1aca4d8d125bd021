"""What films are drawn with: tubes, frames, curves, random fields."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.ndimage import gaussian_filter

from afire.data.phantom.physics import Contour, Curve, Frame, Shadow, blurred, mottle, tubes


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


def test_a_closed_curve_goes_through_its_points() -> None:
    angle = np.linspace(-3, 2.8, 9)
    points = np.column_stack([(4 + np.sin(3 * angle)) * np.cos(angle), (4 + np.sin(3 * angle)) * np.sin(angle)])
    contour = Contour((0.0, 0.0), points)
    np.testing.assert_allclose(contour.reach(points[:, 0], points[:, 1]), 1, atol=0.01)
    np.testing.assert_allclose(contour.table[0], contour.table[-1], atol=1e-4)


def test_a_blur_is_a_gaussian_at_every_width() -> None:
    frame = Frame(size=150, centre=(0, 0), extent=(30, 24), roll=0.0, yaw=0.0)
    image = np.random.default_rng(0).random((150, 150)).astype(np.float32)
    image[40:80, 60:90] += 3
    for deviation in (0.3, 1.0, 2.5):
        exact = gaussian_filter(image, (deviation * 150 / 24, deviation * 150 / 30), mode="nearest")
        assert np.abs(blurred(image, deviation, frame) - exact)[10:-10, 10:-10].max() < 0.12


def test_mottle_has_mean_0_and_deviation_1_at_every_grain() -> None:
    frame = Frame(size=200, centre=(0, 0), extent=(40, 40), roll=0.0, yaw=0.0)
    for grain in (0.4, 1.0, 2.0):
        field = mottle(np.random.default_rng(1), frame, grain)
        assert abs(field.mean()) < 0.3 and 0.8 < field.std() < 1.2


def test_a_plate_and_balls_keep_their_mass() -> None:
    frame = Frame(size=100, centre=(0, 0), extent=(20, 20), roll=0.1, yaw=0.0)
    plate, balls = Shadow(frame), Shadow(frame)
    plate.plate((1.0, 2.0), (2.0, 1.5), 0.3, 0.7)
    image = plate.image()
    assert image.max() == pytest.approx(0.7, rel=0.25)
    assert image.sum() * 0.2**2 == pytest.approx(0.7 * 4 * 2.0 * 1.5 * 0.927, rel=0.05)  # of a squircle
    balls.balls(np.array([1.0, -3.0]), np.array([2.0, 0.0]), np.array([0.2, 0.3]), 2.0)
    assert balls.image().sum() * 0.2**2 == pytest.approx(2 * 4 / 3 * np.pi * (0.2**3 + 0.3**3), rel=1e-3)
