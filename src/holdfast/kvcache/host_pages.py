"""The books of pages in RAM, below the pool: which holds which prefix, which is being filled or read, which goes next.

    free ──reserve──► arriving ──arrived──► double ◄────────► in line ──reserve──► another's
      ▲                   │                 also in the pool    the pool has it no longer; who left it first goes first
      └──────lost─────────┘                     pin / unpin: read by copies to the pool, never given away meanwhile

What the pool still has is not given up here for something else that it still has: pages would go round in a circle.
Knows neither the pool nor sequences. Every operation takes constant time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

Key = tuple[int, bytes]
"""KV group and chain hash."""


def _not_there(key: Key) -> bool:
    return False


class HostPages:
    """`pages` of them; none at first where memory comes later. `evicted` hears of content that is here no longer."""

    def __init__(self, groups: int, pages: int, evicted: Callable[[Key], None]) -> None:
        self._evicted = evicted
        self._index: list[dict[bytes, int]] = [{} for _ in range(groups)]
        self._key: list[Key | None] = [None] * pages
        """Of each page: what it holds, or will; None: nothing that anybody may ask for."""
        self._free = list(range(pages - 1, -1, -1))
        self._line: OrderedDict[int, None] = OrderedDict()
        """Pages with content that the pool has not, and nobody reads; the least recently used first."""
        self._doubles: set[int] = set()
        """Pages with content that the pool has too."""
        self._readers: dict[int, int] = {}
        self._arriving: dict[int, Key | None] = {}
        """By page; None: nobody wants it any more."""
        self._awaited: set[Key] = set()
        self._expected: dict[Key, int] = {}
        """Pages that are to come, by what they hold: see `expect`."""

    def __len__(self) -> int:
        """Pages with content."""
        return sum(len(pages) for pages in self._index)

    @property
    def total(self) -> int:
        return len(self._key)

    @property
    def free(self) -> int:
        """Pages that nothing would be given up for."""
        return len(self._free)

    @property
    def has_room(self) -> bool:
        """`reserve` would find a page."""
        return bool(self._free or self._line)

    def pages(self, group: int) -> Mapping[bytes, int]:
        """Hash -> page of one group, of content that is here."""
        return self._index[group]

    def awaits(self, group: int, key: bytes) -> bool:
        """It is here, or on its way here."""
        return key in self._index[group] or (group, key) in self._awaited

    def grow(self, pages: int, in_pool: Callable[[Key], bool] = _not_there) -> None:
        """To so many; there are never fewer. `in_pool`: as for `arrived`."""
        new = range(self.total, pages)
        if not new:
            return
        self._key += [None] * len(new)
        there = {page: key for key, page in self._expected.items() if page in new and not self.awaits(*key)}
        self._expected = {key: page for key, page in self._expected.items() if page >= pages}
        self._free[:0] = (page for page in reversed(new) if page not in there)
        for page, key in there.items():
            self._hold(page, key, in_pool)

    def entries(self) -> list[tuple[int, bytes, int]]:
        """Group, chain hash and page of all content, those first that would go first."""
        pages = (*self._line, *self._doubles, *(page for page in self._readers if page not in self._doubles))
        return [(*key, page) for page in pages if (key := self._key[page]) is not None]

    def expect(self, entries: Sequence[tuple[int, bytes, int]]) -> None:
        """Pages that come with `grow` hold these already, from books before; those first that go first."""
        self._expected = {(group, key): page for group, key, page in entries}

    def reserve(self, group: int, key: bytes) -> int | None:
        """A page to be filled with this; None: all are being read or filled, or hold what the pool has too."""
        assert not self.awaits(group, key), "a prefix would be in RAM twice"
        if self._free:
            page = self._free.pop()
        elif self._line:
            page = self._line.popitem(last=False)[0]
            self._forget(page)
        else:
            return None
        self._arriving[page] = group, key
        self._awaited.add((group, key))
        return page

    def arrived(self, page: int, in_pool: Callable[[Key], bool] = _not_there) -> None:
        """It is filled, unless that was forgotten meanwhile. `in_pool`: whether the pool has this too."""
        key = self._arriving.pop(page)
        if key is None:
            self._free.append(page)
            return
        self._awaited.remove(key)
        self._hold(page, key, in_pool)

    def _hold(self, page: int, key: Key, in_pool: Callable[[Key], bool]) -> None:
        self._key[page] = key
        self._index[key[0]][key[1]] = page
        if in_pool(key):
            self._doubles.add(page)
        else:
            self._line[page] = None

    def lost(self, page: int) -> None:
        """It was not filled."""
        key = self._arriving.pop(page)
        if key is not None:
            self._awaited.remove(key)
        self._free.append(page)

    def note_pool(self, group: int, key: bytes, there: bool) -> bool:
        """Whether the pool has this from now on. Says whether it is here as well."""
        page = self._index[group].get(key)
        if page is None:
            return False
        if there:
            self._doubles.add(page)
            self._line.pop(page, None)
        else:
            self._doubles.discard(page)
            if page not in self._readers:
                self._line[page] = None
                self._line.move_to_end(page)
        return True

    def pin(self, group: int, key: bytes) -> int:
        """The page that holds it, which is read until `unpin`."""
        page = self._index[group][key]
        self._line.pop(page, None)
        self._readers[page] = self._readers.get(page, 0) + 1
        return page

    def unpin(self, page: int, *, intact: bool = True) -> None:
        """One reader less. Not `intact`: what it holds could not be read, and is forgotten."""
        if not intact:
            self._forget(page)
        self._readers[page] -= 1
        if self._readers[page]:
            return
        del self._readers[page]
        if self._key[page] is None:
            self._free.append(page)
        elif page not in self._doubles:
            self._line[page] = None

    def forget(self, group: int, key: bytes) -> None:
        """Nobody may ask for it, nor when its page comes; one that is read or filled is free when that is over."""
        self._expected.pop((group, key), None)
        page = self._index[group].get(key)
        if page is not None:
            self._forget(page)
            if page not in self._readers:
                self._line.pop(page, None)
                self._free.append(page)
        elif (group, key) in self._awaited:
            self._awaited.remove((group, key))
            self._arriving = {page: None if one == (group, key) else one for page, one in self._arriving.items()}

    def clear(self) -> None:
        """Forgets all content; pages that are read or filled are free when that is over."""
        self._expected.clear()
        for page in range(self.total - 1, -1, -1):  # Taken in order again: what is saved together lies together.
            if self._key[page] is not None:
                self._forget(page)
                if page not in self._readers:
                    self._line.pop(page, None)
                    self._free.append(page)
        self._arriving = dict.fromkeys(self._arriving)
        self._awaited.clear()

    def _forget(self, page: int) -> None:
        key = self._key[page]
        if key is not None:
            self._key[page] = None
            self._doubles.discard(page)
            del self._index[key[0]][key[1]]
            self._evicted(key)

    def recount(self) -> None:
        """Every page is in exactly one place. Raises AssertionError; walks all."""
        free, line, read, filled = set(self._free), set(self._line), set(self._readers), set(self._arriving)
        doubles = self._doubles - read
        assert len(free) == len(self._free), "a page of RAM is free twice"
        for page, key in enumerate(self._key):
            places = (page in free) + (page in line) + (page in read) + (page in filled) + (page in doubles)
            assert places == 1, f"page {page} of RAM is in {places} places"
            assert page not in free | filled or key is None, f"page {page} of RAM is not in use and has a key"
            assert page not in line or key is not None, f"page {page} of RAM is in line and holds nothing"
            if key is not None:
                assert self._index[key[0]].get(key[1]) == page, f"page {page} of RAM is not indexed for what it holds"
        assert len(self) == sum(key is not None for key in self._key), "the index of RAM names a page that holds none"
        assert self._awaited == set(self._arriving.values()) - {None}, "RAM awaits what does not come"
        assert all(count > 0 for count in self._readers.values()), "a page of RAM is read by nobody"

    def check_doubles(self, of_pool: Sequence[Key]) -> None:
        """That these, and no others, are in the pool too."""
        found = {self._key[page] for page in self._doubles}
        assert found == set(of_pool), f"{len(found)} pages of RAM count as in the pool too, {len(of_pool)} are"
