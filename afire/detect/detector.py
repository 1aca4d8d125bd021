"""The detector that `afire detect fit` makes unless another is asked for: patch maps of a pre-trained model.

It holds the adapted networks of any method and a map for everything they can do: Gaussians of tokens; restoration
where there is a decoder; surprise where there are prototypes; lesions where there is a classifier of them. A film is
scored by the maps that were chosen on drawn lesions.

Shapes: B films, L positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from typing_extensions import Self

from afire.config import Config
from afire.detect.adapt import adapted
from afire.detect.base import AnomalyDetector, FitTask, Look, NormalFilms, Subsets
from afire.detect.choose import unchosen
from afire.detect.maps import (
    SCORES,
    Evidence,
    PatchMap,
    StudentSurprise,
    TokenGaussian,
    film_scores,
    fit_maps,
    possible_maps,
    settle,
)
from afire.detect.normals import Standard
from afire.methods import Method, make_method
from afire.tasks.settings import DetectConfig, DetectorConfig
from afire.weights import pick_device

_SURPRISED = 1024  # films that settle what is surprising: one more pass over all would cost a third of the fit


class MapDetector(AnomalyDetector):
    """Networks, and a map for all that they can do."""

    method = "afire"
    Settings = DetectConfig
    meanings: ClassVar[Mapping[str, str]] = {name: score.meaning for name, score in SCORES.items()}
    model: Method

    def __init__(self, model: Method, settings: DetectorConfig | None = None) -> None:
        super().__init__(settle(model), model.config, model.grid, settings or DetectConfig())
        self.maps = nn.ModuleDict({patch_map.name: patch_map for patch_map in possible_maps(model)})
        self.choice = unchosen(TokenGaussian.name)  # which every model has

    @classmethod
    def build(cls, config: Config, settings: DetectorConfig) -> Self:
        return cls(make_method(config), settings)

    @classmethod
    def start(cls, task: FitTask, subsets: Subsets) -> Self:
        device = pick_device(task.device)
        # The Gaussians need double precision, which Apple's GPUs do not have.
        return cls(adapted(task, subsets), task.settings).to("cpu" if device.type == "mps" else device)

    def fit(self, normals: NormalFilms) -> None:
        """The student's surprise first: its standard decides what the second pass hides."""
        maps = self._maps
        first = [maps.pop(StudentSurprise.name)] if StudentSurprise.name in maps else []
        if first:
            fit_maps(first, lambda what: self._evidence(normals, what, _SURPRISED), "what is surprising")
        fit_maps(list(maps.values()), lambda what: self._evidence(normals, what))

    def _evidence(self, normals: NormalFilms, what: str, most: int | None = None) -> Iterable[Evidence]:
        for images in normals.batches(what, most):
            yield Evidence(self.model, self.prepared(images), self.surprising)

    def look(self, images: Tensor, names: Sequence[str] | None, restore: bool) -> Look:
        evidence, maps = Evidence(self.model, images, self.surprising), self._maps
        wanted = [name for name, score in SCORES.items() if score.map in maps] if names is None else names
        raw = {name: maps[name](evidence) for name in dict.fromkeys(SCORES[n].map for n in wanted) if name in maps}
        standard = {name: maps[name].standard(values) for name, values in raw.items()}
        chosen = [SCORES[name].map for name in self.choice.names]
        if self.device.type == "mps":  # which has no double precision
            raw, standard = ({name: values.cpu() for name, values in found.items()} for found in (raw, standard))
        return Look(
            scores=film_scores(raw, standard, wanted),
            heat=torch.stack([standard[name] for name in chosen]).mean(dim=0),
            restored=self._restored(images, evidence) if restore else None,
        )

    def _restored(self, images: Tensor, evidence: Evidence) -> Tensor | None:
        """The film as the decoder draws it with the most suspicious quarter of its tokens hidden."""
        if not self.model.restores:
            return None
        if self.surprising is None:
            return self.model.picture(evidence.restored, images)
        patches = torch.where(evidence.hidden[:, :, None], evidence.behind, evidence.patches)
        return self.model.picture(patches, images)

    @property
    def _maps(self) -> dict[str, PatchMap]:
        return {name: cast(PatchMap, patch_map) for name, patch_map in self.maps.items()}

    @property
    def surprising(self) -> Standard | None:
        """By which the second pass knows what to hide; None where the model has no prototypes."""
        return self._maps[StudentSurprise.name].standard if StudentSurprise.name in self.maps else None
