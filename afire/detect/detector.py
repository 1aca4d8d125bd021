"""From a score to what it means: percentile among normals, conformal p-value, and the threshold of a false-alarm rate.

The calibration films are normals that neither trained the networks nor chose the score. If a new film is normal and
comes from where they come from, its p-value is at most a with probability at most a, whatever the score is.

A fitted detector: networks, what normal films look like to them, the chosen score and its calibration.

A folder with ``config.yaml`` and ``model.safetensors`` (the adapted AFiRe), ``detector.safetensors`` (Gaussians and
standards) and, written last, ``detector.json`` (choice, calibration, scale of heatmaps, domain, origin of it all).

Shapes: B films, L = rows x columns positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from afire.config import Config, load_config, to_yaml
from afire.detect.choose import Choice, choice_from_json, choice_to_json
from afire.detect.domain import Domain
from afire.detect.maps import (
    MAPS,
    SCORES,
    Evidence,
    Fitted,
    Standard,
    TokenGaussian,
    film_scores,
    look,
    raw_maps,
    settle,
    standardised,
    suspicious,
)
from afire.errors import UserError
from afire.files import read_json, write_atomic, write_json, write_text
from afire.methods.afire import AFiRe

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Calibration:
    """Scores of the calibration normals, rising."""

    normal_scores: Floats

    @classmethod
    def of(cls, scores: ArrayLike) -> Calibration:
        """From the scores (N,) of held-out normal films."""
        found = np.sort(np.asarray(scores, np.float64))
        if len(found) == 0 or not np.isfinite(found).all():
            raise UserError("calibration needs finite scores of at least one normal film.")
        return cls(found)

    def __len__(self) -> int:
        return len(self.normal_scores)

    def p_values(self, scores: ArrayLike) -> Floats:
        """(1 + normals that score at least as high) / (1 + normals): never below 1 / (n + 1)."""
        as_high = len(self) - np.searchsorted(self.normal_scores, np.asarray(scores, np.float64), side="left")
        found: Floats = (1 + as_high) / (1 + len(self))
        return found

    def percentiles(self, scores: ArrayLike) -> Floats:
        """Percent of calibration normals that score lower, ties counting half."""
        values = np.asarray(scores, np.float64)
        below = np.searchsorted(self.normal_scores, values, side="left")
        upto = np.searchsorted(self.normal_scores, values, side="right")
        found: Floats = 50 * (below + upto) / len(self)
        return found

    def threshold(self, false_alarms: float) -> float:
        """The smallest score whose p-value is at most ``false_alarms``; infinite when there are too few normals.

        A film alarms when its score is at least this.
        """
        may_pass = int(np.floor(false_alarms * (len(self) + 1) + 1e-9)) - 1  # normals that may score as high
        if may_pass < 0:
            return float("inf")
        if may_pass >= len(self):
            return float("-inf")
        return float(np.nextafter(self.normal_scores[len(self) - 1 - may_pass], np.inf))

    def smallest_rate(self) -> float:
        """The lowest false-alarm rate that this many normals can vouch for."""
        return 1 / (1 + len(self))


FORMAT = 1
SETTINGS, TENSORS, MODEL, CONFIG = "detector.json", "detector.safetensors", "model.safetensors", "config.yaml"
DISCLAIMER = "Research software, not a medical device."


@dataclass(frozen=True)
class HeatScale:
    """The one scale of all heatmaps, in sd of normal films: below ``low`` nothing is shown, at ``high`` it is full."""

    low: float
    high: float


@dataclass(frozen=True)
class Found:
    """What a detector says about a batch. Larger scores are more abnormal."""

    score: Floats  # (B,)
    parts: dict[str, Floats]  # the scores behind it, or all of them
    heat: NDArray[np.float32]  # (B, rows, columns), in sd of normal films
    restored: NDArray[np.float32] | None  # (B, S, S) in [0, 1]: the film with its suspicious places drawn as normal


@dataclass
class Detector:
    """``detector = Detector.load(folder)``, then ``detector.score(images)``."""

    model: AFiRe
    fitted: Fitted
    choice: Choice
    calibration: Calibration
    scale: HeatScale
    domain: Domain
    false_alarms: float
    origin: dict[str, Any]  # data, split, counts, settings, environment: for tables and the model card

    @property
    def config(self) -> Config:
        """Settings of the networks."""
        return self.model.config

    @property
    def device(self) -> torch.device:
        """Where the networks are."""
        return next(self.model.parameters()).device

    @property
    def threshold(self) -> float:
        """The score from which on a film alarms, at the false-alarm rate it was calibrated for."""
        return self.calibration.threshold(self.false_alarms)

    def to(self, device: torch.device | str) -> Detector:
        """Move to a device; the same detector."""
        place = torch.device(device)
        self.model.to(place)
        standards = {
            name: Standard(one.mean.to(place), one.sd.to(place)) for name, one in self.fitted.standards.items()
        }
        self.fitted = Fitted(self.fitted.gaussian.to(place), standards)
        return self

    @torch.inference_mode()
    def score(self, images: Tensor, *, all_scores: bool = False, restore: bool = True) -> Found:
        """Films (B, 1, S, S) in [0, 1] at the detector's size -> scores, heatmaps and restored films."""
        images = self._films(images)
        evidence = look(self.model, images)
        names = None if all_scores else [one.name for one in self.choice.components]
        wanted = MAPS if names is None else {SCORES[name].map for name in names}
        raw = raw_maps(self.model, evidence, self.fitted.gaussian, self._hide_from, wanted)
        standard = standardised(raw, self.fitted.standards)
        parts = {name: values.cpu().numpy() for name, values in film_scores(raw, standard, names).items()}
        heat = torch.stack([standard[SCORES[one.name].map] for one in self.choice.components]).mean(dim=0)
        restored = self._restored(images, evidence) if restore else None
        rows, columns = self.model.grid
        return Found(
            score=self.choice(parts),
            parts=parts,
            heat=heat.view(len(images), rows, columns).float().cpu().numpy(),
            restored=restored.mean(dim=1).float().cpu().numpy() if restored is not None else None,
        )

    def _films(self, images: Tensor) -> Tensor:
        size, channels = self.config.image.size, self.config.image.channels
        if images.ndim != 4 or images.shape[-2:] != (size, size) or images.shape[1] not in (1, channels):
            raise UserError(
                f"films of shape {tuple(images.shape)} came, but the detector takes (B, 1, {size}, {size})."
            )
        return images.to(self.device).expand(-1, channels, -1, -1)

    @property
    def _hide_from(self) -> Standard | None:
        return self.fitted.standards.get("student_surprise")

    def _restored(self, images: Tensor, evidence: Evidence) -> Tensor | None:
        """The film as the decoder draws it with the most suspicious quarter of its tokens hidden."""
        if self.model.decoder is None:
            return None
        if self._hide_from is None or evidence.student_surprise is None:
            assert evidence.restored is not None
            return self.model.picture(evidence.restored, images)
        hidden = suspicious(self._hide_from(evidence.student_surprise))
        patches = torch.where(hidden[:, :, None], evidence.behind(hidden), evidence.patches)
        return self.model.picture(patches, images)

    def save(self, folder: Path) -> None:
        """Write the folder; ``detector.json`` comes last, so its presence says that all is there."""
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / CONFIG, to_yaml(self.config))
        weights = {name: tensor.detach().cpu().contiguous() for name, tensor in self.model.state_dict().items()}
        write_atomic(folder / MODEL, lambda path: save_file(weights, path))
        tensors = {
            "gaussian.mean": self.fitted.gaussian.mean,
            "gaussian.whiten": self.fitted.gaussian.whiten,
            "gaussian.shrinkage": self.fitted.gaussian.shrinkage,
            "calibration": torch.from_numpy(self.calibration.normal_scores),
            **{f"standard.{name}.mean": one.mean for name, one in self.fitted.standards.items()},
            **{f"standard.{name}.sd": one.sd for name, one in self.fitted.standards.items()},
            **{f"domain.{name}": tensor for name, tensor in self.domain.tensors().items()},
        }
        kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        write_atomic(folder / TENSORS, lambda path: save_file(kept, path))
        write_json(
            folder / SETTINGS,
            {
                "format": FORMAT,
                "note": DISCLAIMER,
                "choice": choice_to_json(self.choice),
                "false_alarms": self.false_alarms,
                "threshold": self.threshold if np.isfinite(self.threshold) else None,
                "calibration_films": len(self.calibration),
                "heat_scale": {"low": self.scale.low, "high": self.scale.high},
                "domain": self.domain.settings(),
                "origin": self.origin,
            },
        )

    @classmethod
    def load(cls, folder: Path | str) -> Detector:
        """Read a detector's folder."""
        folder = Path(folder)
        if not (folder / SETTINGS).is_file():
            raise UserError(f"{folder} holds no detector ({SETTINGS}); make one with `afire detect fit`.")
        raw = read_json(folder / SETTINGS)
        if not isinstance(raw, Mapping) or raw.get("format") != FORMAT:
            raise UserError(f"{folder / SETTINGS} is not a detector of format {FORMAT}; fit it again.")
        tensors, weights = _tensors(folder / TENSORS), _tensors(folder / MODEL)
        model = AFiRe(load_config(file=folder / CONFIG))
        try:
            model.load_state_dict(weights)
            gaussian = TokenGaussian(*(tensors[f"gaussian.{name}"] for name in ("mean", "whiten", "shrinkage")))
            names = [name.split(".")[1] for name in tensors if name.startswith("standard.") and name.endswith(".mean")]
            standards = {n: Standard(tensors[f"standard.{n}.mean"], tensors[f"standard.{n}.sd"]) for n in names}
            domain = {name.removeprefix("domain."): t for name, t in tensors.items() if name.startswith("domain.")}
            return cls(
                model=settle(model),
                fitted=Fitted(gaussian, standards),
                choice=choice_from_json(raw["choice"]),
                calibration=Calibration.of(tensors["calibration"].numpy()),
                scale=HeatScale(float(raw["heat_scale"]["low"]), float(raw["heat_scale"]["high"])),
                domain=Domain.restore(domain, raw["domain"]),
                false_alarms=float(raw["false_alarms"]),
                origin=dict(raw["origin"]),
            )
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"{folder} is torn or not ours ({type(error).__name__}: {reason}); fit it again.") from None


def _tensors(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file} cannot be read ({error}); fit the detector again.") from None


def heat_scale(heat_of_normals: Sequence[NDArray[np.float32]]) -> HeatScale:
    """Nothing shows below what 1 position in 40 of a normal film reaches; full is three times what 1 in 1,000 does."""
    values = np.concatenate([heat.ravel() for heat in heat_of_normals])
    low, rare = (float(value) for value in np.quantile(values, [0.975, 0.999]))
    return HeatScale(low, max(3 * rare, low + 1))
