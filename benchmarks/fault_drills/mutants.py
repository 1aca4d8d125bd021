"""500 mutated files from a seed: truncated, flipped bits, wrong extension, false DICOM tags, bombs, absurd headers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fault_drills.bombs import ABSURD, BOMBS
from fault_drills.films import FORMATS, phantom
from fault_drills.hostile_tags import hostile

SHARES = {
    "truncated": 110,
    "bits flipped in the header": 70,
    "bits flipped in the body": 70,
    "wrong extension": 60,
    "hostile DICOM tags": 130,
    "zip bomb": 36,
    "absurd header": 24,
}
"""Of 500, how many files of each kind."""
_HEADER = 400
Bytes = tuple[str, str, bytes]
"""What was done, ending, content."""


@dataclass(frozen=True)
class Mutant:
    """A file that is bad, or may be. ``must`` is ``read`` or ``refused`` where there is no doubt, else empty."""

    file: str
    kind: str
    what: str
    must: str


def truncated(number: int, rng: np.random.Generator) -> Bytes:
    name, ending, whole = _some_film(number)
    return name, ending, whole[: int(rng.integers(1, len(whole)))]


def flipped(number: int, rng: np.random.Generator, header: bool) -> Bytes:
    name, ending, whole = _some_film(number)
    content = np.frombuffer(whole, np.uint8).copy()
    first, last = (0, min(_HEADER, len(content))) if header else (min(_HEADER, len(content) - 1), len(content))
    for _ in range(int(rng.integers(1, 9))):
        content[rng.integers(first, last)] ^= np.uint8(1 << rng.integers(8))
    return name, ending, content.tobytes()


def wrong_extension(number: int, rng: np.random.Generator) -> Bytes:
    """A good film with another format's extension, which must be read; or not a film, which must be refused."""
    if number % 2:
        name, ending, whole = _some_film(number)
        others = sorted({".png", ".jpg", ".tif", ".dcm", ".bmp", ".gif"} - {ending})
        return f"{name} in another's name", str(rng.choice(others)), whole
    noise = rng.bytes(4000)
    texts = {
        "empty": b"",
        "text": b"a letter, not a film\n" * 40,
        "page": b"<html><script>alert(1)</script></html>",
        "noise": noise,
        "zeros": bytes(5000),
        "archive": b"PK\x03\x04" + noise,
        "program": b"\x7fELF" + noise,
        "pickle": b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R.",
    }
    name = list(texts)[(number // 2) % len(texts)]
    return name, str(rng.choice([".png", ".jpg", ".tif", ".dcm", ".bmp"])), texts[name]


def bomb(number: int, rng: np.random.Generator) -> Bytes:
    name = list(BOMBS)[number % len(BOMBS)]
    return name, ".png", BOMBS[name](phantom(number % 8))


def absurd(number: int, rng: np.random.Generator) -> Bytes:
    name = list(ABSURD)[number % len(ABSURD)]
    return name, ".png", ABSURD[name](phantom(number % 8))


def hostile_tags(number: int, rng: np.random.Generator) -> Bytes:
    name, content = hostile(number, phantom(number % 16), rng)
    return name, ".dcm", content


def _some_film(number: int) -> Bytes:
    name = list(FORMATS)[number % len(FORMATS)]
    ending, write = FORMATS[name]
    return name, ending, write(phantom(number % 16))


_MAKERS: dict[str, Callable[[int, np.random.Generator], Bytes]] = {
    "truncated": truncated,
    "bits flipped in the header": lambda number, rng: flipped(number, rng, header=True),
    "bits flipped in the body": lambda number, rng: flipped(number, rng, header=False),
    "wrong extension": wrong_extension,
    "hostile DICOM tags": hostile_tags,
    "zip bomb": bomb,
    "absurd header": absurd,
}


def _must(kind: str, what: str) -> str:
    """What has to happen to a file, where that is certain beforehand."""
    if kind == "wrong extension":
        return "read" if "another's name" in what else "refused"
    if what == "palette without a palette":  # pillow takes the numbers for grey values
        return ""
    if kind == "absurd header" or "30,000" in what or "65,5" in what or "2,000,000,000" in what:
        return "refused"
    if what in ("pixels missing", "pixels empty", "frames 10**9", "slope NaN", "slope infinite", "modality CT"):
        return "refused"
    if what.startswith(("patient ", "study ", "text of")) or what in ("window width 0", "window width negative"):
        return "read"
    return ""


def write_mutants(folder: Path, count: int, seed: int) -> list[Mutant]:
    """Write ``count`` mutants in the proportions of :data:`SHARES`."""
    folder.mkdir(parents=True, exist_ok=True)
    return [_write(folder, seed, *one) for one in _plan(count)]


def _plan(count: int) -> Iterator[tuple[int, str, int]]:
    """Number, kind and number within the kind of each file."""
    total = sum(SHARES.values())
    ends = np.rint(np.cumsum(list(SHARES.values())) * count / total).astype(int)
    start = 0
    for kind, end in zip(SHARES, ends.tolist(), strict=True):
        # A shortened drill takes a few of all there are, not the first ones only.
        step = max(1, SHARES[kind] // max(1, end - start))
        yield from ((start + place, kind, place * step) for place in range(end - start))
        start = end


def _write(folder: Path, seed: int, number: int, kind: str, within: int) -> Mutant:
    what, ending, content = _MAKERS[kind](within, np.random.default_rng([seed, number]))
    file = f"m{number:03d}{ending}"
    (folder / file).write_bytes(content)
    return Mutant(file, kind, what, _must(kind, what))


def write_good(folder: Path, count: int) -> list[str]:
    """Good films of all formats; their names."""
    folder.mkdir(parents=True, exist_ok=True)
    names = []
    for number in range(count):
        ending, write = list(FORMATS.values())[number % len(FORMATS)]
        names.append(f"good{number:02d}{ending}")
        (folder / names[-1]).write_bytes(write(phantom(100 + number)))
    return names
