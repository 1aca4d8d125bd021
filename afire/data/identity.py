"""Patient ids leave afire only as hashes: the same in every run, and of no use without the salt."""

from __future__ import annotations

import hashlib
import os

SALT_VARIABLE = "AFIRE_PATIENT_SALT"
DEFAULT_SALT = "afire"


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
