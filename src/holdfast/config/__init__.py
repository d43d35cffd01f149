"""Every user-facing setting, documented where it is declared."""

from holdfast.config.engine import EngineConfig
from holdfast.config.parts.profiler import ProfilerConfig
from holdfast.config.server import ServerConfig

__all__ = ["EngineConfig", "ProfilerConfig", "ServerConfig"]
