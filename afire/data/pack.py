"""Films as tensors, from a pack, a manifest or a folder; and packing: decode and resize every film once, in parallel.

    DIR/images.npy        (N, S, S) uint8 or uint16; in format 2, shards of it (afire/data/shards.py)
    DIR/manifest.parquet  the films that are in the pack; column meta:pack_row is the row in images.npy
    DIR/pack.json         settings, hashes, counts, skipped films with reasons

While packing, ``images.npy.part`` is filled chunk by chunk and ``journal.jsonl`` says which chunks are on disk, so a
kill loses at most the chunks in flight and a rerun continues. A skipped film keeps its (empty) row: rows never move,
and once the file is fixed a rerun fills it in. A rerun packs films again whose file has changed since, or whose pixels
are not those that were stored: in a finished pack into a copy, so that programs that read the pack keep what they
opened.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import pandas as pd

from afire.config import Config, Fit, ImageConfig, Voi
from afire.data.decode import decode_film, fit_square, read_file, read_film
from afire.data.manifest import META_PREFIX, Manifest, inside_root, make_manifest, read_manifest, write_manifest
from afire.data.pack_files import ShardedArray, file_digest, pixel_digest, still_packed
from afire.errors import ImageError, UserError
from afire.files import (
    folder_lock,
    making_sense_of,
    names_path,
    read_json,
    require_own,
    sha256_text,
    write_atomic,
    write_json,
)
from afire.processes import in_processes, usable_cores
from afire.progress import progress

if TYPE_CHECKING:  # torch is imported where tensors are made: processes that pack start without its two seconds
    import torch

FORMAT, SHARDED = 1, 2  # one array; shards of it
IMAGES, MANIFEST, SUMMARY = "images.npy", "manifest.parquet", "pack.json"
BEGUN, PART, JOURNAL = "begun.json", "images.npy.part", "journal.jsonl"
ROW, DIGEST = f"{META_PREFIX}pack_row", f"{META_PREFIX}pixel_digest"
FILE_DIGEST = f"{META_PREFIX}file_digest"  # of the source file: the same in packs of any settings
CHUNK = 64

logger = logging.getLogger("afire")


@dataclass(frozen=True)
class PackSettings:
    """What decides the pixels of a pack."""

    size: int = 224
    bits: Literal[8, 16] = 8
    fit: Fit = "squash"
    voi: Voi = "auto"

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the stored films."""
        return np.dtype(np.uint8 if self.bits == 8 else np.uint16)


@dataclass(frozen=True)
class PackSummary:
    """What ``pack.json`` holds."""

    films: int
    skipped: Mapping[str, str]
    hash: str
    manifest_hash: str
    settings: PackSettings
    shards: int | None = None  # of a pack of format 2


def pack(
    manifest: Manifest,
    out: Path,
    settings: PackSettings | None = None,
    on_error: Literal["skip", "stop"] = "stop",
    workers: int | None = None,
) -> PackSummary:
    """Pack ``manifest`` into ``out``; continue where an earlier run with the same films and settings ended."""
    settings = settings or PackSettings()
    require_own(out, BEGUN, (IMAGES, MANIFEST, JOURNAL))
    with folder_lock(out, "the pack"):
        refuse_other(out, identity(manifest, settings))
        shape = (len(manifest), settings.size, settings.size)
        results = still_packed(manifest, (out / PART, out / IMAGES), shape, settings.dtype, out / JOURNAL)
        todo = [row for row in range(len(manifest)) if "digest" not in results.get(row, {})]
        finished = (out / IMAGES).exists() and not (out / PART).exists()
        # Nobody reads the rows of films that a finished pack had to skip: those alone are filled in where they are.
        in_place = finished and all("error" in results.get(row, {}) for row in todo)
        target = out / (IMAGES if in_place else PART)
        if not in_place:
            _allocate(out, shape, settings.dtype)
        if todo:
            _fill(manifest, todo, target, settings, on_error, workers, results, out / JOURNAL)
        if not in_place:
            _flush(target)
            target.replace(out / IMAGES)
        return write_summary(manifest, out, settings, results)


