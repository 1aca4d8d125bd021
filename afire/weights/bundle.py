"""A bundle: one folder with a pre-trained method or a detector, its settings, a card, a sample with expected outputs,
and hashes.

    BUNDLE/
        README.md              the model card
        config.json            format, settings, where the weights come from
        preprocessing.json     from a film to the network's input, as text and numbers that other tools can use
        encoder.safetensors    the trunk to use, in timm's names (AFiRe: the teacher's)
        NETWORK.safetensors    the trunk of another network (AFiRe: student)
        NAME.safetensors       what else the method has (AFiRe: head, decoder, prototypes, lesion_classifier)
        detector/              a fitted detector, when there is one: its thresholds and calibration
        sample/                a phantom film and what the networks say about it
        manifest.json          the SHA-256 of every file above

A bundle of a detector holds no method: the encoder that the detector looks through, or, where its networks are its own,
the detector alone. Nothing is used before its hash was compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal, get_args

from torch import Tensor

from afire._version import __version__
from afire.config import Config
from afire.errors import UserError
from afire.files import read_json, require_folder, sha256_file, sha256_text
from afire.methods import Method, method_type
from afire.settings import validate

FORMAT = 1
CONFIG, MANIFEST, CARD, PREPROCESSING = "config.json", "manifest.json", "README.md", "preprocessing.json"
DETECTOR, SAMPLE = "detector", "sample"
DETECTOR_SETTINGS = "detector.json"  # what makes a folder a fitted detector
_VERSION_KEY = "afire_bundle"
ENCODER, METHOD = "encoder", "method"  # components: the exported trunk, and tensors that the method itself has
Holds = Literal["method", "encoder", "detector"]
"""A whole method; a detector and the encoder that it looks through; a detector whose networks are its own."""
_CALLED = {"bank": "prototypes"}  # a module of a method that goes by another name here


@dataclass(frozen=True)
class Bundle:
    """An opened bundle: every file in it is what was written."""

    folder: Path
    config: Config
    about: Mapping[str, Any]
    """``config.json`` as it stands."""
    hash: str
    """Of all files and their names."""

    @property
    def components(self) -> list[str]:
        """Names of the files of tensors."""
        return list(self.about["parts"])

    @property
    def holds(self) -> Holds:
        """What it is a bundle of; until detectors were exported by themselves, it was always a method."""
        holds: Holds = self.about.get("holds", "method")
        return holds

    @property
    def detector(self) -> Path | None:
        """The folder of the detector inside, if there is one."""
        folder = self.folder / DETECTOR
        return folder if (folder / DETECTOR_SETTINGS).is_file() else None

    @property
    def method(self) -> type[Method]:
        """What it was pre-trained by."""
        return method_type(self.config.method)

    def component_file(self, component: str) -> Path:
        """The file of a component that the bundle has."""
        if component not in self.components:
            raise UserError(f"{self.folder} holds no {component}; it has {', '.join(self.components)}.")
        return component_file(self.folder, component)

    def trunk_file(self, network: str | None = None) -> Path:
        """The file of a network's trunk; without a name that of the trunk to use."""
        return self.component_file(trunk_component(network, self.method))


def component_file(folder: Path, component: str) -> Path:
    return folder / f"{component}.safetensors"


def is_bundle(folder: Path) -> bool:
    """Whether ``folder`` is a bundle, whole or not; other tools have a ``config.json`` too."""
    if not folder.is_dir():
        return False
    if (folder / MANIFEST).is_file():
        return True
    try:
        return (folder / CONFIG).is_file() and _VERSION_KEY in read_json(folder / CONFIG)
    except (UserError, TypeError):
        return False


def open_bundle(folder: Path) -> Bundle:
    """Check the format, then every file against its hash, then the settings; each failure is a message."""
    require_folder(folder, "bundle")
    about = _read_config(folder)
    content = check_files(folder)
    _check_listed(folder, about)
    settings = about.get("settings")
    if not isinstance(settings, Mapping):
        raise UserError(f"{folder / CONFIG} holds no settings; export the bundle again.")
    try:
        config = validate(settings, Config)
    except UserError as error:
        raise UserError(
            f"{folder / CONFIG} was written by afire {about.get('afire')} and does not fit afire {__version__}: {error}"
        ) from None
    return Bundle(folder, config, about, content)


def describe(config: Config, holds: Holds, components: list[str], **facts: Any) -> dict[str, Any]:
    """What ``config.json`` holds."""
    about = {_VERSION_KEY: FORMAT, "afire": __version__, "holds": holds, "parts": components}
    return {**about, **facts, "settings": config.model_dump()}


def _read_config(folder: Path) -> Mapping[str, Any]:
    if not (folder / CONFIG).is_file():
        raise UserError(f"{folder} lacks {CONFIG}; the bundle is not whole, get it again.")
    about: Mapping[str, Any] = read_json(folder / CONFIG)
    version = about.get(_VERSION_KEY) if isinstance(about, Mapping) else None
    if version != FORMAT:
        kind = "no bundle of afire" if version is None else f"a bundle of format {version}"
        raise UserError(
            f"{folder} is {kind}, and afire {__version__} reads format {FORMAT}; "
            "use the afire version that wrote it, or export it again."
        )
    return about


