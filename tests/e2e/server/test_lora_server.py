"""Adapters of a real server: asked for by name, mixed, loaded and unloaded while it runs, and attacked."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
import transformers
from deadlines import PATIENCE_S
from lora_adapters import write_adapter

from holdfast.config import EngineConfig
from holdfast.engine.fake.engine import FakeEngine
from holdfast.engine.requests.adapters import Adapters
from holdfast.engine.startup.build import find_model
from holdfast.errors import AdapterError
from holdfast.records import AdapterRef

PROMPT = "Once upon a time there was a language model that had several"
ATTEMPTS = 9
"""To kill an engine in the middle of a short answer."""
KEY = {"Authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    base = tmp_path_factory.mktemp("lora-server")
    torch.manual_seed(0)
    settings = json.loads((tiny_model / "config.json").read_text())
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings, initializer_range=0.2)).float()
    model.save_pretrained(base / "model")
    write_adapter(base / "sql", base / "model", seed=1)
    write_adapter(base / "allowed" / "law", base / "model", seed=2, rank=8)
    write_adapter(base / "outside" / "law", base / "model", seed=2)
    return base


@pytest.fixture(scope="module")
def server(folder: Path, module_server: Callable[..., Any]) -> Any:
    return module_server(
        str(folder / "model"),
        "--tokenizer",
        "smollm2",
        "--threads",
        "1",
        "--dtype",
        "float32",
        "--device",
        "cpu",
        "--kv-cache-memory-bytes",
        "16MiB",
        "--served-model-name",
        "tiny",
        "--max-model-len",
        "512",
        "--enable-lora",
        "--max-loras",
        "2",
        "--lora-modules",
        f"sql={folder / 'sql'}",
        "--lora-folders",
        str(folder / "allowed"),
        "--api-key",
        "secret",
    ).wait_ready()


def post(server: Any, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, headers=KEY, timeout=PATIENCE_S)


def load(server: Any, name: str, path: object, **more: Any) -> httpx.Response:
    return post(server, "/v1/load_lora_adapter", lora_name=name, lora_path=str(path), **more)


def say(server: Any, model: str) -> str:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret")
    made = client.completions.create(
        model=model, prompt=PROMPT, max_tokens=12, temperature=0, extra_body={"ignore_eos": True}
    )
    assert made.model == model
    return made.choices[0].text


def cards(server: Any) -> dict[str, Any]:
    found = httpx.get(f"{server.url}/v1/models", headers=KEY, timeout=PATIENCE_S).json()["data"]
    return {card["id"]: card for card in found}


def test_named_at_start_and_loaded_while_it_runs(server: Any, folder: Path) -> None:
    assert list(cards(server)) == ["tiny", "sql"]
    assert cards(server)["sql"]["parent"] == "tiny"
    assert cards(server)["tiny"]["parent"] is None
    assert [card["aliases"] for card in cards(server).values()] == [["tiny"], ["sql"]]
    alone = {name: say(server, name) for name in ("sql", "tiny")}
    with pytest.raises(openai.NotFoundError):
        say(server, "law")
    answer = load(server, "law", folder / "allowed" / "law")
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'law' added successfully.")
    assert httpx.get(f"{server.url}/v1/models/law", headers=KEY, timeout=PATIENCE_S).json()["parent"] == "tiny"
    alone["law"] = say(server, "law")
    assert len(set(alone.values())) == 3
    names = ["law", "sql", "tiny", "law", "tiny", "sql"]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(lambda name: say(server, name), names)) == [alone[name] for name in names]
    assert load(server, "law", folder / "allowed" / "law").status_code == 400
    assert load(server, "law", folder / "allowed" / "law", load_inplace=True).status_code == 200
    assert load(server, "tiny", folder / "allowed" / "law").status_code == 400
    assert post(server, "/v1/unload_lora_adapter", lora_name="law").status_code == 200
    assert post(server, "/v1/unload_lora_adapter", lora_name="law").status_code == 404
    assert list(cards(server)) == ["tiny", "sql"]
    with pytest.raises(openai.NotFoundError):
        say(server, "law")


def test_an_answer_goes_on_with_its_adapter_when_the_engine_dies(server: Any) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret")
    asked: dict[str, Any] = {"model": "sql", "prompt": PROMPT, "max_tokens": 200, "temperature": 0}
    asked["extra_body"] = {"ignore_eos": True}
    whole = client.completions.create(**asked).choices[0].text
    for _ in range(ATTEMPTS):
        pieces = []
        for event in client.completions.create(**asked, stream=True):
            if not pieces:
                killed = server.kill_engine()
            pieces.append(event.choices[0].text)
        assert "".join(pieces) == whole
        if killed:
            break
    assert killed
    assert "the engine process exited" in server.log


def test_it_is_measured_and_in_the_ledger(server: Any) -> None:
    say(server, "sql")
    told = httpx.get(f"{server.url}/metrics", headers=KEY, timeout=PATIENCE_S).text
    assert 'vllm:lora_requests_info{max_lora="2",running_lora_adapters=' in told
    ledger = httpx.get(f"{server.url}/memory", headers=KEY, timeout=PATIENCE_S).json()
    terms = {term["term"]: term for term in ledger["terms"]}
    assert terms["adapters"]["measured_bytes"] == terms["adapters"]["planned_bytes"] > 0


def test_no_way_out_of_the_allowed_folders(server: Any, folder: Path) -> None:
    allowed, outside = folder / "allowed", folder / "outside" / "law"
    (allowed / "link").symlink_to(outside)
    shutil.copytree(outside, allowed / "linked-file")
    (allowed / "linked-file" / "adapter_model.safetensors").unlink()
    (allowed / "linked-file" / "adapter_model.safetensors").symlink_to(outside / "adapter_model.safetensors")
    for path in (
        outside,
        allowed / ".." / "outside" / "law",
        allowed / "link",
        allowed / "linked-file",
        "/etc",
        "/nowhere",
        ".",
        "\0",
        "~",
        "//" + str(outside),
    ):
        answer = load(server, "evil", path)
        assert answer.status_code == 404, path
        assert answer.json()["error"]["holdfast"]["code"] == "HF371"
        assert str(folder) not in answer.text
    assert httpx.post(f"{server.url}/v1/load_lora_adapter", json={}, timeout=PATIENCE_S).status_code == 401
    assert post(server, "/v1/load_lora_adapter", lora_name="a").status_code == 400
    assert load(server, "a", "x" * 70_000).status_code == 413
    assert list(cards(server)) == ["tiny", "sql"]


class OtherNode(FakeEngine):
    """An engine on two nodes, one of which has not got what is called lacks."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = list[AdapterRef]()

    async def generate(self, *given: Any, adapter: AdapterRef | None = None, **named: Any) -> Any:
        stream = await super().generate(*given, adapter=adapter, **named)
        if adapter is not None:
            self.asked.append(adapter)
            if adapter.shared_path.endswith("lacks"):
                await stream.aclose()
                raise AdapterError("rank 1 (node 1): there is no such folder", code="HF379", field="model")
        return stream


