"""`afire serve` against `afire detect run` on the same DICOM films. Goal: 70 % of its films/s.

python benchmarks/pacs.py [--network small|vit-b] [--films N] [--side PIXELS] [--senders N] [--send dicomweb|dimse]
    [--apart] [--json FILE]

Needs Debian's orthanc, orthanc-dicomweb and dcmtk. `storescu` sends the films in several associations; the service
writes, syncs and acknowledges them, scores them, and stores a capture and a report of each in an Orthanc by DICOMweb,
or by C-STORE with ``--send dimse``. The clock runs from the first film sent to the last result acknowledged. All of it
is on one machine, so senders and Orthanc take their share of its cores from the service: the CPU time of each is
reported, and beside the ratio of films/s that of CPU time, the run's to the service's own, which is what it could reach
with the others elsewhere. The run reads the same files from a folder, with and without writing the same objects. The
detector is that of benchmarks/detect.py; spool and results are on the disk of the temporary folder.

``--apart`` keeps the service and the run on one core each time, and Orthanc and the senders on another, as if the PACS
were a machine of its own.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from threading import Event, Semaphore
from typing import Any

import numpy as np
import torch
from detect import BATCH, NETWORKS, make_painter, random_detector
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import ComputedRadiographyImageStorage, ExplicitVRLittleEndian, generate_uid
from timing import machine, report

from afire.data.decode import fit_square
from afire.data.phantom.film import draw_film
from afire.detect.findings import rule_of
from afire.detect.maps import MapDetector
from afire.detect.run import RunTask, run_detector
from afire.files import sha256_text
from afire.pacs.connections import Credentials, parse_caller, parse_destination
from afire.pacs.objects import Kind, ObjectMaker, ObjectWriter
from afire.pacs.receive import ReceiveSettings
from afire.pacs.service import Service, ServiceSettings
from afire.pacs.spool import Observe

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.pacs.orthanc import PROGRAM, Orthanc, storescu, web_plugin

GOAL = 0.70
KINDS: tuple[Kind, ...] = ("sc", "sr")
FILMS = "films"  # folder of the films
_DRAWN = 16  # films, over and over


def draw_folders(folder: Path, count: int, side: int, senders: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """12-bit DICOM films in a folder for each sender; the drawings (16, side, side) that they show."""
    drawn = np.stack([draw_film(0, index, side).image for index in range(_DRAWN)])
    for index in range(count):
        part = folder / str(index % senders)
        part.mkdir(parents=True, exist_ok=True)
        write_film(part / f"{index:05d}.dcm", drawn[index % _DRAWN])
    return drawn


def write_film(path: Path, image: np.ndarray[Any, np.dtype[np.float32]]) -> None:
    made = Dataset()
    made.SOPClassUID, made.SOPInstanceUID = ComputedRadiographyImageStorage, generate_uid()
    made.StudyInstanceUID, made.SeriesInstanceUID = generate_uid(), generate_uid()
    made.PatientName, made.PatientID, made.Modality, made.BodyPartExamined = "Phantom^", path.stem, "CR", "CHEST"
    made.PatientBirthDate = made.PatientSex = made.StudyDate = made.StudyTime = made.StudyID = ""
    made.AccessionNumber = made.ReferringPhysicianName = ""
    made.Rows, made.Columns = image.shape
    made.SamplesPerPixel, made.PhotometricInterpretation = 1, "MONOCHROME2"
    made.BitsAllocated, made.BitsStored, made.HighBit, made.PixelRepresentation = 16, 12, 11, 0
    made.PixelData = (image * 4095).astype(np.uint16).tobytes()
    made["PixelData"].VR = "OW"
    made.file_meta = FileMetaDataset()
    made.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    made.save_as(path, enforce_file_format=True)


def one_run(detector: MapDetector, films: Path, place: Path, with_objects: bool) -> None:
    out = Path(tempfile.mkdtemp(dir=place)) / "out"
    painter = make_painter(detector, out)
    maker = ObjectMaker.of(detector, rule_of(detector), "0" * 64, KINDS)
    draw = ObjectWriter(out, maker, painter) if with_objects else painter
    run_detector(RunTask(detector, "0" * 64, films, out, draw, batch=BATCH))


def address_of(orthanc: Orthanc, protocol: str) -> str:
    """What `--send` of the service gets."""
    if protocol == "dimse":
        return f"dimse:ORTHANC@127.0.0.1:{orthanc.dicom_port}"
    return f"dicomweb:{orthanc.url}/dicom-web"


def open_service(detector: MapDetector, place: Path, send: str, number: int, observe: Observe) -> Service:
    """Every time another model, so that all ids are new."""
    receive = ReceiveSettings("AFIRE", "127.0.0.1", 0, [parse_caller("SENDER@127.0.0.1")], min_free=0)
    settings = ServiceSettings(
        spool=Path(tempfile.mkdtemp(dir=place)) / "spool",
        receive=receive,
        destination=parse_destination(send),
        credentials=Credentials(),
        kinds=KINDS,
    )
    return Service(settings, detector, sha256_text(str(number)), observe)


def one_service(
    detector: MapDetector, place: Path, orthanc: Orthanc, send: str, count: int, number: int, pinned: Sequence[str]
) -> dict[str, float]:
    """Seconds from the first film sent to the last result acknowledged, and those of each process's CPU."""
    finished, failed = Semaphore(0), Event()

    def observe(event: str, film: str, *, reason: str = "", kind: str = "") -> None:
        if event in ("failed", "refused"):
            failed.set()
        if event in ("done", "failed", "refused"):
            finished.release()

    service = open_service(detector, place, address_of(orthanc, send), number, observe)
    service.start()
    try:
        before = [time.perf_counter(), *_cpu(orthanc)]
        command = [*pinned, str(storescu()), "-aet", "SENDER", "-aec", "AFIRE", "+sd", "127.0.0.1", str(service.port)]
        senders = [subprocess.Popen([*command, str(folder)]) for folder in sorted((place / FILMS).iterdir())]
        if any(sender.wait() for sender in senders):
            raise SystemExit("a sender failed")
        for _ in range(count):
            finished.acquire()
        after = [time.perf_counter(), *_cpu(orthanc)]
    finally:
        service.stop(0)
    if failed.is_set():
        raise SystemExit("a film failed")
    return dict(zip(("wall", "own", "Orthanc", "senders"), np.subtract(after, before).tolist(), strict=True))


