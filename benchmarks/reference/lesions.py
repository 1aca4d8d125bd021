"""Synthetic lesions the slow and obvious way: one film, one pixel at a time, in plain Python.

The tests compare afire.lesions with it, and benchmarks/lesions.py measures its speed.
"""

from __future__ import annotations

import math

from afire.config import LesionConfig
from afire.lesions.places import DRAW_BITS, Draw

Film = list[list[float]]


def pick(draw: int, limit: int) -> int:
    return draw * limit >> DRAW_BITS


def uniform(draw: int) -> float:
    return draw / (1 << DRAW_BITS)


def otsu(film: Film) -> tuple[float, float]:
    """Threshold, and the mean of the bins above it."""
    low = min(min(row) for row in film)
    high = max(max(row) for row in film)
    if low == high:
        return high, high
    width = (high - low) / 256
    counts = [0] * 256
    for row in film:
        for value in row:
            counts[min(int((value - low) / width), 255)] += 1
    total, total_sum = sum(counts), sum(index * count for index, count in enumerate(counts))
    best, best_spread, best_mean = 0, -1.0, 0.0
    below = below_sum = 0
    for index in range(255):
        below += counts[index]
        below_sum += index * counts[index]
        if below == 0 or below == total:
            continue
        mean_below, mean_above = below_sum / below, (total_sum - below_sum) / (total - below)
        spread = below * (total - below) * (mean_above - mean_below) ** 2
        if spread > best_spread * (1 + 1e-12):
            best, best_spread, best_mean = index, spread, mean_above
    return low + (best + 1) * width, low + (best_mean + 0.5) * width


def pixels_where(chosen: list[list[bool]]) -> list[tuple[int, int]]:
    """Row and column of the chosen pixels, row by row."""
    return [(y, x) for y, row in enumerate(chosen) for x, yes in enumerate(row) if yes]


def texture_at(film: Film, left: int, top: int, width: int, height: int, u: float, v: float) -> float:
    """Bilinear value of the window at (u, v) in [-1, 1]."""
    x = min(max((u + 1) * width / 2 - 0.5, 0.0), width - 1.0)
    y = min(max((v + 1) * height / 2 - 0.5, 0.0), height - 1.0)
    x0, y0 = int(x), int(y)
    x1, y1 = min(x0 + 1, width - 1), min(y0 + 1, height - 1)
    upper, lower = film[top + y0], film[top + y1]
    above = upper[left + x0] * (1 - (x - x0)) + upper[left + x1] * (x - x0)
    under = lower[left + x0] * (1 - (x - x0)) + lower[left + x1] * (x - x0)
    return above * (1 - (y - y0)) + under * (y - y0)


def outline(u: float, v: float, draws: list[int], irregularity: float) -> float:
    angle = math.atan2(v, u)
    wave = sum(
        math.cos(k * angle + 2 * math.pi * uniform(draws[Draw.PHASE + order])) / k
        for order, k in enumerate((2, 3, 4, 5))
    )
    return 1 - irregularity * (1 - wave / (1 / 2 + 1 / 3 + 1 / 4 + 1 / 5)) / 2


