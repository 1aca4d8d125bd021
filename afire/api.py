"""afire from Python: ``model = afire.load(path)``, then ``model.encode(images)``.

Shapes: B images, H x W pixels, S the model's own size, L tokens (patches, row by row), D width of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from afire.data.decode import fit_square, read_film
from afire.errors import UserError
from afire.nn.vit import check_films
from afire.weights import Weights, open_weights, pick_device

if TYPE_CHECKING:
    from afire.detect.base import AnomalyDetector

FilePath = str | Path
Images = Tensor | NDArray[Any] | FilePath | Sequence[FilePath]
"""Images: a float tensor or array (B, 1, H, W), (B, H, W) or (H, W) in [0, 1] with black = 0; or files of films."""

_BATCH = 64


@dataclass(frozen=True)
class Detection:
    """What a detector says about images. Research software, not a medical device."""

    score: NDArray[np.float64]
    """(B,), larger = more abnormal."""
    p_value: NDArray[np.float64]
    """(B,): how often a normal film like those of the calibration would score as high."""
    alarm: NDArray[np.bool_]
    """(B,): whether the score reaches the threshold that the detector was calibrated to."""
    heatmap: NDArray[np.float32]
    """(B, rows, columns) of patches, in standard deviations of normal films."""
    restored: NDArray[np.float32] | None
    """(B, S, S) in [0, 1]: the film with its most suspicious places drawn as normal; None without a decoder."""
    objections: list[list[str]]
    """For each image, why its score should not be trusted: blank, inverted, no frontal chest film. Empty is good."""
    warnings: list[list[str]]
    """For each image, what to bear in mind: it looks unlike the films the detector was made from. Empty is good."""


class Model:
    """A pre-trained method or a detector ready for use; :func:`load` makes it."""

    def __init__(self, weights: Weights, detector: AnomalyDetector | None = None) -> None:
        self.name, self.config = weights.name, weights.config
        self.detector = detector
        self.method = weights.method if weights.holds_method else None
        # A detector may use an encoder alone, or networks of its own.
        self._encoder: nn.Module | None = self.method
        if self.method is None and weights.holds_trunk:
            self._encoder = nn.Sequential(weights.normalise, weights.trunk)
        networks = self._encoder if self._encoder is not None else detector
        assert networks is not None
        self._networks = networks.eval().requires_grad_(False)

    @property
    def size(self) -> int:
        """S: side of the films it was trained on."""
        return self.config.image.size

    @property
    def device(self) -> torch.device:
        """Where the networks are."""
        return next(self._networks.parameters()).device

    def to(self, device: str | torch.device) -> Model:
        """Move to a device; the same model."""
        self._networks.to(device)
        if self.detector is not None:
            self.detector.to(device)
        return self

    def read(self, paths: FilePath | Sequence[FilePath]) -> Tensor:
        """Files (PNG, JPEG, TIFF, DICOM) -> images (B, 1, S, S) in [0, 1], as in training."""
        image = self.config.image
        files = [paths] if isinstance(paths, str | Path) else list(paths)
        if not files:
            raise UserError("no films were given to read.")
        images = [fit_square(read_film(Path(file), voi=image.voi)[0], image.size, image.fit) for file in files]
        return torch.from_numpy(np.stack(images)[:, None])

    def encode(self, images: Images, network: str | None = None) -> Tensor:
        """Images -> tokens (B, L, D). Any height and width that the patch divides.

        ``network`` is another than the one to use, such as AFiRe's ``student``.
        """
        self._check_encoder()
        return self._each(images, lambda batch: self._tokens(batch, network))

    def embed(self, images: Images, network: str | None = None) -> Tensor:
        """Images -> one vector each (B, D): the mean of their tokens."""
        self._check_encoder()
        return self._each(images, lambda batch: self._tokens(batch, network).mean(dim=1))

    def restore(self, images: Images) -> Tensor:
        """Images -> what the decoder draws of them, (B, C, H, W) in [0, 1]."""
        self._check_encoder()
        method = self.method
        if method is None:
            raise UserError(f"{self.name} holds a detector and its encoder, and no decoder; it restores nothing.")
        return self._each(images, lambda batch: method.picture(method.restore(batch), batch))

    def lesion_maps(self, images: Images) -> Tensor:
        """Images -> how likely each cell is to be part of a lesion, (B, 1, G, G) in [0, 1]."""
        self._check_encoder()
        method = self.method
        if method is None:
            raise UserError(f"{self.name} holds a detector and its encoder, and no lesion classifier.")
        return self._each(images, method.lesion_maps)

    def detect(self, images: Images) -> Detection:
        """Images at the model's size S -> scores, p-values, alarms and heatmaps, by the detector inside."""
        if self.detector is None:
            raise UserError(
                f"{self.name} holds no detector; fit one with `afire detect fit` on normal films, and export it with "
                "`afire export --detector`."
            )
        tensor = self._tensor(images)
        results = [self.detector.score(batch) for batch in _batches(tensor)]
        score = np.concatenate([result.score for result in results])
        restored = [result.restored for result in results if result.restored is not None]
        objections, warnings = self.detector.domain.verdicts(tensor)
        return Detection(
            score=score,
            p_value=self.detector.calibration.p_values(score),
            alarm=score >= self.detector.threshold,
            heatmap=np.concatenate([result.heat for result in results]),
            restored=np.concatenate(restored) if restored else None,
            objections=objections,
            warnings=warnings,
        )

    def _check_encoder(self) -> None:
        if self._encoder is None:
            raise UserError(
                f"{self.name} holds the detector {self.config.method} alone; it detects, and neither encodes nor "
                "restores."
            )

    def _tokens(self, images: Tensor, network: str | None) -> Tensor:
        if self.method is not None:
            return self.method.encode(images, network)
        if network is not None:
            raise UserError(f"{self.name} holds a detector and its encoder, and no network {network!r}.")
        check_films(images, self.config.image.channels, "images")
        with_class_token: Tensor = self._networks(images)
        return with_class_token[:, 1:]

    @torch.inference_mode()
    def _each(self, images: Images, compute: Callable[[Tensor], Tensor]) -> Tensor:
        """Batch by batch, so that memory does not grow with the number of images."""
        return torch.cat([compute(batch.to(self.device)) for batch in _batches(self._tensor(images))])

    def _tensor(self, images: Images) -> Tensor:
        """Images (B, C, H, W) from tensors, arrays or files."""
        if isinstance(images, Tensor):
            tensor = images
        elif isinstance(images, np.ndarray):
            tensor = torch.from_numpy(np.ascontiguousarray(images))
        else:
            return self.read(images)
        if tensor.ndim in (2, 3):
            tensor = tensor[None, None] if tensor.ndim == 2 else tensor[:, None]
        return tensor.float() if tensor.is_floating_point() else tensor

    def __repr__(self) -> str:
        if self._encoder is None:
            return f"<afire.Model {self.name}: the detector {self.config.method} alone, {self.size} px>"
        encoder = self.config.encoder
        inside = "a detector inside" if self.detector is not None else "no detector"
        return f"<afire.Model {self.name}: width {encoder.width}, depth {encoder.depth}, {self.size} px, {inside}>"


def load(path: FilePath, device: Literal["auto", "cpu", "cuda", "mps"] = "auto") -> Model:
    """Open a bundle, a run folder, a fitted detector, or ``hf://owner/name``; every file of a bundle is checked."""
    weights = open_weights(path)
    detector = None
    if weights.detector is not None:
        from afire.detect.base import load_detector

        detector = load_detector(weights.detector)
    elif not weights.holds_method:
        _ = weights.method  # raises an error that says why, and what to give
    return Model(weights, detector).to(pick_device(device))


def _batches(images: Tensor) -> Iterator[Tensor]:
    yield from torch.split(images, _BATCH) if len(images) else (images,)
