"""The overlay as a DICOM Secondary Capture in the study of its film, for a viewer that shows nothing else.

Warning, scale and its meaning are burnt in. Of a film out of domain it shows the film, and why it was not scored.
"""

from __future__ import annotations

import io
import textwrap
from functools import lru_cache
from struct import pack

from PIL import Image, ImageDraw, ImageFont
from pydicom.dataset import Dataset
from pydicom.encaps import encapsulate
from pydicom.uid import JPEGBaseline8Bit, SecondaryCaptureImageStorage

from afire._version import __version__
from afire.detect.base import HeatScale
from afire.pacs.mould import Elements, Mould, ascii_text, elements, encapsulated
from afire.pacs.source import (
    MAKER,
    MAKER_MODEL,
    Finding,
    Ids,
    Source,
    new_object,
    own_elements,
    placeholder_ids,
    placeholder_source,
    reference_to,
    source_values,
)
from afire.report.detect_pictures import WARNING, heat_legend

_SIDE = 512  # longest side of the picture, at least
_NARROWEST = 420  # of the page: the warning must be legible
_MOST_TEXT = 1024  # of a DICOM short text, in which the derivation is told

_QUALITY = 92  # letters stay sharp
_CONTENT_DATE, _CONTENT_TIME, _PIXEL_DATA = 0x00080023, 0x00080033, 0x7FE00010
_REFERRED = ("film", "class")  # how a capture names its film


def capture_file(source: Source, finding: Finding, page: Image.Image, ids: Ids, patient: Elements) -> bytes:
    """``page`` as a DICOM file; ``patient`` has the tags of patient, study and body part."""
    own, pixels = own_elements(ids), compressed(page)
    own |= elements(
        DerivationDescription=("ST", ascii_text(finding.derivation[:_MOST_TEXT])),
        DateOfSecondaryCapture=("DA", own[_CONTENT_DATE][8:]),
        TimeOfSecondaryCapture=("TM", own[_CONTENT_TIME][8:]),
        Rows=("US", pack("<H", page.height)),
        Columns=("US", pack("<H", page.width)),
        LossyImageCompressionRatio=("DS", _ratio(page, pixels).encode()),
    )
    own[_PIXEL_DATA] = encapsulated(pixels)
    values = source_values(source)
    mould = _mould(ids["series_number"], ids["series_description"])
    return mould.fill({name: values[name] for name in _REFERRED}, own | patient)


def prepare_captures(number: int, description: str) -> None:
    """Make what captures of a series share."""
    _mould(number, description)


@lru_cache(maxsize=4)
def _mould(number: int, description: str) -> Mould:
    source = placeholder_source()
    places = source_values(source)
    made = secondary_capture(source, Finding.none(), Image.new("RGB", (8, 8)), placeholder_ids(number, description))
    return Mould(made, {name: places[name] for name in _REFERRED})


def secondary_capture(source: Source, finding: Finding, page: Image.Image, ids: Ids) -> Dataset:
    """``page`` as a derived image; the patient is not in it yet."""
    capture = new_object(SecondaryCaptureImageStorage, "OT", ids)
    capture.ConversionType = "WSD"
    capture.ImageType = ["DERIVED", "SECONDARY"]
    capture.DerivationDescription = finding.derivation[:_MOST_TEXT]
    capture.BurnedInAnnotation = "YES"
    capture.SecondaryCaptureDeviceManufacturer = MAKER
    capture.SecondaryCaptureDeviceManufacturerModelName = MAKER_MODEL
    capture.SecondaryCaptureDeviceSoftwareVersions = __version__
    capture.DateOfSecondaryCapture, capture.TimeOfSecondaryCapture = capture.ContentDate, capture.ContentTime
    capture.SourceImageSequence = [reference_to(source)]
    capture.Rows, capture.Columns = page.height, page.width
    capture.SamplesPerPixel, capture.PhotometricInterpretation, capture.PlanarConfiguration = 3, "YBR_FULL_422", 0
    capture.BitsAllocated, capture.BitsStored, capture.HighBit, capture.PixelRepresentation = 8, 8, 7, 0
    pixels = compressed(page)
    capture.LossyImageCompression, capture.LossyImageCompressionMethod = "01", "ISO_10918_1"
    capture.LossyImageCompressionRatio = _ratio(page, pixels)
    capture.PixelData = encapsulate([pixels], has_bot=False)
    capture["PixelData"].VR, capture["PixelData"].is_undefined_length = "OB", True
    capture.file_meta.TransferSyntaxUID = JPEGBaseline8Bit
    return capture


def compressed(page: Image.Image) -> bytes:
    """As JPEG, of which a picture takes a twelfth of the space: on the disk, on the wire and in the archive."""
    stream = io.BytesIO()
    page.save(stream, "JPEG", quality=_QUALITY, subsampling="4:2:2")
    return stream.getvalue()


def _ratio(page: Image.Image, pixels: bytes) -> str:
    return f"{3 * page.width * page.height / len(pixels):.4g}"


def captioned(picture: Image.Image, scale: HeatScale, finding: Finding) -> Image.Image:
    """The picture enlarged; below it the warning, and the scale or why there is none."""
    factor = max(1, -(-_SIDE // max(picture.size)))
    if factor > 1:
        picture = picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.BICUBIC)
    width = max(_NARROWEST, picture.width)
    caption = _legend(scale, width) if finding.judgement is not None else _refusal(finding.reason, width)
    page = Image.new("RGB", (width, picture.height + caption.height))
    page.paste(picture, ((page.width - picture.width) // 2, 0))
    page.paste(caption, (0, picture.height))
    return page


@lru_cache(maxsize=16)
def _legend(scale: HeatScale, width: int) -> Image.Image:
    """One of each width for all films of a detector."""
    return heat_legend(scale, width)


def _refusal(reason: str, width: int) -> Image.Image:
    """The warning, and why the film was not scored."""
    size = max(13, width // 44)
    font = ImageFont.load_default(size)
    lines = [WARNING, "OUT OF DOMAIN, NOT SCORED", *textwrap.wrap(reason, 60)]
    image = Image.new("RGB", (width, round((1 + 1.4 * len(lines)) * size)), (10, 11, 13))
    draw = ImageDraw.Draw(image)
    for number, line in enumerate(lines):
        draw.text((width / 2, (0.5 + 1.4 * number) * size), line, (255, 255, 255), font=font, anchor="ma")
    return image
