"""DICOM objects of a film: in its study, with the right content, read back by highdicom; dciodvfy finds no error."""

from __future__ import annotations

import io
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("highdicom")

import pydicom
from highdicom.seg import segread
from highdicom.sr import srread
from pydicom.dataset import Dataset
from pydicom.uid import SecondaryCaptureImageStorage

from afire.data.decode import read_film
from afire.data.film import FilmInfo
from afire.detect.base import HeatScale
from afire.detect.findings import FilmResult, Rule
from afire.detect.normals import Calibration
from afire.detect.run import Drawing, Drawn, ReadFilm
from afire.errors import ImageError, UserError
from afire.pacs import silence_libraries
from afire.pacs.capture import captioned, secondary_capture
from afire.pacs.objects import KINDS, Kind, ObjectMaker, ObjectWriter, parse_kinds
from afire.pacs.source import Finding, Ids, Region, name_patient, place_on_body, read_source, result_uid, series_uid
from afire.pacs.structured_report import structured_report
from tests.pacs.films import ACCESSION, IDENTIFYING, NAME, PATIENT, SERIES, STUDY, film, instance

HASH = "ab" * 32
SHAPE = (40, 30)
BADLY_WRITTEN = {"PatientAge": "81", "PatientBirthDate": "May 1943", "StudyDate": "2024-01-31", "StudyTime": "10:15"}


def maker(kinds: tuple[Kind, ...] = KINDS, model_hash: str = HASH) -> ObjectMaker:
    rule = Rule(2.0, 0.1, "score", Calibration.of(np.linspace(0, 2.5, 50)))
    return ObjectMaker(rule, HeatScale(2.0, 6.0), "squash", model_hash, kinds)


def drawing(path: Path, spot: float | None = 5.0, reason: str = "") -> Drawing:
    """A film with heat ``spot`` in the upper left of its 8 x 8 cells; none is a film out of domain."""
    info = FilmInfo(width=SHAPE[1], height=SHAPE[0], bits=12, kind="dicom")
    shown = np.full(SHAPE, 100, np.uint8)
    read = ReadFilm(3, path.name, path, np.zeros((16, 16), np.float32), shown, info)
    if spot is None:
        return Drawing(read, FilmResult(3, "x", "out of domain", 9.0, objections=(reason,)), None, None)
    heat = np.zeros((8, 8), np.float32)
    heat[1:3, 1:4] = spot
    words = "right upper zone, 5.0 sd above normal films there"
    result = FilmResult(3, "x", "scored", 2.25, region=words, region_words="right upper zone", region_sd=spot)
    return Drawing(read, result, heat, None)


def made_of(path: Path, kinds: tuple[Kind, ...] = KINDS, **about: object) -> dict[Kind, Dataset]:
    objects = maker(kinds)(drawing(path, **about))  # type: ignore[arg-type]
    return {kind: pydicom.dcmread(io.BytesIO(data)) for kind, data in objects.items()}


def test_all_are_in_the_study_of_the_film_under_ids_of_their_own(tmp_path: Path) -> None:
    made = made_of(film(tmp_path / "film.dcm"))
    assert set(made) == set(KINDS)
    for one in made.values():
        assert (one.PatientName, one.PatientID, one.AccessionNumber) == (NAME, PATIENT, ACCESSION)
        assert one.StudyInstanceUID == STUDY and one.StudyDate == "20240131"
        assert one.Manufacturer == "afire" and one.ManufacturerModelName == "afire detect"
        assert "research only" in one.SeriesDescription
    for name in ("SeriesInstanceUID", "SOPInstanceUID"):
        ids = {str(one[name].value) for one in made.values()}
        assert len(ids) == len(KINDS) and not ids & {SERIES, instance(0)}


def test_what_a_film_writes_badly_is_left_empty(tmp_path: Path) -> None:
    """An age without a unit, a birthday in words; names and ids are never touched."""
    path = film(tmp_path / "film.dcm", **BADLY_WRITTEN)
    for made in made_of(path).values():
        assert (made.PatientName, made.PatientID, made.AccessionNumber) == (NAME, PATIENT, ACCESSION)
        assert not made.get("PatientAge") and not made.PatientBirthDate and not made.StudyDate and not made.StudyTime
    kept = film(tmp_path / "other.dcm", PatientAge="081Y", StudyTime="101500.25")
    for made in made_of(kept).values():
        assert (made.PatientAge, made.StudyTime, made.StudyDate) == ("081Y", "101500.25", "20240131")


