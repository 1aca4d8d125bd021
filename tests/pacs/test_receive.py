"""What the receiver makes of a film before it keeps it."""

from __future__ import annotations

import pytest

pytest.importorskip("pynetdicom")

from pydicom.dataset import Dataset
from pydicom.uid import RLELossless

from afire.pacs import receive
from tests.pacs.films import SIDE, dataset


@pytest.mark.parametrize(("frames", "is_decoded"), [(None, True), (1, True), (2, True), (100, False)])
def test_a_small_file_of_many_frames_is_not_unpacked(
    monkeypatch: pytest.MonkeyPatch, frames: int | None, is_decoded: bool
) -> None:
    decoded: list[Dataset] = []

    def decode(tags: Dataset, **_: object) -> object:
        decoded.append(tags)
        raise ValueError("nothing is decoded in this test")

    monkeypatch.setattr(receive, "pixel_array", decode)
    monkeypatch.setattr(receive, "MAX_PIXELS", 10 * SIDE * SIDE)
    film = dataset(0)
    film.compress(RLELossless, generate_instance_uid=False)
    if frames is not None:
        film.NumberOfFrames = frames
    _, pixels = receive._pixels(film)
    assert pixels == film.PixelData and bool(decoded) == is_decoded