def list_files(folder: Path) -> dict[str, Any]:
    """What ``manifest.json`` holds: size and SHA-256 of every file of the bundle, and a hash of the list."""
    files = {
        name: {"bytes": (folder / name).stat().st_size, "sha256": sha256_file(folder / name)}
        for name in sorted(_file_names(folder))
        if name != MANIFEST
    }
    return {_VERSION_KEY: FORMAT, "hash": _list_hash(files), "files": files}


def check_files(folder: Path) -> str:
    """Compare every file with ``manifest.json``; the hash of the list, or a message that names the first bad file."""
    if not (folder / MANIFEST).is_file():
        raise UserError(f"{folder} lacks {MANIFEST}; the bundle is not whole, get it again.")
    manifest = read_json(folder / MANIFEST)
    try:
        files = {str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in manifest["files"].items()}
        content, version = manifest["hash"], manifest[_VERSION_KEY]
        if content != _list_hash(manifest["files"]) or version != FORMAT or CONFIG not in files:
            raise ValueError
    except (KeyError, TypeError, ValueError, AttributeError):
        raise UserError(f"{folder / MANIFEST} was altered or is truncated; get the bundle again.") from None
    for name, (size, expected) in files.items():
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or "\\" in name:
            raise UserError(f"{folder / MANIFEST} names {name}, which lies outside the bundle; do not use it.")
        file = folder / name
        if not file.is_file():
            raise UserError(f"{folder} lacks {name}; the bundle is not whole, get it again.")
        if file.stat().st_size != size or sha256_file(file) != expected:
            raise UserError(f"{file} is not what was exported (its SHA-256 differs from {MANIFEST}); get it again.")
    return str(content)


def _check_listed(folder: Path, about: Mapping[str, Any]) -> None:
    """Nothing that the bundle names or that lies where its files lie may be missing in the manifest: it has no hash."""
    components = about.get("parts")
    if not isinstance(components, list) or not all(isinstance(name, str) for name in components):
        raise UserError(f"{folder / CONFIG} names no parts; export the bundle again.")
    holds = about.get("holds", "method")
    if holds not in get_args(Holds):
        raise UserError(f"{folder / CONFIG} says that it holds {holds!r}, which afire {__version__} does not know.")
    own = {CARD, PREPROCESSING, *(component_file(Path(), name).as_posix() for name in components)}
    if holds != "method":
        own.add(f"{DETECTOR}/{DETECTOR_SETTINGS}")
    listed = set(read_json(folder / MANIFEST)["files"])
    unhashed = sorted(own - listed) + [name for name in unlisted_files(folder) if _is_own(name)]
    if unhashed:
        raise UserError(f"{folder / MANIFEST} does not list {unhashed[0]}, so nothing vouches for it; do not use it.")


def _is_own(name: str) -> bool:
    """Whether a file lies where a bundle has its own; hidden leftovers of a disk (.DS_Store) do not count."""
    path = PurePosixPath(name)
    return path.parts[0] in (DETECTOR, SAMPLE) and not path.name.startswith(".")


def unlisted_files(folder: Path) -> list[str]:
    """Files beside the bundle's own, which nothing reads: a hub's or a disk's leftovers."""
    listed = set(read_json(folder / MANIFEST)["files"]) | {MANIFEST}
    return sorted(name for name in _file_names(folder) if name not in listed)


def _file_names(folder: Path) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]


def split_components(state: Mapping[str, Tensor], method: type[Method]) -> dict[str, dict[str, Tensor]]:
    """A method's state dict by component of the bundle; the trunks come first."""
    trunks = [trunk_component(network, method) for network in method.networks]
    components: dict[str, dict[str, Tensor]] = {name: {} for name in trunks}
    for name, tensor in state.items():
        component, short = component_of(name, method)
        components.setdefault(component, {})[short] = tensor
    return components


def trunk_component(network: str | None, method: type[Method]) -> str:
    """The component of a trunk: the exported one is ``encoder``, another goes by the name of its network."""
    name = method.network(network)
    return ENCODER if name == method.networks[0] else name


def component_of(name: str, method: type[Method]) -> tuple[str, str]:
    """Where a tensor of a method's state dict goes: a component, and its name in there.

    A trunk is a component under timm's names. What else belongs to a network goes by its kind, ``teacher.head.x`` to
    ``head`` as ``teacher.x``; the rest goes by module, ``decoder.x`` to ``decoder`` as ``x``.
    """
    for network in method.networks:
        prefix = method.trunk_prefix(network)
        if name.startswith(prefix):
            return trunk_component(network, method), name.removeprefix(prefix)
    first, *rest = name.split(".")
    if first in method.networks and len(rest) > 1:
        component, short = rest[0], ".".join([first, *rest[1:]])
    else:
        component, short = _CALLED.get(first, first), ".".join(rest)
    trunks = [trunk_component(network, method) for network in method.networks]
    return (METHOD, name) if not short or component in (METHOD, *trunks) else (component, short)


def _list_hash(files: Mapping[str, Mapping[str, Any]]) -> str:
    return sha256_text("".join(f"{entry['sha256']} {entry['bytes']} {name}\n" for name, entry in sorted(files.items())))
