"""Grad-CAM of a fine-tuned classifier, and how well its maps meet the boxes that readers drew.

Grad-CAM needs a layer of channels over places. Tokens (B, 1 + L, D) become one when the class token, which has
no place, is set aside and the image tokens are laid out on their grid: (B, D, rows, columns). By default this is done
after the last norm. The classifier takes the mean of those tokens and one linear layer, so the gradient is the same
at every place and Grad-CAM is exactly each token's own share of the logit (before negative shares are cut off).
S pixels a side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from afire.data.decode import film_shape, fit_box
from afire.data.manifest import Box, Manifest
from afire.data.pack import Films
from afire.errors import UserError
from afire.nn.vit import VisionTransformer, grid_of, run_blocks
from afire.progress import progress
from afire.tasks.finetune import Classifier
from afire.tasks.results import Rows

HALF = 0.5  # of a map's maximum: everything above is the answer
SHARE = 0.1  # of the film's pixels: the highest are the answer
Mask = NDArray[np.bool_]
Map = NDArray[np.float32]


@dataclass(frozen=True)
class Case:
    """A finding in a film with the boxes drawn around it; two boxes of one finding are one target."""

    row: int
    label: str
    boxes: list[tuple[float, float, float, float]]  # x, y, w, h in fractions of the square film
    mask: Mask  # (S, S), inside any of the boxes


@dataclass(frozen=True)
class Meeting:
    """How a map meets the boxes of a case; ``chance_*`` is what as many pixels placed at random would reach."""

    hit: float  # 1 when the highest pixel lies inside
    chance_hit: float
    iou_half: float
    chance_iou_half: float
    iou_share: float
    chance_iou_share: float


class TokenMap(nn.Module):
    """A classifier whose tokens of one depth pass through ``picture`` as (B, D, rows, columns)."""

    def __init__(self, model: Classifier, after: int | None = None) -> None:
        """``after`` is a number of blocks; None: after the last block and the last norm."""
        super().__init__()
        self.model, self.picture = model, nn.Identity()
        depth = len(model.encoder.blocks)
        self.after = depth if after is None else after
        if not 1 <= self.after <= depth:
            raise UserError(f"--block {self.after}: this encoder has the blocks 1 to {depth}.")
        if self.after < depth and not isinstance(model.encoder, VisionTransformer):
            raise UserError(
                f"--block {self.after}: a residual network has maps behind its last stage only; leave --block out."
            )

    def forward(self, images: Tensor) -> Tensor:
        encoder = self.model.encoder
        tokens = encoder.levels(self.model.normalise(images), [self.after])[0]
        rows, columns = grid_of(images.shape[-2], images.shape[-1], encoder.patch_size)
        channels_first = tokens[:, 1:].transpose(1, 2).reshape(len(images), -1, rows, columns)
        image_tokens = self.picture(channels_first).flatten(2).transpose(1, 2)
        if self.after < len(encoder.blocks) and isinstance(encoder, VisionTransformer):
            all_tokens = run_blocks(
                [*encoder.blocks][self.after :], torch.cat([tokens[:, :1], image_tokens], dim=1), False
            )
            image_tokens = encoder.norm(all_tokens)[:, 1:]
        logits: Tensor = self.model.head(image_tokens.mean(dim=1))
        return logits


def gradcam(model: Classifier, images: Tensor, label: int, after: int | None = None) -> Map:
    """Maps (B, S, S) >= 0 of one label for images (B, 1, S, S), bilinear between tokens."""
    from captum.attr import LayerAttribution, LayerGradCam

    network = TokenMap(model, after).eval()
    maps = LayerGradCam(network, network.picture).attribute(images, target=label, relu_attributions=True)
    upright: Tensor = LayerAttribution.interpolate(maps.detach(), images.shape[-2:], "bilinear")
    positive: Map = upright[:, 0].clamp_min(0).cpu().numpy()
    return positive


def find_cases(films: Films, rows: Rows, labels: Sequence[str]) -> list[Case]:
    """The boxed findings of ``rows`` that the classifier knows."""
    cases = []
    for row in rows[films.manifest.table["boxes"].to_numpy()[rows] != ""].tolist():
        fitted: dict[str, list[tuple[float, float, float, float]]] = {}
        for box in films.manifest.boxes(row):
            place = _placed(films, row, box)
            if box.label in labels and place is not None:
                fitted.setdefault(box.label, []).append(place)
        cases += [Case(row, label, boxes, box_mask(boxes, films.size)) for label, boxes in fitted.items()]
    return cases


def _placed(films: Films, row: int, box: Box) -> tuple[float, float, float, float] | None:
    """A box of the original film, in coordinates of the square film."""
    if films.fit == "squash":
        return box.x, box.y, box.w, box.h
    height, width = _original_shape(films.manifest, row)
    return fit_box((box.x, box.y, box.w, box.h), height, width, films.fit)


def _original_shape(manifest: Manifest, row: int) -> tuple[int, int]:
    shape = film_shape(manifest.path(row))
    if shape is None:
        raise UserError(
            f"{manifest.path(row)} is not there any more, and without its proportions the boxes of a film that was not "
            "squashed cannot be placed; pack with --fit squash or bring the films back."
        )
    return shape


def box_mask(boxes: Sequence[tuple[float, float, float, float]], size: int) -> Mask:
    """Pixels (S, S) whose centre lies in any of the boxes, and at least the one in each box's middle."""
    centres = (np.arange(size) + 0.5) / size
    mask = np.zeros((size, size), np.bool_)
    for x, y, w, h in boxes:
        mask |= ((centres >= y) & (centres < y + h))[:, None] & ((centres >= x) & (centres < x + w))[None]
        mask[min(int((y + h / 2) * size), size - 1), min(int((x + w / 2) * size), size - 1)] = True
    return mask


