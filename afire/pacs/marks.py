"""The region on the film itself: as a DICOM Segmentation, and as a Presentation State that draws its box."""

from __future__ import annotations

from typing import Any

import numpy as np
from highdicom.content import AlgorithmIdentificationSequence
from highdicom.pr import (
    GraphicAnnotation,
    GraphicLayer,
    GraphicObject,
    GrayscaleSoftcopyPresentationState,
    TextObject,
)
from highdicom.seg import Segmentation, SegmentDescription
from pydicom.dataset import Dataset
from pydicom.sr.codedict import codes

from afire._version import __version__
from afire.detect.base import DISCLAIMER
from afire.pacs.source import MAKER, MAKER_MODEL, Finding, Ids, Region, Source, nobody


def segmentation(source: Source, finding: Finding, region: Region, ids: Ids) -> Dataset:
    """The region as a binary mask of the film. ``ids`` name series and instance; the patient is not in it yet."""
    image = nobody(source)
    segment = SegmentDescription(
        segment_number=1,
        segment_label="Most deviating region",
        segmented_property_category=codes.SCT.MorphologicallyAbnormalStructure,
        segmented_property_type=codes.SCT.Abnormal,
        algorithm_type="AUTOMATIC",
        algorithm_identification=AlgorithmIdentificationSequence(
            name=MAKER_MODEL,
            family=codes.DCM.ArtificialIntelligence,
            version=__version__,
            source=MAKER,
            parameters={"model": finding.model_hash},
        ),
    )
    return Segmentation(
        source_images=[image],
        pixel_array=region.on_film(int(image.Rows), int(image.Columns))[None].astype(np.uint8),
        segmentation_type="BINARY",
        segment_descriptions=[segment],
        content_label="REGION",
        content_description="Most deviating region; research only",
        content_creator_name=f"{MAKER}^",  # a name of one part
        **_maker(finding),
        **ids,
    )


def presentation_state(source: Source, finding: Finding, region: Region, ids: Ids) -> Dataset:
    """The region's box drawn on the film. ``ids`` name series and instance; the patient is not in it yet."""
    image = nobody(source)
    left, top, right, bottom = region.box(int(image.Rows), int(image.Columns))
    corners = np.array([(left, top), (right, top), (right, bottom), (left, bottom), (left, top)], np.float64)
    layer = GraphicLayer("AFIRE", order=1, description="Most deviating region; research only")
    annotation = GraphicAnnotation(
        referenced_images=[image],
        graphic_layer=layer,
        graphic_objects=[GraphicObject("POLYLINE", np.maximum(corners, 1), units="PIXEL")],
        text_objects=[
            TextObject(
                f"{finding.words}\r\n{DISCLAIMER}",
                units="PIXEL",
                anchor_point=(max(left, 1.0), max(top, 1.0)),
                text_justification="LEFT",
                anchor_point_visible=False,
            )
        ],
    )
    return GrayscaleSoftcopyPresentationState(
        referenced_images=[image],
        content_label="REGION",
        content_description="Most deviating region; research only",
        graphic_annotations=[annotation],
        graphic_layers=[layer],
        content_creator_name=f"{MAKER}^",  # a name of one part
        **_maker(finding),
        **ids,
    )


def _maker(finding: Finding) -> dict[str, Any]:
    return {
        "manufacturer": MAKER,
        "manufacturer_model_name": MAKER_MODEL,
        "software_versions": __version__,
        "device_serial_number": finding.model_hash[:12],
    }