def read_summary(folder: Path) -> PackSummary:
    """Read ``pack.json`` of a finished pack."""
    if not (folder / SUMMARY).exists():
        begun = " It was begun but not finished: run the same `afire data pack` again." if is_pack(folder) else ""
        raise UserError(f"{folder} is not a pack: it has no {SUMMARY}.{begun}")
    raw = read_json(folder / SUMMARY)
    with making_sense_of(folder / SUMMARY, "pack again"):
        version = raw.get("format")
        if version not in (FORMAT, SHARDED):
            raise UserError(f"{folder} is a pack of format {version}, this version reads up to {SHARDED}; pack again.")
        settings = PackSettings(**raw["settings"])
        shards = int(raw["shards"]) if version == SHARDED else None
        return PackSummary(raw["films"], raw["skipped"], raw["hash"], raw["manifest_hash"], settings, shards)


def identity(manifest: Manifest, settings: PackSettings, shards: int | None = None) -> dict[str, Any]:
    """What everything in the folder of a pack must have in common."""
    sharded = {} if shards is None else {"shards": shards}
    return {"manifest_hash": manifest.hash, **asdict(settings), **sharded}


def refuse_other(out: Path, mine: Mapping[str, Any]) -> None:
    """A folder holds one pack: other films or other settings need another folder."""
    record = out / BEGUN
    if not record.exists():
        write_json(record, mine)
        return
    theirs = read_json(record)
    with making_sense_of(record, "choose another --out or delete that folder"):
        different = [key for key in {**mine, "shards": None} if theirs.get(key) != mine.get(key)]
    if different:
        differences = ", ".join(f"{key} {theirs.get(key)} there, {mine.get(key)} asked" for key in different)
        raise UserError(f"{out} holds another pack ({differences}); choose another --out or delete that folder.")


