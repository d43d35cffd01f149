"""`holdfast ps` for people: beside the memory, how is sampled where a request says nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from holdfast.checkpoints import ModelFiles
from holdfast.cli.commands.running.ps import lines
from holdfast.config import EngineConfig
from holdfast.engine.fake import FakeEngine
from holdfast.engine.requests.sampling_defaults import decided, default_sampling


def told(own: dict[str, object] | None, **settings: object) -> list[str]:
    engine = FakeEngine()
    asyncio.run(engine.start())
    config = EngineConfig.from_arguments(**settings)
    files = ModelFiles(name="x", kind="folder", path=Path("x"), weights=(), format="safetensors", generation_config=own)
    info = decided(engine.info, config, default_sampling(config, files))
    ledger = engine.memory()
    assert ledger is not None
    memory = msgspec.structs.replace(ledger, decisions=info.decisions)
    answer = {"url": "http://here", "status": "ready", "reason": None, "memory": msgspec.to_builtins(memory)}
    return [line for line in lines(answer) if "sampling" in line]


def test_defaults_are_shown_with_their_source() -> None:
    assert told({"temperature": 0.2, "max_new_tokens": 9}) == [
        "  sampling defaults = temperature 0.2, max_tokens 9 (model): from the model's generation config"
    ]
    assert told(None) == ["  sampling defaults = API defaults (model): the model sets none"]
    (line,) = told({"top_p": 0.5}, generation_config="vllm")
    assert line == "  sampling defaults = API defaults (set): the model's generation config is ignored"
    (line,) = told({"top_p": 0.5}, override_generation_config={"temperature": 0})
    assert "top_p 0.5, temperature 0 (set)" in line
