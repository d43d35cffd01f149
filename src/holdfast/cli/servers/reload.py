"""SIGUSR1: the settings are read again, with the --config file as it is now, and the memory budget follows. What else
has changed is said: only a restart takes it over."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable

from holdfast.config import EngineConfig, ServerConfig
from holdfast.config.setting import flag_name
from holdfast.engine.interface import Engine
from holdfast.errors import HoldfastError

log = logging.getLogger("holdfast")

BUDGETS = ("ram", "vram")


class SettingsReload:
    """`read`: the settings as they are written now. `engine_config`, `server_config`: as the server was started."""

    def __init__(
        self,
        engine: Engine,
        engine_config: EngineConfig,
        server_config: ServerConfig,
        read: Callable[[], tuple[EngineConfig, ServerConfig]],
    ) -> None:
        self._engine, self._read = engine, read
        self._served: tuple[EngineConfig, ServerConfig] = engine_config, server_config

    async def __call__(self) -> None:
        try:
            found = self._read()
        except HoldfastError as error:
            log.error("the settings could not be read again, and stay as they are: %s", error)
            return
        changed = _differing(self._served[0], found[0]) + _differing(self._served[1], found[1])
        if not changed:
            log.info("the settings were read again: nothing has changed")
        for name in changed:
            if name in BUDGETS:
                await self._set_budget(name, found[0])
        if others := [flag_name(name) for name in changed if name not in BUDGETS]:
            log.warning("changed, and only a restart takes it over: %s", ", ".join(others))

    async def _set_budget(self, tier: str, wanted: EngineConfig) -> None:
        size = getattr(wanted, tier)
        try:
            await self._engine.set_memory_budget(tier, size)
        except HoldfastError as error:
            log.error("the memory budget stays as it is: %s", error)
            return
        engine_config, server_config = self._served
        self._served = dataclasses.replace(engine_config, **{tier: size}), server_config


def _differing(old: EngineConfig | ServerConfig, new: EngineConfig | ServerConfig) -> list[str]:
    return [one.name for one in dataclasses.fields(old) if getattr(old, one.name) != getattr(new, one.name)]
