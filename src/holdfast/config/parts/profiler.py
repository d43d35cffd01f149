"""What `LLM(profiler_config=...)` may say, in vLLM's words. Owns no profiler: that is `execution.profiler`'s."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from holdfast.errors import ConfigurationError

_EXAMPLE = 'profiler_config={"profiler": "torch", "torch_profiler_dir": "traces"}'


class ProfilerConfig(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    profiler: Literal["torch"] | None = None
    torch_profiler_dir: str = ""
    """Where traces are written, for chrome://tracing and Perfetto."""
    torch_profiler_with_stack: bool = True
    torch_profiler_with_flops: bool = False
    torch_profiler_with_memory: bool = False
    torch_profiler_record_shapes: bool = False
    torch_profiler_use_gzip: bool = True
    torch_profiler_dump_cuda_time_total: bool = True
    """Without effect: a trace has every kernel's time."""
    ignore_frontend: bool = False
    """Without effect: an LLM has none."""
    delay_iterations: int = 0
    max_iterations: int = 0

    def __post_init__(self) -> None:
        for name in ("delay_iterations", "max_iterations"):
            if getattr(self, name):
                raise ConfigurationError(
                    f"profiler_config.{name} is not supported: all steps between start_profile and stop_profile are "
                    "recorded",
                    fix="call start_profile and stop_profile where recording is to begin and end",
                    field="profiler_config",
                )
        if self.profiler is not None and not self.torch_profiler_dir:
            raise ConfigurationError(
                "profiler_config has no torch_profiler_dir", needed="a folder", fix=_EXAMPLE, field="profiler_config"
            )

    @property
    def folder(self) -> Path:
        return Path(self.torch_profiler_dir).expanduser().absolute()


def read_profiler_config(given: object) -> ProfilerConfig | None:
    """None: no profiler is wanted."""
    if given is None or given == {}:
        return None
    if isinstance(given, Mapping):
        given = _converted(dict(given))
    if not isinstance(given, ProfilerConfig):
        raise ConfigurationError(
            f"profiler_config has the type {type(given).__name__}",
            needed="a dictionary or ProfilerConfig",
            fix=_EXAMPLE,
            field="profiler_config",
        )
    return given if given.profiler is not None else None


def _converted(given: dict[str, Any]) -> ProfilerConfig:
    try:
        return msgspec.convert(given, ProfilerConfig)
    except msgspec.ValidationError as error:
        raise ConfigurationError(
            f"profiler_config: {error}",
            needed=f"of these: {', '.join(ProfilerConfig.__struct_fields__)}",
            fix=_EXAMPLE,
            field="profiler_config",
        ) from None
