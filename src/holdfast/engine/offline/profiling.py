"""`LLM.start_profile` and `stop_profile`. What is recorded and how is `execution.profiler`'s."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from holdfast.config.parts.profiler import ProfilerConfig
from holdfast.errors import ConfigurationError, EngineError

if TYPE_CHECKING:
    from holdfast.execution.profiler import TorchProfile

log = logging.getLogger("holdfast")


class ProfileMethods:
    _profiler_config: ProfilerConfig | None
    _profile: TorchProfile | None = None

    def start_profile(self, profile_prefix: str | None = None) -> None:
        """Records what this thread computes until `stop_profile`, and what a GPU does meanwhile. The log says to which
        file, also where vLLM's `profile_prefix` is given."""
        config = self._profiler_config
        if config is None:
            raise ConfigurationError(
                "there is no profiler_config",
                fix='LLM(profiler_config={"profiler": "torch", "torch_profiler_dir": "traces"})',
                field="profiler_config",
            )
        if self._profile is not None:
            raise EngineError("a profile is being recorded already", fix="stop_profile()")
        from holdfast.execution.profiler import TorchProfile

        self._profile = TorchProfile(
            config.folder,
            stack=config.torch_profiler_with_stack,
            flops=config.torch_profiler_with_flops,
            memory=config.torch_profiler_with_memory,
            shapes=config.torch_profiler_record_shapes,
            compressed=config.torch_profiler_use_gzip,
        )

    def stop_profile(self) -> None:
        profile, self._profile = self._profile, None
        if profile is None:
            raise EngineError("no profile is being recorded", fix="start_profile()")
        log.info("profile written to %s", profile.stop())
