"""Children end with their parent, and wait for the one before them."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from afire.files import FolderBusyError, folder_lock
from afire.processes import patient_lock


def test_a_child_ends_when_its_parent_does() -> None:
    program = "import time; from afire.processes import end_with_parent; end_with_parent(); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE)
    time.sleep(0.2)
    assert process.poll() is None and process.stdin is not None
    process.stdin.close()
    assert process.wait(30) == -signal.SIGTERM


def test_the_lock_is_waited_for(tmp_path: Path) -> None:
    held, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        with folder_lock(tmp_path, "it"):
            held.set()
            let_go.wait(30)

    threading.Thread(target=hold).start()
    assert held.wait(10)
    with pytest.raises(FolderBusyError), patient_lock(tmp_path, "it", seconds=0):
        pass
    threading.Timer(0.2, let_go.set).start()
    with patient_lock(tmp_path, "it", seconds=30):
        assert let_go.is_set()
