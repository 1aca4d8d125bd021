"""Masks: where they come from, what they must fit, and that none is invented."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from afire.data.decode import film_shape
from afire.data.manifest import Manifest, make_manifest
from afire.data.pack import DecodedFilms, PackedFilms
from afire.data.rle import encode_rle
from afire.data.sources.folders import build_lungmasks
from afire.errors import UserError
from afire.tasks.masks import load_masks, mask_cells, pack, unpack
from afire.tasks.settings import MaskConfig
from tests.tasks.drawn import draw_spots


@pytest.fixture(scope="module")
def films(tmp_path_factory: pytest.TempPathFactory) -> PackedFilms:
    return PackedFilms(draw_spots(tmp_path_factory.mktemp("spots"), 12))


def own(folder: Path, mask: tuple[int, int], film: tuple[int, int] = (40, 60), column: str = "mask") -> Manifest:
    """One film of ``film`` (H, W) pixels whose left half is inside its mask of ``mask`` (H, W) pixels."""
    inside = np.zeros(mask, bool)
    inside[:, : mask[1] // 2] = True
    Image.fromarray(np.full(film, 90, np.uint8)).save(folder / "film.png")
    Image.fromarray(inside.astype(np.uint8) * 255).save(folder / "mask.png")
    cell = "mask.png" if column == "mask" else encode_rle(inside)
    return make_manifest(pd.DataFrame({"image": ["film.png"], column: [cell]}), folder)


def test_packing_is_exact() -> None:
    masks = np.random.default_rng(0).random((5, 9, 9)) > 0.5
    assert np.array_equal(unpack(pack(masks), 9), masks) and pack(masks).shape == (5, 11)


@pytest.mark.parametrize("column", ["auto", "mask", "rle"])
def test_images_and_runs_give_the_same_masks(films: PackedFilms, column: str) -> None:
    config = MaskConfig(column=column)
    target, cells = mask_cells(films.manifest, config)
    rows = np.array([1, 4, 7])
    masks = load_masks(films, rows, cells, config)
    assert target == "spots" and masks.read(np.array([4, 7])).sum(axis=(1, 2)).tolist() == [0, 144]
    assert masks.batch(rows).shape == (3, 1, 32, 32) and masks.share(rows) == pytest.approx(2 * 144 / (3 * 1024))
    bright = films.batch([7])[0, 0].numpy() > 0.5  # the mask lies where the spot is
    assert np.array_equal(bright, masks.read(np.array([7]))[0])


def test_another_column_and_films_without_a_mask(films: PackedFilms) -> None:
    target, cells = mask_cells(films.manifest, MaskConfig(column="lungs"))
    assert target == "lungs" and [cell is None for cell in cells] == [True, False] * 6
    assert mask_cells(films.manifest, MaskConfig(column="meta:lungs")) == ("lungs", cells)
    _, filled = mask_cells(films.manifest, MaskConfig(column="lungs", normal_is_empty=True))
    assert filled[::2] == [""] * 6
    masks = load_masks(films, np.arange(12), filled, MaskConfig())
    assert masks.read(np.array([0])).sum() == 0
    with pytest.raises(UserError, match="the manifest has no column hearts for masks; it has mask, rle, meta:lungs"):
        mask_cells(films.manifest, MaskConfig(column="hearts"))


def test_no_mask_at_all_is_a_message(tmp_path: Path) -> None:
    manifest = make_manifest(pd.DataFrame({"image": ["a.png"]}), tmp_path)
    with pytest.raises(
        UserError, match="no film has a mask in column mask or rle; choose the column with --mask-column"
    ):
        mask_cells(manifest, MaskConfig())


@pytest.mark.parametrize("column", ["mask", "rle"])
def test_a_mask_of_another_size_is_a_message(tmp_path: Path, column: str) -> None:
    manifest = own(tmp_path, (20, 30), column=column)
    config = MaskConfig()
    films = DecodedFilms(manifest, 16)
    with pytest.raises(UserError, match=r"the mask of film.png is 20 x 30 pixels, but the film is 40 x 60"):
        load_masks(films, np.array([0]), mask_cells(manifest, config)[1], config)
    scaled = load_masks(films, np.array([0]), mask_cells(manifest, config)[1], MaskConfig(size="scaled"))
    assert scaled.read(np.array([0]))[0, :, :8].all() and scaled.share(np.array([0])) == 0.5


def test_other_proportions_are_never_the_same_film(tmp_path: Path) -> None:
    manifest = own(tmp_path, (30, 30))
    with pytest.raises(UserError, match="other proportions"):
        config = MaskConfig(size="scaled")
        load_masks(DecodedFilms(manifest, 16), np.array([0]), mask_cells(manifest, config)[1], config)


def test_masks_follow_the_fit_of_the_films(tmp_path: Path) -> None:
    manifest, config = own(tmp_path, (40, 60)), MaskConfig()
    films = DecodedFilms(manifest, 60, fit="letterbox")
    mask = load_masks(films, np.array([0]), mask_cells(manifest, config)[1], config).read(np.array([0]))[0]
    assert not mask[:10].any() and mask[10:50, :30].all() and not mask[:, 30:].any() and not mask[50:].any()


def test_a_broken_code_names_its_film(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"")
    manifest = make_manifest(
        pd.DataFrame({"image": ["a.png"], "rle": ['{"size": [4, 4], "runs": [[15, 9]]}']}), tmp_path
    )
    with pytest.raises(UserError, match=r"film a\.png: the runs of a mask"):
        load_masks(DecodedFilms(manifest, 16), np.array([0]), mask_cells(manifest, MaskConfig())[1], MaskConfig())


def test_sizes_from_headers(tmp_path: Path) -> None:
    Image.fromarray(np.zeros((7, 5), np.uint8)).save(tmp_path / "film.png")
    assert film_shape(tmp_path / "film.png") == (7, 5)
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.fromarray(np.zeros((7, 5), np.uint8)).save(tmp_path / "turned.jpg", exif=turned)
    assert film_shape(tmp_path / "turned.jpg") == (5, 7)
    assert film_shape(tmp_path / "none.png") is None
    (tmp_path / "text.png").write_text("not an image at all")
    assert film_shape(tmp_path / "text.png") is None


@pytest.mark.realdata
def test_shenzhen_masks_have_the_area_its_index_says(real_data: Path) -> None:
    manifest = build_lungmasks(real_data / "shenzhen")
    area = pd.read_csv(real_data / "shenzhen/index.csv").set_index("name")["lungs_area"]
    rows, config = np.arange(0, len(manifest), 40), MaskConfig()
    masks = load_masks(DecodedFilms(manifest, 256), rows, mask_cells(manifest, config)[1], config)
    names = [Path(str(image)).stem for image in manifest.table["image"].iloc[rows]]
    for row, name in zip(rows, names, strict=True):
        assert masks.share(np.array([row])) == pytest.approx(area[name], abs=0.001)
