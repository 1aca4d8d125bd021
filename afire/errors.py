"""Errors with a name. A :class:`UserError` is one message for the user; everything else is a defect of ours."""

from __future__ import annotations


class UserError(Exception):
    """What went wrong, where, and what to do, in one message. The CLI prints it and exits with code 2."""


class ImageError(UserError):
    """A film that cannot be read: truncated, not an image, a decompression bomb, the wrong modality."""
