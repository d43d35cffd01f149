"""Scales of a KV cache in FP8 at start: the checkpoint's, or calibrated. Knows no kernels and no pages."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from holdfast.checkpoints import ModelFiles, open_checkpoint
from holdfast.config import EngineConfig
from holdfast.observability.decisions import Decision

if TYPE_CHECKING:
    from holdfast.execution.gpu.runner import GpuRunner
    from holdfast.execution.runner import Runner

log = logging.getLogger("holdfast")

_WITH_THEIR_MEAN = (
    "the checkpoint's scales of the KV cache are for keys with their mean, and this model adds a bias to keys, which"
    " can be a hundred times what differs between them: where answers are poor, --calculate-kv-scales stores keys"
    " without it"
)
WHOLE_NAMES = {"fp8": "fp8_e4m3"}


def find_kv_scales(config: EngineConfig, files: ModelFiles, runner: Runner | GpuRunner) -> tuple[Decision, ...]:
    """Gives them to the runner, before its first step and before anything is captured; nothing where pages are kept in
    a type that needs none."""
    from holdfast.execution.kv_pool import LARGEST
    from holdfast.execution.weights.kv_scales import stored_kv_scales

    if runner.kv_dtype not in LARGEST:
        return ()
    if config.load_format != "dummy" and not config.calculate_kv_scales:
        with open_checkpoint(files) as checkpoint:
            stored = stored_kv_scales(checkpoint, [layer.index for layer in runner.spec.layers])
        if stored is not None:
            runner.use_kv_scales(stored)
            if any(tensor.name.endswith(".k_bias") and not tensor.optional for tensor in runner.spec.tensors):
                log.warning(_WITH_THEIR_MEAN)
            return (Decision("kv_cache_scales", stored.described(), "the checkpoint has them", "model"),)
    runner.calibrate_kv()
    found = runner.kv_scales
    reason = (
        "calibrated in a run over random tokens: powers of two, so that keys and values may get twice as large as any "
        "seen there; with 1.0, those beyond the largest FP8 number would be cut off"
    )
    if found.centers:
        reason += "; keys are stored without their mean where positions hardly turn them, which softmax does not see"
    return (Decision("kv_cache_scales", found.described(), reason, "measured"),)
