"""The service between two peers that pynetdicom plays: films in, results out, whoever fails meanwhile."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("pynetdicom")

from pydicom.dataset import Dataset
from pydicom.uid import (
    ComprehensiveSRStorage,
    CTImageStorage,
    ExplicitVRBigEndian,
    ImplicitVRLittleEndian,
    JPEGBaseline8Bit,
    RLELossless,
    SecondaryCaptureImageStorage,
)

from afire.detect.base import AnomalyDetector
from afire.detect.run import detector_hash
from afire.errors import UserError
from afire.pacs.service import Service
from afire.pacs.source import result_uid
from tests.pacs.films import IDENTIFYING, STUDY, dataset, instance, pixels
from tests.pacs.peers import LOOPBACK, Pacs, StartService, store, wait_for
from tests.pacs.test_objects import texts


def expected(model: Path, numbers: range | list[int], kinds: tuple[str, ...] = ("sc", "sr")) -> set[str]:
    return {str(result_uid(instance(number), detector_hash(model), kind)) for number in numbers for kind in kinds}


def identifying(spool: Path, *more: str) -> list[str]:
    """What tells in the spool, its log included, whose films there were."""
    everything = b"".join(path.name.encode() + path.read_bytes() for path in spool.rglob("*") if path.is_file())
    return [word for word in (*IDENTIFYING, *more) if word.encode() in everything]


def is_idle(service: Service) -> bool:
    return not service.spool.has_work()


def test_a_film_comes_back_as_capture_and_report(
    start_service: StartService, pacs: Pacs, model: Path, tmp_path: Path
) -> None:
    service = start_service()
    assert store(service.port, dataset(0)) == [0]
    wait_for(lambda: is_idle(service) and len(pacs.kept) == 2)
    assert set(pacs.ids()) == expected(model, [0])
    assert {made.SOPClassUID for made in pacs.kept} == {SecondaryCaptureImageStorage, ComprehensiveSRStorage}
    assert all(made.StudyInstanceUID == STUDY for made in pacs.kept)
    service.stop()
    assert identifying(tmp_path / "spool", instance(0)) == [], "after delivery"
    events = [json.loads(line)["event"] for line in (tmp_path / "spool/audit.jsonl").read_text().splitlines()]
    assert events.count("sent") == 2 and events[0] == "started" and events[-1] == "stopped"


@pytest.mark.parametrize("takes_jpeg", [False, True])
def test_a_capture_is_sent_as_the_receiver_takes_it(
    start_service: StartService, pacs: Pacs, model: Path, takes_jpeg: bool
) -> None:
    if takes_jpeg:
        pacs.take(SecondaryCaptureImageStorage, JPEGBaseline8Bit)
    service = start_service(kinds=("sc",))
    assert store(service.port, dataset(0)) == [0]
    wait_for(lambda: is_idle(service) and len(pacs.kept) == 1)
    [capture] = pacs.kept
    assert str(capture.SOPInstanceUID) in expected(model, [0]), "whatever became of its pixels"
    assert capture.PhotometricInterpretation == ("YBR_FULL_422" if takes_jpeg else "RGB")
    assert capture.LossyImageCompression == "01", "what was lost stays lost"


def test_the_same_film_again_changes_nothing(start_service: StartService, pacs: Pacs) -> None:
    service = start_service()
    assert store(service.port, dataset(0), dataset(0)) == [0, 0]
    wait_for(lambda: is_idle(service) and len(pacs.kept) == 2)
    assert store(service.port, dataset(0)) == [0]
    compressed = dataset(0)
    compressed.compress(RLELossless, generate_instance_uid=False)
    other_syntaxes = [compressed]
    for syntax in (ImplicitVRLittleEndian, ExplicitVRBigEndian):
        one = dataset(0)
        one.file_meta.TransferSyntaxUID = syntax
        if syntax == ExplicitVRBigEndian:
            one.PixelData = pixels(0).astype(">u2").tobytes()
        other_syntaxes.append(one)
    for one in other_syntaxes:
        assert store(service.port, one) == [0], "the same pixels, packed in another way"
    wait_for(lambda: is_idle(service))
    assert len(pacs.kept) == 2 and service.spool.counts()["quarantine"] == 0


def test_other_pixels_under_a_known_id_are_quarantined(start_service: StartService, pacs: Pacs) -> None:
    service = start_service()
    store(service.port, dataset(0))
    other = dataset(0, PixelData=pixels(5).tobytes())
    assert store(service.port, other) == [0]
    wait_for(lambda: is_idle(service) and len(pacs.kept) == 2)
    assert service.spool.counts()["quarantine"] == 1


def test_eight_associations_at_once(start_service: StartService, pacs: Pacs, model: Path) -> None:
    service = start_service()
    answers: dict[int, list[int]] = {}

    def send(number: int) -> None:
        films = [dataset(3 * number + each) for each in range(3)] + [dataset(99)]
        answers[number] = store(service.port, *films)

    threads = [threading.Thread(target=send, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(answer == [0] * 4 for answer in answers.values())
    wait_for(lambda: is_idle(service) and len(pacs.kept) == 50)
    assert set(pacs.ids()) == expected(model, [*range(24), 99])


@pytest.mark.parametrize(
    ("words", "reason"),
    [({"called": "OTHER"}, "unknown called title"), ({"caller": "STRANGER"}, "unknown caller")],
)
def test_strangers_are_rejected(
    start_service: StartService, tmp_path: Path, words: dict[str, str], reason: str
) -> None:
    service = start_service()
    assert store(service.port, dataset(0), **words) == [-1]  # type: ignore[arg-type]
    assert store(service.port, dataset(0)) == [0]
    assert reason in (tmp_path / "spool/audit.jsonl").read_text()


def test_a_caller_from_elsewhere_is_rejected(start_service: StartService, monkeypatch: pytest.MonkeyPatch) -> None:
    service = start_service()
    monkeypatch.setattr("afire.pacs.receive.plain_address", lambda _: "10.9.8.7")
    assert store(service.port, dataset(0)) == [-1]


def test_there_is_no_context_for_what_is_no_film(start_service: StartService) -> None:
    service = start_service()
    assert store(service.port, dataset(0, SOPClassUID=CTImageStorage)) == [-1]
    assert store(service.port, dataset(0, SOPClassUID=ComprehensiveSRStorage)) == [-1]
    assert service.spool.counts()["incoming"] == 0


def test_results_of_ours_and_screenshots_are_not_scored(start_service: StartService, pacs: Pacs) -> None:
    service = start_service()
    store(service.port, dataset(0))
    wait_for(lambda: len(pacs.kept) == 2)
    [ours] = [made for made in pacs.kept if made.SOPClassUID == SecondaryCaptureImageStorage]
    ours.file_meta = dataset(0).file_meta
    screenshot = dataset(1, SOPClassUID=SecondaryCaptureImageStorage, Modality="OT")
    assert store(service.port, ours, screenshot) == [0, 0], "acknowledged, so that the sender's job goes on"
    wait_for(lambda: is_idle(service))
    assert len(pacs.kept) == 2 and service.look().events["ignored"] == 2
    assert store(service.port, dataset(2, SOPClassUID=SecondaryCaptureImageStorage, Modality="DX")) == [0]
    wait_for(lambda: len(pacs.kept) == 4)


def test_a_short_disk_is_said_and_nothing_is_kept(start_service: StartService, pacs: Pacs) -> None:
    service = start_service(min_free=2**60, health=(LOOPBACK, 0))
    assert store(service.port, dataset(0)) == [0xA700]
    assert service.spool.counts()["incoming"] == 0
    health = service.look()
    assert health.alive and not health.ready and "--min-free" in health.reasons[0]


def test_a_disk_that_fills_while_a_film_is_written(
    start_service: StartService, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = start_service()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("afire.pacs.spool.write_synced", full)
        assert store(service.port, dataset(0)) == [0xA700]
    assert store(service.port, dataset(0)) == [0]


def test_a_data_set_that_is_not_what_it_was_announced_as(
    start_service: StartService, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pynetdicom import AE

    service = start_service()
    ae = AE(ae_title="SENDER")
    ae.add_requested_context(dataset(0).SOPClassUID)
    association = ae.associate(LOOPBACK, service.port, ae_title="AFIRE")
    import pynetdicom.association as module

    encode = module.encode

    def lying(made: Dataset, *words: object) -> bytes | None:
        made.SOPInstanceUID = instance(7)
        return encode(made, *words)

    monkeypatch.setattr(module, "encode", lying)
    assert association.send_c_store(dataset(0)).Status == 0xA900
    monkeypatch.setattr(module, "encode", lambda *_: b"\x08\x00\x18\x00UI\xff\xff torn")
    assert association.send_c_store(dataset(0)).Status in (0xA900, 0xC000)
    association.release()
    assert service.spool.counts()["incoming"] == 0


def test_results_wait_for_a_pacs_that_is_away(start_service: StartService, pacs: Pacs, model: Path) -> None:
    pacs.stop()
    service = start_service()
    assert store(service.port, dataset(0), dataset(1)) == [0, 0]
    wait_for(lambda: service.spool.counts()["outgoing"] == 2 and service.look().events.get("not sent", 0) > 1)
    assert set(identifying(service.settings.spool)) == {*IDENTIFYING}, "until they are delivered"
    pacs.start()
    wait_for(lambda: is_idle(service))
    assert set(pacs.ids()) == expected(model, [0, 1]) and len(pacs.kept) == 4


def test_what_may_pass_is_tried_again_and_a_refusal_is_kept(start_service: StartService, pacs: Pacs) -> None:
    answers = iter([0xA700, 0x0110, 0xA7FF])
    pacs.answer = lambda made: next(answers, 0) if made.SOPClassUID == SecondaryCaptureImageStorage else 0xC123
    service = start_service(health=(LOOPBACK, 0))
    store(service.port, dataset(0))
    wait_for(lambda: service.spool.counts()["failed"] == 1)
    assert [made.SOPClassUID for made in pacs.kept] == [SecondaryCaptureImageStorage], "after three that may pass"
    with urllib.request.urlopen(f"http://{LOOPBACK}:{service.health_port}/healthz") as answer:
        assert json.load(answer)["spool"]["failed"] == 1
    [reason] = (service.settings.spool / "failed").rglob("reason.json")
    assert json.loads(reason.read_text())["reason"] == "sr: status 0xC123"
    service.stop()
    pacs.answer = lambda _: 0
    again = start_service(retry_failed=True)
    wait_for(lambda: is_idle(again) and len(pacs.kept) == 2)
    assert again.spool.counts()["failed"] == 0


def test_films_that_cannot_be_read_are_kept_with_a_reason(start_service: StartService, pacs: Pacs) -> None:
    service = start_service()
    torn = dataset(0, PixelData=b"\0" * 100)
    assert store(service.port, torn, dataset(1)) == [0, 0]
    wait_for(lambda: len(pacs.kept) == 2 and is_idle(service))
    [reason] = (service.settings.spool / "failed").rglob("reason.json")
    assert "DICOM" in json.loads(reason.read_text())["reason"]
    assert str(service.settings.spool) not in reason.read_text()


def test_a_film_that_breaks_its_batch_does_not_break_the_others(
    start_service: StartService, pacs: Pacs, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    score = AnomalyDetector.score

    def touchy(self: AnomalyDetector, images: object, **named: object) -> object:
        if bool((images == 0).flatten(1).all(dim=1).any()):  # type: ignore[attr-defined]
            raise RuntimeError("boom")
        return score(self, images, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(AnomalyDetector, "score", touchy)
    service = start_service(workers=1)
    blank = dataset(0, PixelData=np.zeros((48, 48), np.uint16).tobytes())
    assert store(service.port, dataset(1), blank, dataset(2)) == [0, 0, 0]
    wait_for(lambda: is_idle(service))
    assert set(pacs.ids()) == expected(model, [1, 2])
    assert service.spool.counts()["failed"] == 1


def test_a_film_out_of_domain_is_reported_without_a_score(start_service: StartService, pacs: Pacs) -> None:
    service = start_service()
    blank = dataset(0, PixelData=np.full((48, 48), 900, np.uint16).tobytes())
    assert store(service.port, blank) == [0]
    wait_for(lambda: len(pacs.kept) == 2 and is_idle(service))
    [report] = [made for made in pacs.kept if made.SOPClassUID == ComprehensiveSRStorage]
    said = texts(report)
    assert said["Why the film was not scored"] == "blank: one grey level"
    assert not [name for name in said if "score, larger" in name]
    assert service.look().events["out of domain"] == 1


def test_ending_drains_and_leaves_the_rest_for_the_next_start(
    start_service: StartService, pacs: Pacs, model: Path
) -> None:
    service = start_service()
    assert store(service.port, *(dataset(number) for number in range(6))) == [0] * 6
    service.stop()
    assert set(pacs.ids()) == expected(model, range(6)), "what was acknowledged was finished first"
    pacs.stop()
    second = start_service()
    store(second.port, dataset(6))
    second.stop(0.2)
    assert second.spool.has_work()
    pacs.start()
    third = start_service()
    wait_for(lambda: is_idle(third))
    assert set(pacs.ids()) == expected(model, range(7)) and len(pacs.kept) == 14


def test_health(start_service: StartService, pacs: Pacs) -> None:
    service = start_service(health=(LOOPBACK, 0))
    store(service.port, dataset(0))
    wait_for(lambda: len(pacs.kept) == 2 and is_idle(service))

    def get(path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://{LOOPBACK}:{service.health_port}{path}") as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    assert get("/healthz")[0] == get("/readyz")[0] == 200 and get("/else")[0] == 404
    text = get("/metrics")[1]
    assert 'afire_events_total{event="received"} 1' in text and 'afire_spool{state="failed"} 0' in text
    assert "afire_ready 1" in text
    for line in text.splitlines():
        assert line.startswith("#") or len(line.rsplit(" ", 1)) == 2
    assert not any(word in text for word in IDENTIFYING)


def test_a_port_that_is_taken_is_one_message(start_service: StartService, pacs: Pacs) -> None:
    with pytest.raises(UserError, match=f"port {pacs.port}"):
        start_service(port=pacs.port)


def test_scorers_keep_to_their_share_of_the_cores(
    start_service: StartService, pacs: Pacs, detector: AnomalyDetector, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[int] = []
    score = type(detector).score

    def noted(self: AnomalyDetector, *words: Any, **named: Any) -> Any:
        used.append(torch.get_num_threads())
        return score(self, *words, **named)

    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        monkeypatch.setattr(type(detector), "score", noted)
        service = start_service(workers=2)
        assert torch.get_num_threads() == 4, "others keep theirs"
        assert store(service.port, dataset(0)) == [0]
        wait_for(lambda: len(pacs.ids()) == 2)
    finally:
        torch.set_num_threads(before)
    assert used == [2]
