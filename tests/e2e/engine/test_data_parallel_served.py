"""Two engines behind one API as a client sees them: conversations stay, adapters are everywhere, sleep and budgets are
of both."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers
from deadlines import PATIENCE_S
from lora_adapters import write_adapter

from holdfast.units import GIB, MIB

STORY = "Once upon a time there was a language model that had several engines, and "


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    base = tmp_path_factory.mktemp("data-parallel")
    torch.manual_seed(0)
    settings = json.loads((tiny_model / "config.json").read_text())
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings, initializer_range=0.2)).float()
    model.save_pretrained(base / "model")
    write_adapter(base / "law", base / "model", seed=2)
    return base


@pytest.fixture(scope="module")
def server(folder: Path, module_server: Callable[..., Any]) -> Any:
    return module_server(
        str(folder / "model"), "--tokenizer", "smollm2", "-dp", "2", "--threads", "1", "--dtype", "float32",
        "--device", "cpu", "--ram", "2GiB", "--served-model-name", "tiny", "--max-model-len", "512", "--enable-lora",
        "--enable-sleep-mode", "--data-parallel-size-local", "2", "--data-parallel-backend", "mp",
    ).wait_ready()  # fmt: skip


def post(server: Any, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=PATIENCE_S)


def completed(server: Any, prompt: str, model: str = "tiny") -> dict[str, Any]:
    answer = post(server, "/v1/completions", model=model, prompt=prompt, max_tokens=8, temperature=0, ignore_eos=True)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def engines(server: Any) -> list[dict[str, Any]]:
    return list(httpx.get(f"{server.url}/memory", timeout=PATIENCE_S).json()["engines"])


def test_conversations_stay_with_what_is_cached_of_them(server: Any) -> None:
    said = {user: f"Conversation {user}. " + STORY * (1 + user) for user in range(4)}
    for turn in range(3):
        for user, prompt in said.items():
            found = completed(server, prompt)
            usage = found["usage"]
            if turn:
                assert usage["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] - 48
            said[user] = prompt + found["choices"][0]["text"] + " and then "
    page = httpx.get(f"{server.url}/metrics", timeout=PATIENCE_S).text
    counts = [line for line in page.splitlines() if line.startswith("vllm:prompt_tokens_cached_total{")]
    assert len(counts) == 2
    assert all(float(line.rpartition(" ")[2]) > 0 for line in counts), counts


def test_an_adapter_is_on_every_engine(server: Any, folder: Path) -> None:
    assert post(server, "/v1/load_lora_adapter", lora_name="law", lora_path=str(folder / "law")).status_code == 200
    plain = completed(server, STORY)["choices"][0]["text"]

    def text(place: int) -> str:
        return str(completed(server, STORY, "law")["choices"][0]["text"])

    with ThreadPoolExecutor(8) as threads:
        deadline_s = time.monotonic() + PATIENCE_S
        with server.engine_held():  # All at once, so that they are divided.
            asked = [threads.submit(text, place) for place in range(16)]
            while server.open_requests() < 8:
                assert time.monotonic() < deadline_s
        found = [one.result(PATIENCE_S) for one in asked]
    assert len(set(found)) == 1
    assert found[0] != plain
    page = httpx.get(f"{server.url}/metrics", timeout=PATIENCE_S).text
    for number in (0, 1):
        assert f'vllm:cache_config_info{{block_size="16",cache_dtype="float32",enable_prefix_caching="True",engine="{number}"' in page  # fmt: skip  # noqa: E501
        running = [line for line in page.splitlines() if line.startswith("vllm:lora_requests_info{")]
        assert any(f'engine="{number}"' in line for line in running)


def test_a_budget_is_divided(server: Any) -> None:
    before = engines(server)
    planned = httpx.get(f"{server.url}/memory", timeout=PATIENCE_S).json()["tiers"][0]["planned_bytes"]
    smaller = (planned - 12 * MIB) // 2 * 2
    changed = post(server, "/memory", ram=smaller)
    assert changed.status_code == 200, changed.text
    ledger = changed.json()
    assert ledger["tiers"][0]["budget_bytes"] == smaller
    after = ledger["engines"]
    assert all(new["kv_pool_bytes"] < old["kv_pool_bytes"] for new, old in zip(after, before, strict=True))
    assert sum(row["kv_pool_bytes"] for row in after) == next(
        term["planned_bytes"] for term in ledger["terms"] if term["term"] == "kv_pool"
    )
    refused = post(server, "/memory", ram="300MiB")
    assert refused.status_code == 400
    assert [row["kv_pool_bytes"] for row in engines(server)] == [row["kv_pool_bytes"] for row in after]
    assert post(server, "/memory", ram=2 * GIB).status_code == 200
    assert engines(server) == before
    assert completed(server, STORY)["usage"]["completion_tokens"] == 8


def test_both_sleep_and_wake(server: Any) -> None:
    text = completed(server, STORY)["choices"][0]["text"]
    assert httpx.post(f"{server.url}/sleep", timeout=PATIENCE_S).status_code == 200
    assert httpx.get(f"{server.url}/is_sleeping", timeout=PATIENCE_S).json() == {"is_sleeping": True}
    assert [row["status"] for row in engines(server)] == ["sleeping"] * 2
    assert [row["pid"] for row in engines(server)] == [None] * 2
    assert httpx.post(f"{server.url}/wake_up", timeout=PATIENCE_S).status_code == 200
    assert [row["status"] for row in engines(server)] == ["ready"] * 2
    assert completed(server, STORY)["choices"][0]["text"] == text
