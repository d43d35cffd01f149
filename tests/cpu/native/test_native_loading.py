"""The compiled kernels load, and step aside with a reason. Their threads: test_native_threads.py."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import torch

from holdfast.execution import native

BEST_VARIANT = True
"""Others: see conftest.py."""


def run_python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return done.stdout.strip()


def test_they_step_aside_with_a_reason() -> None:
    """By the switch, and where they were not built; torch is imported once for all."""
    code = """
import os, sys
def ask():
    for name in [name for name in sys.modules if name.startswith("holdfast")]:
        del sys.modules[name]
    from holdfast.execution import native
    print(native.available(), native.why_not())
ask()
os.environ["HOLDFAST_NATIVE"] = "1"
ask()
class NotBuilt:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("holdfast.execution.native._kernels"):
            raise ImportError("as if it were not there")
sys.meta_path.insert(0, NotBuilt())
ask()
"""
    off, on, missing = run_python(code, HOLDFAST_NATIVE="0").splitlines()
    assert off == "False HOLDFAST_NATIVE=0 is set"
    assert on == "True None"
    assert missing.startswith("False")
    assert "not built" in missing


def test_the_interpreter_is_let_go_and_other_threads_may_call() -> None:
    matrix = native.BlockMatrix(torch.zeros(256, 18 * 4, dtype=torch.uint8), "Q4_0")
    failures: list[Exception] = []

    def use() -> None:
        try:
            for rows in (1, 20) * 10:
                out = torch.full((rows, 256), float("nan"))
                matrix.write(torch.ones(rows, 128), out)
                if not bool((out == 0).all()):
                    raise ValueError("a product was wrong")
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_the_sources_travel_with_the_package() -> None:
    folder = Path(native.__file__).parent
    assert {path.suffix for path in folder.iterdir()} >= {".c", ".h"}