def test_a_load_over_several_nodes_is_over_when_all_have_it(
    launch: Callable[..., Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the ranks say by a request of one token; where one has not got it, what there was before is served on."""
    shutil.copytree(folder / "sql", folder / "lacks")
    config = EngineConfig(
        model=str(folder / "model"), device="cpu", enable_lora=True, nnodes=2, pipeline_parallel_size=2
    )
    engine, adapters = OtherNode(), Adapters(find_model(config).spec, "fake", config, None)
    server = launch(engine, adapters=adapters)
    with server.client() as http:

        def load(name: str, path: str, **more: Any) -> httpx.Response:
            asked = {"lora_name": name, "lora_path": str(folder / path), **more}
            return http.post("/v1/load_lora_adapter", json=asked)

        assert load("law", "sql").status_code == 200
        law = adapters.known("law")
        assert law is not None
        assert engine.asked == [law.ref]
        for more in ({"name": "new"}, {"name": "law", "load_inplace": True}):
            refused = load(**more, path="lacks")
            assert refused.status_code == 400
            error = refused.json()["error"]
            assert (error["holdfast"]["code"], error["param"]) == ("HF379", "lora_path")
            assert "rank 1 (node 1)" in error["message"]
        assert adapters.listed == [law]
        asyncio.run_coroutine_threadsafe(engine.sleep(), server.loop).result(PATIENCE_S)
        assert load("new", "lacks").status_code == 200, "of which nobody can be asked now"
        assert [one.ref.name for one in adapters.listed] == ["law", "new"]
