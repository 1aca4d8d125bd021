"""The result as a DICOM Structured Report, TID 1500 (Measurement Report), unverified.

One group of measurements is about the film: score, p-value and percentile by an algorithm that names its model's hash,
and the region in words. A second one is about the region, when one stands out: its box and how far it deviates. A film
out of domain has no measurement; the report says so and why.

DICOM has no codes for these things, so they are ours (scheme 99AFIRE).

highdicom makes the tree, once for each kind of report; a film's report is filled into its bytes.
"""

from __future__ import annotations

from functools import lru_cache
from struct import pack

import numpy as np
from highdicom.coding_schemes import CodingSchemeIdentificationItem
from highdicom.sr import (
    AlgorithmIdentification,
    CodedConcept,
    DeviceObserverIdentifyingAttributes,
    ImageRegion,
    Measurement,
    MeasurementReport,
    MeasurementsAndQualitativeEvaluations,
    ObservationContext,
    ObserverContext,
    PlanarROIMeasurementsAndQualitativeEvaluations,
    QualitativeEvaluation,
    SourceImageForMeasurementGroup,
    SourceImageForRegion,
    TextContentItem,
    TrackingIdentifier,
)
from numpy.typing import NDArray
from pydicom.dataset import Dataset
from pydicom.sr.codedict import codes
from pydicom.uid import UID, ComprehensiveSRStorage, generate_uid
from pydicom.valuerep import DS

from afire._version import __version__
from afire.detect.base import DISCLAIMER
from afire.detect.findings import OUT_OF_DOMAIN as NOT_SCORED
from afire.detect.findings import SCORED, FilmResult, Judgement
from afire.pacs.mould import Elements, Mould, ascii_text
from afire.pacs.source import (
    MAKER,
    MAKER_MODEL,
    Finding,
    Ids,
    Region,
    Source,
    new_object,
    own_elements,
    placeholder_ids,
    placeholder_source,
    reference_to,
    source_values,
)

SCHEME = "99AFIRE"


def _code(value: str, meaning: str) -> CodedConcept:
    return CodedConcept(value, SCHEME, meaning)


SCORE = _code("score", "Anomaly score, larger is more abnormal")
P_VALUE = _code("p-value", "Share of normal films that score as high")
PERCENTILE = _code("percentile", "Calibration normals that score lower")
DEVIATION = _code("deviation", "Deviation from normal films, in their sd")
STATUS = _code("status", "Status of the film")
IN_DOMAIN = _code("scored", "Scored")
OUT_OF_DOMAIN = _code("out-of-domain", "Out of domain, not scored")
REASON = _code("reason", "Why the film was not scored")
REGION = _code("region", "Most deviating region")
MODEL = _code("model", "SHA-256 of the model")
_NOTE = CodedConcept("121106", "DCM", "Comment")
_PROCEDURE = CodedConcept("399208008", "SCT", "Plain chest X-ray")
_ONE, _PERCENT = CodedConcept("1", "UCUM", "no units"), CodedConcept("%", "UCUM", "percent")


def report_file(source: Source, finding: Finding, ids: Ids, patient: Elements) -> bytes:
    """The report of a film as a DICOM file; ``patient`` has the tags of patient and study."""
    scored, marked = finding.judgement is not None, finding.region is not None
    mould = _mould(finding.model_hash, scored, marked, ids["series_number"], ids["series_description"])
    return mould.fill(_values(source, finding), own_elements(ids) | patient)


def prepare_reports(model_hash: str, number: int, description: str) -> None:
    """Make what the reports of a model share: of films with a region, without one, and out of domain."""
    for scored, marked in ((True, True), (True, False), (False, False)):
        _mould(model_hash, scored, marked, number, description)


@lru_cache(maxsize=16)
def _mould(model_hash: str, scored: bool, marked: bool, number: int, description: str) -> Mould:
    """For films that were scored or not, with a region or without."""
    source = placeholder_source()
    result = FilmResult(0, "", SCORED, 4711.25, region="where it deviates", region_sd=4713.25)
    if not scored:
        result = FilmResult(0, "", NOT_SCORED, objections=("why it was not scored",))
    region = Region(np.pad(np.ones((1, 1), np.bool_), 1)) if marked else None
    finding = Finding(result, Judgement(4715.25, 4717.25, False) if scored else None, region, model_hash)
    made = structured_report(source, finding, placeholder_ids(number, description))
    return Mould(made, _values(source, finding))


def _values(source: Source, finding: Finding) -> dict[str, bytes]:
    """What differs from film to film in a report of a kind, by name, as it is written."""
    values = source_values(source)
    values["tracked film"] = _tracking_uid(source, finding, "film").encode()
    numbers: dict[str, float] = {}
    if finding.judgement is None:
        values["reason"] = ascii_text(finding.reason)
    else:
        assert finding.result.score is not None
        values["region"] = ascii_text(finding.result.region)
        numbers = {"score": finding.result.score, "p": finding.judgement.p_value, "%": finding.judgement.percentile}
    if finding.region is not None:
        assert finding.result.region_sd is not None
        values["tracked region"] = _tracking_uid(source, finding, "region").encode()
        values["box"] = _corners(source, finding.region).astype("<f4").tobytes()
        numbers["deviation"] = finding.result.region_sd
    for name, number in numbers.items():
        values[name] = str(DS(number, auto_format=True)).encode()
        values[f"{name}, exactly"] = pack("<d", number)
    return values


