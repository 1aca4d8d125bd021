"""A JPEG that is shown as it is: the same pixels, and nothing else of the file."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from afire.data.film import picture_alone

FILM = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 30)).astype(np.uint8))


def saved(image: Image.Image = FILM, kind: str = "JPEG", **how: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **how)
    return file.getvalue()


@pytest.mark.parametrize("how", [{}, {"progressive": True}, {"optimize": True}, {"restart_marker_blocks": 2}])
def test_pixels_stay_and_everything_else_goes(how: dict[str, object]) -> None:
    data = saved(comment=b"Jane Doe", icc_profile=b"Jane Doe" * 4, dpi=(300, 300), **how) + b"Jane Doe"
    alone = picture_alone(data)
    assert alone is not None and b"Jane" in data and b"Jane" not in alone
    with Image.open(io.BytesIO(alone)) as image:
        assert image.mode == "L" and not {"comment", "icc_profile", "dpi"} & set(image.info)
        np.testing.assert_array_equal(np.asarray(image), np.asarray(Image.open(io.BytesIO(data))))


def test_what_may_have_to_be_turned_or_is_no_grey_jpeg_is_not_taken() -> None:
    turned = Image.Exif()
    turned[0x0112] = 6
    assert picture_alone(saved(exif=turned)) is None
    assert picture_alone(saved(FILM.convert("RGB"))) is None
    assert picture_alone(saved(kind="PNG")) is None


def test_a_truncated_file_is_not_taken() -> None:
    data = saved()
    assert picture_alone(data) is not None
    assert all(picture_alone(data[:end]) is None for end in range(len(data)))
