"""PyTorch's profiler around steps of a runner in this process: one trace from its start to its end.

Knows no engine and no requests. On a GPU the kernels are recorded beside the host's calls.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


class TorchProfile:
    """Records from its creation on, what the creating thread and the GPU do."""

    def __init__(self, folder: Path, *, stack: bool, flops: bool, memory: bool, shapes: bool, compressed: bool) -> None:
        self._folder = folder
        self._suffix = ".pt.trace.json.gz" if compressed else ".pt.trace.json"
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(
            activities=activities, with_stack=stack, with_flops=flops, profile_memory=memory, record_shapes=shapes
        )
        self._profile.start()

    def stop(self) -> Path:
        """The file that the trace was written to."""
        self._profile.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"holdfast_{os.getpid()}_{time.time_ns()}{self._suffix}"
        self._profile.export_chrome_trace(str(path))
        return path