def structured_report(source: Source, finding: Finding, ids: Ids) -> Dataset:
    """The report of a film; the patient is not in it yet.

    The document around the tree is made here: highdicom's own copies and searches it several times, for what is one
    film and known.
    """
    report = new_object(ComprehensiveSRStorage, "SR", ids)
    report.DeviceSerialNumber = finding.model_hash[:12]
    report.CompletionFlag, report.VerificationFlag, report.PreliminaryFlag = "COMPLETE", "UNVERIFIED", "PRELIMINARY"
    report.CodingSchemeIdentificationSequence = [
        CodingSchemeIdentificationItem(SCHEME, name="Results of afire", responsible_organization=MAKER)
    ]
    report.PerformedProcedureCodeSequence, report.ReferencedPerformedProcedureStepSequence = [], []
    report.CurrentRequestedProcedureEvidenceSequence = [_evidence(source)]
    report.update(_content(source, finding)[0])
    return report


def _evidence(source: Source) -> Dataset:
    """The film as the one thing that the report is about."""
    series, study = Dataset(), Dataset()
    series.SeriesInstanceUID, series.ReferencedSOPSequence = source.image.SeriesInstanceUID, [reference_to(source)]
    study.StudyInstanceUID, study.ReferencedSeriesSequence = source.image.StudyInstanceUID, [series]
    return study


def _content(source: Source, finding: Finding) -> MeasurementReport:
    groups = [_film_group(source, finding)]
    if finding.region is not None:
        groups.append(_region_group(source, finding))
    device = DeviceObserverIdentifyingAttributes(
        uid=generate_uid(entropy_srcs=["afire model", finding.model_hash]),
        name=MAKER,
        manufacturer_name=MAKER,
        model_name=MAKER_MODEL,
        serial_number=finding.model_hash[:12],
    )
    observer = ObserverContext(observer_type=codes.DCM.Device, observer_identifying_attributes=device)
    return MeasurementReport(
        observation_context=ObservationContext(observer_device_context=observer),
        procedure_reported=_PROCEDURE,
        imaging_measurements=groups,
        title=codes.DCM.ImagingMeasurementReport,
    )


def _film_group(source: Source, finding: Finding) -> MeasurementsAndQualitativeEvaluations:
    judged = finding.judgement
    measurements, texts = [], [(MODEL, finding.model_hash), (_NOTE, DISCLAIMER)]
    if judged is None:
        texts.insert(0, (REASON, finding.reason))
    else:
        assert finding.result.score is not None
        texts.insert(0, (REGION, finding.result.region))
        measurements = [
            Measurement(SCORE, finding.result.score, _ONE),
            Measurement(P_VALUE, judged.p_value, _ONE),
            Measurement(PERCENTILE, judged.percentile, _PERCENT),
        ]
    group = MeasurementsAndQualitativeEvaluations(
        tracking_identifier=_tracking(source, finding, "film"),
        algorithm_id=_algorithm(finding),
        measurements=measurements or None,
        qualitative_evaluations=[QualitativeEvaluation(STATUS, IN_DOMAIN if judged else OUT_OF_DOMAIN)],
        source_images=[SourceImageForMeasurementGroup(source.image.SOPClassUID, source.instance)],
    )
    for name, text in texts:
        group[0].ContentSequence.append(TextContentItem(name, text, relationship_type="CONTAINS"))
    return group


def _region_group(source: Source, finding: Finding) -> PlanarROIMeasurementsAndQualitativeEvaluations:
    assert finding.region is not None and finding.result.region_sd is not None
    return PlanarROIMeasurementsAndQualitativeEvaluations(
        tracking_identifier=_tracking(source, finding, "region"),
        referenced_region=ImageRegion(
            "POLYLINE",
            _corners(source, finding.region),
            SourceImageForRegion(source.image.SOPClassUID, source.instance),
        ),
        algorithm_id=_algorithm(finding),
        measurements=[Measurement(DEVIATION, finding.result.region_sd, _ONE)],
    )


def _corners(source: Source, region: Region) -> NDArray[np.float32]:
    """Of the region's box on the film, (5, 2): the first one again at the end."""
    left, top, right, bottom = region.box(int(source.image.Rows), int(source.image.Columns))
    return np.array([(left, top), (right, top), (right, bottom), (left, bottom), (left, top)], np.float32)


def _tracking(source: Source, finding: Finding, what: str) -> TrackingIdentifier:
    return TrackingIdentifier(_tracking_uid(source, finding, what), f"afire {what}")


def _tracking_uid(source: Source, finding: Finding, what: str) -> UID:
    return generate_uid(entropy_srcs=["afire tracking", source.instance, finding.model_hash, what])


def _algorithm(finding: Finding) -> AlgorithmIdentification:
    return AlgorithmIdentification(MAKER_MODEL, __version__, parameters=[f"model {finding.model_hash}"])
