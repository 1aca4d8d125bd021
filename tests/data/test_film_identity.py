"""No name gets in: ids are hashed, views come from a list, whichever way a table is made or read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from pydicom.uid import DeflatedExplicitVRLittleEndian, ExplicitVRLittleEndian, ImplicitVRLittleEndian
from typer.testing import CliRunner

from afire.cli import app
from afire.data.dicom import read_header
from afire.data.film import hash_patient, hash_patients, view_names, view_of
from afire.data.manifest import Manifest, make_manifest, read_manifest, write_manifest
from afire.data.sources.folders import build_folder
from afire.data.splits import Split, fraction_of, random_split, read_split, write_split
from tests.data.dicom_films import make, to_bytes, write

NAME, SECRET = "DOE^JANE 19700101", ("DOE", "JANE", "19700101")
GREY = np.arange(64, dtype=np.uint8).reshape(8, 8)


def without_preamble(data: bytes) -> bytes:
    """As old software wrote it: the file meta group, or the data set itself, comes first."""
    return data[132:]


@pytest.mark.parametrize("syntax", [ExplicitVRLittleEndian, ImplicitVRLittleEndian, DeflatedExplicitVRLittleEndian])
def test_one_patient_in_files_with_and_without_a_preamble(tmp_path: Path, syntax: str) -> None:
    dataset = make(GREY, PatientID=NAME, ViewPosition="PA")
    dataset.file_meta.TransferSyntaxUID = syntax
    data = to_bytes(dataset)
    write(tmp_path, data, "1.dcm")
    write(tmp_path, without_preamble(data), "2.dcm")
    table = build_folder(tmp_path, headers=True).table
    assert table["patient"].tolist() == [hash_patient(NAME)] * 2 and table["view"].tolist() == ["PA", "PA"]


def test_an_image_that_is_not_dicom_has_no_header(tmp_path: Path) -> None:
    Image.fromarray(GREY).save(tmp_path / "a.png")
    (tmp_path / "b.dcm").write_bytes(b"nothing of the kind")
    table = build_folder(tmp_path, headers=True).table
    assert table["patient"].tolist() == ["a.png", "b.dcm"] and table["view"].tolist() == ["", ""]


def test_text_in_the_tags_of_the_view_stays_out(tmp_path: Path) -> None:
    write(tmp_path, make(GREY, PatientID="1", ViewPosition="DOE JANE"), "1.dcm")
    write(tmp_path, make(GREY, PatientID="1", ViewPosition="", PatientPosition="AP"), "2.dcm")
    assert build_folder(tmp_path, headers=True).table["view"].tolist() == ["", "AP"]
    assert read_header(tmp_path / "1.dcm") == (hash_patient("1"), "")


def test_views_come_from_a_list() -> None:
    assert [view_of(text) for text in ("pa", " A.P. ", "Postero-anterior", "LL", "HFS", "")] == [
        *("PA", "AP", "PA", "LATERAL", "", "")
    ]
    assert view_names(pd.Series(["PA", NAME, " ", "frontal"])).tolist() == ["PA", "OTHER", "", "FRONTAL"]


def test_a_hash_is_not_hashed_again() -> None:
    once = hash_patients(pd.Series([NAME, "", "7 ", "7"]))
    assert once.tolist() == [hash_patient(NAME), "", hash_patient("7"), hash_patient("7")]
    assert hash_patients(once).tolist() == once.tolist()


def films(folder: Path, count: int = 8) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{number}.png" for number in range(count)]
    for name in names:
        Image.fromarray(GREY).save(folder / name)
    return names


def written(folder: Path) -> str:
    """All that was written, Parquet as CSV."""
    texts = [pd.read_parquet(file).to_csv() for file in folder.rglob("*.parquet")]
    return "".join([*texts, *(file.read_text() for end in ("csv", "json") for file in folder.rglob(f"*.{end}"))])


def test_a_column_of_patients_reaches_neither_manifest_nor_split(tmp_path: Path) -> None:
    names = films(tmp_path / "films")
    who = [f"{NAME} {number // 2}" for number in range(8)]
    table = pd.DataFrame({"image": names, "who": who, "pos": [NAME] * 8, "sick": [0, 1] * 4})
    table.to_csv(tmp_path / "list.csv", index=False)
    out = tmp_path / "out"
    words = ["data", "build", "csv", "--root", tmp_path / "films", "--csv", tmp_path / "list.csv"]
    words += ["--patient-column", "who", "--view-column", "pos", "--label-columns", "sick"]
    for name in ("m.parquet", "m.csv"):
        CliRunner().invoke(app, [*map(str, words), "--out", str(out / name)], catch_exceptions=False)
        split = ["data", "split", "--data", out / name, "--test", "0.25", "--out", out / "splits"]
        assert CliRunner().invoke(app, [*map(str, split)], catch_exceptions=False).exit_code == 0
    manifest = read_manifest(out / "m.parquet")
    assert manifest.table["patient"].tolist() == [hash_patient(text) for text in who]
    assert manifest.table["patient"].nunique() == 4 and set(manifest.table["view"]) == {"OTHER"}
    assert read_manifest(out / "m.csv").hash == manifest.hash, "what afire wrote is read as it is"
    assert not any(word in written(out) for word in SECRET)


@pytest.mark.parametrize("name", ["own.csv", "own.parquet"])
def test_a_manifest_written_by_hand_is_read_without_names(tmp_path: Path, name: str) -> None:
    names = films(tmp_path, 3)
    table = pd.DataFrame({"image": names, "patient": [NAME, NAME, ""], "view": ["pa", NAME, ""]})
    table.to_csv(tmp_path / name, index=False) if name.endswith("csv") else table.to_parquet(tmp_path / name)
    manifest = read_manifest(tmp_path / name)
    assert manifest.table["patient"].tolist() == [hash_patient(NAME), hash_patient(NAME), "2.png"]
    assert manifest.table["view"].tolist() == ["PA", "OTHER", ""]
    write_manifest(manifest, tmp_path / "ours.csv")
    assert read_manifest(tmp_path / "ours.csv").hash == manifest.hash


def test_public_pseudonyms_stay(tmp_path: Path) -> None:
    public = make_manifest(pd.DataFrame({"image": ["a.png"], "patient": ["patient00001"]}), tmp_path)
    write_manifest(public, tmp_path / "m.csv")
    assert read_manifest(tmp_path / "m.csv").table["patient"].tolist() == ["patient00001"]


def test_a_split_of_plain_ids_fits_the_manifest_that_hashes_them(tmp_path: Path) -> None:
    """Split files of earlier versions name the ids of a column as they were."""
    table = pd.DataFrame(
        {"image": [f"{n}.png" for n in range(40)], "patient": [f"id{n // 2}" for n in range(38)] + ["", ""]}
    )
    plain = make_manifest(table, tmp_path)
    write_split(random_split(plain), tmp_path / "split.json")
    hashed = Manifest(
        plain.table.assign(
            patient=hash_patients(plain.table["patient"]).where(plain.patient_known, plain.table["image"])
        ),
        plain.root,
    )
    split: Split = read_split(tmp_path / "split.json")
    for part, rows in split.rows(hashed).items():
        assert np.array_equal(rows, split.rows(plain)[part])
    assert "id" in json.dumps(dict(split.patients)), "else this test shows nothing"
    assert len(fraction_of(split, hashed, 0.5).rows(hashed)["train"]) > 0
