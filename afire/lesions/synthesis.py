"""Lesions for a batch, from a generator or from the key (seed, epoch, sample, view), and the tokens they make abnormal.

Three sorts: the paper's, planned from draws (how many, how large, how strong, which texture, where) and then painted;
AnatPaste (:mod:`afire.lesions.anatpaste`); and, by their shares of the views, opacities and patches of other films
(:mod:`afire.lesions.mixture`).

Only the pixels inside the lesions' boxes are computed, those of all lesions of a group of films at once. The boxes
differ in size, so their rows form one list, each as long as the widest box; what a row holds beyond its own box has no
strength. A row knows its lesion, so that what differs from lesion to lesion is looked up by row, not by pixel.

Shapes: B films of H x W with C channels, V views, S slots, N lesions in all, boxes of h x w pixels, R rows of all
boxes, the widest of A pixels. A sample is one view of one film; samples are numbered film by film: rows i*V .. i*V +
V-1 belong to film i.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn import functional

from afire.config import LesionConfig
from afire.lesions.anatpaste import paste
from afire.lesions.mixture import is_mixed, mixed, slots
from afire.lesions.pastes import Donors
from afire.lesions.places import (
    DRAW_BITS,
    Draw,
    PixelPicker,
    below,
    drawn,
    grey,
    keyed,
    lung_field,
    nth_of_stream,
    otsu_with_bright_level,
    place_windows,
    scaled,
    unit,
)

HARMONICS = (2, 3, 4, 5)  # of the outline; the first would only shift it
# Lesions add up as whole multiples of 2^-24, of which float32 holds every one up to 1, where sums are cut off: so they
# do not depend on the order in which a GPU adds them.
FIXED_POINT = 2**24
_PIXELS_AT_ONCE = {"cpu": 2**21, "gpu": 2**25}  # a GPU wants few large steps, a CPU's cache wants small ones
_CLOUDS = (1.5, 3.0, 6.0)  # waves across a lesion, of each size of clouds, coarse to fine
_WAVES = 4  # of each size, in directions of their own
_RAGGED = 3.0  # how much further out an edge without clouds lies than it is
_RANGE_TOLERANCE = 1e-3  # resampling and half precision overshoot a little; a film in [0, 255] does not


def synthesize(
    images: Tensor, *, generator: torch.Generator, config: LesionConfig | None = None, donors: Donors | None = None
) -> tuple[Tensor, Tensor]:
    """Add synthetic lesions to normal films.

    images (B, C, H, W), floating point in [0, 1] -> lesioned (B*V, C, H, W) in the type of ``images`` and
    mask (B*V, 1, H, W) float32, both in [0, 1]. With ``slm`` the mask is what was added: ``clip(x + mask, 0, 1)``;
    with ``anatpaste`` it is the share of the pasted patch. In views with patches of ``donors`` (without any, of the
    film itself) it is how abnormal each pixel has become (:func:`~afire.lesions.pastes.change_labels`), 0 where it has
    not changed. The same generator state gives the same lesions.
    """
    config = config or LesionConfig()
    _check_images(images, True)
    if is_mixed(config):
        seed = int(torch.randint(1 << 62, (), generator=generator, device=generator.device))
        return mixed(images, seed, 0, torch.arange(len(images)), config, donors, painted)
    return painted(images, drawn((len(images), config.views, slots(config)), generator), config)


def synthesize_keyed(
    images: Tensor,
    *,
    seed: int,
    epoch: int,
    indices: Tensor | Sequence[int],
    config: LesionConfig | None = None,
    donors: Donors | None = None,
    check_values: bool = True,
) -> tuple[Tensor, Tensor]:
    """As :func:`synthesize`, but a sample's lesions depend only on (seed, epoch, index, view), its film and the donors.

    ``indices`` (B,) number the films within the dataset. The result is the same for every batch size, order of films,
    number of workers and number of processes; to the bit where nothing is pasted, there to the rounding of float32.
    ``check_values`` looks for values outside of [0, 1], for which a GPU has to finish its queue.
    """
    config = config or LesionConfig()
    _check_images(images, check_values)
    if len(indices) != len(images):
        raise ValueError(f"{len(images)} images came with {len(indices)} indices; give one index for each image.")
    if is_mixed(config):
        return mixed(images, seed, epoch, torch.as_tensor(indices, dtype=torch.int64).cpu(), config, donors, painted)
    return painted(images, keyed(seed, epoch, indices, config.views, slots(config)), config)


@torch.no_grad()
def painted(images: Tensor, draws_BVSD: Tensor, config: LesionConfig) -> tuple[Tensor, Tensor]:
    """Films (B, C, H, W) -> lesioned (B*V, C, H, W) and mask (B*V, 1, H, W), as these draws say.

    Group by group: what is computed on the way stays in the cache, and memory does not grow with the batch.
    """
    films, channels, height, width = images.shape
    views = config.views
    lesioned = images.new_empty((films * views, channels, height, width))
    mask = images.new_empty((films * views, 1, height, width), dtype=torch.float32)
    at_once = _PIXELS_AT_ONCE["cpu" if images.device.type == "cpu" else "gpu"]
    group = max(1, at_once // (height * width * views))
    draws = draws_BVSD.to(images.device)
    for start in range(0, films, group):
        some, rows = slice(start, start + group), slice(start * views, (start + group) * views)
        _paint_group(images[some], draws[some], config, lesioned[rows], mask[rows])
    return lesioned, mask


def _paint_group(
    images: Tensor, draws_BVSD: Tensor, config: LesionConfig, lesioned_out: Tensor, mask_out: Tensor
) -> None:
    exact = images if images.dtype in (torch.float32, torch.float64) else images.to(torch.float32)
    gray_BHW = grey(images)
    threshold_B, bright_B = otsu_with_bright_level(gray_BHW)
    highlighted = PixelPicker.above(gray_BHW, threshold_B)
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
    lesions = plan(gray_BHW, highlighted, draws_BVSD, config)
    if config.haze == 0:
        paint(gray_BHW, lesions, config, mask_out.zero_().transpose(0, 1))
    else:
        texture, haze = paint(gray_BHW, lesions, config, mask_out.new_zeros((2, films * views, *mask_out.shape[2:])))
        # Blending towards the bright level adds density where the film is darker; it never takes any away.
        headroom = (bright_B[:, None, None] - gray_BHW).clamp_(min=0).repeat_interleave(views, 0)
        torch.add(texture, headroom.mul_(haze.clamp_(max=1)), out=mask_out[:, 0])
    mask_out.clamp_(max=1)


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


def lesion_shares(mask: Tensor, cell: int) -> Tensor:
    """Share of each cell of ``cell`` x ``cell`` pixels that is lesion, (B, 1, H / cell, W / cell), in [0, 1].

    A pixel is lesion by the rule of :func:`token_labels`: where the mask (B, 1, H, W) exceeds its mean over the image.
    """
    mean = mask.to(torch.float32).mean(dim=(2, 3), keepdim=True)
    return functional.avg_pool2d((mask > mean).to(torch.float32), cell)


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


# The plan of the lesions


@dataclass(frozen=True)
class Lesions:
    """N lesions as columns. A lesion is ``width`` x ``height``, turned by the angle, in the middle of its box."""

    sample: Tensor  # row of the result
    film: Tensor
    left: Tensor  # the box of pixels that the lesion is painted in, always within the film
    top: Tensor
    box_width: Tensor
    box_height: Tensor
    width: Tensor
    height: Tensor
    window_left: Tensor  # the window that the texture is taken from
    window_top: Tensor
    amplitude: Tensor
    cosine: Tensor
    sine: Tensor
    phases: Tensor  # (N, len(HARMONICS))
    clouds: Tensor  # (N, W, 3): of each wave its steps along u and v, in radians, and its phase; W = 0 without any
    haze: Tensor  # bool

    def __len__(self) -> int:
        return len(self.sample)

    def where(self, keep: Tensor) -> Lesions:
        """Some of the lesions, by number."""
        return Lesions(**{column.name: getattr(self, column.name).index_select(0, keep) for column in fields(self)})


def window_size(config: LesionConfig, height: int, width: int) -> tuple[int, int]:
    """Width and height of the texture window, never larger than the film."""
    side = scaled(config.texture_window, height, width)
    return min(side, width), min(side, height)


def plan(gray_BHW: Tensor, highlighted: PixelPicker, draws_BVSD: Tensor, config: LesionConfig) -> Lesions:
    """Turn draws into the lesions of every sample."""
    films, views, slots, _ = draws_BVSD.shape
    device = gray_BHW.device
    draws = draws_BVSD.reshape(films, views * slots, -1).unbind(2)
    height_H, width_W = gray_BHW.shape[1:]

    size_low, size_high = (scaled(size, height_H, width_W) for size in (config.size_min, config.size_max))
    width = (size_low + below(draws[Draw.WIDTH], size_high - size_low + 1)).clamp(max=width_W)
    height = (size_low + below(draws[Draw.HEIGHT], size_high - size_low + 1)).clamp(max=height_H)
    cosine, sine = _turn(draws[Draw.ANGLE], config.rotate)
    box_width = _extent(width, height, cosine, sine, width_W)
    box_height = _extent(height, width, cosine, sine, height_H)
    left, top = _place(gray_BHW, draws, box_width, box_height, config)
    window_left, window_top = place_windows(highlighted, draws, window_size(config, height_H, width_W))
    amplitude = config.amplitude_min + unit(draws[Draw.AMPLITUDE]) * (config.amplitude_max - config.amplitude_min)
    turns = unit(draws_BVSD[..., Draw.PHASE : Draw.PHASE + len(HARMONICS)])

    index = torch.arange(films * views * slots, device=device)
    flat = Lesions(
        sample=index // slots,
        film=index // (slots * views),
        left=left.flatten(),
        top=top.flatten(),
        box_width=box_width.flatten(),
        box_height=box_height.flatten(),
        width=width.flatten(),
        height=height.flatten(),
        window_left=window_left.flatten(),
        window_top=window_top.flatten(),
        amplitude=amplitude.flatten(),
        cosine=cosine.flatten(),
        sine=sine.flatten(),
        phases=turns.flatten(0, 2) * (2 * torch.pi),
        clouds=_cloud_waves(draws_BVSD.flatten(0, 2), config.patchy > 0),
        haze=(unit(draws[Draw.KIND]) < config.haze).flatten(),
    )
    count_BV = config.count_min + below(draws_BVSD[:, :, 0, Draw.COUNT], config.count_max - config.count_min + 1)
    present = torch.arange(slots, device=device) < count_BV[:, :, None]
    return flat.where(present.flatten().nonzero()[:, 0])


def _cloud_waves(draws_ND: Tensor, wanted: bool) -> Tensor:
    """Waves (N, W, 3) of each lesion's clouds, from numbers that follow from the draws of its outline; else none.

    From those, because a draw of its own would change what a generator gives to everything else.
    """
    if not wanted:
        return draws_ND.new_zeros((len(draws_ND), 0, 3), dtype=torch.float32)
    key_N = (draws_ND[:, Draw.PHASE] << DRAW_BITS) + draws_ND[:, Draw.PHASE_3]
    waves = len(_CLOUDS) * _WAVES
    numbers = nth_of_stream(key_N[:, None], torch.arange(2 * waves, device=draws_ND.device))
    turns = unit(numbers & ((1 << DRAW_BITS) - 1)) * (2 * torch.pi)
    steps = torch.tensor(_CLOUDS, device=draws_ND.device).repeat_interleave(_WAVES) * torch.pi
    direction, phase = turns.chunk(2, dim=1)
    return torch.stack([steps * direction.cos(), steps * direction.sin(), phase], dim=2)


def _turn(draw: Tensor, rotate: bool) -> tuple[Tensor, Tensor]:
    turn = unit(draw)
    if not rotate:
        return torch.ones_like(turn), torch.zeros_like(turn)
    angle = turn * (2 * torch.pi)
    return angle.cos(), angle.sin()


def _extent(along: Tensor, across: Tensor, cosine: Tensor, sine: Tensor, limit: int) -> Tensor:
    """Side of the upright box around a turned lesion, cut to the film; the lesion's own side when it is not turned."""
    return (along * cosine.abs() + across * sine.abs()).ceil().to(torch.int64).clamp(max=limit)


