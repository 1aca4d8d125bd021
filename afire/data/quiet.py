"""Keep pydicom and pillow silent while they read: their warnings and log lines quote tag values, some of them names."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_LOGGERS = (
    "pydicom",
    "pydicom.pixels.decoders.base",
    "pydicom.pixels.utils",
    "PIL.ImageFile",
    "PIL.PngImagePlugin",
    "PIL.TiffImagePlugin",
)
# Attributed by stack level, so a warning of pydicom may carry our module's name.
_MODULES = r"(pydicom|PIL|pylibjpeg|libjpeg|openjpeg|afire\.data)\b"

_here = threading.local()
_lock = threading.Lock()
_readers = 0
_restore: warnings.catch_warnings[None] | None = None


def _not_reading(_record: logging.LogRecord) -> bool:
    return not getattr(_here, "reading", False)


@contextmanager
def quiet_readers() -> Iterator[None]:
    """Drop what pydicom and pillow would say about a file, in this thread, until the body is done.

    ``warnings`` has one state for all threads. The first reader in changes it and the last one out restores it;
    nested ``catch_warnings`` of several threads would restore each other's state.
    """
    before = getattr(_here, "reading", False)
    _here.reading = True
    _enter()
    try:
        yield
    finally:
        _leave()
        _here.reading = before


def _enter() -> None:
    global _readers, _restore
    with _lock:
        if _readers == 0:
            for name in _LOGGERS:
                logging.getLogger(name).addFilter(_not_reading)  # adding it twice does nothing
            _restore = warnings.catch_warnings()
            _restore.__enter__()
            warnings.filterwarnings("ignore", module=_MODULES)
        _readers += 1


def _leave() -> None:
    global _readers, _restore
    with _lock:
        _readers -= 1
        if _readers == 0 and _restore is not None:
            _restore.__exit__(None, None, None)
            _restore = None
