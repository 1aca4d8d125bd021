"""A bundle is whole and of this format, or it is refused with a sentence that says what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import afire
from afire.errors import UserError
from afire.weights.bundle import MANIFEST, is_bundle, list_files, open_bundle, unlisted_files
from afire.weights.open import open_weights, start_from

FILES = [
    *(
        "README.md",
        "config.json",
        "preprocessing.json",
        "manifest.json",
        "sample/film.png",
        "sample/expected.safetensors",
    ),
    *("encoder.safetensors", "student.safetensors", "head.safetensors", "decoder.safetensors"),
    *("prototypes.safetensors", "lesion_classifier.safetensors"),
]


def flip(file: Path, position: int) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("name", FILES)
def test_one_flipped_byte_is_refused(bundle_folder: Path, copy_of: Callable[[Path], Path], name: str) -> None:
    folder = copy_of(bundle_folder)
    size = (folder / name).stat().st_size
    for position in np.random.default_rng(0).integers(0, size, 5):
        flip(folder / name, int(position))
        with pytest.raises(UserError, match=r"manifest\.json|config\.json|format"):
            open_bundle(folder)
        flip(folder / name, int(position))
    open_bundle(folder)


def test_a_flipped_byte_is_named_wherever_weights_are_taken(
    bundle_folder: Path,
    copy_of: Callable[[Path], Path],
) -> None:
    folder = copy_of(bundle_folder)
    flip(folder / "encoder.safetensors", -1)
    for open_it in (open_weights, afire.load, start_from):
        with pytest.raises(UserError, match=r"encoder\.safetensors is not what was exported"):
            open_it(str(folder))


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(bundle_folder: Path, copy_of: Callable[[Path], Path], name: str) -> None:
    folder = copy_of(bundle_folder)
    (folder / name).unlink()
    assert is_bundle(folder)
    with pytest.raises(UserError, match=f"lacks {name}"):
        open_bundle(folder)


def rewrite(folder: Path, change: Callable[[dict], None]) -> None:  # type: ignore[type-arg]
    """Change config.json and make the hashes fit again, as another version's export would."""
    about = json.loads((folder / "config.json").read_text())
    change(about)
    (folder / "config.json").write_text(json.dumps(about))
    (folder / MANIFEST).write_text(json.dumps(list_files(folder)))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda about: about.update(afire_bundle=2), r"a bundle of format 2.*reads format 1"),
        (lambda about: about.pop("afire_bundle"), r"no bundle of afire"),
        (lambda about: about["settings"].update(attention="linear"), r"does not fit afire .*unknown setting attention"),
        (lambda about: about["settings"]["encoder"].update(depth=0), r"does not fit afire .*depth"),
        (lambda about: about.pop("settings"), "holds no settings"),
    ],
)
def test_another_versions_config_is_a_sentence(
    bundle_folder: Path,
    copy_of: Callable[[Path], Path],
    change: Callable[[dict], None],  # type: ignore[type-arg]
    sentence: str,
) -> None:
    folder = copy_of(bundle_folder)
    rewrite(folder, change)
    with pytest.raises(UserError, match=sentence):
        open_bundle(folder)


def test_settings_that_do_not_fit_the_weights(bundle_folder: Path, copy_of: Callable[[Path], Path]) -> None:
    folder = copy_of(bundle_folder)
    rewrite(folder, lambda about: about["settings"]["encoder"].update(depth=2))
    with pytest.raises(UserError, match=r"do not fit config\.json"):
        _ = open_weights(folder).method
    with pytest.raises(UserError, match=r"lacks blocks\.1"):
        _ = open_weights(folder).trunk


def test_names_stay_inside(bundle_folder: Path, copy_of: Callable[[Path], Path]) -> None:
    folder = copy_of(bundle_folder)
    manifest = list_files(folder)
    (folder.parent / "outside").write_text("x")
    manifest["files"]["../outside"] = {"bytes": 1, "sha256": "0"}
    from afire.weights import bundle

    manifest["hash"] = bundle._list_hash(manifest["files"])
    (folder / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="outside the bundle"):
        open_bundle(folder)


def test_what_a_hub_leaves_beside_is_seen_and_not_minded(
    bundle_folder: Path,
    copy_of: Callable[[Path], Path],
) -> None:
    folder = copy_of(bundle_folder)
    (folder / ".gitattributes").write_text("*")
    open_bundle(folder)
    assert unlisted_files(folder) == [".gitattributes"]


def test_other_folders_are_no_bundles(tmp_path: Path, run_folder: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    assert not is_bundle(tmp_path) and not is_bundle(run_folder) and not is_bundle(tmp_path / "none")
