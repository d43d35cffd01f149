"""The doctor of logs, whole: sources or lines in, a diagnosis out. Puts reading, gathering and judging together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from holdfast.doctor.judging import diagnosis
from holdfast.doctor.lines import read_lines
from holdfast.doctor.reading import LOOKED_BYTES, Sift, worth_reading
from holdfast.doctor.records import Diagnosis
from holdfast.doctor.scene import Scene
from holdfast.doctor.sources import Source

_TORN = "the rest of {}: the file is cut, its compressed data ends before its end"


class Watch:
    """Lines in as they come, a diagnosis of what was seen so far whenever it is wanted. Bounded in memory."""

    def __init__(self, source: str = "output") -> None:
        self._scene = Scene(source)
        self._number = 0

    def feed(self, line: str) -> None:
        self._number += 1
        for part in line.split("\r"):
            if part and (self._scene.settings.listing or worth_reading(part)):
                for one in read_lines(part[:LOOKED_BYTES], self._number):
                    self._scene.feed(one)

    @property
    def ready(self) -> bool:
        """The server that writes these lines has begun to serve."""
        return self._scene.run.ready

    def diagnosis(self) -> Diagnosis:
        return diagnosis(self._scene)


def diagnose_lines(lines: Iterable[str], source: str) -> Diagnosis:
    watch = Watch(source)
    for line in lines:
        watch.feed(line.rstrip("\n"))
    return watch.diagnosis()


def diagnose(sources: Sequence[str]) -> Diagnosis:
    """Logs, judged together: paths of files (gz too), `-` for standard input. Raises a ConfigurationError (HFD90)."""
    scene: Scene | None = None
    torn = []
    for name in sources:
        called = "standard input" if name == "-" else name
        if scene is None:
            scene = Scene(called)
        else:
            scene.open(called)
        source, sift = Source(name), Sift(scene.feed)
        for block in source.blocks():
            sift.feed(block)
        sift.close()
        torn += [_TORN.format(called)] if source.torn else []
    found = diagnosis(scene or Scene(""))
    found.missing.extend(torn)
    return found
