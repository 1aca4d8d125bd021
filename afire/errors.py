"""Errors with a name. A :class:`UserError` is one sentence for the user; everything else is a defect of ours."""

from __future__ import annotations


class UserError(Exception):
    """What went wrong, where, and what to do, in one sentence. The CLI prints it and exits with code 2."""


class ImageError(UserError):
    """A film that cannot be read: truncated, not an image, a decompression bomb, the wrong modality."""
