"""Lesions: range, shape, repeatability and independence of the batch; a slow reference; the token labels."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from lesion_films import draw_films
from reference import lesions as slow

from afire.config import LesionConfig
from afire.lesions import synthesis as module
from afire.lesions.places import PixelPicker, drawn, keyed, lung_field, otsu_threshold
from afire.lesions.synthesis import Lesions, paint, plan, synthesize, synthesize_keyed, token_labels

EVERYTHING = LesionConfig(rotate=True, irregularity=0.3, haze=0.5, place="lungs", views=3, fade=True)
KINDS = [LesionConfig(), EVERYTHING, LesionConfig(kind="anatpaste", views=2)]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def planned(films: torch.Tensor, config: LesionConfig) -> Lesions:
    gray = films[:, 0]
    highlighted = PixelPicker(gray > otsu_threshold(gray)[:, None, None])
    return plan(gray, highlighted, drawn((len(films), config.views, config.count_max), seeded()), config)


def test_the_example_of_the_docstring(films: torch.Tensor) -> None:
    lesioned, mask = synthesize(films, generator=seeded())
    assert lesioned.shape == films.shape and mask.shape == (6, 1, 64, 64)
    assert mask.min() == 0 and mask.flatten(1).amax(1).min() > 0
    torch.testing.assert_close(lesioned, (films + mask).clamp(0, 1), atol=0, rtol=0)
    assert token_labels(mask, 16).any(1).all()


@pytest.mark.parametrize("config", KINDS, ids=lambda config: config.kind)
def test_the_same_generator_gives_the_same_lesions(films: torch.Tensor, config: LesionConfig) -> None:
    first, second = (synthesize(films, generator=seeded(3), config=config) for _ in range(2))
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
    other = synthesize(films, generator=seeded(4), config=config)
    assert not torch.equal(first[1], other[1])


@pytest.mark.parametrize("config", KINDS, ids=lambda config: config.kind)
@pytest.mark.parametrize("channels", [1, 3])
def test_keyed_lesions_do_not_depend_on_the_batch(config: LesionConfig, channels: int) -> None:
    films = draw_films(7, 56, 64).repeat(1, channels, 1, 1)
    films[:, -1] *= 0.9
    indices = torch.tensor([3, 14, 15, 92, 65, 35, 89])

    def run(rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        return synthesize_keyed(films[rows], seed=1, epoch=2, indices=indices[rows], config=config)

    everything = run(list(range(7)))
    per_film = [part.unflatten(0, (7, config.views)) for part in everything]
    for rows in ([0], [6], [4, 1], [5, 3, 0, 6, 2, 1, 4]):
        for whole, part in zip(per_film, run(rows), strict=True):
            assert torch.equal(whole[rows].flatten(0, 1), part)


@pytest.mark.parametrize("config", KINDS, ids=lambda config: config.kind)
def test_groups_do_not_show(films: torch.Tensor, config: LesionConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = synthesize(films, generator=seeded(), config=config)
    monkeypatch.setitem(module._PIXELS_AT_ONCE, "cpu", 64 * 64 * config.views * 4)
    grouped = synthesize(films, generator=seeded(), config=config)
    assert torch.equal(whole[0], grouped[0]) and torch.equal(whole[1], grouped[1])


def test_seed_epoch_index_and_view_all_matter(films: torch.Tensor) -> None:
    film = films[:1]
    config = LesionConfig(views=4)
    masks = [
        synthesize_keyed(film, seed=seed, epoch=epoch, indices=[index], config=config)[1]
        for seed, epoch, index in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1))
    ]
    different = torch.cat(masks)
    for one in range(len(different)):
        for other in range(one):
            assert not torch.equal(different[one], different[other])


def test_views_of_a_film_stand_together(films: torch.Tensor) -> None:
    config = LesionConfig(views=3)
    lesioned, mask = synthesize(films, generator=seeded(), config=config)
    assert len(lesioned) == len(mask) == 18
    untouched = (mask == 0).expand_as(lesioned)
    assert torch.equal(lesioned[untouched], films.repeat_interleave(3, 0)[untouched])
    one_view = synthesize_keyed(films, seed=0, epoch=0, indices=range(6))[1]
    three = synthesize_keyed(films, seed=0, epoch=0, indices=range(6), config=config)[1]
    assert torch.equal(three[::3], one_view)


def test_sixteen_bit_films_keep_their_values() -> None:
    stored = torch.randint(0, 65536, (2, 1, 96, 96), generator=seeded())
    films = stored.float() / 65535
    lesioned, mask = synthesize(films, generator=seeded())
    outside = mask == 0
    assert torch.equal((lesioned * 65535).round().long()[outside], stored[outside])
    inside = lesioned[(mask > 0) & (lesioned < 1)]
    assert (inside * 255).round().div(255).sub(inside).abs().max() > 1e-3  # not on an 8-bit grid


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("config", KINDS, ids=lambda config: config.kind)
def test_other_float_types_come_back_as_they_were(
    films: torch.Tensor, dtype: torch.dtype, config: LesionConfig
) -> None:
    lesioned, mask = synthesize(films.to(dtype), generator=seeded(), config=config)
    assert lesioned.dtype == dtype and mask.dtype == torch.float32
    exact, _ = synthesize(films.to(dtype).float(), generator=seeded(), config=config)
    torch.testing.assert_close(lesioned.float(), exact, atol=max(torch.finfo(dtype).eps, 1e-6), rtol=0)


@pytest.mark.parametrize("config", KINDS, ids=lambda config: config.kind)
def test_the_input_is_left_alone(films: torch.Tensor, config: LesionConfig) -> None:
    before = films.clone()
    synthesize(films, generator=seeded(), config=config)
    assert torch.equal(films, before)


@pytest.mark.parametrize("config", KINDS, ids=lambda config: config.kind)
@pytest.mark.parametrize("value", [0.0, 0.5, 1.0])
def test_blank_films_never_raise(config: LesionConfig, value: float) -> None:
    lesioned, mask = synthesize(torch.full((2, 1, 48, 48), value), generator=seeded(), config=config)
    for result in (lesioned, mask):
        assert result.isfinite().all() and result.min() >= 0 and result.max() <= 1


@hypothesis_settings(max_examples=80, deadline=None)
@given(
    shape=st.tuples(st.integers(0, 3), st.integers(1, 3), st.integers(1, 70), st.integers(1, 70)),
    config=st.builds(
        lambda counts, sizes, amplitudes, **rest: LesionConfig(
            count_min=min(counts),
            count_max=max(counts),
            size_min=min(sizes),
            size_max=max(sizes),
            amplitude_min=min(amplitudes),
            amplitude_max=max(amplitudes),
            **rest,
        ),
        counts=st.tuples(st.integers(1, 16), st.integers(1, 16)),
        sizes=st.tuples(st.floats(0.1, 1000), st.floats(0.1, 1000)),
        amplitudes=st.tuples(st.floats(0, 1), st.floats(0, 1)),
        kind=st.sampled_from(["slm", "anatpaste"]),
        texture_window=st.floats(0.1, 1000),
        paste_size=st.floats(0.1, 1000),
        gamma=st.floats(0.01, 100),
        rotate=st.booleans(),
        fade=st.booleans(),
        irregularity=st.floats(0, 0.99),
        patchy=st.sampled_from([0.0, 0.6, 1.0]),
        opacities=st.sampled_from([0.0, 0.5, 1.0]),
        place=st.sampled_from(["anywhere", "lungs"]),
        haze=st.sampled_from([0.0, 0.5, 1.0]),
        views=st.integers(1, 3),
    ),
    seed=st.integers(0, 2**64 - 1),
)
def test_any_shape_and_settings(shape: tuple[int, int, int, int], config: LesionConfig, seed: int) -> None:
    films = torch.rand(shape, generator=seeded(seed % 2**63))
    lesioned, mask = synthesize_keyed(films, seed=seed, epoch=1, indices=range(shape[0]), config=config)
    assert lesioned.shape == (shape[0] * config.views, *shape[1:])
    assert mask.shape == (shape[0] * config.views, 1, *shape[2:])
    for result in (lesioned, mask):
        assert result.isfinite().all()
        assert not result.numel() or (result.min() >= 0 and result.max() <= 1)


def test_one_to_four_lesions_equally_often() -> None:
    lesions = planned(draw_films(1, 32, 32).expand(3000, 1, 32, 32), LesionConfig())
    counts = torch.bincount(torch.bincount(lesions.sample), minlength=5)
    assert counts[0] == 0 and len(counts) == 5
    assert ((counts[1:] - 750).abs() < 4 * math.sqrt(750 * 0.75)).all()


def test_sizes_amplitudes_and_places_fill_their_ranges() -> None:
    config = LesionConfig(count_min=4)
    films = draw_films(1, 224, 224).expand(400, 1, 224, 224)
    lesions = planned(films, config)
    for side in (lesions.width, lesions.height):
        assert side.unique().tolist() == list(range(16, 65))
    assert 0.2 <= lesions.amplitude.min() < 0.21 and 0.79 < lesions.amplitude.max() <= 0.8
    assert lesions.left.min() == 0 and (lesions.left + lesions.width).max() == 224
    assert lesions.top.min() == 0 and (lesions.top + lesions.height).max() == 224
    # sizes scale with the film
    assert planned(films[:20, :, :112, :112], config).width.max() <= 32


def test_texture_windows_are_centred_on_highlight() -> None:
    film = torch.full((1, 1, 224, 224), 0.2)
    film[..., 100:104, 150:160] = 0.9
    lesions = planned(film.expand(50, 1, 224, 224), LesionConfig())
    assert (lesions.window_left + 30).min() >= 150 and (lesions.window_left + 30).max() < 160
    assert (lesions.window_top + 30).min() >= 100 and (lesions.window_top + 30).max() < 104
    corner = torch.full((1, 1, 224, 224), 0.2)
    corner[..., -1, -1] = 0.9
    pushed_in = planned(corner, LesionConfig())
    assert (pushed_in.window_left == 164).all() and (pushed_in.window_top == 164).all()


def test_the_share_of_haze() -> None:
    lesions = planned(draw_films(1, 32, 32).expand(1000, 1, 32, 32), LesionConfig(haze=0.3))
    assert abs(float(lesions.haze.float().mean()) - 0.3) < 0.04


def test_haze_only_brightens_and_never_beyond_the_bright_level(films: torch.Tensor) -> None:
    config = LesionConfig(haze=1.0, amplitude_min=1.0, amplitude_max=1.0, size_min=200, size_max=200)
    lesioned, mask = synthesize(films, generator=seeded(), config=config)
    bright = (lesioned * (mask > 0)).flatten(1).amax(1)
    assert (lesioned >= films).all() and (mask > 0).any()
    assert (bright < 0.9).all()


def test_faded_lesions_leave_no_edge() -> None:
    film = torch.full((1, 1, 224, 224), 0.5)
    for fade, largest_step in ((False, 0.03), (True, 0.0)):
        config = LesionConfig(count_max=1, size_min=64, amplitude_min=0.8, fade=fade)
        mask = synthesize(film, generator=seeded(), config=config)[1][0, 0]
        rows = mask.amax(1).nonzero()
        assert float(mask[rows.min()].max()) >= largest_step
        assert fade == (float(mask[rows.min()].max()) < 0.01)


def test_a_paste_stays_in_the_lungs_and_keeps_its_size() -> None:
    films = draw_films(8, 224, 224)
    lesioned, mask = synthesize(films, generator=seeded(), config=LesionConfig(kind="anatpaste", paste_size=40))
    inside = lung_field(films[:, 0])
    changed = mask[:, 0] > 0
    assert changed.any((1, 2)).all() and not (changed & ~inside).any()
    assert (changed.any(1).sum(1) <= 40).all() and (changed.any(2).sum(1) <= 40).all()
    assert torch.equal(lesioned[mask == 0], films[mask == 0])
    assert mask.max() <= 0.8


def test_a_paste_is_a_blend_of_film_and_patch() -> None:
    film = torch.full((1, 1, 64, 64), 0.25)
    film[..., :8, :] = 1.0  # the only highlight: every patch touches it
    config = LesionConfig(kind="anatpaste", paste_size=224, amplitude_min=1, amplitude_max=1)
    lesioned, mask = synthesize(film, generator=seeded(), config=config)
    share = mask[0, 0]
    torch.testing.assert_close(lesioned[0, 0], film[0, 0])  # a patch as large as the film can only be the film itself
    assert share.max() == 1


def test_wrong_input_is_named(films: torch.Tensor) -> None:
    generator = seeded()
    with pytest.raises(ValueError, match=r"floating point in \[0, 1\], got uint8"):
        synthesize((films * 255).to(torch.uint8), generator=generator)
    with pytest.raises(ValueError, match="range from 0 to 255"):
        synthesize(films * 255, generator=generator)
    with pytest.raises(ValueError, match="range from -1 to 1"):
        synthesize(films * 2 - 1, generator=generator)
    with pytest.raises(ValueError, match="nan"):
        synthesize(films * float("nan"), generator=generator)
    with pytest.raises(ValueError, match=r"\(B, C, H, W\)"):
        synthesize(films[0], generator=generator)
    with pytest.raises(ValueError, match="6 images came with 2 indices"):
        synthesize_keyed(films, seed=0, epoch=0, indices=[0, 1])


def test_a_little_overshoot_is_clipped(films: torch.Tensor) -> None:
    lesioned, _ = synthesize((films * 1.001 - 0.0005), generator=seeded())
    assert lesioned.min() >= 0 and lesioned.max() <= 1
    _, mask = synthesize(films * 0 - 0.0005, generator=seeded())
    assert mask.min() >= 0


def test_the_order_of_lesions_does_not_show(films: torch.Tensor) -> None:
    config = LesionConfig(count_min=16, count_max=16, size_min=100, size_max=200, amplitude_min=0.1)
    gray = films[:, 0]
    lesions = plan(gray, PixelPicker.above(gray, otsu_threshold(gray)), drawn((len(gray), 1, 16), seeded()), config)
    order = torch.arange(len(lesions))
    masks = [
        paint(gray, lesions.where(some), config, torch.zeros(1, *gray.shape)).clamp(max=1)
        for some in (order, order.flip(0), order.roll(7))
    ]
    assert (masks[0] == 1).any() and (masks[0] < 1).any()
    assert torch.equal(masks[0], masks[1]) and torch.equal(masks[0], masks[2])


def test_known_lesions_stay_what_they_were() -> None:
    """Golden numbers: a change here changes every run that is resumed or repeated."""
    film = (torch.arange(64 * 64) % 251 / 250).view(1, 1, 64, 64)
    _, mask = synthesize_keyed(film, seed=0, epoch=0, indices=[0], config=EVERYTHING)
    assert mask.mean((1, 2, 3)).tolist() == pytest.approx([0.004792, 0.002650, 0.001538], abs=2e-6)


def slow_labels(mask: torch.Tensor, patch: int) -> list[bool]:
    whole = mask.double().mean()
    rows, columns = mask.shape[0] // patch, mask.shape[1] // patch
    return [
        bool(mask[y * patch : (y + 1) * patch, x * patch : (x + 1) * patch].double().mean() > whole)
        for y in range(rows)
        for x in range(columns)
    ]


@pytest.mark.parametrize(("height", "width", "patch"), [(32, 32, 8), (24, 48, 8), (16, 16, 16), (30, 20, 10)])
def test_equal_the_loop(height: int, width: int, patch: int) -> None:
    masks = torch.rand(4, 1, height, width, generator=torch.Generator().manual_seed(0))
    labels = token_labels(masks, patch)
    assert labels.dtype == torch.bool
    assert labels.tolist() == [slow_labels(mask[0], patch) for mask in masks]


def test_rows_first() -> None:
    mask = torch.zeros(1, 1, 4, 6)
    mask[0, 0, 0:2, 4:6] = 1
    assert token_labels(mask, 2).tolist() == [[False, False, True, False, False, False]]


@pytest.mark.parametrize("value", [0.0, 0.1, 0.3, 0.7, 1.0])
def test_a_mask_of_one_value_has_no_abnormal_token(value: float) -> None:
    assert not token_labels(torch.full((2, 1, 224, 224), value), 16).any()


def test_half_precision_is_averaged_in_full() -> None:
    mask = torch.rand(2, 1, 32, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(token_labels(mask, 8), token_labels(mask.float(), 8))


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="not a multiple of patch_size 16"):
        token_labels(torch.zeros(1, 1, 30, 32), 16)
    with pytest.raises(ValueError, match=r"\(B, 1, H, W\)"):
        token_labels(torch.zeros(1, 3, 32, 32), 16)


SETTINGS: list[dict[str, Any]] = [
    {},
    {"rotate": True},
    {"irregularity": 0.6},
    {"fade": True},
    {"haze": 1.0},
    {"haze": 0.5, "amplitude_max": 1.0, "size_max": 200},
    {"place": "lungs"},
    {"patchy": 0.8},
    {"patchy": 0.5, "haze": 1.0, "fade": True, "rotate": True, "irregularity": 0.5, "gamma": 2.0, "size_max": 128},
    {"count_min": 4, "count_max": 9, "gamma": 0.2, "texture_window": 5},
    {"rotate": True, "irregularity": 0.4, "fade": True, "haze": 0.5, "place": "lungs", "size_max": 128, "views": 2},
    {"size_min": 300, "size_max": 900, "texture_window": 999},
    {"size_min": 300, "size_max": 900, "rotate": True, "amplitude_min": 0.0},
    {"size_min": 0.01, "size_max": 0.02, "texture_window": 0.01},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: "-".join(settings) or "default")
@pytest.mark.parametrize(("height", "width"), [(64, 64), (48, 72)])
def test_equal_the_slow_reference(settings: dict[str, Any], height: int, width: int) -> None:
    config = LesionConfig(**settings)
    films = draw_films(3, height, width, seed=1)
    lesioned, masks = synthesize_keyed(films, seed=4, epoch=2, indices=[5, 6, 7], config=config)
    draws = keyed(4, 2, [5, 6, 7], config.views, config.count_max)
    lungs = lung_field(films[:, 0])
    for film in range(3):
        pixels = films[film, 0].double().tolist()
        for view in range(config.views):
            mask = slow.lesion_mask(pixels, draws[film, view].tolist(), config, lungs[film].tolist())
            row = film * config.views + view
            torch.testing.assert_close(
                masks[row, 0].double(), torch.tensor(mask, dtype=torch.float64), atol=1e-5, rtol=0
            )
            expected = torch.tensor(slow.add(pixels, mask), dtype=torch.float64)
            torch.testing.assert_close(lesioned[row, 0].double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("value", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("haze", [0.0, 0.5])
def test_equal_the_slow_reference_on_a_film_of_one_value(value: float, haze: float) -> None:
    config = LesionConfig(haze=haze)
    film = torch.full((1, 1, 32, 40), value)
    _, masks = synthesize_keyed(film, seed=0, epoch=0, indices=[0], config=config)
    expected = slow.lesion_mask(film[0, 0].tolist(), keyed(0, 0, [0], 1, 4)[0, 0].tolist(), config)
    torch.testing.assert_close(masks[0, 0], torch.tensor(expected), atol=1e-5, rtol=0)