def meet(values: Map, inside: Mask) -> Meeting:
    """The numbers of :class:`Meeting`. A map without any positive place points nowhere: a miss, and IoU 0."""
    area = float(inside.mean())
    if values.max() <= 0:
        return Meeting(0.0, area, 0.0, 0.0, 0.0, 0.0)
    half = values >= HALF * values.max()
    top = np.zeros_like(inside)
    top.flat[np.argsort(-values, axis=None, kind="stable")[: max(round(SHARE * values.size), 1)]] = True
    return Meeting(
        hit=float(inside.flat[int(values.argmax())]),
        chance_hit=area,
        iou_half=_iou(half, inside),
        chance_iou_half=_blind_iou(float(half.mean()), area),
        iou_share=_iou(top, inside),
        chance_iou_share=_blind_iou(float(top.mean()), area),
    )


def _iou(answer: Mask, inside: Mask) -> float:
    return float((answer & inside).sum() / (answer | inside).sum())


def _blind_iou(answer: float, inside: float) -> float:
    """Expected overlap over expected union of two independent shares of the film."""
    overlap = answer * inside
    return overlap / (answer + inside - overlap)


def case_maps(
    model: Classifier,
    labels: Sequence[str],
    films: Films,
    cases: Sequence[Case],
    after: int | None,
    device: torch.device,
) -> NDArray[np.float32]:
    """The map (cases, S, S) of each case's own finding on its own film."""
    model = model.to(device)
    maps = np.zeros((len(cases), films.size, films.size), np.float32)
    with progress("Grad-CAM", len(cases), "boxed findings") as bar:
        for label in dict.fromkeys(case.label for case in cases):
            numbers = [number for number, case in enumerate(cases) if case.label == label]
            for start in range(0, len(numbers), 32):
                batch = numbers[start : start + 32]
                images = films.batch([cases[number].row for number in batch]).to(device)
                maps[batch] = gradcam(model, images, list(labels).index(label), after)
                bar.advance(len(batch))
    return maps
