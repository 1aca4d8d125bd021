"""Manifests: reading and writing lose nothing, and no path leaves the root."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from afire.data import manifest as manifest_module
from afire.data.manifest import (
    Box,
    check_relative,
    inside_root,
    make_manifest,
    parse_boxes,
    read_manifest,
    write_manifest,
)
from afire.errors import UserError


def table(**columns: object) -> pd.DataFrame:
    return pd.DataFrame({"image": ["a.png", "sub/b.png"], **columns})


def test_columns_are_completed_and_ordered(tmp_path: Path) -> None:
    manifest = make_manifest(
        table(**{"meta:age": [57, 58], "label:Mass": [1, 0], "split": ["train", "test"]}), tmp_path
    )
    assert list(manifest.table.columns) == [
        "image", "split", "patient", "view", "normal", "label:Mass", "boxes", "mask", "rle", "meta:age",
    ]  # fmt: skip
    assert manifest.labels == ["Mass"]
    assert manifest.table["normal"].isna().all()
    assert manifest.table["patient"].tolist() == ["a.png", "sub/b.png"], "a film without a patient is its own"
    assert manifest.path(1) == tmp_path / "sub/b.png"
    assert manifest.mask_path(0) is None


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".CSV"])
def test_round_trip(tmp_path: Path, suffix: str) -> None:
    boxes = json.dumps([{"label": "Mass", "x": 0.1, "y": 0.2, "w": 0.3, "h": 0.4}])
    columns = {
        "split": ["train", ""],
        "patient": ["007", "NA"],
        "view": ["PA", None],
        "normal": [1.0, math.nan],
        "label:Mass": [0.0, math.nan],
        "boxes": [boxes, ""],
        "mask": ["", "masks/b.png"],
        "rle": [json.dumps({"size": [2, 2], "runs": [[0, 1]]}), ""],
        "meta:width": [2682, 2500],
        "meta:spacing": [0.14300000000000002, math.nan],
        "meta:code": ["007", 'say "hi", ü'],
    }
    written = make_manifest(table(**columns), tmp_path / "films", {"builder": "test"})
    path = tmp_path / "lists" / f"m{suffix}"
    write_manifest(written, path)
    read = read_manifest(path)
    assert read.hash == written.hash
    assert read.root == tmp_path / "films"
    assert read.info == {"builder": "test"}
    pd.testing.assert_frame_equal(read.table, written.table)
    assert read.table["patient"].tolist() == ["007", "NA"]
    assert read.table["meta:code"].tolist() == ["007", 'say "hi", ü']
    assert read.boxes(0) == [Box("Mass", 0.1, 0.2, 0.3, 0.4)] and read.boxes(1) == []
    assert read.mask_path(1) == tmp_path / "films/masks/b.png"


cell = st.one_of(
    st.sampled_from(["", "NA", "nan", "null", "None", "007", "1", "1.0", "1e5", "-0", "inf", "True", " x ", '"', "#"]),
    st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=8),
)
label = st.sampled_from([0.0, 1.0, math.nan])
number = st.one_of(st.integers(-(10**12), 10**12), st.floats(allow_nan=True, allow_infinity=True))


@settings(max_examples=60, deadline=None)
@example(rows=[("p", 1.0, "x", 10**11)])
@example(rows=[("p", 1.0, "nan", math.nan)])
@given(rows=st.lists(st.tuples(cell, label, cell, number), min_size=1, max_size=5))
def test_csv_and_parquet_have_one_hash(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, float, str, float]]
) -> None:
    folder = tmp_path_factory.mktemp("m")
    patient, finding, text, value = zip(*rows, strict=True)
    films = [f"{i}.png" for i in range(len(rows))]
    columns = {"image": films, "patient": patient, "label:A": finding, "meta:text": text, "meta:n": value}
    manifest = make_manifest(pd.DataFrame(columns), folder)
    for name in ("m.csv", "m.parquet"):
        write_manifest(manifest, folder / name)
        assert read_manifest(folder / name).hash == manifest.hash


def test_the_hash_sees_every_cell_and_not_the_root(tmp_path: Path) -> None:
    plain = make_manifest(table(patient=["1", "2"], normal=[1, 0]), tmp_path)
    assert make_manifest(table(patient=[1, 2], normal=[1.0, 0.0]), tmp_path / "other").hash == plain.hash
    assert make_manifest(table(patient=["1", "3"], normal=[1, 0]), tmp_path).hash != plain.hash
    assert make_manifest(table(patient=["1", "2"], normal=[1, None]), tmp_path).hash != plain.hash


def test_ids_that_pandas_made_floats(tmp_path: Path) -> None:
    manifest = make_manifest(table(patient=[12.0, math.nan]), tmp_path)
    assert manifest.table["patient"].tolist() == ["12", "sub/b.png"]


LEAVING = [
    "/etc/passwd",
    "../x.png",
    "a/../../x.png",
    "..",
    "a/..",
    "C:/x.png",
    "c:x.png",
    "\\\\server\\x",
    "..\\x",
    "a\0b",
]


@pytest.mark.parametrize("path", LEAVING)
@pytest.mark.parametrize("column", ["image", "mask"])
def test_paths_that_leave_the_root_are_refused(tmp_path: Path, path: str, column: str) -> None:
    with pytest.raises(UserError, match=f"{column} path"):
        check_relative(path, column)
    with pytest.raises(UserError, match=f"{column} path .* leaves the manifest's root"):
        make_manifest(
            pd.DataFrame({"image": ["ok.png", "b.png"], "mask": ["", ""], column: ["fine.png", path]}), tmp_path
        )


@pytest.mark.parametrize("path", ["a..b.png", "..a/b.png", ".hidden/x.png", "a b.png", "films: new/x.png", "ü/片.png"])
def test_paths_that_only_look_odd_are_kept(tmp_path: Path, path: str) -> None:
    assert make_manifest(pd.DataFrame({"image": [path]}), tmp_path).table["image"].tolist() == [path]


def test_paths_are_tidied_before_they_are_compared(tmp_path: Path) -> None:
    films = ["a\\b.png", "./c.png", "d//e/./f.png"]
    tidy = make_manifest(pd.DataFrame({"image": films}), tmp_path)
    assert tidy.table["image"].tolist() == ["a/b.png", "c.png", "d/e/f.png"]
    with pytest.raises(UserError, match=r"c.png more than once"):
        make_manifest(pd.DataFrame({"image": ["c.png", "./c.png"]}), tmp_path)


def test_links_may_not_leave_the_root(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    (root / "real").mkdir(parents=True)
    outside.mkdir()
    (outside / "secret.png").write_bytes(b"x")
    (root / "real" / "a.png").write_bytes(b"x")
    (root / "out").symlink_to(outside)
    (root / "within.png").symlink_to(root / "real" / "a.png")
    assert inside_root(root, "within.png") == root / "within.png"
    with pytest.raises(UserError, match="link that leaves the root"):
        inside_root(root, "out/secret.png")
    manifest = make_manifest(pd.DataFrame({"image": ["real/a.png"], "mask": ["out/secret.png"]}), root)
    assert manifest.path(0).read_bytes() == b"x"
    with pytest.raises(UserError, match="link that leaves the root"):
        manifest.mask_path(0)


def test_a_root_that_is_itself_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a.png").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert inside_root(tmp_path / "link", "a.png").read_bytes() == b"x"


@pytest.mark.parametrize("empty", ["", ".", None])
def test_an_empty_image_path_is_refused(tmp_path: Path, empty: str | None) -> None:
    with pytest.raises(UserError, match=r"image path in row 2 .* is empty"):
        make_manifest(pd.DataFrame({"image": ["a.png", empty]}), tmp_path)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"image": ["a.png", "a.png"]}, "a.png more than once \\(1 repeated"),
        ({"split": ["train", "dev"]}, "split 'dev' is not one of train, val, test"),
        ({"label:Mass": [1, -1]}, "column label:Mass holds '-1' in row 2 \\(1 such rows\\); allowed are 1, 0"),
        ({"label:Mass": ["1", "yes"]}, "holds 'yes' in row 2"),
        ({"normal": [0.5, 1]}, "column normal holds '0.5' in row 1"),
        ({"age": [1, 2]}, "unknown manifest columns age; name labels label:X"),
        ({"label:": [1, 0]}, "unknown manifest columns label:"),
        ({"boxes": ["", "[1]"]}, "boxes of sub/b.png are not a JSON list"),
        ({"boxes": ["", "{"]}, "boxes of sub/b.png are not a JSON list"),
        ({"view": ["PA", "bad\udcff"]}, "column view .* not valid text"),
    ],
)
def test_wrong_tables_are_refused_in_words(tmp_path: Path, columns: dict[str, list[object]], message: str) -> None:
    frame = pd.DataFrame({name: pd.Series(values, dtype=object) for name, values in columns.items()})
    if "image" not in frame:
        frame["image"] = ["a.png", "sub/b.png"]
    with pytest.raises(UserError, match=message):
        make_manifest(frame, tmp_path)


@pytest.mark.parametrize("text", ["1", "1.0", " 0 ", "", "nan", "NaN", "None", "NA"])
def test_labels_as_text(tmp_path: Path, text: str) -> None:
    value = make_manifest(pd.DataFrame({"image": ["a"], "label:A": [text]}), tmp_path).table["label:A"].iloc[0]
    assert math.isnan(value) if not text.strip() or text.isalpha() else value == float(text)


def test_boxes_outside_the_film_are_refused() -> None:
    good = {"label": "Mass", "x": 0.5, "y": 0.5, "w": 0.5, "h": 0.5}
    assert parse_boxes(json.dumps([good])) == [Box("Mass", 0.5, 0.5, 0.5, 0.5)]
    for change in ({"x": 0.6}, {"y": -0.1}, {"w": 0}, {"h": 512}, *({key: math.nan} for key in "xywh")):
        with pytest.raises(UserError, match=r"a box of film.png lies outside"):
            parse_boxes(json.dumps([{**good, **change}]), "film.png")


def test_where_keeps_the_rest(tmp_path: Path) -> None:
    manifest = make_manifest(table(normal=[0, 1]), tmp_path, {"builder": "x"})
    kept = manifest.where(manifest.table["normal"] == 1)
    assert kept.table["image"].tolist() == ["sub/b.png"]
    assert kept.path(0) == tmp_path / "sub/b.png"
    assert kept.info == manifest.info and len(manifest) == 2


def test_a_plain_csv_is_a_manifest_in_its_own_folder(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text("\ufeffimage,label:Mass\nx/a.png,1\nx/b.png,\n", encoding="utf-8")
    manifest = read_manifest(tmp_path / "mine.csv")
    assert manifest.path(0) == tmp_path / "x/a.png"
    assert manifest.table["label:Mass"].tolist()[0] == 1.0 and math.isnan(manifest.table["label:Mass"].iloc[1])
    assert read_manifest(tmp_path / "mine.csv", root=tmp_path / "other").root == tmp_path / "other"


def test_a_csv_saved_again_by_a_spreadsheet(tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    manifest = make_manifest(table(), tmp_path / "films", {"builder": "x", "note": "a, b"})
    write_manifest(manifest, path)
    first, _, rest = path.read_text().partition("\n")
    cells = ",".join('"' + part.replace('"', '""') + '"' for part in first.split(","))
    path.write_text(f"{cells},,,,\n{rest}")
    assert read_manifest(path).info == manifest.info
    assert read_manifest(path).hash == manifest.hash


def test_manifest_and_films_can_move_together(tmp_path: Path) -> None:
    (tmp_path / "set" / "films").mkdir(parents=True)
    write_manifest(make_manifest(table(), tmp_path / "set" / "films"), tmp_path / "set" / "m.parquet")
    (tmp_path / "set").rename(tmp_path / "moved")
    assert read_manifest(tmp_path / "moved" / "m.parquet").path(0) == tmp_path / "moved/films/a.png"


def test_a_folder_name_is_not_a_column(tmp_path: Path) -> None:
    path = tmp_path / "split=train" / "m.parquet"
    write_manifest(make_manifest(table(split=["test", ""]), tmp_path), path)
    assert read_manifest(path).table["split"].tolist() == ["test", ""]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("m.parquet", b"PAR1 truncated", "not a readable Parquet file"),
        ("m.csv", b"", "not a readable CSV file"),
        ("m.csv", b"image\na.png\nb.png,1,2\n", "not a readable CSV file"),
        ("m.csv", b"image\nb.png,1\n", "not a readable CSV file"),
        ("m.csv", "image\nü.png\n".encode("latin-1"), r"m.csv is not UTF-8 text \(byte 6\); save it as CSV UTF-8"),
        ("m.csv", b"# afire manifest {truncated\nimage\na.png\n", "truncated; build it again"),
        ("m.csv", b"# afire manifest [1]\nimage\na.png\n", "truncated; build it again"),
        ("m.csv", b"path,label\na.png,1\n", "m.csv: the manifest has no column 'image'; its columns are path, label"),
        ("m.csv", b"image\n", "has no rows"),
        ("m.txt", b"image\na.png\n", "ends in .parquet or .csv"),
        ("missing.csv", None, "missing.csv does not exist"),
    ],
)
def test_unreadable_files(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        read_manifest(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_an_unknown_ending_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"ends in .parquet or .csv"):
        write_manifest(make_manifest(table(), tmp_path), tmp_path / "m.xlsx")
    assert list(tmp_path.iterdir()) == []


def test_a_large_table_is_checked_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """400,000 films must not mean 400,000 calls; counted, because a clock tells more about the machine."""
    calls: list[str] = []
    monkeypatch.setattr(
        manifest_module, "check_relative", lambda value, what: calls.append(value) or check_relative(value, what)
    )
    films = pd.DataFrame({"image": [f"files/p{i // 3:05d}/{i:05d}.jpg" for i in range(20_000)]})
    make_manifest(films, tmp_path)
    assert calls == []
    films.loc[19_999, "image"] = "../x.jpg"
    with pytest.raises(UserError, match="leaves the manifest's root"):
        make_manifest(films, tmp_path)
    assert calls == ["../x.jpg"]


def test_a_parquet_file_with_a_damaged_text_is_a_message(tmp_path: Path) -> None:
    path = tmp_path / "m.parquet"
    pq.write_table(pa.table({"image": ["a.png"], "patient": ["20f6d8b8"]}), path, compression="none")
    path.write_bytes(path.read_bytes().replace(b"20f6d8b8", b"20f6\xe48b8"))  # one bit: no longer UTF-8
    with pytest.raises(UserError, match=r"m\.parquet is not a readable Parquet file"):
        read_manifest(path)


def test_a_parquet_file_with_damaged_notes_of_pandas_is_a_message(tmp_path: Path) -> None:
    path = tmp_path / "m.parquet"
    notes = {"pandas": json.dumps({"index_columns": [], "columns": [{}], "column_indexes": []})}
    pq.write_table(pa.table({"image": ["a.png"]}).replace_schema_metadata(notes), path)
    with pytest.raises(UserError, match=r"m\.parquet is not a readable Parquet file"):
        read_manifest(path)
