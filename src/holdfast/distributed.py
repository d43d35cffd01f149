"""Where vLLM keeps this name, for scripts that call it before they end. There are no process groups here."""

from __future__ import annotations

import gc

__all__ = ["cleanup_dist_env_and_memory"]


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """What no name refers to any more is given back; an `LLM` that is still referred to keeps its memory."""
    gc.collect()
