"""A disk that loses what was written to it, while layers are read from there: the engine process ends, another one
writes them anew, and answers go on with the same tokens; where nothing can be written either, clients hear of it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from holdfast import SamplingParams
from holdfast.config import EngineConfig
from holdfast.engine.process import restarts
from holdfast.engine.process.client import ProcessEngine
from holdfast.engine.startup.build import find_model, plan_model
from holdfast.errors import HoldfastError
from holdfast.planner.serve import streamed
from holdfast.units import MIB

pytestmark = pytest.mark.usefixtures("forked_starts")

SMALL = {"max_model_len": 512, "max_num_seqs": 2, "max_num_batched_tokens": 64, "skip_tokenizer_init": True}


def lose_layers(pid: int, folder: Path) -> None:
    """Reads find the end of the file from now on."""
    for opened in Path(f"/proc/{pid}/fd").iterdir():
        if os.readlink(opened).startswith(str(folder)):
            os.truncate(opened, 0)
            return
    raise AssertionError("the engine process has no file there")


async def answer(engine: ProcessEngine) -> list[int]:
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    stream = await engine.generate([5, 6, 7, 8], greedy, request_id="one")
    return [token async for delta in stream for token in delta.token_ids]


async def lose(engine: ProcessEngine, folder: Path) -> None:
    await engine.start()
    expected = await answer(engine)
    assert engine.pid is not None
    lose_layers(engine.pid, folder)
    assert await answer(engine) == expected
    assert engine.restarts >= 1
    assert engine.pid is not None
    lose_layers(engine.pid, folder)
    folder.rmdir()
    with pytest.raises(HoldfastError, match="cannot keep layers") as caught:
        await answer(engine)
    assert caught.value.code == "HF443"


def test_answers_go_on_or_the_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed, "IN_MEMORY", ())  # Some machines have such a folder for tests.
    monkeypatch.setattr(restarts, "MAX_FRUITLESS_STARTS", 1)
    plan = plan_model(EngineConfig(**SMALL), find_model(EngineConfig(**SMALL)))
    needed = sum(size for term, size in plan.terms.items() if term != "kv_pool")
    needed += (1 + plan.engine.layout.peak_blocks(512, 64)) * plan.engine.layout.page_bytes
    folder = tmp_path / "disk"
    folder.mkdir()
    config = EngineConfig(**SMALL, ram=needed - 50 * MIB, nvme_path=str(folder))
    model = find_model(config)
    with asyncio.Runner() as runner:
        engine = ProcessEngine(config, model, None, plan=plan_model(config, model))
        try:
            runner.run(lose(engine, folder))
        finally:
            runner.run(engine.stop())
