"""What all objects have in common: the film's header as they need it, and the finding that they report.

The patient's tags go from the film into these objects and nowhere else. The libraries that build them get ids and sizes
only: some of them log a name that they find odd.

Shapes: H x W pixels of a film, h x w of its region, small.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.tag import Tag
from pydicom.uid import UID, ComputedRadiographyImageStorage, ExplicitVRLittleEndian, generate_uid
from scipy.ndimage import label
from typing_extensions import TypedDict

from afire._version import __version__
from afire.data.dicom import read_tags
from afire.data.film import quiet_readers
from afire.detect.base import DISCLAIMER
from afire.detect.findings import OUT_OF_DOMAIN, SCORED, FilmResult, Judgement, Rule
from afire.errors import ImageError
from afire.files import sha256_file
from afire.pacs.mould import Elements, elements

# Required in every object, even if empty.
_REQUIRED = (
    "PatientName", "PatientID", "PatientBirthDate", "PatientSex",
    "StudyDate", "StudyTime", "ReferringPhysicianName", "StudyID", "AccessionNumber",
)  # fmt: skip
_OPTIONAL = (
    "SpecificCharacterSet", "StudyDescription", "PatientAge", "InstitutionName", "OtherPatientIDs", "IssuerOfPatientID",
)  # fmt: skip
_IMAGE = (
    "StudyInstanceUID", "SeriesInstanceUID", "SOPInstanceUID", "SOPClassUID", "FrameOfReferenceUID",
    "InstanceNumber", "Modality", "Rows", "Columns", "PatientOrientation", "Laterality", "ImageLaterality",
    "BodyPartExamined", "PixelSpacing", "ImagerPixelSpacing",
    "PhotometricInterpretation", "SamplesPerPixel", "BitsAllocated", "BitsStored", "HighBit", "PixelRepresentation",
    "RescaleSlope", "RescaleIntercept", "RescaleType", "WindowCenter", "WindowWidth", "VOILUTFunction",
)  # fmt: skip
_REQUIRED_TAGS = {Tag(name): name for name in _REQUIRED}
_IDENTITY_TAGS = frozenset(Tag(name) for name in (*_REQUIRED, *_OPTIONAL))
_IMAGE_TAGS = frozenset(Tag(name) for name in _IMAGE)
TAGS = [*_REQUIRED, *_OPTIONAL, *_IMAGE]
"""What results take from the header of their film."""
_SEXES = ("M", "F", "O")
# Ages, dates and times written in another way are left empty: our objects are to be correct where films are not.
# Names and ids stay as they are, because a PACS finds the patient by them.
_DATE, _TIME = re.compile(r"(\d{8})?"), re.compile(r"(\d{2}(\d{2}(\d{2}(\.\d{1,6})?)?)?)?")
_FORMS = {
    "PatientAge": re.compile(r"(\d{3}[DWMY])?"),
    "PatientBirthDate": _DATE,
    "StudyDate": _DATE,
    "StudyTime": _TIME,
}
_UNPAIRED = ("CHEST", "THORAX", "ABDOMEN", "SPINE", "CSPINE", "TSPINE", "LSPINE", "PELVIS", "SKULL", "HEAD", "NECK")


MAKER, MAKER_MODEL = "afire", "afire detect"
"""Manufacturer and model of everything we make, by which the service knows its own results."""


class Ids(TypedDict):
    """Series and instance of an object, under the names that highdicom gives them."""

    series_instance_uid: UID
    series_number: int
    series_description: str
    sop_instance_uid: UID
    instance_number: int


@dataclass(frozen=True)
class Source:
    """A film that objects are derived from: ``identity`` has the tags of patient and study, ``image`` ids and sizes."""

    identity: Dataset
    image: Dataset
    number: int  # of the film in its series, so that the results of a study's films can be told apart

    @property
    def study(self) -> str:
        return str(self.image.StudyInstanceUID)

    @property
    def instance(self) -> str:
        return str(self.image.SOPInstanceUID)


def read_source(film: Path) -> Source:
    """The header of a DICOM film; one without ids gets its own, which follow from its bytes."""
    with quiet_readers():
        return source_of(read_tags(film, TAGS), film)


def source_of(tags: Dataset, film: Path) -> Source:
    """From the tags ``TAGS`` of a film's file, which was parsed before."""
    with quiet_readers():
        try:
            image = _image(tags, film)
            return Source(_identity(tags), image, max(1, int(image.get("InstanceNumber", 1))))
        except Exception:  # pydicom parses a tag when it is looked at; its errors quote what is in it
            raise ImageError(f"{film} has tags that cannot be copied into a derived object.") from None