def _cpu(orthanc: Orthanc) -> tuple[float, float, float]:
    """Seconds of this process, of Orthanc, and of the senders that have ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time(), orthanc.cpu_seconds(), ended.ru_utime + ended.ru_stime


def timed_run(detector: MapDetector, films: Path, place: Path, with_objects: bool) -> dict[str, float]:
    wall, own = time.perf_counter(), time.process_time()
    one_run(detector, films, place, with_objects)
    return {"wall": time.perf_counter() - wall, "own": time.process_time() - own}


def run(network: str, count: int, side: int, senders: int, send: str, repetitions: int, apart: bool) -> dict[str, Any]:
    own, others = sorted(os.sched_getaffinity(0))[:2] if apart else (None, None)
    pinned = ("taskset", "--cpu-list", str(others)) if apart else ()
    if own is not None:
        os.sched_setaffinity(0, {own})  # before any thread is there to be left on another core
        torch.set_num_threads(1)
    preset, size, _ = NETWORKS[network]
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        drawn = draw_folders(place / FILMS, count, side, senders)
        images = torch.from_numpy(np.stack([fit_square(one, size) for one in drawn]))[:, None]
        detector = random_detector(preset, size, images)
        orthanc = Orthanc(place / "orthanc").start()
        if apart:
            subprocess.run(["taskset", "--all-tasks", "--cpu-list", "--pid", str(others), str(orthanc.pid)], check=True)
        numbers = iter(range(1000))
        ways: dict[str, Callable[[], dict[str, float]]] = {
            "detect run": lambda: timed_run(detector, place / FILMS, place, with_objects=False),
            "detect run --dicom-out sc,sr": lambda: timed_run(detector, place / FILMS, place, with_objects=True),
            "serve": lambda: one_service(detector, place, orthanc, send, count, next(numbers), pinned),
        }
        try:
            seconds = measured(ways, repetitions)
        finally:
            orthanc.stop()
    films_per_second = {name: count / times["wall"] for name, times in seconds.items()}
    ratio = films_per_second["serve"] / films_per_second["detect run"]
    return {
        "network": network,
        "films": count,
        "side": side,
        "results sent by": send,
        "cores": "one for the service and the run, one for Orthanc and senders" if apart else "shared by all",
        **{f"{name}, films/s": round(value, 2) for name, value in films_per_second.items()},
        **{f"{name}, CPU ms/film": round(1000 * times["own"] / count, 1) for name, times in seconds.items()},
        **{f"{who}, CPU ms/film": round(1000 * seconds["serve"][who] / count, 1) for who in ("Orthanc", "senders")},
        "serve / detect run": round(ratio, 3),
        "serve / detect run, by their own CPU": round(seconds["detect run"]["own"] / seconds["serve"]["own"], 3),
        "goal": f"at least {GOAL:g}: {'met' if ratio >= GOAL else 'missed'}",
    }


def measured(ways: dict[str, Callable[[], dict[str, float]]], repetitions: int) -> dict[str, dict[str, float]]:
    """Medians of what each way took, in alternation, after one turn of each that does not count."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for repetition in range(repetitions + 1):
        for name, work in ways.items():
            seconds = work()
            if repetition:
                found[name].append(seconds)
    return {name: {key: median(one[key] for one in turns) for key in turns[0]} for name, turns in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=NETWORKS, default="small")
    parser.add_argument("--films", type=int, default=200)
    parser.add_argument("--side", type=int, default=1024)
    parser.add_argument("--senders", type=int, default=4)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--send", choices=("dicomweb", "dimse"), default="dicomweb", help="how results reach Orthanc")
    parser.add_argument("--apart", action="store_true", help="Orthanc and senders on a core of their own")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if PROGRAM is None or web_plugin() is None or storescu() is None:
        raise SystemExit("this needs orthanc, orthanc-dicomweb and dcmtk (storescu)")
    values = run(
        options.network, options.films, options.side, options.senders, options.send, options.repetitions, options.apart
    )
    report({"machine": machine(), **values}, options.json)


if __name__ == "__main__":
    main()
