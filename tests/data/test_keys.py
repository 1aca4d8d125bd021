"""Keys of films: the same in every form a film is kept in, and silent where they cannot be compared."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from afire.data.keys import (
    FILMS,
    Seen,
    films_seen,
    most_seen,
    remember_behind,
    remember_films,
    seen_by_weights,
)
from afire.data.manifest import Manifest, read_manifest, write_manifest
from afire.data.pack import DIGEST, FILE_DIGEST, MANIFEST, DecodedFilms, Films, PackedFilms, PackSettings, pack
from afire.files import sha256_text
from tests.data.test_pack import SMALL, draw

FIRST, OTHERS = np.arange(0, 4), np.arange(4, 10)


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    return draw(tmp_path / "films", 10)


def packed(manifest: Manifest, folder: Path, settings: PackSettings = SMALL) -> PackedFilms:
    pack(manifest, folder, settings, workers=1)
    return PackedFilms(folder)


def forms(manifest: Manifest, folder: Path) -> dict[str, Films]:
    """One set of films in every form."""
    packs = {
        "pack": SMALL,
        "other size": PackSettings(size=16),
        "other bits": PackSettings(size=32, bits=16),
        "other fit": PackSettings(size=32, fit="letterbox"),
        "other voi": PackSettings(size=32, voi="none"),
    }
    return {
        "manifest": DecodedFilms(manifest, 32),
        **{name: packed(manifest, folder / name, settings) for name, settings in packs.items()},
    }


def without_file_keys(films: PackedFilms) -> PackedFilms:
    """The same pack as earlier versions wrote it."""
    old = read_manifest(films.folder / MANIFEST)
    write_manifest(Manifest(old.table.drop(columns=FILE_DIGEST), old.root, old.info), films.folder / MANIFEST)
    return PackedFilms(films.folder)


def write_old_record(folder: Path, values: list[str]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / FILMS).write_text("".join(f"{sha256_text(value)[:24]}\n" for value in values))


def test_keys_survive_every_form(manifest: Manifest, tmp_path: Path) -> None:
    every = forms(manifest, tmp_path / "packs")
    for name, trained in every.items():
        run = tmp_path / f"run on {name}"
        remember_films(run, trained, FIRST)
        for asked, films in every.items():
            assert films_seen(run, films, np.arange(10)) == Seen(10, 4), (name, asked)
            assert films_seen(run, films, OTHERS).answer == "none", (name, asked)
            assert films_seen(run, films, np.arange(10)[::-1]).rows.tolist() == FIRST[::-1].tolist()


def test_a_renamed_film_is_the_same_film_and_a_changed_one_is_not(manifest: Manifest, tmp_path: Path) -> None:
    remember_films(tmp_path / "run", DecodedFilms(manifest, 32), FIRST)
    (tmp_path / "films" / "film0000.png").rename(tmp_path / "films" / "film0009.png")
    shutil.copy(tmp_path / "films" / "film0008.png", tmp_path / "films" / "film0001.png")
    seen = films_seen(tmp_path / "run", DecodedFilms(manifest, 32), np.array([1, 2, 9]))
    assert seen == Seen(3, 2), "film 9 is film 0 now, and film 1 is film 8"


def test_without_a_record_nothing_is_known(manifest: Manifest, tmp_path: Path) -> None:
    films = DecodedFilms(manifest, 32)
    assert films_seen(tmp_path, films, FIRST) == Seen(4, 0, 4)
    assert seen_by_weights(tmp_path / "bundle", films, FIRST).answer == "unknown"
    assert seen_by_weights(None, films, FIRST).answer == "unknown"


def test_an_old_pack_whose_films_are_gone_answers_packs_of_its_settings_only(
    manifest: Manifest, tmp_path: Path
) -> None:
    old, new = packed(manifest, tmp_path / "old"), packed(manifest, tmp_path / "new")
    other = packed(manifest, tmp_path / "other", PackSettings(size=16))
    old = without_file_keys(old)
    remember_films(tmp_path / "with films", old, FIRST)
    assert films_seen(tmp_path / "with films", other, OTHERS).answer == "none", "the files tell"
    shutil.rmtree(tmp_path / "films")
    remember_films(tmp_path / "run", old, FIRST)
    assert films_seen(tmp_path / "run", new, np.arange(10)) == Seen(10, 4)
    assert films_seen(tmp_path / "run", other, np.arange(10)) == Seen(10, 0, 10)


def test_records_of_earlier_versions(manifest: Manifest, tmp_path: Path) -> None:
    """Bare keys, of pixels for a pack and of paths for a manifest."""
    films, decoded = packed(manifest, tmp_path / "pack"), DecodedFilms(manifest, 32)
    other = packed(manifest, tmp_path / "other", PackSettings(size=16))
    write_old_record(tmp_path / "of pack", films.manifest.table[DIGEST].iloc[FIRST].tolist())
    write_old_record(tmp_path / "of paths", manifest.table["image"].iloc[FIRST].tolist())
    assert films_seen(tmp_path / "of pack", films, np.arange(10)) == Seen(10, 4)
    assert films_seen(tmp_path / "of pack", films, OTHERS).answer == "none"
    assert films_seen(tmp_path / "of pack", other, OTHERS) == Seen(6, 0, 6)
    assert films_seen(tmp_path / "of pack", decoded, FIRST) == Seen(4, 0, 4)
    assert films_seen(tmp_path / "of paths", decoded, np.arange(10)) == Seen(10, 4)
    assert films_seen(tmp_path / "of paths", films, OTHERS).answer == "none"


def test_what_weights_started_from_counts_too(manifest: Manifest, tmp_path: Path) -> None:
    films = packed(manifest, tmp_path / "pack")
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    remember_films(first, films, FIRST)
    remember_films(second, films, OTHERS[:2])
    remember_behind(second, first / "checkpoints" / "step-3" / "model.safetensors")
    assert seen_by_weights(second, films, np.arange(10)) == Seen(10, 6)
    assert films_seen(second, films, np.arange(10)) == Seen(10, 2), "its own films alone"
    remember_films(third, films, OTHERS[:1])
    remember_behind(third, second)
    assert seen_by_weights(third, films, np.arange(10)) == Seen(10, 6), "two steps back"
    remember_behind(third, "timm.safetensors")
    assert seen_by_weights(third, films, np.arange(10)) == Seen(10, 1, 9), "a file does not say what it has seen"


def test_of_several_answers_the_worst_counts() -> None:
    assert most_seen([Seen(5), Seen(5, 0, 3), Seen(5, 2)]) == Seen(5, 2)
    assert most_seen([Seen(5), Seen(5, 0, 3)]).as_dict() == {"answer": "unknown", "films": 5, "seen": 0, "unknown": 3}
