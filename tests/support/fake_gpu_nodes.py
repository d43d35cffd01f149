"""A node with ranks on GPUs on a machine without one: `holdfast serve --headless` whose driver shows a GPU, and whose
ranks are those of fake_rank_gpus.py."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from fake_rank_gpus import show_a_gpu, start_ranks_here


def main() -> int:
    from holdfast.cli.main import main as run_command
    from holdfast.engine.startup import select_device

    patch = pytest.MonkeyPatch()
    show_a_gpu(patch)
    patch.setattr(select_device, "settle_device", lambda config: replace(config, device="cuda"))
    start_ranks_here(patch, Path(tempfile.mkdtemp()))
    return run_command()


if __name__ == "__main__":
    sys.exit(main())
