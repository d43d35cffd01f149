"""What is one for all engine processes behind a front: grammars, seeds, and the room for deltas that nobody has read.

A front with one engine owns its parts. One with several lends them to each, and they outlive any of these.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from holdfast.config import EngineConfig
from holdfast.engine.requests.stream import Waiting
from holdfast.engine.requests.structured_output import StructuredOutput
from holdfast.models import ModelSpec
from holdfast.observability.ledger import ProcessMemory
from holdfast.text.tokenizer.tokenizer import Tokenizer


def process_name(engine: int | None) -> str:
    """Of an engine process, for people. `engine`: its number, where there are several."""
    return "the engine process" if engine is None else f"engine {engine}: the engine process"


@dataclass(frozen=True, slots=True)
class FrontParts:
    structured: StructuredOutput | None
    seeds: random.Random
    """One sequence for all: which engine a request goes to does not change the seed it draws."""
    waiting: Waiting
    engine: int | None = None
    """Of several engines, the one that these are lent to; None: they are owned."""

    @classmethod
    def of(cls, config: EngineConfig, tokenizer: Tokenizer | None, spec: ModelSpec) -> FrontParts:
        seeds = random.Random(config.seed) if config.seed is not None else random.SystemRandom()
        return cls(StructuredOutput.of(tokenizer, spec), seeds, Waiting())

    def lent(self, engine: int) -> FrontParts:
        return replace(self, engine=engine)

    @property
    def named(self) -> str:
        return process_name(self.engine)

    def memory(self) -> list[ProcessMemory]:
        return [] if self.structured is None else self.structured.memory()

    def prepare_soon(self) -> None:
        if self.structured is not None:
            self.structured.prepare_soon()

    def stop(self) -> None:
        """Nothing is wanted of them until an engine is started again."""
        if self.structured is not None and self.engine is None:
            self.structured.stop()

    def close(self) -> None:
        if self.structured is not None and self.engine is None:
            self.structured.close()
