from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from afire.data.manifest import Manifest, make_manifest
from afire.errors import UserError
from afire.files import sha256_file
from afire.tasks import guard
from afire.tasks.guard import check_no_leaks, film_digests, group_copies


def manifest(patients: list[str], digests: list[str]) -> Manifest:
    images = [f"{i}.png" for i in range(len(patients))]
    table = pd.DataFrame({"image": images, "patient": patients, "meta:pixel_digest": digests})
    return make_manifest(table, Path("films"))


PARTS = {"train": np.array([0, 1]), "test": np.array([2, 3])}


def test_clean_parts_pass_and_unused_films_do_not_matter() -> None:
    films = manifest(["a", "a", "b", "c", "a"], ["x1", "x1", "x2", "x3", "x2"])
    check_no_leaks(films, PARTS)


def test_a_patient_in_two_parts_is_named() -> None:
    with pytest.raises(UserError, match=r"1 patients .* \(patient b: 1.png in train, 2.png in test\)"):
        check_no_leaks(manifest(["a", "b", "b", "c"], ["x1", "x2", "x3", "x4"]), PARTS)


def test_an_exact_copy_in_two_parts_is_named() -> None:
    with pytest.raises(UserError, match=r"1 films have exact copies .*\(0.png in train is 3.png in test\)"):
        check_no_leaks(manifest(["a", "b", "c", "d"], ["x1", "x2", "x3", "x1"]), PARTS)


def test_copies_are_found_in_files_without_a_pack(tmp_path: Path) -> None:
    for number, content in enumerate([b"one", b"two", b"three"]):
        (tmp_path / f"{number}.png").write_bytes(content)
    shutil.copy(tmp_path / "0.png", tmp_path / "3.png")
    table = pd.DataFrame({"image": [f"{i}.png" for i in range(5)]})  # 4.png does not exist: not the guard's business
    films = make_manifest(table, tmp_path)
    digests = film_digests(films)
    assert digests[0] == digests[3] != ""
    assert digests[1] == digests[2] == digests[4] == ""  # two has the size of one, but another content
    with pytest.raises(UserError, match=r"0.png in train is 3.png in test"):
        check_no_leaks(films, PARTS)


def test_files_are_read_whole_only_where_their_ends_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Films of one machine all have one size; reading them all would take as long as training."""
    middle = 200_000
    contents = [b"a" * middle + b"x" + b"b" * middle, b"a" * middle + b"y" + b"b" * middle, b"c" * (2 * middle + 1)]
    for number, content in enumerate(contents):
        (tmp_path / f"{number}.png").write_bytes(content)
    read: list[str] = []
    monkeypatch.setattr(guard, "sha256_file", lambda path: (read.append(path.name), sha256_file(path))[1])
    digests = film_digests(make_manifest(pd.DataFrame({"image": [f"{i}.png" for i in range(3)]}), tmp_path))
    assert read == ["0.png", "1.png"] and (digests == "").all()


def test_copies_make_one_patient_also_over_several_steps() -> None:
    films = manifest(["a", "b", "b", "c", "d"], ["x1", "x1", "x2", "x2", "x3"])
    grouped = group_copies(films, film_digests(films))
    assert grouped.table["patient"].tolist() == ["a", "a", "a", "a", "d"]
    assert films.table["patient"].tolist() == ["a", "b", "b", "c", "d"]
    clean = manifest(["a", "b"], ["x1", "x2"])
    assert group_copies(clean, film_digests(clean)) is clean
