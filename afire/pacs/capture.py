"""The overlay as a DICOM Secondary Capture in the study of its film, for a viewer that shows nothing else.

Warning, scale and its meaning are burnt in. Of a film out of domain it shows the film, and why it was not scored.
"""

from __future__ import annotations

import textwrap
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from pydicom.dataset import Dataset
from pydicom.uid import SecondaryCaptureImageStorage

from afire._version import __version__
from afire.detect.base import HeatScale
from afire.pacs.findings import Finding
from afire.pacs.source import MAKER, MAKER_MODEL, Ids, Source, new_object, reference_to
from afire.report.detect_pictures import WARNING, heat_legend

_SIDE = 512  # longest side of the picture, at least
_NARROWEST = 420  # of the page: the warning must be legible
_MOST_TEXT = 1024  # of a DICOM short text, in which the derivation is told

Bytes = NDArray[np.uint8]


def secondary_capture(source: Source, finding: Finding, page: Bytes, ids: Ids) -> Dataset:
    """``page`` (H, W, 3) as a derived image; the patient is not in it yet."""
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
    _put_pixels(capture, page)
    return capture


def _put_pixels(capture: Dataset, page: Bytes) -> None:
    """``page`` (H, W, 3), interleaved, 8 bit."""
    capture.Rows, capture.Columns = page.shape[:2]
    capture.SamplesPerPixel, capture.PhotometricInterpretation, capture.PlanarConfiguration = 3, "RGB", 0
    capture.BitsAllocated, capture.BitsStored, capture.HighBit, capture.PixelRepresentation = 8, 8, 7, 0
    pixels = np.ascontiguousarray(page).tobytes()
    capture.PixelData = pixels + b"\0" * (len(pixels) % 2)
    capture["PixelData"].VR = "OB"


def captioned(picture: Image.Image, scale: HeatScale, finding: Finding) -> Bytes:
    """The picture enlarged; below it the warning, and the scale or why there is none."""
    factor = max(1, -(-_SIDE // max(picture.size)))
    picture = picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.BICUBIC)
    width = max(_NARROWEST, picture.width)
    caption = _legend(scale, width) if finding.judgement is not None else _refusal(finding.reason, width)
    page = Image.new("RGB", (width, picture.height + caption.height))
    page.paste(picture, ((page.width - picture.width) // 2, 0))
    page.paste(caption, (0, picture.height))
    return np.asarray(page)


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
