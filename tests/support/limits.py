"""Calls a function in a process of its own, with bounds on memory and time, and tells how each call ended.

One process serves many calls, and a new one takes over where it died: a call that ends the process, by a signal, by an
abort of native code or because it took too long, is told as such and ends nothing else.

    with Limited("hostile_loads:load_model") as load:
        assert load(str(folder)).good, ...
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import select
import subprocess
import sys
import traceback
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

MEMORY_BYTES = 1 << 30
"""Beyond what the process has when it is ready."""
SECONDS = 20.0
"""For one call: nothing here takes one, but other work may have the machine."""
_WORKER = "import sys; sys.path.insert(0, sys.argv[1]); from limits import serve; serve(*sys.argv[2:])"


@dataclass(frozen=True, slots=True)
class Ending:
    kind: str
    """returned, refused (by an error of holdfast's own), raised, died, or hung."""
    detail: str = ""
    """What was returned, in JSON; the error's code and message; a traceback; or the process's exit and last words."""

    @property
    def good(self) -> bool:
        return self.kind in ("returned", "refused")


class Limited:
    def __init__(self, function: str, *, memory_bytes: int = MEMORY_BYTES, seconds: float = SECONDS) -> None:
        """`function`: module:name, in tests/support or in holdfast; its arguments and result are JSON."""
        self._function, self._memory_bytes, self._seconds = function, memory_bytes, seconds
        self._process: subprocess.Popen[str] | None = None
        self.starts = 0

    def __enter__(self) -> Limited:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def __call__(self, *arguments: Any) -> Ending:
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(arguments) + "\n")
        process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], self._seconds)
        line = process.stdout.readline() if ready else ""
        if line:
            return Ending(**json.loads(line))
        if not ready:
            self._end()
            return Ending("hung", f"no answer in {self._seconds} s")
        code = process.wait()
        return Ending("died", f"exit status {code}: {self._end()}")

    def _start(self) -> subprocess.Popen[str]:
        self.starts += 1
        words = [sys.executable, "-c", _WORKER, str(Path(__file__).parent), self._function, str(self._memory_bytes)]
        # Backtraces of native code are long, and made for each of the many panics that are caught.
        environment = {**os.environ, "RUST_BACKTRACE": "0", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        self._log = Path(f"/tmp/limited-{os.getpid()}-{id(self)}.log")
        with self._log.open("w") as log:
            self._process = process = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
            )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", self._end()
        return process

    def _end(self) -> str:
        """Its last words."""
        process, self._process = self._process, None
        if process is None:
            return ""
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()
        with self._log.open(errors="replace") as log:
            said = "".join(deque(log, 8))
        self._log.unlink()
        return said


def serve(function: str, memory_bytes: str) -> None:
    from holdfast.errors import HoldfastError

    module, _, name = function.partition(":")
    called = getattr(importlib.import_module(module), name)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # What a function prints is no answer.
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + int(memory_bytes)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print("ready", file=answers)
    for line in sys.stdin:
        try:
            ending = {"kind": "returned", "detail": json.dumps(called(*json.loads(line)))}
        except HoldfastError as error:
            ending = {"kind": "refused", "detail": f"{error.code} {error}"}
        except BaseException:
            ending = {"kind": "raised", "detail": traceback.format_exc()[-4000:]}
        print(json.dumps(ending), file=answers)