def _identity(tags: Dataset) -> Dataset:
    identity = _only(tags, _IDENTITY_TAGS)
    for tag, name in _REQUIRED_TAGS.items():
        if tag not in tags:
            setattr(identity, name, "")
    if identity.PatientSex not in _SEXES:
        identity.PatientSex = ""
    for name, form in _FORMS.items():
        if name in identity and not form.fullmatch(str(identity[name].value or "")):
            del identity[name]  # the element itself belongs to the film's header, too
            setattr(identity, name, "")
    return identity


def _only(tags: Dataset, names: frozenset[int], *, with_empty: bool = True) -> Dataset:
    """The elements of ``tags`` that are in ``names``: looking up each by its keyword takes ten times as long."""
    chosen = Dataset()
    for tag in tags.keys():  # noqa: SIM118 - a data set yields its elements, and would convert each
        if tag in names:
            element = tags[tag]
            if with_empty or not element.is_empty:
                chosen[tag] = element
    return chosen


def _image(tags: Dataset, film: Path) -> Dataset:
    image = _only(tags, _IMAGE_TAGS, with_empty=False)
    if "SOPInstanceUID" not in image:
        image.SOPInstanceUID = generate_uid(entropy_srcs=["film", sha256_file(film)])
    if "SOPClassUID" not in image:
        image.SOPClassUID = UID(ComputedRadiographyImageStorage)
    for name in ("StudyInstanceUID", "SeriesInstanceUID"):
        if name not in image:
            setattr(image, name, generate_uid(entropy_srcs=[name, str(image.SOPInstanceUID)]))
    return image


def nobody(source: Source) -> Dataset:
    """The image of a film without its patient: what libraries get to build an object around."""
    image = Dataset()
    image.update(source.image)
    for name in _REQUIRED:
        setattr(image, name, "")
    return image


def name_patient(made: Dataset, source: Source) -> None:
    """Put an object into the patient's study."""
    made.update(source.identity)
    made.StudyInstanceUID = source.image.StudyInstanceUID


def place_on_body(made: Dataset, source: Source, *, is_image: bool) -> None:
    """Say what part of the body an object shows, and of an image which way round, as far as the film does.

    The standard wants the orientation where no frame of reference says it, empty if it is unknown; and the side of the
    body, but only if the part is one of a pair or not known.
    """
    if is_image:
        made.PatientOrientation = source.image.get("PatientOrientation") or ""
    part = str(source.image.get("BodyPartExamined") or "")
    if part:
        made.BodyPartExamined = part
    if part not in _UNPAIRED and "SegmentSequence" not in made:  # a segmentation has the side of its frames instead
        made.Laterality = source.image.get("Laterality") or source.image.get("ImageLaterality") or ""


def new_object(sop_class: UID, modality: str, ids: Ids) -> Dataset:
    """An object of ours, made now, with nothing in it yet."""
    made = Dataset()
    made.SOPClassUID, made.SOPInstanceUID = sop_class, ids["sop_instance_uid"]
    made.Modality, made.SeriesInstanceUID = modality, ids["series_instance_uid"]
    made.SeriesNumber, made.InstanceNumber = ids["series_number"], ids["instance_number"]
    made.SeriesDescription = ids["series_description"]
    made.Manufacturer, made.ManufacturerModelName, made.SoftwareVersions = MAKER, MAKER_MODEL, __version__
    now = datetime.now()
    made.ContentDate, made.ContentTime = now.strftime("%Y%m%d"), now.strftime("%H%M%S")
    made.file_meta = FileMetaDataset()
    made.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    made.file_meta.MediaStorageSOPClassUID = sop_class
    made.file_meta.MediaStorageSOPInstanceUID = ids["sop_instance_uid"]
    return made


def own_elements(ids: Ids) -> Elements:
    """What a new object of a kind has of its own, whatever it holds."""
    now = datetime.now()
    return elements(
        SOPInstanceUID=("UI", ids["sop_instance_uid"].encode()),
        SeriesInstanceUID=("UI", ids["series_instance_uid"].encode()),
        InstanceNumber=("IS", str(ids["instance_number"]).encode()),
        ContentDate=("DA", now.strftime("%Y%m%d").encode()),
        ContentTime=("TM", now.strftime("%H%M%S").encode()),
    )


