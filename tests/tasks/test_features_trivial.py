from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from afire.data.manifest import make_manifest
from afire.data.pack import PackedFilms
from afire.errors import UserError
from afire.tasks.features import TRIVIAL, laplacian_variance, size_features, trivial_features, trivial_hash


def test_sharpness_equals_the_loop(films: PackedFilms) -> None:
    batch = films.batch([0, 1, 2])
    for film, value in zip(batch[:, 0].double().numpy(), laplacian_variance(batch).tolist(), strict=True):
        inner = [
            film[y - 1, x] + film[y + 1, x] + film[y, x - 1] + film[y, x + 1] - 4 * film[y, x]
            for y in range(1, 31)
            for x in range(1, 31)
        ]
        assert value == pytest.approx(np.var(inner), rel=1e-4)
    assert laplacian_variance(torch.full((1, 1, 8, 8), 0.4)).item() == pytest.approx(0, abs=1e-10)
    assert trivial_features("sharpness", films, np.arange(70)).shape == (70, 1)


def test_the_edge_says_nothing_of_the_inside(films: PackedFilms) -> None:
    """Ranks of the cells in the outermost tenth among themselves, as a loop over cells finds them."""
    edges = trivial_features("edge", films, np.arange(8))
    images = films.batch(np.arange(8))[:, 0].numpy()
    for film, ranks in zip(images, edges, strict=True):
        cells = [film[y, x] for y in range(32) for x in range(32) if not (3 <= y < 29 and 3 <= x < 29)]
        below = [
            sum(other < cell for other in cells) + (sum(other == cell for other in cells) - 1) / 2 for cell in cells
        ]
        assert ranks.shape == (len(cells),) == (348,)
        # Ranks are kept with 8 bits: cells that differ by less may tie.
        np.testing.assert_allclose(ranks, np.array(below) / 347, atol=0.02)


def test_size_facts_and_the_median_for_an_unknown_size() -> None:
    table = pd.DataFrame(
        {"image": list("abcd"), "meta:orig_width": [100, 200, 300, None], "meta:orig_height": [50, 50, 100, None]}
    )
    features = size_features(make_manifest(table, Path("films")), np.array([0, 2, 3, 1]))
    np.testing.assert_allclose(features[0], [100, 50, 5000, 2])
    np.testing.assert_allclose(features[2], [200, 50, 10000, 4])


def test_sizes_come_from_the_files_where_the_manifest_has_none(tmp_path: Path) -> None:
    Image.new("L", (30, 20)).save(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes(b"not a picture")
    manifest = make_manifest(pd.DataFrame({"image": ["a.png", "b.png"]}), tmp_path)
    np.testing.assert_allclose(size_features(manifest, np.array([0])), [[30, 20, 600, 1.5]])
    with pytest.raises(UserError, match=r"size of .*b\.png cannot be read; give the manifest"):
        size_features(manifest, np.array([0, 1]))


def test_each_kind_has_its_own_hash() -> None:
    assert len({trivial_hash(kind) for kind in TRIVIAL}) == len(TRIVIAL)
