"""The processes that a study starts, forked from the study's own: each would import torch anew, which takes seconds.

What a fresh interpreter does with a step is tested in ``tests/studies``; a forked one differs in its start alone.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import types
import warnings
from collections.abc import Mapping, Sequence
from multiprocessing import resource_tracker
from pathlib import Path
from typing import BinaryIO

_FIRST_OF_OTHERS = 3  # after standard input, output and error


def fork_steps() -> None:
    """From now on, the steps of a study that runs in this process are forked."""
    from afire.studies import steps

    replaced = types.SimpleNamespace(Popen=ForkedStep, PIPE=subprocess.PIPE, STDOUT=subprocess.STDOUT)
    steps.subprocess = replaced  # type: ignore[assignment]


class ForkedStep:
    """What :mod:`afire.studies.steps` needs of :class:`subprocess.Popen`."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdin: int,
        stdout: BinaryIO,
        stderr: int,
        cwd: Path | None,
        env: Mapping[str, str],
        start_new_session: bool,
    ) -> None:
        assert list(command[:3]) == [sys.executable, "-m", "afire.studies.steps"]
        assert (stdin, stderr, start_new_session) == (subprocess.PIPE, subprocess.STDOUT, True)
        self.returncode: int | None = None
        end, begin = os.pipe()
        arguments = (command[3:], end, stdout.fileno(), cwd, dict(env))
        process = multiprocessing.get_context("fork").Process(target=_be_the_step, args=arguments)
        process.start()
        assert process.pid is not None
        self.pid = process.pid
        os.close(end)
        self.stdin = os.fdopen(begin, "wb")

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def _be_the_step(words: Sequence[str], stdin: int, output: int, folder: Path | None, variables: dict[str, str]) -> None:
    """As a new interpreter would begin: nothing open but the standard streams, no handlers of signals."""
    from afire.studies import steps

    os.setsid()
    gc.freeze()  # no file object of the study may be closed here: by then, its number may be another file's
    for target, source in ((0, stdin), (1, output), (2, output)):
        os.dup2(source, target)
    tracker = resource_tracker.getfd()  # of what pools share; it serves all processes of a test
    os.closerange(_FIRST_OF_OTHERS, tracker)
    os.closerange(tracker + 1, os.sysconf("SC_OPEN_MAX"))
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(variables)
    if folder is not None:
        os.chdir(folder)
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")  # a module that is imported already
    sys.argv = ["afire.studies.steps", *words]
    steps.main()