def gaps(u: float, v: float, draws: list[int]) -> float:
    """How little cloud there is at a place of a lesion: twelve waves, four of each size, in directions of their own."""
    word = (1 << 64) - 1
    state = (draws[Draw.PHASE] << DRAW_BITS) + draws[Draw.PHASE_3]
    turns = []
    for number in range(24):
        mixed = (state + (number + 1) * 0x9E3779B97F4A7C15) & word
        mixed = ((mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9) & word
        mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) & word
        turns.append(2 * math.pi * uniform((mixed ^ mixed >> 31) % (1 << DRAW_BITS)))
    clouds, squares = 0.0, 0.0
    for wave in range(12):
        waves_across, direction, phase = (1.5, 3.0, 6.0)[wave // 4], turns[wave], turns[12 + wave]
        along = u * math.cos(direction) + v * math.sin(direction)
        clouds += math.cos(math.pi * waves_across * along + phase) / waves_across
        squares += 1 / waves_across**2
    return min(max(0.4 - 0.4 * clouds / math.sqrt(squares / 2), 0.0), 1.0)


def lesion_mask(
    film: Film, draws: list[list[int]], config: LesionConfig, lungs: list[list[bool]] | None = None
) -> Film:
    """What the lesions of one view add to a film; ``draws`` holds a list of draws for each slot."""
    height, width = len(film), len(film[0])
    scale = min(height, width) / 224
    smallest, largest = (max(1, round(size * scale)) for size in (config.size_min, config.size_max))
    window_width = min(max(1, round(config.texture_window * scale)), width)
    window_height = min(max(1, round(config.texture_window * scale)), height)
    threshold, bright = otsu(film)
    highlighted = pixels_where([[value > threshold for value in row] for row in film])
    lung_pixels = pixels_where(lungs) if lungs is not None else []
    added = [[0.0] * width for _ in range(height)]
    opacity = [[0.0] * width for _ in range(height)]

    count = config.count_min + pick(draws[0][Draw.COUNT], config.count_max - config.count_min + 1)
    for draw in draws[:count]:
        if highlighted:
            y, x = highlighted[pick(draw[Draw.TEXTURE], len(highlighted))]
            window_left = min(max(x - window_width // 2, 0), width - window_width)
            window_top = min(max(y - window_height // 2, 0), height - window_height)
        else:
            window_left = pick(draw[Draw.WINDOW_X], width - window_width + 1)
            window_top = pick(draw[Draw.WINDOW_Y], height - window_height + 1)
        lesion_width = min(smallest + pick(draw[Draw.WIDTH], largest - smallest + 1), width)
        lesion_height = min(smallest + pick(draw[Draw.HEIGHT], largest - smallest + 1), height)
        angle = 2 * math.pi * uniform(draw[Draw.ANGLE]) if config.rotate else 0.0
        cosine, sine = math.cos(angle), math.sin(angle)
        box_width = min(math.ceil(lesion_width * abs(cosine) + lesion_height * abs(sine)), width)
        box_height = min(math.ceil(lesion_height * abs(cosine) + lesion_width * abs(sine)), height)
        if config.place == "lungs":
            y, x = lung_pixels[pick(draw[Draw.LUNG], len(lung_pixels))]
            left = min(max(x - box_width // 2, 0), width - box_width)
            top = min(max(y - box_height // 2, 0), height - box_height)
        else:
            left = pick(draw[Draw.PLACE_X], width - box_width + 1)
            top = pick(draw[Draw.PLACE_Y], height - box_height + 1)
        amplitude = config.amplitude_min + uniform(draw[Draw.AMPLITUDE]) * (config.amplitude_max - config.amplitude_min)
        haze = uniform(draw[Draw.KIND]) < config.haze
        for row in range(box_height):
            for column in range(box_width):
                dx, dy = column + 0.5 - box_width / 2, row + 0.5 - box_height / 2
                u = (dx * cosine + dy * sine) * 2 / lesion_width
                v = (dy * cosine - dx * sine) * 2 / lesion_height
                if abs(u) > 1 or abs(v) > 1:
                    continue
                square = u * u + v * v
                if config.irregularity:
                    square /= outline(u, v, draw, config.irregularity) ** 2
                gap = config.patchy * gaps(u, v, draw) if config.patchy else 0.0
                square *= 1 + 3 * gap
                delta = math.exp(-square / config.gamma)
                if config.fade:
                    edge = math.exp(-1 / config.gamma)
                    delta = max(0.0, (delta - edge) / (1 - edge))
                strength = amplitude * delta * (1 - gap)
                if haze:
                    opacity[top + row][left + column] += strength
                else:
                    eta = texture_at(film, window_left, window_top, window_width, window_height, u, v)
                    added[top + row][left + column] += strength * eta

    for row in range(height):
        for column in range(width):
            headroom = max(bright - film[row][column], 0.0)
            value = added[row][column] + min(opacity[row][column], 1.0) * headroom
            added[row][column] = min(max(value, 0.0), 1.0)
    return added


def add(film: Film, mask: Film) -> Film:
    """clip(x + M, 0, 1)."""
    return [
        [min(max(value + extra, 0.0), 1.0) for value, extra in zip(row, extras, strict=True)]
        for row, extras in zip(film, mask, strict=True)
    ]
