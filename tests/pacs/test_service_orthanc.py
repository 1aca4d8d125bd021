"""The drill with a real PACS, Debian's Orthanc: 40 films, kills on both sides, and everything is there once."""

from __future__ import annotations

import io
import json
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pydicom
import pytest

pytest.importorskip("pynetdicom")

from pydicom.uid import ComprehensiveSRStorage, SecondaryCaptureImageStorage

from tests.pacs.drill import FilmSender, die_after_each_step, lives
from tests.pacs.films import STUDY, dataset, encoded, film, instance, pixels
from tests.pacs.orthanc import PROGRAM, Orthanc, free_port, storescu, web_plugin
from tests.pacs.peers import LOOPBACK, StartService, store, wait_for
from tests.pacs.test_service import expected, identifying

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        PROGRAM is None or web_plugin() is None, reason="orthanc and orthanc-dicomweb are not installed"
    ),
]
FILMS = 40


@pytest.fixture
def orthanc(tmp_path: Path) -> Iterator[Orthanc]:
    one = Orthanc(tmp_path / "orthanc").start()
    yield one
    one.stop()


def test_nothing_is_lost_and_nothing_doubled(orthanc: Orthanc, model: Path, tmp_path: Path) -> None:
    spool, send = tmp_path / "spool", f"dicomweb:{orthanc.url}/dicom-web"
    films = FilmSender(range(FILMS))

    def kill_the_pacs_too(step: str) -> None:
        if step in ("received", "sent"):  # once when it is fresh, and once with results in it
            orthanc.kill()
            orthanc.start()

    die_after_each_step(spool, send, model, films, kill_the_pacs_too)
    with lives(spool, send, model) as (_, port):
        assert port is not None and store(port, dataset(0), called="OTHER") == [-1]
        films.send_at_once(port, 8)
        orthanc.kill()
        films.pending = list(range(0, FILMS, 3))  # duplicates
        films.send_at_once(port, 8)
        orthanc.start()
        wait_for(lambda: orthanc.ids() == expected(model, range(FILMS)), 60)
        wait_for(lambda: not any(any((spool / state).iterdir()) for state in ("incoming", "scored", "outgoing")))
    assert len(orthanc.get("/instances")) == 2 * FILMS, "each once"
    assert identifying(spool) == []
    assert not any((spool / "failed").iterdir())


def test_a_film_sent_by_storescu_is_seen_in_orthanc(
    start_service: StartService, orthanc: Orthanc, model: Path, tmp_path: Path
) -> None:
    service = start_service(send=f"dicomweb:{orthanc.url}/dicom-web", kinds=("sc", "sr", "seg", "gsps"))
    path = film(tmp_path / "film.dcm")
    program = storescu()
    if program is None:
        pytest.skip("storescu (dcmtk) is not installed")
    orthanc.post("/instances", path.read_bytes())
    words = ["-aet", "SENDER", "-aec", "AFIRE", LOOPBACK, str(service.port), str(path)]
    subprocess.run([program, *words], check=True, capture_output=True)
    wait_for(lambda: expected(model, [0]) <= orthanc.ids() and not service.spool.has_work())
    [study] = orthanc.get("/studies?expand")
    assert study["MainDicomTags"]["StudyInstanceUID"] == STUDY
    held = orthanc.instances()
    made = {uid: pydicom.dcmread(io.BytesIO(orthanc.file(held[uid]))) for uid in expected(model, [0])}
    assert {one.SOPClassUID for one in made.values()} == {SecondaryCaptureImageStorage, ComprehensiveSRStorage}
    capture = next(uid for uid, one in made.items() if one.SOPClassUID == SecondaryCaptureImageStorage)
    with urllib.request.urlopen(f"{orthanc.url}/instances/{held[capture]}/preview") as answer:
        assert answer.read().startswith(b"\x89PNG"), "Orthanc draws it"


def test_orthanc_routes_films_and_gets_results_back(start_service: StartService, model: Path, tmp_path: Path) -> None:
    """Its job survives a full queue and our own results, which it sends along with the study."""
    port = free_port()
    orthanc = Orthanc(tmp_path / "orthanc", {"afire": ["AFIRE", LOOPBACK, port]}).start()
    try:
        service = start_service(send=f"dimse:ORTHANC@{LOOPBACK}:{orthanc.dicom_port}", port=port)
        ids = [orthanc.post("/instances", encoded(dataset(number)))["ID"] for number in range(8)]
        done = orthanc.post("/modalities/afire/store", json.dumps(ids).encode())
        assert done["FailedInstancesCount"] == 0 and done["InstancesCount"] == 8
        wait_for(lambda: orthanc.ids() == expected(model, range(8)) | {instance(number) for number in range(8)})
        captures = [
            one
            for one in orthanc.get("/instances")
            if orthanc.get(f"/instances/{one}/simplified-tags")["Modality"] == "OT"
        ]
        again = orthanc.post("/modalities/afire/store", json.dumps(captures).encode())
        assert again["FailedInstancesCount"] == 0
        wait_for(lambda: not service.spool.has_work())
        assert len(orthanc.get("/instances")) == 24, "results of results there are none"
        other = orthanc.post("/instances", encoded(dataset(50, PixelData=pixels(51).tobytes())))["ID"]
        assert orthanc.post("/modalities/afire/store", json.dumps([other]).encode())["FailedInstancesCount"] == 0
    finally:
        orthanc.stop()
