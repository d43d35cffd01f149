"""How one side of a connection shows the other that it has a key without saying it. Knows neither sockets nor nodes."""

from __future__ import annotations

import hmac

KEY_BYTES = NONCE_BYTES = PROOF_BYTES = 32


def proof(key: bytes, side: bytes, first: bytes, second: bytes) -> bytes:
    """`side`: which of the two this is, so that nobody can give it back. `first`, `second`: what both have drawn for
    this connection alone."""
    return hmac.digest(key, side + b"\0" + first + second, "sha256")


def proves(shown: bytes, key: bytes, side: bytes, first: bytes, second: bytes) -> bool:
    return hmac.compare_digest(shown, proof(key, side, first, second))
