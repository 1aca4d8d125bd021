"""From normal films to a detector: maps, scores, calibration, domain, evaluation and runs over folders.

Knows methods and weights; knows no page and no command.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from afire.errors import UserError


class _Detectors(Mapping[str, Any]):
    """Detector classes by name. A class is imported when it is asked for, so that the names cost no torch."""

    def __init__(self, places: Mapping[str, str]) -> None:
        self._places = places

    def __getitem__(self, name: str) -> Any:
        if name not in self._places:
            raise UserError(f"there is no detector {name!r}; detectors are {', '.join(self._places)}.")
        module, _, kind = self._places[name].partition(":")
        return getattr(import_module(module), kind)

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


DETECTORS = _Detectors(
    {
        "afire": "afire.detect.maps:MapDetector",
        "aeu": "afire.detect.aeu:AEU",
        "anatpaste": "afire.detect.anatpaste:AnatPaste",
        "cutpaste": "afire.detect.cutpaste:CutPaste",
        "fae": "afire.detect.fae:FAE",
        "fanogan": "afire.detect.fanogan:FAnoGAN",
        "memae": "afire.detect.memae:MemAE",
        "mkd": "afire.detect.mkd:MKD",
        "nsa": "afire.detect.nsa:NSA",
        "panda": "afire.detect.panda:PANDA",
        "patchcore": "afire.detect.patchcore:PatchCore",
        "salad": "afire.detect.salad:SALAD",
        "squid": "afire.detect.squid:SQUID",
        "taught": "afire.detect.taught:Taught",
    }
)
"""What `afire detect fit --method` takes: name -> class, a subclass of :class:`afire.detect.base.AnomalyDetector`."""
