"""Results that a PACS takes: DICOM objects of a detector's findings, and the service that takes films and sends them.

Knows detectors and the pictures of reports; knows no command. Needs the packages of `afire[pacs]`, but for captures.
"""

from __future__ import annotations

import logging
from importlib.util import find_spec

from afire.errors import UserError

_PACKAGES = {"highdicom": "highdicom", "pynetdicom": "pynetdicom", "dicomweb_client": "dicomweb-client"}
# They quote tags and addresses in what they log; whatever matters of it, the service says itself.
TALKATIVE = ("pynetdicom", "pydicom", "highdicom", "dicomweb_client", "urllib3", "requests")


def require_packages(what: str, *modules: str) -> None:
    """Say what to install when ``what`` needs a package that is not there."""
    missing = [_PACKAGES[module] for module in modules or _PACKAGES if find_spec(module) is None]
    if missing:
        raise UserError(f'{what} needs {", ".join(missing)}; run pip install "afire[pacs]".')


def silence_libraries() -> None:
    """Nothing that a library says about a film or a peer reaches a log of this process."""
    for name in TALKATIVE:
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
