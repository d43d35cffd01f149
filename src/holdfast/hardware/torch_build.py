"""Which build of torch is installed, without importing it."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True, slots=True)
class TorchBuild:
    version: str
    cuda: str | None
    """The CUDA version it was built for; None: it computes on the CPU alone."""


@cache
def torch_build() -> TorchBuild | None:
    """None: torch is not installed."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    try:
        text = (Path(found.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return TorchBuild("unknown", None)
    return parse_version_file(text)


def parse_version_file(text: str) -> TorchBuild:
    """Of torch/version.py, which torch's build writes."""

    def value(name: str) -> str | None:
        line = re.search(rf"^{name}\b[^=\n]*=\s*(?:'([^']*)'|\"([^\"]*)\"|None)", text, re.MULTILINE)
        return None if line is None else line[1] or line[2]

    return TorchBuild(value("__version__") or "unknown", value("cuda"))
