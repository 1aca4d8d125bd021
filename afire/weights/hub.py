"""Bundles and other weights on the Hugging Face hub: ``hf://owner/name`` or ``hf://owner/name@revision``.

What was downloaded once is found again without a network, in the hub's own cache (``HF_HUB_CACHE``). A machine that
never has one gets a bundle into that cache with :func:`install`, from a disk that was carried there.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from afire.errors import UserError
from afire.files import sha256_text, write_text
from afire.progress import current_mode

SCHEME = "hf://"
BUILTIN = "builtin"
"""The detector that comes with afire, wherever weights or a detector are asked for."""
_BUILTIN_FOLDER = Path(__file__).parent.parent / BUILTIN
_LEFTOVERS = [".cache", ".cache/*", ".git", ".git/*", ".DS_Store", ".part-*"]
# Weights come as safetensors; the same ones again as pickles, or for other frameworks, are not fetched.
_NOT_WEIGHTS = ["*.h5", "*.msgpack", "*.ot", "*.tflite"]
_NAME = re.compile(r"hf:/{1,2}(?P<repo>[\w.-]+/[\w.-]+?)(?:@(?P<revision>[\w./-]+))?/?")


@dataclass(frozen=True)
class HubName:
    """A repository on the hub and, if one was named, its branch, tag or commit."""

    repo: str
    revision: str | None = None

    def __str__(self) -> str:
        return f"{SCHEME}{self.repo}" + (f"@{self.revision}" if self.revision else "")


def is_hub_name(weights: str | Path) -> bool:
    """Also of a :class:`Path`, which makes ``hf:/`` out of ``hf://``."""
    return str(weights).startswith("hf:/")


def parse_hub_name(weights: str | Path) -> HubName:
    """``hf://owner/name`` or ``hf://owner/name@revision``, taken apart."""
    match = _NAME.fullmatch(str(weights))
    if match is None:
        raise UserError(f"{weights} is not hf://owner/name or hf://owner/name@revision.")
    return HubName(match["repo"], match["revision"])


def local_path(weights: str | Path) -> Path:
    """Where ``weights`` lie on this disk: the path itself, the detector that comes with afire (``builtin``), or the
    folder of a hub's repository, downloaded if need be.

    Every command and function that takes weights comes through here.
    """
    if str(weights) == BUILTIN:
        return _BUILTIN_FOLDER
    return download(parse_hub_name(weights)) if is_hub_name(weights) else Path(weights)


def bundle_name(weights: str | Path) -> str:
    """What tables call a bundle: its repository on a hub, or its folder."""
    return parse_hub_name(weights).repo if is_hub_name(weights) else Path(weights).resolve().name


def download(name: HubName) -> Path:
    """The folder of a repository in the local cache; the network is asked first, and the cache without it."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    with _hub_progress():
        try:
            return Path(snapshot_download(name.repo, revision=name.revision, ignore_patterns=_NOT_WEIGHTS))
        except LocalEntryNotFoundError:
            raise UserError(
                f"{name} is not in the local cache and the hub cannot be reached; go online once, or copy the bundle "
                "here and use its folder (afire push --cache puts it into the cache)."
            ) from None
        except HFValidationError as error:
            raise UserError(f"{name} is no name of a repository: {_first_line(error)}") from None
        except (HfHubHTTPError, OSError) as error:
            raise _explain(error, name, "read") from None


def push(folder: Path, name: HubName, *, private: bool = True, message: str = "") -> str:
    """Upload a folder as a repository, made if it is not there; the address of the commit."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    api = HfApi(library_name="afire")
    try:
        api.create_repo(name.repo, private=private, exist_ok=True)
        if name.revision:
            api.create_branch(name.repo, branch=name.revision, exist_ok=True)
        commit = api.upload_folder(
            repo_id=name.repo,
            folder_path=folder,
            revision=name.revision,
            commit_message=message or f"afire bundle {folder.name}",
            delete_patterns="*",  # a bundle is whole: nothing of an older one stays beside it
            ignore_patterns=_LEFTOVERS,
        )
    except HFValidationError as error:
        raise UserError(f"{name} is no name of a repository: {_first_line(error)}") from None
    except (HfHubHTTPError, OSError) as error:
        raise _explain(error, name, "write") from None
    return str(getattr(commit, "commit_url", commit))


def install(folder: Path, name: HubName, content: str) -> Path:
    """Copy a folder into the local cache under a hub name, so that ``hf://owner/name`` works without a network.

    ``content`` is a hash of what is in the folder; it stands in for the commit.
    """
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    commit = sha256_text(content)[:40]
    store = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name.repo, repo_type="model")
    snapshot = store / "snapshots" / commit
    if not snapshot.exists():
        unfinished = store / "snapshots" / f".part-{commit}"
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.copytree(folder, unfinished, ignore=shutil.ignore_patterns(*_LEFTOVERS))
        unfinished.replace(snapshot)
    write_text(store / "refs" / (name.revision or constants.DEFAULT_REVISION), commit)
    return snapshot


def _explain(error: Exception, name: HubName, what: str) -> UserError:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403, 404):
        return UserError(
            f"the hub does not let you {what} {name} (HTTP {status}): check the name, and log in with `hf auth login`."
        )
    return UserError(f"the hub cannot be reached to {what} {name} ({type(error).__name__}: {_first_line(error)}).")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextmanager
def _hub_progress() -> Iterator[None]:
    """The hub's own bars, only where afire shows progress."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if current_mode() != "off" or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