def _allocate(out: Path, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    if (out / PART).exists():
        return
    if (out / IMAGES).exists():
        write_atomic(out / PART, lambda path: _copy(out / IMAGES, path))
        return
    (out / JOURNAL).unlink(missing_ok=True)  # it spoke of an array that is no longer there
    # The body is left sparse; the journal says which rows are real.
    write_atomic(out / PART, lambda path: np.lib.format.open_memmap(path, "w+", dtype, shape).flush())


def _fill(
    manifest: Manifest,
    todo: list[int],
    target: Path,
    settings: PackSettings,
    on_error: str,
    workers: int | None,
    results: dict[int, dict[str, str]],
    journal: Path,
) -> None:
    names = manifest.table["image"].tolist()
    chunks = [todo[start : start + CHUNK] for start in range(0, len(todo), CHUNK)]
    jobs = ((manifest.root, [names[row] for row in rows], rows, target, settings) for rows in chunks)
    with names_path(target), journal.open("a", encoding="utf-8") as log, progress("packing", len(todo), "films") as bar:
        for chunk in chunk_results(jobs, workers if workers is not None else usable_cores()):
            for row, result in chunk.items():
                results[row] = result
                log.write(json.dumps({"row": row, **result}) + "\n")
            log.flush()
            os.fsync(log.fileno())
            bar.advance(len(chunk))
            name_bad(chunk, names, manifest.root, on_error, "The films packed so far are kept")


def name_bad(
    results: Mapping[int, Mapping[str, str]], names: Sequence[str], root: Path, on_error: str, note: str
) -> None:
    """Warn of films that could not be read, or stop at the first of them, with a ``note`` of what is kept."""
    bad = [(row, result["error"]) for row, result in results.items() if "error" in result]
    for row, error in bad:
        logger.warning("skipped %s: %s", names[row], error)
    if bad and on_error == "stop":
        reason = root / bad[0][1].rstrip(".")
        raise UserError(f"{reason}. {note}: fix the file and run again, or use --on-error skip.")


def chunk_results(jobs: Iterable[tuple[Any, ...]], processes: int) -> Iterator[dict[int, dict[str, str]]]:
    """What :func:`pack_chunk` says of jobs, in any order; so many processes read films."""
    try:
        yield from in_processes(pack_chunk, jobs, processes)
    except BrokenProcessPool:
        raise UserError(
            "a process that reads films has died, on a film or for lack of memory; run again to continue, with fewer "
            "workers if need be (`afire data check` names a film that ends its process)."
        ) from None


def pack_chunk(
    root: Path, names: list[str], rows: list[int], target: Path, settings: PackSettings
) -> dict[int, dict[str, str]]:
    """Decode, resize and store some films; for each row its digest or its error. Runs in a worker."""
    start = np.lib.format.open_memmap(target, mode="r").offset
    top = 255 if settings.bits == 8 else 65535
    results: dict[int, dict[str, str]] = {}
    with target.open("rb+") as stream:  # not the map: on a full disk the system ends a process that writes through one
        for name, row in zip(names, rows, strict=True):
            data = b""
            try:
                data = read_file(path := inside_root(root, name))
                film, info = decode_film(path, data, voi=settings.voi)
            except ImageError as error:
                # Reasons are kept with the pack, which may be passed on: they must not show where the films lie.
                results[row] = {"error": str(error).replace(f"{root}{os.sep}", ""), "file": file_digest(data)}
                continue
            square = fit_square(film, settings.size, settings.fit)
            pixels = np.rint(square * top).astype(settings.dtype).tobytes()
            stream.seek(start + row * len(pixels))
            stream.write(pixels)
            results[row] = {"digest": pixel_digest(pixels), "file": file_digest(data)}
            if info.constant:
                results[row]["note"] = "constant"
        stream.flush()
        os.fsync(stream.fileno())
    return results


def write_summary(
    manifest: Manifest,
    out: Path,
    settings: PackSettings,
    results: Mapping[int, Mapping[str, str]],
    shards: int | None = None,
) -> PackSummary:
    """Write the manifest of the pack and ``pack.json``, last; ``results`` has a digest or an error for each row."""
    rows = [row for row in range(len(manifest)) if "digest" in results[row]]
    if not rows:
        first = next(iter(results.values()))["error"]
        raise UserError(f"none of the {len(manifest)} films could be read; the first: {first}")
    table = manifest.table.iloc[rows].copy()
    table[ROW] = rows
    table[DIGEST] = [results[row]["digest"] for row in rows]
    files = [results[row].get("file", "") for row in rows]  # a pack begun by an earlier version has none
    if any(files):
        table[FILE_DIGEST] = files
    packed = make_manifest(table, manifest.root, {**manifest.info, "pack": asdict(settings)})
    names = manifest.table["image"]
    skipped = {str(names.iloc[row]): entry["error"] for row, entry in sorted(results.items()) if "error" in entry}
    constant = [str(names.iloc[row]) for row in rows if results[row].get("note") == "constant"]
    content = "\n".join(f"{image}\t{digest}" for image, digest in zip(table["image"], table[DIGEST], strict=True))
    summary = PackSummary(len(rows), skipped, sha256_text(content), manifest.hash, settings, shards)
    write_manifest(packed, out / MANIFEST)
    write_json(
        out / SUMMARY,
        {
            **({"format": FORMAT} if shards is None else {"format": SHARDED, "shards": shards}),
            "films": summary.films,
            "rows": len(manifest),
            "hash": summary.hash,
            "manifest_hash": summary.manifest_hash,
            "settings": asdict(settings),
            "constant": constant,
            "skipped": skipped,
        },
    )
    return summary


def _copy(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)


def _flush(path: Path) -> None:
    with path.open("rb+") as stream:
        os.fsync(stream.fileno())


class Films(Protocol):
    """What training and tasks see of a dataset: the manifest, and films by row."""

    manifest: Manifest
    size: int
    fit: Fit
    voi: Voi

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> torch.Tensor:
        """Film (1, S, S), float32 in [0,1]."""
        ...

    def batch(self, rows: Sequence[int] | np.ndarray) -> torch.Tensor:
        """Films (B, 1, S, S), float32 in [0,1]."""
        ...


class PackedFilms:
    """Films straight from a pack's memory map: no decoding, no copy but the one that makes the tensor.

    A film is compared with its digest when it is read first; one that was altered is an :class:`ImageError`.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = folder = Path(folder)
        self.summary = read_summary(folder)
        self.manifest = read_manifest(folder / MANIFEST)
        settings = self.summary.settings
        self.size, self.fit, self.voi = settings.size, settings.fit, settings.voi
        with making_sense_of(folder / MANIFEST, "pack again"):
            self._rows = self.manifest.table[ROW].to_numpy(dtype=np.int64)
            self._digests = self.manifest.table[DIGEST].tolist()
        self._images = self._map() if self.summary.shards is None else self._map_shards(self.summary.shards)
        self._compared = np.zeros(len(self._rows), bool)
        self._altered: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> torch.Tensor:
        return self.batch([row])[0]

    def raw(self, rows: Sequence[int] | np.ndarray) -> torch.Tensor:
        """Films (B, S, S) as stored, uint8 or uint16: a quarter of the bytes to move to a device."""
        import torch

        for message in self.altered(rows).values():
            raise ImageError(message)
        return torch.from_numpy(self._images[self._rows[np.asarray(rows)]])

    def batch(self, rows: Sequence[int] | np.ndarray) -> torch.Tensor:
        """Films (B, 1, S, S), float32 in [0,1]."""
        return self.to_unit(self.raw(rows))

    def altered(self, rows: Sequence[int] | np.ndarray) -> dict[int, str]:
        """Those of ``rows`` whose pixels are not those that were packed, each with a message."""
        indices = np.asarray(rows, dtype=np.int64)
        for row in np.unique(indices[~self._compared[indices]]).tolist():
            if pixel_digest(self._images[self._rows[row]].data) != self._digests[row]:
                self._altered[row] = (
                    f"{self.folder}: the pixels of {self.manifest.table['image'].iloc[row]} (row {row}) are not those "
                    "that were packed; the same `afire data pack` again repairs it."
                )
            self._compared[row] = True
        return {row: self._altered[row] for row in indices.tolist() if row in self._altered} if self._altered else {}

    def to_unit(self, raw_BSS: torch.Tensor) -> torch.Tensor:
        """Stored values to float32 (B, 1, S, S) in [0,1], on the device they are on."""
        return raw_BSS.float().div_(255 if self.summary.settings.bits == 8 else 65535).unsqueeze(1)

    def _map_shards(self, count: int) -> ShardedArray:
        rows = read_json(self.folder / SUMMARY)["rows"]
        return ShardedArray(self.folder, count, (rows, self.size, self.size), self.summary.settings.dtype)

    def _map(self) -> np.ndarray:
        try:
            images: np.ndarray = np.load(self.folder / IMAGES, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise UserError(f"{self.folder / IMAGES} cannot be mapped ({error}); pack again.") from None
        if images.ndim != 3 or len(images) <= self._rows.max() or images.shape[1:] != (self.size, self.size):
            raise UserError(
                f"{self.folder / IMAGES} has shape {images.shape}, which is not what pack.json says; pack again."
            )
        return images

    def __getstate__(self) -> dict[str, object]:
        # Sent to a loader process, the map is opened again there, not copied.
        return {"folder": self.folder}

    def __setstate__(self, state: dict[str, Path]) -> None:
        self.__init__(state["folder"])  # type: ignore[misc]


class DecodedFilms:
    """Films decoded from their files each time: for a look or a small set; training wants a pack."""

    def __init__(self, manifest: Manifest, size: int, fit: Fit = "squash", voi: Voi = "auto") -> None:
        self.manifest, self.size, self.fit, self.voi = manifest, size, fit, voi

    def __len__(self) -> int:
        return len(self.manifest)

    def __getitem__(self, row: int) -> torch.Tensor:
        import torch

        film, _ = read_film(self.manifest.path(row), voi=self.voi)
        return torch.from_numpy(fit_square(film, self.size, self.fit)).unsqueeze(0)

    def batch(self, rows: Sequence[int] | np.ndarray) -> torch.Tensor:
        """Films (B, 1, S, S), float32 in [0,1]."""
        import torch

        return torch.stack([self[int(row)] for row in rows])


class NumberedFilms:
    """Films 0 .. ``count`` - 1, all blank: what the loop counts epochs by where a method draws its films itself.

    A run that is given these has seen no real film.
    """

    def __init__(self, count: int, image: ImageConfig) -> None:
        names = [f"drawn/{number:06d}" for number in range(count)]
        self.manifest = make_manifest(pd.DataFrame({"image": names}), Path(), {"builder": "numbered"})
        self.size, self.fit, self.voi = image.size, image.fit, image.voi

    def __len__(self) -> int:
        return len(self.manifest)

    def __getitem__(self, row: int) -> torch.Tensor:
        return self.batch([row])[0]

    def batch(self, rows: Sequence[int] | np.ndarray) -> torch.Tensor:
        """(B, 1, S, S), all zero."""
        import torch

        return torch.zeros(len(rows), 1, self.size, self.size)


def open_films(
    source: Path, root: Path | None = None, size: int = 224, fit: Fit | None = None, voi: Voi | None = None
) -> Films:
    """Open a pack folder, a manifest file or a folder of images.

    A pack keeps the size, fit and VOI it was made with; a ``fit`` or ``voi`` that differs from them is refused.
    """
    if not is_pack(source):
        return DecodedFilms(open_manifest(source, root), size, fit or "squash", voi or "auto")
    films = PackedFilms(source)
    _refuse_other_reading(films, fit or films.fit, voi or films.voi, str(source))
    return films


def config_for(config: Config, source: Path) -> Config:
    """``config`` with the fit and VOI of the pack ``source``, so that every film that comes later is read like those.

    Settings that were given and say otherwise are refused. Without a pack the settings stay as they are.
    """
    if not is_pack(source):
        return config
    packed, image = read_summary(source).settings, config.image
    explicit = image.model_fields_set
    fit, voi = (getattr(image if name in explicit else packed, name) for name in ("fit", "voi"))
    _refuse_other_reading(packed, fit, voi, str(source))
    # Taken over is not given: weights that say otherwise are refused by name, as those of other films.
    adopted = ImageConfig.model_construct(explicit, **{**image.model_dump(), "fit": fit, "voi": voi})
    return config.model_copy(update={"image": adopted})


def check_reading(films: Films, image: ImageConfig) -> None:
    """Refuse films that are made square, or given their grey-scale, in another way than ``image`` says."""
    _refuse_other_reading(films, image.fit, image.voi, "the set of films")


def _refuse_other_reading(films: Films | PackSettings, fit: Fit, voi: Voi, source: str) -> None:
    for name, setting in (("fit", fit), ("voi", voi)):
        stored = getattr(films, name)
        if stored != setting:
            raise UserError(
                f"{source} was made with {name} {stored}, but the settings or the weights say image.{name} {setting}; "
                f"pack the films with --{name} {setting}, or use settings and weights with image.{name} {stored}."
            )


def open_manifest(source: Path, root: Path | None = None) -> Manifest:
    """The manifest of a pack or a phantom, which lies in its folder, of a manifest file, or of a folder of images."""
    if not source.exists():
        raise UserError(f"{source} does not exist; give a pack, a manifest (.parquet or .csv) or a folder of films.")
    if is_pack(source):
        read_summary(source)
    if (source / MANIFEST).is_file():
        return read_manifest(source / MANIFEST, root)
    if source.is_dir():
        from afire.data.sources.folders import build_folder

        return build_folder(source)
    return read_manifest(source, root)


def is_pack(source: Path) -> bool:
    """Whether ``source`` is a pack, finished or begun."""
    return any((source / name).exists() for name in (SUMMARY, PART, BEGUN))
