"""What proves that the bytes of a page are those that were written under its key. Knows nothing of files.

Two checks of all bytes, each in one call without Python's lock: CRC-32, which finds every burst of up to 32 bits, and
for every 64 KiB a 64-bit sum of words times fixed odd weights, which tells pages apart that were mixed. Both together,
with key, model and generation, are hashed to what the index keeps.
"""

from __future__ import annotations

import zlib
from hashlib import blake2b, shake_256

import numpy as np

CHECK_BYTES = 16
_ROW = 8192
_WEIGHTS = np.frombuffer(shake_256(b"holdfast prefix store").digest(_ROW * 8), "<u8") | np.uint64(1)


def page_check(page: memoryview, identity: bytes) -> bytes:
    """`identity`: everything besides the bytes that must be the same."""
    whole = len(page) // 8 * 8
    words = np.frombuffer(page, "<u8", whole // 8) if whole else np.zeros(0, "<u8")
    rows = len(words) // _ROW
    sums = np.dot(words[: rows * _ROW].reshape(rows, _ROW), _WEIGHTS)
    rest = np.dot(words[rows * _ROW :], _WEIGHTS[: len(words) - rows * _ROW])
    state = blake2b(identity, digest_size=CHECK_BYTES, person=b"holdfast-kv-page")
    state.update(zlib.crc32(page).to_bytes(4, "little"))
    state.update(sums.tobytes() + int(rest).to_bytes(8, "little") + bytes(page[whole:]))
    return state.digest()
