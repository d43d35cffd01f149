"""Words that ranks wait for: what a wait leaves behind for the next one, in C."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.execution import native

BEST_VARIANT = True
"""Others: see conftest.py."""
SOURCES = Path(native.__file__).parent


@pytest.mark.skipif(shutil.which("cc") is None or sys.platform != "linux", reason="no C compiler, or no futex")
def test_who_looks_without_spinning_changes_nothing_of_what_sums_have_learned(tmp_path: Path) -> None:
    """Lines between nodes look at their words in the same process."""
    program, harness = tmp_path / "harness", Path(__file__).with_name("rank_words_harness.c")
    files = (str(harness), str(SOURCES / "parallel.c"))
    subprocess.run(["cc", "-std=gnu11", "-O1", "-pthread", f"-I{SOURCES}", *files, "-o", str(program)], check=True)
    done = subprocess.run([program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout.split(), done.returncode) == (["learns", "slept", "looked", "reached"], 0)
