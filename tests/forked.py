"""``python -m afire ...``, started by a study or a drill, as a fork of it: a new Python takes seconds to import torch.

Only for a process without threads that has imported everything and done little, such as those of ``tests/commands.py``.
What a new Python makes of a step is tested in ``tests/studies``, and of a command in ``tests/cli``.
"""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.process
import os
import runpy
import signal
import subprocess
import sys
import types
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import thread
from multiprocessing import resource_tracker
from pathlib import Path
from typing import BinaryIO

_FIRST_OF_OTHERS = 3  # after standard input, output and error


def fork_commands(module: types.ModuleType) -> None:
    """From now on, what ``module`` starts by :mod:`subprocess` in this process is forked."""
    module.subprocess = types.SimpleNamespace(  # type: ignore[attr-defined]
        Popen=ForkedCommand, PIPE=subprocess.PIPE, STDOUT=subprocess.STDOUT
    )


class ForkedCommand:
    """What studies and drills need of :class:`subprocess.Popen`."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdin: int | None = None,
        stdout: BinaryIO,
        stderr: BinaryIO | int,
        cwd: Path | None = None,
        env: Mapping[str, str],
        start_new_session: bool,
    ) -> None:
        assert list(command[:2]) == [sys.executable, "-m"] and start_new_session
        self.returncode: int | None = None
        self.stdin: BinaryIO | None = None
        if stdin == subprocess.PIPE:
            source, end = os.pipe()
            self.stdin = os.fdopen(end, "wb")
        else:
            source = os.open(os.devnull, os.O_RDONLY)
        error = stdout.fileno() if isinstance(stderr, int) else stderr.fileno()
        arguments = (command[2:], (source, stdout.fileno(), error), cwd, dict(env))
        process = multiprocessing.get_context("fork").Process(target=_be_the_command, args=arguments)
        process.start()
        # Whoever starts the next process would collect the end of this one, and with it the time that it took.
        multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]
        os.close(source)
        assert process.pid is not None
        self.pid = process.pid

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def _be_the_command(
    words: Sequence[str], streams: Sequence[int], folder: Path | None, variables: Mapping[str, str]
) -> None:
    """As a new Python would begin: nothing open but the standard streams, no handlers of signals."""
    os.setsid()
    thread._threads_queues.clear()  # of a pool whose thread this was: it would wait for itself to end
    gc.freeze()  # no file object of the parent may be closed here: by then, its number may be another file's
    for target, stream in enumerate(streams):
        os.dup2(stream, target)
    tracker = resource_tracker.getfd()  # of what pools share; it serves all processes of a test
    os.closerange(_FIRST_OF_OTHERS, tracker)
    os.closerange(tracker + 1, os.sysconf("SC_OPEN_MAX"))
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(variables)
    if folder is not None:
        os.chdir(folder)
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")  # of modules that are imported already
    sys.argv = list(words)
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)
