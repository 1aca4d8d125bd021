"""afire: anatomy-driven self-supervised learning for radiographs."""

from afire._version import __version__
from afire.errors import UserError

__all__ = ["UserError", "__version__"]