_PLACEHOLDER = "1.2.826.0.1.3680043.8.498.4711"


def placeholder_source() -> Source:
    """A film that is none: its values are found again in an object that was made of it."""
    image = Dataset()
    for number, name in enumerate(("StudyInstanceUID", "SeriesInstanceUID", "SOPInstanceUID"), 1):
        setattr(image, name, UID(f"{_PLACEHOLDER}.{number}"))
    image.SOPClassUID = UID(ComputedRadiographyImageStorage)
    image.Rows = image.Columns = 64
    return Source(Dataset(), image, 1)


def source_values(source: Source) -> dict[str, bytes]:
    """What objects say about their film, by name."""
    image = source.image
    named = {"study": image.StudyInstanceUID, "series": image.SeriesInstanceUID}
    named |= {"film": image.SOPInstanceUID, "class": image.SOPClassUID}
    return {name: str(uid).encode() for name, uid in named.items()}


def placeholder_ids(number: int, description: str) -> Ids:
    """Of an object that is none, in a series with this number and description."""
    uid = UID(f"{_PLACEHOLDER}.9")
    return {
        "series_instance_uid": uid, "series_number": number, "series_description": description,
        "sop_instance_uid": uid, "instance_number": 1,
    }  # fmt: skip


def reference_to(source: Source) -> Dataset:
    """The film, as an item of a sequence that refers to it."""
    reference = Dataset()
    reference.ReferencedSOPClassUID = source.image.SOPClassUID
    reference.ReferencedSOPInstanceUID = source.image.SOPInstanceUID
    return reference


def result_uid(instance: str, model_hash: str, kind: str) -> UID:
    """The id of a result: the same film, model and kind give the same, so that a second delivery is not a second
    result."""
    return generate_uid(entropy_srcs=["afire result", instance, model_hash, kind])


def series_uid(study: str, model_hash: str, kind: str) -> UID:
    """The series of a model's results of one kind in a study."""
    return generate_uid(entropy_srcs=["afire series", study, model_hash, kind])


Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Region:
    """The connected area around the hottest place that the overlay colours, small, in the film's proportions."""

    mask: Mask  # (h, w)

    @classmethod
    def of(cls, levels: NDArray[np.uint8]) -> Region | None:
        """From steps of the heat's scale (h, w), 0 = below it; nothing when nothing stands out."""
        if not levels.any():
            return None
        areas, _ = label(levels > 0)
        return cls(areas == areas.flat[int(levels.argmax())])

    def box(self, height: int, width: int) -> tuple[float, float, float, float]:
        """Left, top, right, bottom on a film of that size."""
        rows, columns = np.nonzero(self.mask)
        down, across = height / self.mask.shape[0], width / self.mask.shape[1]
        return (
            float(columns.min() * across),
            float(rows.min() * down),
            float((columns.max() + 1) * across),
            float((rows.max() + 1) * down),
        )

    def on_film(self, height: int, width: int) -> Mask:
        """(H, W), each pixel as the small one it lies in."""
        rows = np.arange(height) * self.mask.shape[0] // height
        columns = np.arange(width) * self.mask.shape[1] // width
        return self.mask[np.ix_(rows, columns)]


@dataclass(frozen=True)
class Finding:
    """A film's result and its place among the calibration normals; no judgement means that it was not scored."""

    result: FilmResult
    judgement: Judgement | None
    region: Region | None
    model_hash: str

    @classmethod
    def of(cls, result: FilmResult, rule: Rule, region: Region | None, model_hash: str) -> Finding:
        return cls(result, rule.judge(result), region if result.status == SCORED else None, model_hash)

    @classmethod
    def none(cls) -> Finding:
        """Of no film: what an object of a kind is first made of."""
        return cls(FilmResult(0, "", OUT_OF_DOMAIN), None, None, "")

    @property
    def reason(self) -> str:
        """Why there is no score."""
        return "; ".join(self.result.objections)

    @property
    def words(self) -> str:
        """The finding in one line."""
        if self.judgement is None:
            return f"out of domain, not scored: {self.reason}"
        return f"score {self.result.score:.3g}, p-value {self.judgement.p_value:.3g}; {self.result.region}"

    @property
    def derivation(self) -> str:
        """How an object came about, for its header."""
        return f"afire {__version__}, model {self.model_hash[:12]}: {self.words}. {DISCLAIMER}"
