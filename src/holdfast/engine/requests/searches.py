"""Beam searches under way and the places they hold, so that a search that was taken can be finished.

Every step of a search is a request for each of its beams. Between two steps it has none open, but its places are not
free, and its next step is nothing new. Knows neither beams nor streams.
"""

from __future__ import annotations


class Searches:
    def __init__(self) -> None:
        self._places: dict[str, int] = {}
        self._steps: set[str] = set()
        """Names of open requests that are steps."""

    def __contains__(self, search_id: object) -> bool:
        return search_id in self._places

    def __len__(self) -> int:
        return len(self._places)

    @property
    def idle_places(self) -> int:
        """Held by no open request."""
        return sum(self._places.values()) - len(self._steps)

    @property
    def steps(self) -> int:
        return len(self._steps)

    def open(self, search_id: str, places: int) -> None:
        self._places[search_id] = places

    def begin_step(self, request_id: str) -> None:
        self._steps.add(request_id)

    def end_step(self, request_id: str) -> None:
        self._steps.discard(request_id)

    def close(self, search_id: str) -> None:
        self._places.pop(search_id, None)

    def clear(self) -> None:
        """What is left of them is not to be finished."""
        self._places.clear()
        self._steps.clear()
