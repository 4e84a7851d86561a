"""Every random stream has a seed of its own, derived from its purpose, so that no stream disturbs another."""

from __future__ import annotations

import hashlib


def derive(*parts: object) -> int:
    """A 63-bit seed from any printable parts: the same parts give the same seed on every machine and version."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
