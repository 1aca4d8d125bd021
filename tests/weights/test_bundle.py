"""A bundle is whole and of this format, or it is refused with a message that says what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import afire
from afire.errors import UserError
from afire.weights import bundle as bundles
from afire.weights import open_weights, start_from
from afire.weights.bundle import MANIFEST, is_bundle, list_files, open_bundle, unlisted_files

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
    ("change", "message"),
    [
        (lambda about: about.update(afire_bundle=2), r"a bundle of format 2.*reads format 1"),
        (lambda about: about.pop("afire_bundle"), r"no bundle of afire"),
        (lambda about: about["settings"].update(attention="linear"), r"does not fit afire .*unknown setting attention"),
        (lambda about: about["settings"]["encoder"].update(depth=0), r"does not fit afire .*depth"),
        (lambda about: about.pop("settings"), "holds no settings"),
    ],
)
def test_another_versions_config_is_refused(
    bundle_folder: Path,
    copy_of: Callable[[Path], Path],
    change: Callable[[dict], None],  # type: ignore[type-arg]
    message: str,
) -> None:
    folder = copy_of(bundle_folder)
    rewrite(folder, change)
    with pytest.raises(UserError, match=message):
        open_bundle(folder)


def test_settings_that_do_not_fit_the_weights(bundle_folder: Path, copy_of: Callable[[Path], Path]) -> None:
    folder = copy_of(bundle_folder)
    rewrite(folder, lambda about: about["settings"]["encoder"].update(depth=2))
    with pytest.raises(UserError, match=r"do not fit config\.json"):
        _ = open_weights(folder).method
    with pytest.raises(UserError, match=r"lacks blocks\.1"):
        _ = open_weights(folder).trunk


@pytest.mark.parametrize("schedule", [None, 3, {"teacher_temperature": "warm"}])
def test_a_schedule_that_is_none(bundle_folder: Path, copy_of: Callable[[Path], Path], schedule: object) -> None:
    folder = copy_of(bundle_folder)
    rewrite(folder, lambda about: about.update(schedule=schedule))
    with pytest.raises(UserError, match="says no numbers of a schedule"):
        _ = open_weights(folder).method


def test_names_stay_inside(bundle_folder: Path, copy_of: Callable[[Path], Path]) -> None:
    folder = copy_of(bundle_folder)
    manifest = list_files(folder)
    (folder.parent / "outside").write_text("x")
    manifest["files"]["../outside"] = {"bytes": 1, "sha256": "0"}
    manifest["hash"] = bundles._list_hash(manifest["files"])
    (folder / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="outside the bundle"):
        open_bundle(folder)


def unlist(folder: Path, *names: str) -> None:
    """Take files out of the manifest, which stays right in itself."""
    manifest = list_files(folder)
    for name in names:
        del manifest["files"][name]
    manifest["hash"] = bundles._list_hash(manifest["files"])
    (folder / MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.parametrize("name", ["decoder.safetensors", "sample/expected.safetensors", "preprocessing.json"])
def test_a_file_that_the_manifest_does_not_list_is_not_read(
    bundle_folder: Path, copy_of: Callable[[Path], Path], name: str
) -> None:
    """Else it would be read without a hash."""
    folder = copy_of(bundle_folder)
    unlist(folder, name)
    for open_it in (open_bundle, afire.load):
        with pytest.raises(UserError, match=rf"manifest\.json does not list {name}"):
            open_it(folder)


@pytest.mark.parametrize("names", [["detector/model.safetensors"], ["detector/detector.json"], []])
def test_a_detector_that_was_put_in_later_is_refused(
    full_bundle: Path, copy_of: Callable[[Path], Path], names: list[str]
) -> None:
    folder = copy_of(full_bundle)
    unlist(folder, *(names or [name for name in list_files(folder)["files"] if name.startswith("detector/")]))
    with pytest.raises(UserError, match=r"manifest\.json does not list detector/"):
        afire.load(folder)


@pytest.mark.parametrize("parts", [["../outside"], ["encoder", "decoy"], "encoder", [3], None])
def test_parts_are_those_of_the_manifest(bundle_folder: Path, copy_of: Callable[[Path], Path], parts: object) -> None:
    folder = copy_of(bundle_folder)
    rewrite(folder, lambda about: about.update(parts=parts))
    (folder / "decoy.safetensors").write_bytes((folder / "decoder.safetensors").read_bytes())
    with pytest.raises(UserError, match=r"manifest\.json does not list|names no parts"):
        open_bundle(folder)


def test_a_network_that_the_bundle_does_not_name_is_not_read(
    bundle_folder: Path, copy_of: Callable[[Path], Path]
) -> None:
    folder = copy_of(bundle_folder)
    rewrite(folder, lambda about: about["parts"].remove("student"))
    unlist(folder, "student.safetensors")
    with pytest.raises(UserError, match="holds no student; it has encoder, head"):
        _ = open_weights(folder, network="student").trunk


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