def test_ids_follow_from_film_model_and_kind(tmp_path: Path) -> None:
    first, other = film(tmp_path / "a.dcm"), film(tmp_path / "b.dcm", number=1)

    def ids(path: Path, model_hash: str = HASH) -> tuple[str, str]:
        data = maker(("sc",), model_hash)(drawing(path))["sc"]
        one = pydicom.dcmread(io.BytesIO(data))
        return str(one.SeriesInstanceUID), str(one.SOPInstanceUID)

    assert ids(first) == ids(first)
    assert ids(other)[0] == ids(first)[0] and ids(other)[1] != ids(first)[1]
    assert not set(ids(first, "cd" * 32)) & set(ids(first))


def test_the_capture_shows_film_scale_and_warning(tmp_path: Path) -> None:
    capture = made_of(film(tmp_path / "film.dcm"), ("sc",))["sc"]
    assert capture.SOPClassUID == SecondaryCaptureImageStorage == capture.file_meta.MediaStorageSOPClassUID
    assert list(capture.ImageType) == ["DERIVED", "SECONDARY"] and capture.BurnedInAnnotation == "YES"
    assert "not a medical device" in capture.DerivationDescription and HASH[:12] in capture.DerivationDescription
    assert capture.SourceImageSequence[0].ReferencedSOPInstanceUID == instance(0)
    page = capture.pixel_array
    assert page.shape[0] > 512 and page.shape[2] == 3
    assert (page[-80:] > 250).all(axis=2).any(), "white letters below the film"
    (tmp_path / "capture.dcm").write_bytes(maker(("sc",))(drawing(tmp_path / "film.dcm"))["sc"])
    assert read_film(tmp_path / "capture.dcm")[1].colour, "our reader takes it for what it is"


def texts(report: Dataset) -> dict[str, str]:
    """Everything in words in the tree of a report: the meaning of its code -> text."""
    found: dict[str, str] = {}

    def walk(item: Dataset) -> None:
        name = item.ConceptNameCodeSequence[0].CodeMeaning if item.get("ConceptNameCodeSequence") else ""
        if item.ValueType == "TEXT":
            found[name] = str(item.TextValue)
        if item.ValueType == "CODE":
            found[name] = str(item.ConceptCodeSequence[0].CodeMeaning)
        if item.ValueType == "NUM":
            found[name] = str(item.MeasuredValueSequence[0].NumericValue)
        for child in item.get("ContentSequence", []):
            walk(child)

    walk(report)
    return found


def test_the_report_has_score_p_value_region_and_model(tmp_path: Path) -> None:
    path = tmp_path / "report.dcm"
    path.write_bytes(maker(("sr",))(drawing(film(tmp_path / "film.dcm")))["sr"])
    report = srread(path)
    assert report.VerificationFlag == "UNVERIFIED" and report.PreliminaryFlag == "PRELIMINARY"
    [group] = report.content.get_image_measurement_groups()
    values = {item.name.value: float(item.value) for item in group.get_measurements()}
    assert values["score"] == pytest.approx(2.25) and values["p-value"] == pytest.approx(6 / 51)
    [region] = report.content.get_planar_roi_measurement_groups()
    assert float(region.get_measurements()[0].value) == pytest.approx(5.0)
    box = region.roi.value
    assert box.shape == (5, 2) and 0 < box[:, 0].min() < box[:, 0].max() <= 0.6 * 48
    assert box[:, 1].max() <= 0.5 * 48, "the upper left, in pixels of the film itself"
    said = texts(report)
    assert said["SHA-256 of the model"] == HASH and "medical device" in said["Comment"]
    assert said["Most deviating region"].startswith("right upper zone")


def test_a_film_out_of_domain_has_a_reason_and_no_number(tmp_path: Path) -> None:
    made = made_of(film(tmp_path / "film.dcm"), spot=None, reason="looks inverted")
    assert set(made) == {"sc", "sr"}
    said = texts(made["sr"])
    assert said["Why the film was not scored"] == "looks inverted"
    assert said["Status of the film"] == "Out of domain, not scored"
    assert not any("score," in name or "Share" in name for name in said), "no measurement"
    assert b"NUM" not in maker(("sr",))(drawing(tmp_path / "film.dcm", None, "x"))["sr"]
    assert "out of domain" in made["sc"].DerivationDescription and "score 9" not in made["sc"].DerivationDescription
    assert (made["sc"].pixel_array[-80:] > 250).all(axis=2).any()


