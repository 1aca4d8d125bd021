"""What may be kept of a person: a hash in place of a patient id, and a view out of a fixed list.

Ids that come from a user (a DICOM tag, a column, a path, a manifest written by hand) are hashed where they come in, so
that no name or birth date that somebody used as an id reaches a manifest, a split, a prediction or a page. Public
datasets keep the pseudonyms they were published with: everybody knows those, and splits are compared by them.
"""

from __future__ import annotations

import hashlib
import os
import re

import pandas as pd

SALT_VARIABLE = "AFIRE_PATIENT_SALT"
DEFAULT_SALT = "afire"
OTHER_VIEW = "OTHER"
_HASH = r"[0-9a-f]{16}"
_VIEWS = {
    "PA": "PA", "POSTEROANTERIOR": "PA", "AP": "AP", "ANTEROPOSTERIOR": "AP", "FRONTAL": "FRONTAL",
    "LL": "LATERAL", "RL": "LATERAL", "LAT": "LATERAL", "LATERAL": "LATERAL",
    "LEFTLATERAL": "LATERAL", "RIGHTLATERAL": "LATERAL",
}  # fmt: skip


def hash_patient(patient_id: str, salt: str | None = None) -> str:
    """16 hex digits that stand for a patient: equal in every run and on every machine with the same ``salt``.

    Without ``salt``, the environment variable AFIRE_PATIENT_SALT is used, else "afire". The default keeps ids out of
    sight; only a salt that you keep to yourself keeps others from trying out ids until one fits. An empty id stays
    empty.
    """
    patient_id = patient_id.strip(" \0\t\r\n")
    if not patient_id:
        return ""
    salt = os.environ.get(SALT_VARIABLE, DEFAULT_SALT) if salt is None else salt
    key = hashlib.blake2b(salt.encode("utf-8"), digest_size=32).digest()
    return hashlib.blake2b(patient_id.encode("utf-8", "surrogatepass"), key=key, digest_size=8).hexdigest()


def hash_patients(ids: pd.Series) -> pd.Series:
    """Each id of a column hashed; those that are hashes already stay, so that a table can be read and written again."""
    hashes = {name: name if re.fullmatch(_HASH, name) else hash_patient(name) for name in ids.unique()}
    return ids.map(hashes)


def view_of(text: str) -> str:
    """PA, AP, LATERAL or FRONTAL in one spelling; empty for any other text, which may be anything."""
    return _VIEWS.get(re.sub(r"[^A-Z]", "", text.upper()), "")


def view_names(texts: pd.Series) -> pd.Series:
    """A column of :func:`view_of`; what is there and is none of them is ``OTHER``."""
    views = {text: view_of(text) or (OTHER_VIEW if text.strip() else "") for text in texts.unique()}
    return texts.map(views)
