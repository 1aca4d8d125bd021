"""afire: anatomy-driven self-supervised learning for radiographs."""

from typing import TYPE_CHECKING, Any

from afire._version import __version__
from afire.errors import UserError

if TYPE_CHECKING:
    from afire.api import Detection, Model, load

__all__ = ["Detection", "Model", "UserError", "__version__", "load"]


def __getattr__(name: str) -> Any:
    """``load`` and ``Model`` bring torch with them; ``import afire`` alone, and ``afire --help``, do not."""
    if name in ("Detection", "Model", "load"):
        from afire import api

        return getattr(api, name)
    raise AttributeError(f"module 'afire' has no attribute {name!r}")
