"""One step as a process of its own: ``python -m afire.studies.reproduce.child LOCK WORDS...`` is ``afire WORDS...``."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from afire.studies.children import end_with_parent, patient_lock


def main() -> None:
    """Wait for a step that an earlier start may have left saving, then be the command."""
    lock, sys.argv = Path(sys.argv[1]), ["afire", *sys.argv[2:]]
    end_with_parent()
    with patient_lock(lock, "the steps in"):
        runpy.run_module("afire", run_name="__main__")


if __name__ == "__main__":
    main()
