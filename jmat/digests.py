"""Fingerprints by which texts and settings are recognised."""

import hashlib


def short_hash(*content: bytes | memoryview) -> str:
    """Returns 16 hex digits of SHA-256 over all bytes, one part after another."""
    digest = hashlib.sha256()
    for part in content:
        digest.update(part)
    return digest.hexdigest()[:16]
