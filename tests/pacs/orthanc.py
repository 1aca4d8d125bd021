"""An Orthanc of the tests' own: its port, its database and its web address on loopback only."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from tests.pacs.peers import LOOPBACK, wait_for

PROGRAM = shutil.which("Orthanc") or shutil.which("orthanc")
PLUGINS = [Path(folder) for folder in ("/usr/share/orthanc/plugins", "/usr/lib/orthanc/plugins")]


def web_plugin() -> Path | None:
    """The DICOMweb plug-in, where Debian puts it."""
    found = [path for folder in PLUGINS for path in folder.glob("libOrthancDicomWeb.so*")]
    return found[0] if found else None


def storescu() -> str | None:
    """dcmtk's program: pynetdicom installs another of that name beside this Python."""
    own = Path(sys.executable).parent
    return shutil.which("storescu", path=os.pathsep.join(one for one in os.get_exec_path() if Path(one) != own))


def free_port() -> int:
    with socket.socket() as one:
        one.bind((LOOPBACK, 0))
        return int(one.getsockname()[1])


class Orthanc:
    """Started in ``folder``; what it stored is there after a kill too."""

    def __init__(self, folder: Path, modalities: dict[str, list[Any]] | None = None) -> None:
        assert PROGRAM is not None
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.dicom_port, self.web_port = folder, free_port(), free_port()
        self.modalities = modalities or {}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Orthanc:
        plugin = web_plugin()
        settings = {
            "Name": "drill",
            "StorageDirectory": str(self.folder / "storage"),
            "IndexDirectory": str(self.folder / "storage"),
            "DicomAet": "ORTHANC",
            "DicomPort": self.dicom_port,
            "DicomServerEnabled": True,
            "DicomCheckCalledAet": False,
            "DicomAlwaysAllowStore": True,
            "HttpPort": self.web_port,
            "HttpBindAddresses": [LOOPBACK],
            "RemoteAccessAllowed": False,
            "AuthenticationEnabled": False,
            "SslEnabled": False,
            "DicomModalities": self.modalities,
            "Plugins": [str(plugin)] if plugin else [],
            "DicomWeb": {"Enable": True, "Root": "/dicom-web/"},
            "ConcurrentJobs": 8,
        }
        path = self.folder / "orthanc.json"
        path.write_text(json.dumps(settings))
        with (self.folder / "orthanc.log").open("ab") as log:
            self._process = subprocess.Popen([str(PROGRAM), str(path)], stdout=log, stderr=log)
        wait_for(self._answers, 30)
        return self

    def _answers(self) -> bool:
        assert self._process is not None and self._process.poll() is None, (self.folder / "orthanc.log").read_text()
        try:
            return bool(self.get("/system"))
        except (urllib.error.URLError, ConnectionError):
            return False

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """As the system does when memory runs out."""
        if self._process is not None:
            os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(15)
            except subprocess.TimeoutExpired:
                self.kill()
            self._process = None

    def cpu_seconds(self) -> float:
        """What it has taken of the processor so far."""
        assert self._process is not None
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.web_port}"

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return json.load(answer)

    def post(self, path: str, body: bytes) -> Any:
        request = urllib.request.Request(self.url + path, body, method="POST")
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def instances(self) -> dict[str, str]:
        """SOP Instance UID -> Orthanc's own id, of everything that it holds."""
        found = self.get("/instances?expand")
        return {one["MainDicomTags"]["SOPInstanceUID"]: one["ID"] for one in found}

    def ids(self) -> set[str]:
        """The instances; none while it is away."""
        try:
            return set(self.instances())
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.1)
            return set()

    def file(self, instance: str) -> bytes:
        with urllib.request.urlopen(f"{self.url}/instances/{instance}/file", timeout=30) as answer:
            data: bytes = answer.read()
            return data
