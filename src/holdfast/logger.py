"""Where vLLM keeps this name, for scripts that log with it. Owns no handler and no level: those are the script's."""

from __future__ import annotations

import logging
from typing import Any

__all__ = ["init_logger"]


class OnceLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger with vLLM's methods that say a thing once, however often they are called."""

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__(logger)
        self._said: set[tuple[int, str]] = set()

    def debug_once(self, message: str, *given: Any, **_: Any) -> None:
        self._once(logging.DEBUG, message, given)

    def info_once(self, message: str, *given: Any, **_: Any) -> None:
        self._once(logging.INFO, message, given)

    def warning_once(self, message: str, *given: Any, **_: Any) -> None:
        self._once(logging.WARNING, message, given)

    def _once(self, level: int, message: str, given: tuple[Any, ...]) -> None:
        said = (level, message % given if given else message)
        if said not in self._said:
            self._said.add(said)
            self.log(level, message, *given, stacklevel=3)


def init_logger(name: str) -> OnceLogger:
    return OnceLogger(logging.getLogger(name))
