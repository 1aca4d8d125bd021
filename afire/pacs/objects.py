"""From a film's result to DICOM objects of its study: capture, report, segmentation, presentation state.

Whatever is made, its ids follow from the film, the model and the kind; the patient's tags are put in last and here.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import pydicom
from PIL import Image
from pydicom.dataset import Dataset

from afire.data.decode import FitMode
from afire.data.film import quiet_readers
from afire.detect.base import AnomalyDetector, HeatScale
from afire.detect.findings import Rule
from afire.detect.run import Draw, Drawing, Drawn
from afire.errors import ImageError, UserError
from afire.files import write_atomic
from afire.pacs import require_packages, silence_libraries
from afire.pacs.capture import captioned, capture_file, prepare_captures
from afire.pacs.mould import Elements, encode
from afire.pacs.source import (
    Finding,
    Ids,
    Region,
    Source,
    name_patient,
    place_on_body,
    read_source,
    result_uid,
    series_uid,
    source_of,
)
from afire.report.detect_pictures import heat_levels, laid_over

Kind = Literal["sc", "sr", "seg", "gsps"]
KINDS: tuple[Kind, ...] = get_args(Kind)
FOLDER = "dicom"
_SERIES_NUMBERS: dict[Kind, int] = {"sc": 9001, "sr": 9002, "seg": 9003, "gsps": 9004}  # behind those of the machine
_SERIES: dict[Kind, str] = {
    "sc": "afire heatmap, research only",
    "sr": "afire result, research only",
    "seg": "afire region, research only",
    "gsps": "afire region drawn, research only",
}
_PER_FOLDER = 1000


def parse_kinds(text: str, option: str) -> tuple[Kind, ...]:
    """``sc,sr`` -> the kinds, in their own order."""
    words = {word.strip().lower() for word in text.split(",") if word.strip()}
    if not words or not words.issubset(KINDS):
        raise UserError(f"{option} {text!r} is not a list of {', '.join(KINDS)}, separated by commas.")
    kinds = tuple(kind for kind in KINDS if kind in words)
    if kinds != ("sc",):
        require_packages(f"{option} {text}", "highdicom")
    return kinds


@dataclass(frozen=True)
class ObjectMaker:
    """Makes the objects of films by one model; several threads may call it at once."""

    rule: Rule
    scale: HeatScale
    fit: FitMode
    model_hash: str
    kinds: Sequence[Kind]

    @classmethod
    def of(cls, detector: AnomalyDetector, rule: Rule, model_hash: str, kinds: Sequence[Kind]) -> ObjectMaker:
        return cls(rule, detector.scale, detector.config.image.fit, model_hash, kinds)

    def prepare(self) -> None:
        """Make what all films share now, which takes a second or more, so that the first film does not wait for it."""
        for kind in self.kinds:
            if kind == "sc":
                prepare_captures(_SERIES_NUMBERS[kind], _SERIES[kind])
            elif kind == "sr":
                from afire.pacs.structured_report import prepare_reports

                prepare_reports(self.model_hash, _SERIES_NUMBERS[kind], _SERIES[kind])

    def __call__(self, drawing: Drawing, tags: Dataset | None = None) -> dict[Kind, bytes]:
        """The objects of a DICOM film as files: kind -> bytes. ``tags`` are those of its header, if it was read before.

        A film out of domain has a capture and a report that say so. Where nothing stands out there is no region, so
        neither a segmentation nor a presentation state.
        """
        source = read_source(drawing.film.path) if tags is None else source_of(tags, drawing.film.path)
        picture, region = self._picture(drawing)
        finding = Finding.of(drawing.result, self.rule, region, self.model_hash)
        with quiet_readers():
            try:
                patient = _patient(source)
                made = {kind: self._make(kind, source, finding, picture, patient) for kind in self.kinds}
                return {kind: data for kind, data in made.items() if data is not None}
            except Exception:  # a tag of the film that no object can hold; messages of libraries quote it
                raise ImageError(f"{drawing.film.path} has tags that cannot be copied into a derived object.") from None

    def _picture(self, drawing: Drawing) -> tuple[Image.Image, Region | None]:
        """The film under its heat, and the region that stands out in it."""
        shown = drawing.film.shown
        assert shown is not None
        if drawing.heat is None:
            return Image.fromarray(shown).convert("RGB"), None
        levels = heat_levels(drawing.heat, (shown.shape[0], shown.shape[1]), self.scale, self.fit)
        return laid_over(shown, levels), Region.of(np.asarray(levels))

    def _make(
        self, kind: Kind, source: Source, finding: Finding, picture: Image.Image, patient: Elements
    ) -> bytes | None:
        ids: Ids = {
            "series_instance_uid": series_uid(source.study, self.model_hash, kind),
            "series_number": _SERIES_NUMBERS[kind],
            "series_description": _SERIES[kind],
            "sop_instance_uid": result_uid(source.instance, self.model_hash, kind),
            "instance_number": source.number,
        }
        if kind == "sc":
            page = captioned(picture, self.scale, finding)
            return capture_file(source, finding, page, ids, patient | _body_part(source))
        if kind == "sr":  # what needs highdicom is imported here: captures do not
            from afire.pacs.structured_report import report_file

            return report_file(source, finding, ids, patient)
        if finding.region is None:
            return None
        from afire.pacs.marks import presentation_state, segmentation

        made = (segmentation if kind == "seg" else presentation_state)(source, finding, finding.region, ids)
        name_patient(made, source)
        place_on_body(made, source, is_image=kind == "seg")
        return _encoded(made)


def _patient(source: Source) -> Elements:
    """The tags of patient and study, as they are written into an object."""
    named = Dataset()
    name_patient(named, source)
    return encode(named)


def _body_part(source: Source) -> Elements:
    placed = Dataset()
    place_on_body(placed, source, is_image=True)
    return encode(placed)


def _encoded(made: Dataset) -> bytes:
    stream = io.BytesIO()
    pydicom.dcmwrite(stream, made, enforce_file_format=True)
    return stream.getvalue()


@dataclass(frozen=True)
class ObjectWriter:
    """Writes the objects of DICOM films below ``out``, after what ``painter`` draws of every film."""

    out: Path
    maker: ObjectMaker
    painter: Draw | None = None

    def __call__(self, drawing: Drawing) -> Drawn:
        drawn = self.painter(drawing) if self.painter is not None else Drawn({})
        if drawing.film.info.kind != "dicom":
            return drawn
        try:
            objects = self.maker(drawing)
        except UserError:
            return Drawn(drawn.pictures, (*drawn.notes, "no DICOM results: the film's tags cannot be copied"))
        number = drawing.film.number
        for kind, data in objects.items():
            path = self.out / FOLDER / f"{number // _PER_FOLDER:03d}" / f"{number:06d}-{kind}.dcm"
            write_atomic(path, partial(_write, data=data))
        return drawn


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def draw_with_objects(
    painter: Draw | None, kinds: str, out: Path, detector: AnomalyDetector, rule: Rule, model_hash: str
) -> Draw | None:
    """``painter``, followed by the objects that ``--dicom-out`` names, if any."""
    if not kinds:
        return painter
    wanted = parse_kinds(kinds, "--dicom-out")
    silence_libraries()
    return ObjectWriter(out, ObjectMaker.of(detector, rule, model_hash, wanted), painter)
