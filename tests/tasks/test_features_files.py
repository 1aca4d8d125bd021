from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from afire.config import Config
from afire.data.pack import PackedFilms
from afire.errors import UserError
from afire.tasks.features import METADATA_KEY, feature_batches, film_features, write_features
from afire.weights import Weights, open_weights


@pytest.fixture(scope="module")
def backbone(smallest: Config) -> Weights:
    return open_weights("random", smallest)


def test_parquet_has_a_row_for_each_film_and_says_how_it_was_made(
    backbone: Weights, films: PackedFilms, tmp_path: Path
) -> None:
    rows = np.arange(5, 105)
    assert write_features(tmp_path / "f.parquet", backbone, films, rows) == (100, 16)
    table = pd.read_parquet(tmp_path / "f.parquet")
    assert table["image"].tolist() == films.manifest.table["image"].iloc[rows].tolist()
    assert {"split", "patient", "normal", "label:Blob", "label:Rare"} <= set(table.columns)
    np.testing.assert_allclose(np.stack(table["feature"]), film_features(backbone, films, rows), atol=1e-6)
    about = json.loads(pq.read_schema(tmp_path / "f.parquet").metadata[METADATA_KEY])
    assert about["weights_hash"] == backbone.hash and about["pooling"] == "mean" and about["shape"] == [16]


@pytest.mark.parametrize("suffix", [".parquet", ".npz"])
def test_all_tokens_keep_their_order(backbone: Weights, films: PackedFilms, tmp_path: Path, suffix: str) -> None:
    rows = np.arange(70)
    file = tmp_path / f"tokens{suffix}"
    assert write_features(file, backbone, films, rows, "tokens") == (70, 16, 16)
    expected = np.concatenate(list(feature_batches(backbone, films, rows, "tokens")))
    if suffix == ".parquet":
        features = np.stack(pd.read_parquet(file)["feature"]).reshape(70, 16, 16)
    else:
        with np.load(file, allow_pickle=False) as stored:
            features = stored["features"]
            assert stored["image"].tolist() == films.manifest.table["image"].iloc[rows].tolist()
            assert json.loads(str(stored["about"]))["shape"] == [16, 16]
    np.testing.assert_allclose(features, expected, atol=1e-6)


def test_another_format_is_refused_before_the_work(backbone: Weights, films: PackedFilms, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"written as \.parquet or \.npz"):
        write_features(tmp_path / "f.csv", backbone, films, np.arange(2))
    assert list(tmp_path.iterdir()) == []
