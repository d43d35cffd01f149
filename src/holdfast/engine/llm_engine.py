"""`LLMEngine`, made out of settings: an `LLM` that its caller steps. The stepping is `SteppedEngine`'s."""

from __future__ import annotations

from typing import Any

from holdfast.engine.arg_utils import EngineArgs
from holdfast.engine.offline.llm import LLM
from holdfast.engine.offline.stepped import SteppedEngine


class LLMEngine(SteppedEngine):
    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, *_: Any, **__: Any) -> LLMEngine:
        """vLLM's further arguments (usage_context, stat_loggers) say who reports what; nothing is reported here."""
        return cls(LLM(**engine_args.settings()))
