"""The version, alone in its file so that the package's metadata needs no import of the rest."""

__version__ = "0.1.0"
