"""Features are computed once; another film, weight, size or pooling is another feature."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from afire.config import Config
from afire.data.pack import DecodedFilms, PackedFilms
from afire.errors import UserError
from afire.settings import load_config
from afire.tasks import features as f
from afire.weights import Weights, open_weights
from tests.tasks.conftest import SMALLEST


@pytest.fixture(scope="module")
def backbone(smallest: Config) -> Weights:
    return open_weights("random", smallest)


def test_pooling_is_of_the_encoders_tokens(backbone: Weights, films: PackedFilms) -> None:
    rows = np.arange(0, 120, 2)
    with torch.inference_mode():
        tokens = backbone.trunk(backbone.normalise(films.batch(rows))).numpy()
    np.testing.assert_allclose(f.film_features(backbone, films, rows), tokens[:, 1:].mean(axis=1), atol=1e-5)
    np.testing.assert_allclose(f.film_features(backbone, films, rows, "class"), tokens[:, 0], atol=1e-5)
    every = np.concatenate(list(f.feature_batches(backbone, films, rows, "tokens")))
    np.testing.assert_allclose(every, tokens[:, 1:], atol=1e-5)


def test_cached_features_are_read_and_only_missing_ones_computed(
    backbone: Weights, films: PackedFilms, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    compute = f._compute
    monkeypatch.setattr(
        f, "_compute", lambda b, x, rows, *rest: (asked.append(len(rows)), compute(b, x, rows, *rest))[1]
    )
    some, more = np.arange(10, 30), np.array([25, 3, 40, 12])
    first = f.film_features(backbone, films, some, cache=tmp_path)
    again = f.film_features(backbone, films, some, cache=tmp_path)
    mixed = f.film_features(backbone, films, more, cache=tmp_path)
    assert asked == [20, 2]
    np.testing.assert_array_equal(first, again)
    np.testing.assert_allclose(mixed, f.film_features(backbone, films, more), atol=1e-6)
    assert len(list(tmp_path.iterdir())) == 1


def test_what_decides_a_feature_decides_the_key(
    backbone: Weights, films: PackedFilms, packed: Path, smallest: Config
) -> None:
    decoded = DecodedFilms(films.manifest, 32)
    heads = load_config("tiny", overrides=[*SMALLEST, "encoder.heads=4"])
    pixels = load_config("tiny", overrides=[*SMALLEST, "image.normalise=none"])
    keys = {
        f._key(backbone, films, "mean"),
        f._key(backbone, films, "class"),
        f._key(backbone, decoded, "mean"),
        f._key(open_weights("random", smallest, seed=1), films, "mean"),
        f._key(open_weights("random", heads), films, "mean"),
        f._key(open_weights("random", pixels), films, "mean"),
    }
    assert len(keys) == 6
    assert f._key(open_weights("random", smallest), PackedFilms(packed), "mean") in keys


def test_a_changed_file_is_another_film(tmp_path: Path, films: PackedFilms) -> None:
    from afire.data.manifest import make_manifest

    source = films.manifest.path(0)
    (tmp_path / "a.png").write_bytes(source.read_bytes())
    manifest = make_manifest(films.manifest.table.iloc[:1][["image"]].assign(image="a.png"), tmp_path)
    before = f.data_content_hash(DecodedFilms(manifest, 32))
    (tmp_path / "a.png").write_bytes(films.manifest.path(1).read_bytes())
    assert f.data_content_hash(DecodedFilms(manifest, 32)) != before


def test_a_truncated_cache_is_computed_again(
    backbone: Weights, films: PackedFilms, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = np.arange(8)
    whole = f.film_features(backbone, films, rows, cache=tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:100])
    np.testing.assert_array_equal(f.film_features(backbone, films, rows, cache=tmp_path), whole)
    assert "computed again" in caplog.text
    with np.load(file) as stored:
        assert len(stored["rows"]) == 8


def test_films_must_be_whole_patches(films: PackedFilms) -> None:
    config = load_config("tiny", overrides=[*SMALLEST, "image.size=48", "encoder.patch_size=12"])
    with pytest.raises(UserError, match="32 px are not whole patches of 12 px; pack them at a multiple of 12"):
        f.film_features(open_weights("random", config), films, np.arange(2))


def test_the_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AFIRE_CACHE", "/somewhere")
    assert f.default_cache() == Path("/somewhere/features")
    monkeypatch.delenv("AFIRE_CACHE")
    assert f.default_cache() == Path.home() / ".cache" / "afire" / "features"
