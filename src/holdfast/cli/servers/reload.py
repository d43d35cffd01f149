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
        # A budget may have been changed by a client since: what counts is the one in force.
        wanted, in_force = found[0].budgets, self._engine.budgets
        tiers = [tier for tier, size in wanted.items() if size != in_force.get(tier)]
        changed = _differing(self._served[0], found[0]) + _differing(self._served[1], found[1])
        others = [flag_name(name) for name in changed if name not in wanted]
        if not tiers and not others:
            log.info("the settings were read again: nothing has changed")
        for tier in tiers:
            await self._set_budget(tier, wanted[tier])
        if others:
            log.warning("changed, and only a restart takes it over: %s", ", ".join(others))

    async def _set_budget(self, tier: str, size: int | None) -> None:
        try:
            await self._engine.set_memory_budget(tier, size)
        except HoldfastError as error:
            log.error("the memory budget stays as it is: %s", error)


def _differing(old: EngineConfig | ServerConfig, new: EngineConfig | ServerConfig) -> list[str]:
    return [one.name for one in dataclasses.fields(old) if getattr(old, one.name) != getattr(new, one.name)]
