"""Lesions for a batch, from a generator or from the key (seed, epoch, sample, view), and the tokens they make abnormal.

Two kinds: the paper's, painted (:mod:`afire.lesions.painting`), and AnatPaste (Sato et al. 2023), the augmentation of
its ablation: one patch, blended into the lung field.

Shapes: B films, C channels, V views, N = B * V samples, film by film: rows i*V .. i*V + V-1 belong to film i; boxes of
h x w pixels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from afire.config import LesionConfig
from afire.lesions.painting import FIXED_POINT, paint, place_windows, plan, scaled
from afire.lesions.places import Draw, PixelPicker, drawn, keyed, lung_depth, otsu_with_bright_level, unit

_FLAT_SHARE = 0.5  # of the radius; from there the patch fades out to its edge
_PIXELS_AT_ONCE = {"cpu": 2**21, "gpu": 2**25}  # a GPU wants few large steps, a CPU's cache wants small ones
_RANGE_TOLERANCE = 1e-3  # resampling and half precision overshoot a little; a film in [0, 255] does not


def synthesize(
    images: Tensor, *, generator: torch.Generator, config: LesionConfig | None = None
) -> tuple[Tensor, Tensor]:
    """Add synthetic lesions to normal films.

    images (B, C, H, W), floating point in [0, 1] -> lesioned (B*V, C, H, W) in the type of ``images`` and
    mask (B*V, 1, H, W) float32, both in [0, 1]. With ``slm`` the mask is what was added: ``clip(x + mask, 0, 1)``;
    with ``anatpaste`` it is the share of the pasted patch. The same generator state gives the same lesions.
    """
    config = config or LesionConfig()
    _check_images(images, True)
    return _synthesize(images, drawn((len(images), config.views, _slots(config)), generator), config)


def synthesize_keyed(
    images: Tensor,
    *,
    seed: int,
    epoch: int,
    indices: Tensor | Sequence[int],
    config: LesionConfig | None = None,
    check_values: bool = True,
) -> tuple[Tensor, Tensor]:
    """As :func:`synthesize`, but a sample's lesions depend only on (seed, epoch, index, view) and its film.

    ``indices`` (B,) number the films within the dataset. The result is the same for every batch size, order of films,
    number of workers and number of processes. ``check_values`` looks for values outside of [0, 1], for which a GPU has
    to finish its queue.
    """
    config = config or LesionConfig()
    _check_images(images, check_values)
    if len(indices) != len(images):
        raise ValueError(f"{len(images)} images came with {len(indices)} indices; give one index for each image.")
    return _synthesize(images, keyed(seed, epoch, indices, config.views, _slots(config)), config)


def _slots(config: LesionConfig) -> int:
    return 1 if config.kind == "anatpaste" else config.count_max


@torch.no_grad()
def _synthesize(images: Tensor, draws_BVSD: Tensor, config: LesionConfig) -> tuple[Tensor, Tensor]:
    """Group by group: what is computed on the way stays in the cache, and memory does not grow with the batch."""
    films, channels, height, width = images.shape
    views = config.views
    lesioned = images.new_empty((films * views, channels, height, width))
    mask = images.new_empty((films * views, 1, height, width), dtype=torch.float32)
    at_once = _PIXELS_AT_ONCE["cpu" if images.device.type == "cpu" else "gpu"]
    group = max(1, at_once // (height * width * views))
    draws = draws_BVSD.to(images.device)
    for start in range(0, films, group):
        some, rows = slice(start, start + group), slice(start * views, (start + group) * views)
        _synthesize_group(images[some], draws[some], config, lesioned[rows], mask[rows])
    return lesioned, mask


def _synthesize_group(
    images: Tensor, draws_BVSD: Tensor, config: LesionConfig, lesioned_out: Tensor, mask_out: Tensor
) -> None:
    exact = images if images.dtype in (torch.float32, torch.float64) else images.to(torch.float32)
    gray_BHW = exact.mean(1).to(torch.float32) if images.shape[1] > 1 else exact[:, 0].to(torch.float32)
    threshold_B, bright_B = otsu_with_bright_level(gray_BHW)
    highlighted = PixelPicker(gray_BHW > threshold_B[:, None, None])
    if config.kind == "anatpaste":
        lesioned, mask = paste(exact, gray_BHW, highlighted, draws_BVSD, config)
        lesioned_out.copy_(lesioned.clamp_(0, 1))
        mask_out.copy_(mask)
        return
    _paint_mask(gray_BHW, bright_B, highlighted, draws_BVSD, config, mask_out)
    mask_BVCHW = mask_out.view(len(images), -1, 1, *mask_out.shape[2:])
    torch.add(exact[:, None], mask_BVCHW, out=lesioned_out.view(*mask_BVCHW.shape[:2], *images.shape[1:]))
    lesioned_out.clamp_(0, 1)


def _paint_mask(
    gray_BHW: Tensor,
    bright_B: Tensor,
    highlighted: PixelPicker,
    draws_BVSD: Tensor,
    config: LesionConfig,
    mask_out: Tensor,
) -> None:
    """Write what lesions add to each sample into ``mask_out`` (N, 1, H, W)."""
    films, views = draws_BVSD.shape[:2]
    layers = paint(gray_BHW, plan(gray_BHW, highlighted, draws_BVSD, config), films * views, config)
    mask_out[:, 0] = layers[0]
    mask_out *= 1 / FIXED_POINT
    if len(layers) == 2:
        # Blending towards the bright level adds density where the film is darker; it never takes any away.
        headroom = (bright_B[:, None, None] - gray_BHW).clamp_(min=0).repeat_interleave(views, 0)
        mask_out[:, 0] += headroom.mul_(layers[1].clamp_(max=FIXED_POINT)).mul_(1 / FIXED_POINT)
    mask_out.clamp_(max=1)


def paste(
    images_BCHW: Tensor, gray_BHW: Tensor, highlighted: PixelPicker, draws_BVSD: Tensor, config: LesionConfig
) -> tuple[Tensor, Tensor]:
    """Images (N, C, H, W) with one patch each, and the share of the patch in each pixel, (N, 1, H, W).

    The patch is cut around a highlighted pixel, keeps its size, and is pasted around a lung pixel:
    ``x' = x + share * (patch - x)``, with a share that fades out towards the patch's and the lungs' edges.
    """
    films, views = draws_BVSD.shape[:2]
    height, width = gray_BHW.shape[1:]
    draws = draws_BVSD[:, :, 0].unbind(2)  # one lesion for each view: the first slot's draws
    side = scaled(config.paste_size, height, width)
    box_width, box_height = min(side, width), min(side, height)
    depth_BHW = lung_depth(gray_BHW)
    column, row = PixelPicker(depth_BHW > 0).pick(draws[Draw.LUNG])
    left = (column - box_width // 2).clamp(0, width - box_width).flatten()
    top = (row - box_height // 2).clamp(0, height - box_height).flatten()
    from_left, from_top = place_windows(highlighted, draws, (box_width, box_height))

    device = gray_BHW.device
    samples = torch.arange(films * views, device=device)[:, None, None]
    film = samples // views
    across, down = (
        torch.arange(box_width, device=device)[None, None, :],
        torch.arange(box_height, device=device)[None, :, None],
    )
    to_x, to_y = left[:, None, None] + across, top[:, None, None] + down
    patch = gray_BHW[film, from_top.flatten()[:, None, None] + down, from_left.flatten()[:, None, None] + across]
    amplitude = config.amplitude_min + unit(draws[Draw.AMPLITUDE]) * (config.amplitude_max - config.amplitude_min)
    share = amplitude.flatten()[:, None, None] * _fading(box_height, box_width, device) * depth_BHW[film, to_y, to_x]

    mask = torch.zeros(films * views, height, width, device=device)
    mask[samples, to_y, to_x] = share
    lesioned = images_BCHW.repeat_interleave(views, 0).permute(0, 2, 3, 1)  # a view: pixels first, channels last
    under = lesioned[samples, to_y, to_x]
    lesioned[samples, to_y, to_x] = under + share[..., None] * (patch[..., None] - under)
    return lesioned.permute(0, 3, 1, 2), mask[:, None]


def _fading(height: int, width: int, device: torch.device) -> Tensor:
    """1 in the middle of the box, a cosine slope outside, 0 from the inscribed oval on; (h, w)."""
    v = (torch.arange(height, device=device) + 0.5) * (2 / height) - 1
    u = (torch.arange(width, device=device) + 0.5) * (2 / width) - 1
    radius = (u[None, :].square() + v[:, None].square()).sqrt()
    slope = ((radius - _FLAT_SHARE) / (1 - _FLAT_SHARE)).clamp(0, 1)
    return 0.5 + 0.5 * (slope * torch.pi).cos()


def token_labels(mask: Tensor, patch_size: int) -> Tensor:
    """True (abnormal) where a patch's mean of the mask exceeds the mask's mean over the image.

    mask (B, 1, H, W) >= 0 -> bool (B, L), patches row by row as the patch embedding flattens them. A mask of zeros,
    or of one value everywhere, has no abnormal token.
    """
    if mask.ndim != 4 or mask.shape[1] != 1:
        raise ValueError(f"mask must have shape (B, 1, H, W), got {tuple(mask.shape)}.")
    height, width = mask.shape[-2:]
    if height % patch_size or width % patch_size:
        raise ValueError(f"the mask's {height} x {width} pixels are not a multiple of patch_size {patch_size}.")
    patches = functional.avg_pool2d(mask.to(torch.float32), patch_size).flatten(1)
    # In float64 the mean of equal patches is exactly their value; in float32 rounding could make it a little less.
    exact = patches if patches.device.type == "mps" else patches.to(torch.float64)
    return exact > exact.mean(1, keepdim=True)


def _check_images(images: Tensor, values: bool) -> None:
    if images.ndim != 4 or images.shape[1] < 1 or images.shape[2] < 1 or images.shape[3] < 1:
        raise ValueError(f"images must have shape (B, C, H, W), got {tuple(images.shape)}.")
    if not images.is_floating_point():
        kind = str(images.dtype).removeprefix("torch.")
        raise ValueError(f"images must be floating point in [0, 1], got {kind}; divide by the largest value first.")
    if not values or not images.numel():
        return
    low, high = (float(value) for value in images.detach().aminmax())
    if not (low >= -_RANGE_TOLERANCE and high <= 1 + _RANGE_TOLERANCE):  # also true for NaN
        raise ValueError(
            f"images must lie in [0, 1] before lesions are added, but range from {low:g} to {high:g}; "
            "normalise with mean and std afterwards."
        )
