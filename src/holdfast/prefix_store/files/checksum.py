"""What proves that the bytes of a page are those that were written under its key. Knows nothing of files.

For every 64 KiB the sum of its 32-bit words times fixed odd 64-bit weights, modulo 2^64: one pass over the page in one
call that lets go of Python's lock. Every single flipped bit changes it; of any other change one in 2^32 at worst would
not, and of pages that were mixed one in 2^64. The sums are hashed together with key, model and generation.
"""

from __future__ import annotations

from hashlib import blake2b, shake_256

import numpy as np
from numpy.typing import NDArray

CHECK_BYTES = 16
_ROW = 16384
_WEIGHTS = np.frombuffer(shake_256(b"holdfast prefix store").digest(_ROW * 8), "<u8") | np.uint64(1)


def page_check(page: memoryview, identity: bytes) -> bytes:
    """`identity`: everything besides the bytes that must be the same."""
    count = len(page) // 4
    words = np.frombuffer(page, "<u4", count) if count else np.zeros(0, "<u4")
    rows = count // _ROW
    state = blake2b(identity, digest_size=CHECK_BYTES, person=b"holdfast-kv-page")
    state.update(_sums(words[: rows * _ROW].reshape(rows, _ROW)).tobytes())
    state.update(_sums(words[rows * _ROW :].reshape(1, -1)).tobytes())
    state.update(page[count * 4 :])
    return state.digest()


def _sums(rows: NDArray[np.uint32]) -> NDArray[np.uint64]:
    found: NDArray[np.uint64] = np.einsum("ij,j->i", rows, _WEIGHTS[: rows.shape[1]], dtype=np.uint64, casting="safe")
    return found