def test_the_segmentation_is_the_region_that_the_overlay_colours(tmp_path: Path) -> None:
    path = tmp_path / "region.dcm"
    path.write_bytes(maker(("seg",))(drawing(film(tmp_path / "film.dcm")))["seg"])
    mask = segread(path).pixel_array.reshape(48, 48)
    rows, columns = np.nonzero(mask)
    assert set(np.unique(mask)) == {0, 1}
    assert rows.mean() == pytest.approx(48 * 2 / 8, abs=2) and columns.mean() == pytest.approx(48 * 2.5 / 8, abs=2)


def test_the_presentation_state_draws_the_box_on_the_film(tmp_path: Path) -> None:
    state = made_of(film(tmp_path / "film.dcm"), ("gsps",))["gsps"]
    drawn = state.GraphicAnnotationSequence[0]
    assert drawn.GraphicObjectSequence[0].GraphicType == "POLYLINE"
    assert "not a medical device" in drawn.TextObjectSequence[0].UnformattedTextValue
    referenced = state.ReferencedSeriesSequence[0].ReferencedImageSequence[0]
    assert referenced.ReferencedSOPInstanceUID == instance(0)


def test_where_nothing_stands_out_there_is_no_region(tmp_path: Path) -> None:
    made = made_of(film(tmp_path / "film.dcm"), spot=1.0)
    assert set(made) == {"sc", "sr"}
    assert not texts(made["sr"]).get("Deviation from normal films, in their sd")


@pytest.mark.parametrize(
    "tags",
    [
        {},
        {"PatientName": None, "PatientID": None, "AccessionNumber": None, "StudyInstanceUID": None, "StudyDate": None},
        {"PatientOrientation": ["L", "F"], "Laterality": "", "PatientSex": "unknown", "InstanceNumber": None},
        {
            "PixelSpacing": [0.2, 0.2],
            "WindowCenter": 2000,
            "WindowWidth": 3000,
            "RescaleSlope": 1,
            "RescaleIntercept": 0,
        },
        {"SpecificCharacterSet": "ISO_IR 100", "PhotometricInterpretation": "MONOCHROME1"},
        {"Modality": "DX", "SOPClassUID": SecondaryCaptureImageStorage, "BodyPartExamined": None},
        BADLY_WRITTEN,
    ],
)
@pytest.mark.parametrize("spot", [5.0, None])
def test_dciodvfy_finds_no_error(tmp_path: Path, tags: dict[str, object], spot: float | None) -> None:
    made = maker()(drawing(film(tmp_path / "film.dcm", **tags), spot, "unlike the training films"))
    assert len(made) == (4 if spot else 2)
    if shutil.which("dciodvfy") is None:
        pytest.skip("dciodvfy (dicom3tools) is not installed")
    for kind, data in made.items():
        path = tmp_path / f"{kind}.dcm"
        path.write_bytes(data)
        done = subprocess.run(["dciodvfy", str(path)], capture_output=True, text=True, errors="replace")
        errors = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("Error")]
        assert not errors, (kind, errors)


