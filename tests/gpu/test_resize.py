"""Another budget of VRAM while 32 answers are computed: the same tokens, and the GPU's memory follows. A page that is
gone has no memory behind it: whoever touches it ends the process."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from fake_cuda_driver import POISON
from many_streams import STREAMS, requests, run
from named_model import MODEL_VARIABLE

from holdfast.config import EngineConfig
from holdfast.engine.core.loop import EngineCore
from holdfast.engine.process.client import ProcessEngine
from holdfast.engine.startup.build import build_core, find_model, plan_model
from holdfast.errors import DoesNotFitError
from holdfast.execution.gpu.memory import virtual_memory
from holdfast.execution.gpu.memory.virtual_memory import PIECE_BYTES
from holdfast.hardware.nvidia import probe
from holdfast.records import Request, VramBudget
from holdfast.server.app import create_app
from holdfast.server.settings import ServerSettings
from holdfast.units import GIB, MIB

SETTINGS: dict[str, Any] = {
    "load_format": "dummy", "skip_tokenizer_init": True, "device": "cuda", "dtype": "float32", "max_model_len": 4096,
    "max_num_seqs": STREAMS, "max_num_batched_tokens": 512, "vram": "12GiB",
}  # fmt: skip
SLACK = 8 * MIB
"""Of what else may come or go meanwhile."""


@pytest.fixture(scope="module")
def core(shape: Callable[[str], str]) -> Iterator[EngineCore]:
    config = EngineConfig.from_arguments(model=shape("1B"), **SETTINGS)
    found, _ = build_core(config, find_model(config), lambda stage, done, total: None)
    yield found
    found.close()


def free() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def test_the_budget_changes_at_random_while_answers_go_on(core: EngineCore) -> None:
    plain = run(core)
    assert run(core) == plain
    runner: Any = core.runner
    dice, sizes, seconds = random.Random(11), list[int](), list[float]()
    first, at_start = runner.kv.nbytes, free()
    dice.shuffle(core.scheduler.kv._pool._free)  # Else pages that go are hardly ever used.

    def between() -> None:
        if dice.random() > 0.15:
            return
        budget = dice.choice([6 * GIB, dice.randrange(6 * GIB, 12 * GIB)])
        before, held = free(), runner.kv.nbytes
        begin_s = time.perf_counter()
        granted = core.set_vram(VramBudget(budget_bytes=budget))
        after = free()
        seconds.append(time.perf_counter() - begin_s)
        assert granted.kv_bytes == runner.kv.nbytes
        assert granted.blocks == runner.kv.blocks == core.scheduler.kv.blocks_total + 1
        assert abs((before - after) - (runner.kv.nbytes - held)) <= SLACK
        assert core.stats().device_bytes <= granted.budget_bytes + SLACK
        assert granted.budget_bytes == max(budget, granted.budget_bytes)
        sizes.append(granted.blocks)
        if (
            granted.blocks * runner.layout.page_bytes < runner.kv.nbytes
        ):  # What shares a piece with pages that are left.
            end_of_memory = runner.kv.nbytes // runner.layout.page_bytes
            runner.kv.pages[granted.blocks : end_of_memory].fill_(float("nan"))
        dice.shuffle(core.scheduler.kv._pool._free)

    assert run(core, between) == plain
    print(f"{len(sizes)} sizes from {min(sizes)} to {max(sizes)} blocks, {core.stats().preemptions_total} preemptions,")
    middle_ms, most_ms = statistics.median(seconds) * 1000, max(seconds) * 1000
    print(f"in {middle_ms:.1f} ms each, {most_ms:.1f} ms at most; graphs {len(runner._graphs.captured)}")
    assert len(sizes) > 20
    core.set_vram(VramBudget(budget_bytes=12 * GIB))
    assert abs(runner.kv.nbytes - first) <= SLACK
    assert abs(free() - at_start) <= 64 * MIB  # Graphs of more sizes were captured.
    assert run(core) == plain


def test_less_than_it_can_keep_to_is_given_back_as_far_as_it_goes(core: EngineCore) -> None:
    granted = core.set_vram(VramBudget(budget_bytes=GIB))
    assert granted.budget_bytes > 5 * GIB  # Weights.
    least = core.scheduler.least_blocks * core.runner.layout.page_bytes  # type: ignore[attr-defined]
    assert least <= granted.kv_bytes < least + PIECE_BYTES
    assert core.stats().device_bytes <= granted.budget_bytes + SLACK
    answers = run(core)
    assert core.set_vram(VramBudget(budget_bytes=12 * GIB)).blocks > granted.blocks
    assert run(core) == answers


def test_what_a_neighbour_has_taken_is_refused_and_nothing_changes(core: EngineCore, neighbour: Any) -> None:
    plain = run(core)
    small = core.set_vram(VramBudget(budget_bytes=8 * GIB))
    neighbour.take(GIB)
    for budget in (12 * GIB, 10 * GIB):
        with pytest.raises(DoesNotFitError, match="less is free") as refused:
            core.set_vram(VramBudget(budget_bytes=budget))
        print(refused.value)
        runner: Any = core.runner
        assert (runner.kv.blocks, runner.kv.nbytes) == (small.blocks, small.kv_bytes)
    assert run(core) == plain
    neighbour.end()
    assert core.set_vram(VramBudget(budget_bytes=12 * GIB)).kv_bytes > small.kv_bytes + 3 * GIB
    assert run(core) == plain


@pytest.mark.parametrize(
    "more",
    [{"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 200}, {}],
    ids=["window", "fp8"],
)
def test_kernels_for_prompts_touch_no_page_that_is_gone(
    shape: Callable[..., str], more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, where prompts have a kernel of their own that fetches whole tiles of pages, also some that have left
    the window. Tokens may depend on the batch then; that nothing faults and no answer breaks off is what is seen."""
    monkeypatch.setattr(virtual_memory, "PIECE_BYTES", 4 * MIB)
    kv_dtype = "auto" if more else "fp8"
    settings = SETTINGS | {"dtype": "bfloat16", "kv_cache_dtype": kv_dtype, "vram": "6GiB", "max_model_len": 2048}
    config = EngineConfig.from_arguments(model=shape("1B", **more), **settings)
    core, info = build_core(config, find_model(config), lambda stage, done, total: None)
    runner: Any = core.runner
    if torch.cuda.get_device_capability()[0] == 9:
        assert any(line.startswith("prefill_attention = hopper") for line in info.decisions)
    dice, held = random.Random(5), list[int]()
    least, most = core.scheduler.least_blocks, runner.most_blocks

    def between() -> None:
        if dice.random() < 0.2:
            size = dice.choice([least, dice.randint(least, most)])
            core.resize_kv(size)
            held.append(runner.kv.nbytes)
            dice.shuffle(core.scheduler.kv._pool._free)
            runner.kv.pages.view(torch.uint8)[size : runner.kv.nbytes // runner.layout.page_bytes] = POISON

    try:
        answers = run(core, between)
        assert [len(answers[request.request_id]) for request in requests()] == [60 + 4 * n for n in range(STREAMS)]
        print(f"{len(held)} sizes, {len(set(held))} amounts of memory, {core.stats().preemptions_total} preemptions")
        assert len(set(held)) > 6
    finally:
        core.close()


async def stream(engine: ProcessEngine, request: Request, prefix: str) -> list[int]:
    tokens = list[int]()
    name = f"{prefix}-{request.request_id}"
    async for delta in await engine.generate(request.prompt_token_ids, request.params, request_id=name):
        tokens += delta.token_ids
    return tokens


async def streams(engine: ProcessEngine, prefix: str) -> list[list[int]]:
    return list(await asyncio.gather(*(stream(engine, request, prefix) for request in requests())))


async def serves(engine: ProcessEngine, http: httpx.AsyncClient) -> None:
    await engine.start()
    first = (await http.get("/memory")).json()
    plain = await streams(engine, "alone")
    running = asyncio.create_task(streams(engine, "resized"))
    held = list[int]()
    for budget in ("8GiB", "6900MiB", "9GiB", "12GiB"):
        await asyncio.sleep(0.08)
        answer = await http.post("/memory", json={"vram": budget})
        assert answer.status_code == 200, answer.text
        tier, kv = answer.json()["tiers"][0], answer.json()["kv"]
        print(budget, tier["budget_bytes"] // MIB, tier["planned_bytes"] // MIB, tier["measured_bytes"] // MIB, kv)
        assert tier["measured_bytes"] <= tier["budget_bytes"] + SLACK
        held.append(tier["measured_bytes"])
        assert f'num_gpu_blocks="{kv["blocks"]}"' in (await http.get("/metrics")).text
    assert not running.done()
    assert held[1] < held[0] < held[3]
    assert await running == plain
    assert engine.info.blocks * engine.info.memory.page_bytes == pytest.approx(first["kv"]["blocks"] * MIB, rel=0.02)

    for asked, code in (({"vram": "900GiB"}, "HF110"), ({"ram": "20GiB"}, "HF320")):
        refused = await http.post("/memory", json=asked)
        assert (refused.status_code, refused.json()["error"]["holdfast"]["code"]) == (400, code), refused.text
    lowest = await http.post("/memory", json={"vram": "1GiB"})
    assert lowest.json()["tiers"][0]["budget_bytes"] > 5 * GIB
    assert engine.budgets["vram"] == GIB  # Or every SIGUSR1 would ask for it again.
    assert [
        line for line in lowest.json()["decisions"] if line.startswith("budget = ") and "1.00 GiB was requested" in line
    ]
    await http.post("/memory", json={"vram": "8GiB"})
    blocks = engine.info.blocks
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGKILL)
    assert await streams(engine, "again") == plain
    assert (engine.restarts, engine.info.memory.budget_bytes) == (1, 8 * GIB)
    assert engine.info.blocks == pytest.approx(blocks, rel=0.03)
    print(f"{blocks} blocks before the restart, {engine.info.blocks} after it")


def test_a_server_takes_another_budget(shape: Callable[[str], str]) -> None:
    with asyncio.Runner() as runner:
        config = EngineConfig.from_arguments(model=shape("1B"), **SETTINGS)
        model = find_model(config)
        engine = ProcessEngine(config, model, None, plan=plan_model(config, model))
        app = create_app(engine, ServerSettings(served_model_names=("dummy",), may_change_memory=True))
        http = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://here", timeout=120)
        try:
            runner.run(serves(engine, http))
        finally:
            runner.run(engine.stop())


SERVED = (
    "--load-format", "dummy", "--skip-tokenizer-init", "--device", "cuda", "--dtype", "float32", "--max-model-len",
    "4096", "--max-num-seqs", str(STREAMS), "--max-num-batched-tokens", "512",
)  # fmt: skip
PATIENCE_S = 60.0


def streamed(url: str, number: int) -> list[int]:
    """Tokens of an answer that takes seconds."""
    prompt = [number + 3 * place for place in range(3, 20)]
    body = {"prompt": prompt, "max_tokens": 2000, "temperature": 0, "ignore_eos": True, "stream": True}
    found = list[int]()
    with httpx.stream(
        "POST", f"{url}/v1/completions", json=body | {"return_token_ids": True}, timeout=PATIENCE_S
    ) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                found += [token for choice in event["choices"] for token in choice.get("token_ids") or []]
    return found


def test_sigusr1_takes_the_budget_of_the_config_file_as_it_is_now(
    shape: Callable[[str], str], start_server: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Less, then as much as before, while answers are streamed: the driver sees it, and the tokens stay the same."""
    monkeypatch.delenv(MODEL_VARIABLE, raising=False)  # It is no setting of Holdfast, and is refused as one.
    free_before, config = probe().gpus[0].free_bytes, tmp_path / "holdfast.toml"
    config.write_text('vram = "12GiB"\n')
    server = start_server(shape("1B"), *SERVED, "--config", str(config)).wait_ready()

    def held() -> int:
        return free_before - probe().gpus[0].free_bytes

    with ThreadPoolExecutor(4) as pool:
        expected = list(pool.map(streamed, [server.url] * 4, range(4)))
        assert 11 * GIB < held() <= 12 * GIB + SLACK
        running = [pool.submit(streamed, server.url, number) for number in range(4)]
        server.wait_metric("vllm:num_requests_running", lambda count: count == 4)
        for gib, reached in ((7, lambda: held() <= 7 * GIB + SLACK), (12, lambda: held() > 11 * GIB)):
            config.write_text(f'vram = "{gib}GiB"\n')
            begin_s = time.monotonic()
            server.process.send_signal(signal.SIGUSR1)
            while not reached():
                late = f"{held() / MIB:,.0f} MiB are held, the file says {gib} GiB\n{server.log[-2000:]}"
                assert time.monotonic() < begin_s + PATIENCE_S, late
                time.sleep(0.02)
            print(f"{gib} GiB after {time.monotonic() - begin_s:.2f} s: {held() / MIB:,.0f} MiB")
        assert not any(one.done() for one in running), "it was over before the budget changed"
        assert [one.result() for one in running] == expected
    assert held() <= 12 * GIB + SLACK
    assert httpx.get(f"{server.url}/memory").json()["tiers"][0]["budget_bytes"] == 12 * GIB
