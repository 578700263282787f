"""Whose request this is. What one key had stored - responses, traces - is not there for another."""

from __future__ import annotations

import hashlib
from contextvars import ContextVar

#: Stands for the key that the current request came with; "" where no key is asked for.
owner: ContextVar[str] = ContextVar("owner", default="")


def owner_of(key_digest: bytes) -> str:
    """The name under which what a key stores is kept. The key cannot be had from it."""
    return hashlib.sha256(b"onebox owner " + key_digest).hexdigest()[:32]