def _place(
    gray_BHW: Tensor, draws: tuple[Tensor, ...], box_width: Tensor, box_height: Tensor, config: LesionConfig
) -> tuple[Tensor, Tensor]:
    """Left and top of every box: anywhere it fits, or centred on a lung pixel and pushed into the film."""
    height_H, width_W = gray_BHW.shape[1:]
    last_left, last_top = width_W - box_width, height_H - box_height
    if config.place == "anywhere":
        return below(draws[Draw.PLACE_X], last_left + 1), below(draws[Draw.PLACE_Y], last_top + 1)
    column, row = PixelPicker(lung_field(gray_BHW)).pick(draws[Draw.LUNG])
    left = torch.minimum((column - box_width // 2).clamp(min=0), last_left)
    top = torch.minimum((row - box_height // 2).clamp(min=0), last_top)
    return left, top


# Their pixels


def paint(gray_BHW: Tensor, lesions: Lesions, config: LesionConfig, canvas: Tensor) -> Tensor:
    """Add what lesions of texture add to the first layer of ``canvas`` (layers, samples, H, W) and how opaque haze is
    to the second, float32 in whole multiples of 1 / FIXED_POINT."""
    pixels = _pixels(lesions, canvas.shape, config.rotate)
    value = _strength(lesions, pixels, config).mul_(_content(gray_BHW, lesions, pixels, config))
    value.mul_(FIXED_POINT).round_().clamp_(min=0).mul_(1 / FIXED_POINT)
    canvas.view(-1).scatter_add_(0, pixels.target.view(-1), value.view(-1))
    return canvas


@dataclass(frozen=True)
class _Pixels:
    """The rows of all boxes: whose they are, where their pixels go, and where these lie within their lesion.

    ``u`` and ``v`` are in [-1, 1] across the lesion. In lesions that are not turned, ``u`` is the same in every row,
    (N, A), and ``v`` along a row, (R, 1).
    """

    lesion: Tensor  # (R,)
    target: Tensor  # (R, A)
    inside: Tensor  # (N, A) float32: 1 within the box, 0 beyond it
    u: Tensor  # (N, A) or (R, A)
    v: Tensor  # (R, 1) or (R, A)

    def own(self, column: Tensor) -> Tensor:
        """Each row's entry of a lesion column, (R, 1) or, of (N, A), (R, A)."""
        entries = column.index_select(0, self.lesion)
        return entries if entries.ndim == 2 else entries[:, None]

    def of_u(self, across: Tensor) -> Tensor:
        """What was computed from ``u``, for every row, (R, A)."""
        return across if self.v.shape == self.u.shape else self.own(across)


def _pixels(lesions: Lesions, canvas: Sequence[int], rotate: bool) -> _Pixels:
    """On a canvas of the shape (layers, samples, H, W)."""
    _, samples, height, width = canvas
    heights, widths, device = lesions.box_height, lesions.box_width, lesions.sample.device
    rows, widest = torch.stack([heights.sum(), widths.max()]).tolist()  # together: a GPU has to be waited for
    lesion = torch.repeat_interleave(torch.arange(len(lesions), device=device), heights, output_size=rows)
    row = torch.arange(rows, device=device) - (heights.cumsum(0) - heights).index_select(0, lesion)
    along = torch.arange(widest, device=device)
    column_NA = torch.minimum(along, widths[:, None] - 1)  # beyond the box its last pixel, again and again

    # Haze goes to the second layer of the canvas, behind the samples of the first.
    origin = ((lesions.sample + samples * lesions.haze) * height + lesions.top) * width + lesions.left
    target = (origin[:, None] + column_NA).index_select(0, lesion).add_((row * width)[:, None])
    inside = (along < widths[:, None]).to(torch.float32)

    x_NA = column_NA + (0.5 - widths / 2)[:, None]
    y = row + (0.5 - heights / 2).index_select(0, lesion)
    per_x, per_y = 2 / lesions.width, 2 / lesions.height
    u = x_NA * (lesions.cosine * per_x)[:, None]
    v = (y * (lesions.cosine * per_y).index_select(0, lesion))[:, None]
    if rotate:
        u = u.index_select(0, lesion).add_((y * (lesions.sine * per_x).index_select(0, lesion))[:, None])
        v = v - (x_NA * (lesions.sine * per_y)[:, None]).index_select(0, lesion)
    return _Pixels(lesion, target, inside, u, v)


def _strength(lesions: Lesions, pixels: _Pixels, config: LesionConfig) -> Tensor:
    """Amplitude times delta = exp(-(u^2 + v^2) / gamma), 0 beyond the lesion's own box or, with ``fade``, its oval."""
    u, v = pixels.u, pixels.v
    square = pixels.of_u(u * u) + v * v
    if config.irregularity > 0:
        square = square / _outline(lesions, pixels, square, config.irregularity).square()
    gaps: Tensor | None = None
    if config.patchy > 0:
        gaps = _gaps(lesions, pixels).mul_(config.patchy)
        square = square * (1 + _RAGGED * gaps)
    delta = square.mul_(-1 / config.gamma).exp_()
    if config.fade:
        edge = math.exp(-1 / config.gamma)  # delta where the oval meets its box
        delta = delta.sub_(edge).mul_(1 / (1 - edge)).clamp_(min=0)
    elif config.rotate:
        delta = delta.masked_fill_((u.abs() > 1) | (v.abs() > 1), 0)
    if gaps is not None:
        delta = delta.mul_(1 - gaps)
    return delta.mul_(pixels.own(pixels.inside * lesions.amplitude[:, None]))


def _outline(lesions: Lesions, pixels: _Pixels, square: Tensor, irregularity: float) -> Tensor:
    """Relative radius in each pixel's direction, in [1 - irregularity, 1]: smooth, closed, within the box.

    The radius is a sum of harmonics of the angle with random phases and weights 1/k. Powers of the unit vector give
    cos(k angle) and sin(k angle) without a trigonometric function for every pixel.
    """
    length = square.sqrt().clamp(min=1e-6)
    one_x, one_y = pixels.of_u(pixels.u) / length, pixels.v / length
    power_x, power_y = one_x, one_y
    wave = torch.zeros_like(length)
    for k, phase in zip(HARMONICS, lesions.phases.unbind(1), strict=True):
        power_x, power_y = power_x * one_x - power_y * one_y, power_x * one_y + power_y * one_x
        wave = wave + power_x * pixels.own(phase.cos() / k) - power_y * pixels.own(phase.sin() / k)
    wave = wave / sum(1 / k for k in HARMONICS)
    return 1 - irregularity * 0.5 * (1 - wave)


def _gaps(lesions: Lesions, pixels: _Pixels) -> Tensor:
    """Where there are no clouds: 0 in their middle, 1 between them (R, A). Coarse clouds count more than fine ones."""
    share = 1 / torch.tensor(_CLOUDS).repeat_interleave(_WAVES)
    share = share / share.square().sum().div(2).sqrt()  # the sum of the waves deviates by 1
    clouds = torch.zeros_like(pixels.of_u(pixels.u) + pixels.v)
    for wave, height in zip(lesions.clouds.unbind(1), share.tolist(), strict=True):
        along, across, phase = (pixels.own(column) for column in wave.unbind(1))
        clouds.add_((pixels.of_u(pixels.u) * along + (pixels.v * across + phase)).cos_(), alpha=height)
    return clouds.mul_(-0.4).add_(0.4).clamp_(0, 1)


def _content(gray_BHW: Tensor, lesions: Lesions, pixels: _Pixels, config: LesionConfig) -> Tensor:
    """The texture eta under each pixel; 1 for haze, which has none."""
    height, width = gray_BHW.shape[1:]
    window_width, window_height = window_size(config, height, width)
    x_low, x_high, x_share = map(pixels.of_u, _between(pixels.u, window_width))
    y_low, y_high, y_share = _between(pixels.v, window_height)
    origin = (lesions.film * height + lesions.window_top) * width + lesions.window_left
    # int32 halves the traffic; no group of films comes near 2^31 pixels.
    upper = pixels.own(origin.to(torch.int32)) + y_low * width
    lower = upper + (y_high - y_low) * width
    flat = gray_BHW.reshape(-1)

    def at(row: Tensor, column: Tensor) -> Tensor:
        place = row + column
        return flat.index_select(0, place.view(-1)).view_as(place)

    left_share, upper_share = 1 - x_share, 1 - y_share
    above = at(upper, x_low).mul_(left_share).add_(at(upper, x_high).mul_(x_share))
    under = at(lower, x_low).mul_(left_share).add_(at(lower, x_high).mul_(x_share))
    texture = above.mul_(upper_share).add_(under.mul_(y_share))
    return texture if config.haze == 0 else texture.masked_fill_(pixels.own(lesions.haze), 1)


def _between(position: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """For positions in [-1, 1] across ``size`` pixels: the pixel before, the one after, and how far between."""
    at = ((position + 1) * (size / 2) - 0.5).clamp_(0, size - 1)
    low = at.to(torch.int32)
    return low, (low + 1).clamp_(max=size - 1), at - low
