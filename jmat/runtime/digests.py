"""Fingerprints by which texts and settings are recognised."""

import hashlib
from collections.abc import Mapping

import numpy as np
from jax.typing import ArrayLike


def short_hash(*content: bytes | memoryview) -> str:
    """Returns 16 hex digits of SHA-256 over all bytes, one part after another."""
    digest = hashlib.sha256()
    for part in content:
        digest.update(part)
    return digest.hexdigest()[:16]


def model_hash(params: Mapping[str, ArrayLike]) -> str:
    """Returns the fingerprint of a model's weights: 16 hex digits of SHA-256 over
    sorted names, shapes, dtypes and bytes.
    """
    digest = hashlib.sha256()
    for name in sorted(params):
        values = np.ascontiguousarray(params[name])
        digest.update(f"{name}|{np.shape(params[name])}|{values.dtype.name}|".encode())
        digest.update(values.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()[:16]
