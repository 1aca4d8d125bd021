"""hf:// names: parsed, found in a local cache without a network, and messages for what goes wrong."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import afire
from afire.cli import app
from afire.errors import UserError
from afire.weights import hub, open_weights
from afire.weights.bundle import open_bundle
from afire.weights.hub import HubName, parse_hub_name


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hf://owner/name", HubName("owner/name")),
        ("hf://owner/name@v1.2", HubName("owner/name", "v1.2")),
        ("hf://owner/my.model-2@refs/pr/3", HubName("owner/my.model-2", "refs/pr/3")),
        (Path("hf://owner/name"), HubName("owner/name")),
    ],
)
def test_names(text: str | Path, expected: HubName) -> None:
    assert parse_hub_name(text) == expected
    assert parse_hub_name(str(expected)) == expected


@pytest.mark.parametrize("text", ["hf://name", "hf://a/b/c", "hf://a/b@", "hf://../b c", "hf:///x"])
def test_what_is_no_name_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="is not hf://owner/name"):
        parse_hub_name(text)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache of this test's own, and no network."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "cache"


def test_a_bundle_in_the_cache_is_found_without_a_network(bundle_folder: Path, cache: Path) -> None:
    hub.install(bundle_folder, HubName("owner/name"), open_bundle(bundle_folder).hash)
    found = open_weights("hf://owner/name")
    assert found.hash == open_weights(str(bundle_folder)).hash and found.name == "owner/name"
    assert cache in hub.local_path("hf://owner/name").parents
    assert open_weights("hf://owner/name").read_trunk().file.name == "encoder.safetensors"  # for `pretrain --init`


def test_revisions_are_apart(bundle_folder: Path, cache: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(bundle_folder, tmp_path / "other"))
    (other / "note.txt").write_text("beside")
    hub.install(bundle_folder, HubName("owner/name"), "one")
    hub.install(other, HubName("owner/name", "v2"), "two")
    assert not (hub.local_path("hf://owner/name") / "note.txt").exists()
    assert (hub.local_path("hf://owner/name@v2") / "note.txt").exists()


def test_what_is_not_in_the_cache_is_refused(cache: Path) -> None:
    with pytest.raises(UserError, match=r"hf://owner/none is not in the local cache"):
        open_weights("hf://owner/none")


def test_a_spoilt_cache_is_refused(bundle_folder: Path, cache: Path) -> None:
    folder = hub.install(bundle_folder, HubName("owner/name"), "one")
    (folder / "encoder.safetensors").write_bytes(b"not weights")
    with pytest.raises(UserError, match=r"encoder\.safetensors is not what was exported"):
        open_weights("hf://owner/name")


def test_pushing_without_a_network_is_refused(bundle_folder: Path, cache: Path) -> None:
    with pytest.raises(UserError, match="the hub cannot be reached to write hf://owner/name"):
        hub.push(bundle_folder, HubName("owner/name"))


class LocalHub:
    """Stands for the hub: a repository is a folder."""

    def __init__(self, root: Path) -> None:
        self.root, self.calls = root, []  # type: ignore[var-annotated]

    def create_repo(self, repo: str, private: bool, exist_ok: bool) -> None:
        self.calls.append((repo, private))
        (self.root / repo).mkdir(parents=True, exist_ok=exist_ok)

    def create_branch(self, repo: str, branch: str, exist_ok: bool) -> None:
        self.calls.append((repo, branch))

    def upload_folder(self, *, repo_id: str, folder_path: Path, delete_patterns: str, **_: Any) -> str:
        assert delete_patterns == "*"
        shutil.rmtree(self.root / repo_id)
        shutil.copytree(folder_path, self.root / repo_id)
        return f"https://hub/{repo_id}"


def test_push_uploads_a_whole_bundle_privately(
    bundle_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = LocalHub(tmp_path / "hub")
    monkeypatch.setattr("huggingface_hub.HfApi", lambda **_: local)
    assert hub.push(bundle_folder, HubName("owner/name", "v1")) == "https://hub/owner/name"
    assert local.calls == [("owner/name", True), ("owner/name", "v1")]
    assert open_bundle(tmp_path / "hub" / "owner" / "name").hash == open_bundle(bundle_folder).hash


def test_a_hub_that_says_no_is_refused(bundle_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed:
        def create_repo(self, *_: Any, **__: Any) -> None:
            error = OSError("401 Client Error")
            error.response = type("Response", (), {"status_code": 401})()  # type: ignore[attr-defined]
            raise error

    monkeypatch.setattr("huggingface_hub.HfApi", lambda **_: Closed())
    with pytest.raises(UserError, match=r"does not let you write hf://owner/name \(HTTP 401\).*hf auth login"):
        hub.push(bundle_folder, HubName("owner/name"))


def test_the_command_puts_a_bundle_into_the_cache(bundle_folder: Path, cache: Path) -> None:
    done = CliRunner().invoke(app, ["push", str(bundle_folder), "hf://owner/name", "--cache"])
    assert done.exit_code == 0 and str(cache) in done.output
    assert "afire.Model owner/name" in repr(afire.load("hf://owner/name"))
