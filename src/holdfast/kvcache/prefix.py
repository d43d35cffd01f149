"""Which page holds which prefix: (KV group, chain hash) -> page. Knows neither references nor sequences.

A chain hash names the content of a full block: it is made of the hash of the block before it and the block's
own tokens, and the first one of the salt, so equal hashes mean equal tokens from the very start.
It is a strong hash: whoever could make two prefixes collide could read another's answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from struct import pack

HASH_BYTES = 16
TOKEN_BYTES = 8
_EMPTY = blake2b(digest_size=HASH_BYTES)


def root_hash(salt: str, adapter: str = "") -> bytes:
    """Parent of the first block of everyone with this salt and this LoRA adapter. Whatever a client sends as a salt, it
    is never that of an adapter."""
    salted = blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=HASH_BYTES, person=b"holdfast-kv-root").digest()
    if not adapter:
        return salted
    named = salted + adapter.encode("utf-8", "surrogatepass")
    return blake2b(named, digest_size=HASH_BYTES, person=b"holdfast-kv-lora").digest()


def chain_hashes(parent: bytes, tokens: Sequence[int], block_tokens: int) -> list[bytes]:
    """Of full blocks, one behind the other."""
    data, found = pack(f"={len(tokens)}q", *tokens), list[bytes]()  # A third of what an array takes.
    for begin in range(0, len(data), TOKEN_BYTES * block_tokens):
        hashed = _EMPTY.copy()
        hashed.update(parent + data[begin : begin + TOKEN_BYTES * block_tokens])
        parent = hashed.digest()
        found.append(parent)
    return found


class PrefixIndex:
    def __init__(self, groups: int) -> None:
        self._pages: list[dict[bytes, int]] = [{} for _ in range(groups)]

    def __len__(self) -> int:
        return sum(len(pages) for pages in self._pages)

    def pages(self, group: int) -> dict[bytes, int]:
        """Hash -> page of one group, to be read only; changes with the next insert or remove."""
        return self._pages[group]

    def insert(self, group: int, key: bytes, page: int) -> bool:
        """The first writer wins: False when somebody's page already stands for this prefix."""
        return self._pages[group].setdefault(key, page) == page

    def remove(self, group: int, key: bytes) -> None:
        del self._pages[group][key]

    def move(self, moved: Mapping[int, int]) -> None:
        """What lay in the first page of each pair lies in the second."""
        for pages in self._pages:
            pages.update([(key, moved[page]) for key, page in pages.items() if page in moved])

    def clear(self) -> None:
        for pages in self._pages:
            pages.clear()