@pytest.mark.parametrize(
    "tags",
    [
        {},
        {"PatientName": None, "StudyInstanceUID": None, "InstanceNumber": None, "BodyPartExamined": None},
        {"SpecificCharacterSet": "ISO_IR 100", "Laterality": "L", "InstanceNumber": 17, "PatientName": "A^B=C"},
        {"SOPClassUID": SecondaryCaptureImageStorage, "Modality": "DX", "StudyDescription": "Thorax, zweite Aufnahme"},
    ],
)
@pytest.mark.parametrize("spot", [5.0, 1.0, None])
def test_what_is_filled_in_is_what_the_libraries_would_write(
    tmp_path: Path, tags: dict[str, object], spot: float | None
) -> None:
    """Two films, so that nothing of the first is left in the second."""
    film(tmp_path / "other.dcm", number=5)
    maker()(drawing(tmp_path / "other.dcm", spot, "another reason, and a longer one"))
    one = drawing(film(tmp_path / "film.dcm", **tags), spot, "unlike the training films")
    written = maker(("sc", "sr"))(one)
    source, (picture, region) = read_source(one.film.path), maker()._picture(one)
    finding = Finding.of(one.result, maker().rule, region, HASH)
    ids = {kind: pydicom.dcmread(io.BytesIO(data)) for kind, data in written.items()}
    for kind, now in ids.items():
        own: Ids = {
            "series_instance_uid": series_uid(source.study, HASH, kind),
            "series_number": int(now.SeriesNumber),
            "series_description": str(now.SeriesDescription),
            "sop_instance_uid": result_uid(source.instance, HASH, kind),
            "instance_number": source.number,
        }
        if kind == "sc":
            plain = secondary_capture(source, finding, captioned(picture, maker().scale, finding), own)
            place_on_body(plain, source, is_image=True)
        else:
            plain = structured_report(source, finding, own)
        name_patient(plain, source)
        stream = io.BytesIO()
        pydicom.dcmwrite(stream, plain, enforce_file_format=True)
        library = pydicom.dcmread(io.BytesIO(stream.getvalue()))
        for name in ("ContentTime", "TimeOfSecondaryCapture"):  # a second may have passed
            if name in library:
                now[name].value = library[name].value
        assert now == library and now.file_meta == library.file_meta, kind


def test_a_damaged_film_is_one_message(tmp_path: Path) -> None:
    broken_sequence = b"\x08\x00\x20\x00SQ\0\0\xff\xff\0\0"  # where the date of the study should be
    (tmp_path / "film.dcm").write_bytes(bytes(128) + b"DICM" + broken_sequence + b"abc")
    with pytest.raises(ImageError):
        maker()(drawing(tmp_path / "film.dcm"))


def test_no_library_is_told_who_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    silence_libraries()
    film(tmp_path / "film.dcm", PatientName="Odd=Name=Of^Müller=Four", PatientBirthDate="notadate")
    with caplog.at_level("DEBUG"):
        maker()(drawing(tmp_path / "film.dcm"))
    assert not any(word in caplog.text for word in (*IDENTIFYING, "Odd", "notadate"))


def test_the_writer_adds_to_what_the_painter_draws(tmp_path: Path) -> None:
    writer = ObjectWriter(tmp_path, maker(("sc", "sr")), lambda _: Drawn({"overlay": "a.jpg"}, ("noted",)))
    assert writer(drawing(film(tmp_path / "film.dcm"))) == Drawn({"overlay": "a.jpg"}, ("noted",))
    assert {path.name for path in (tmp_path / "dicom/000").iterdir()} == {"000003-sc.dcm", "000003-sr.dcm"}
    (tmp_path / "film.dcm").unlink()
    assert "no DICOM results" in ObjectWriter(tmp_path, maker())(drawing(tmp_path / "film.dcm")).notes[0]


def test_kinds() -> None:
    assert parse_kinds("SR, sc", "--objects") == ("sc", "sr")
    for text in ("", "pm", "sc;sr"):
        with pytest.raises(UserError, match="--objects"):
            parse_kinds(text, "--objects")


def test_the_region_is_the_area_around_the_hottest_place() -> None:
    levels = np.zeros((6, 8), np.uint8)
    levels[0, 0:3] = 5
    levels[4:6, 5:8] = 3
    levels[5, 6] = 9
    region = Region.of(levels)
    assert region is not None and region.mask.sum() == 6
    assert region.box(60, 80) == (50, 40, 80, 60)
    assert region.on_film(60, 80).sum() == 600 and region.on_film(7, 9).shape == (7, 9)
    assert Region.of(np.zeros((2, 2), np.uint8)) is None


def test_a_caption_fits_narrow_and_wide_films(tmp_path: Path) -> None:
    for shape in ((512, 200), (100, 512)):
        one = drawing(film(tmp_path / "film.dcm"))
        wide = Drawing(
            ReadFilm(3, "x", one.film.path, one.film.square, np.zeros(shape, np.uint8), one.film.info),
            one.result, one.heat, None,
        )  # fmt: skip
        capture = pydicom.dcmread(io.BytesIO(maker(("sc",))(wide)["sc"]))
        assert capture.Columns >= 420
