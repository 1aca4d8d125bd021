"""The encoder in the formats of other libraries. Each can be written, and run there to compare it with ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from torch import Tensor

from afire.bundle.formats import huggingface, onnx, timm, torch_export
from afire.errors import UserError
from afire.tasks.backbone import Backbone

__all__ = ["FORMATS", "Format", "missing"]


@dataclass(frozen=True)
class Format:
    """One format: how to write it into a folder, and how the library it is for runs it."""

    name: str
    backend: str
    """Who runs it."""
    write: Callable[[Path, Backbone], None]
    run: Callable[[Path, Backbone, Tensor], dict[str, Tensor]]
    """(folder, ours, films (B, 1, S, S) in [0, 1]) -> ``tokens`` (B, L, D) and what else it gives."""
    needs_to_write: tuple[str, ...] = ()
    needs_to_run: tuple[str, ...] = ()
    extra: str = ""
    """The extra of afire that brings them."""

    def require_writer(self) -> None:
        """Refuse, with the extra to install, where a package is missing."""
        absent = missing(self.needs_to_write)
        if absent:
            raise UserError(
                f"--format {self.name} needs {', '.join(absent)}; install it with pip install 'afire[{self.extra}]'."
            )


def missing(modules: tuple[str, ...]) -> list[str]:
    """Those of ``modules`` that are not installed."""
    return [name for name in modules if find_spec(name) is None]


FORMATS = {
    one.name: one
    for one in (
        Format("timm", "timm", timm.write, timm.run, needs_to_run=("timm", "torchvision"), extra="timm"),
        Format(
            "hf",
            "transformers",
            huggingface.write,
            huggingface.run,
            needs_to_run=("transformers",),
            extra="transformers",
        ),
        Format(
            "onnx",
            "onnxruntime",
            onnx.write,
            onnx.run,
            needs_to_write=("onnx", "onnxscript"),
            needs_to_run=("onnxruntime",),
            extra="onnx",
        ),
        Format("torch", "torch.export", torch_export.write, torch_export.run),
    )
}
