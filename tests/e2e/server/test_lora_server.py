"""Adapters of a real server: asked for by name, mixed, loaded and unloaded while it runs, and attacked."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest
import torch
import transformers
from deadlines import PATIENCE_S
from lora_adapters import write_adapter

from holdfast.checkpoints.lora.adapter import READ_LIMIT_S
from holdfast.config import EngineConfig
from holdfast.engine.fake.engine import FakeEngine
from holdfast.engine.requests.adapters import Adapters
from holdfast.engine.startup.build import find_model
from holdfast.errors import AdapterError, EngineError, HoldfastError
from holdfast.records import AdapterRef, AnswerDelta, EngineStats
from holdfast.server.endpoints import lora

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
    """An engine on two nodes. What the ranks find wrong with an adapter goes by the name of its folder."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = list[AdapterRef]()
        self.reading = False
        """All that was asked for is on its way."""
        lacks = AdapterError("rank 1 (node 1): there is no such folder", code="HF379", field="model")
        self.wrong: dict[str, HoldfastError] = {"lacks": lacks}

    def stats(self) -> EngineStats:
        arriving = [one.number for one in self.asked] if self.reading else []
        return msgspec.structs.replace(super().stats(), arriving_adapters=arriving)

    async def generate(self, *given: Any, adapter: AdapterRef | None = None, **named: Any) -> Any:
        stream: Any = await super().generate(*given, adapter=adapter, **named)
        if adapter is None:
            return stream
        self.asked.append(adapter)
        return self._until_wrong(stream, adapter)

    async def _until_wrong(self, stream: Any, adapter: AdapterRef) -> AsyncIterator[AnswerDelta]:
        try:
            async for delta in stream:
                if (wrong := self.wrong.get(Path(adapter.path).name)) is not None:
                    raise wrong
                yield delta
        finally:
            await stream.aclose()


class Nodes:
    """A server of such an engine, which has loaded `law` out of the folder sql."""

    def __init__(self, launch: Callable[..., Any], folder: Path) -> None:
        config = EngineConfig(
            model=str(folder / "model"), device="cpu", enable_lora=True, nnodes=2, pipeline_parallel_size=2
        )
        self.engine, self.adapters = OtherNode(), Adapters(find_model(config).spec, "fake", config, None)
        self._folder, self._server = folder, launch(self.engine, adapters=self.adapters)
        self.http = self._server.client()
        assert self.load("law", "sql").status_code == 200
        [self.law] = self.adapters.listed

    def load(self, name: str, path: str, **more: Any) -> httpx.Response:
        asked = {"lora_name": name, "lora_path": str(self._folder / path), **more}
        return self.http.post("/v1/load_lora_adapter", json=asked)

    def refused(self, name: str, path: str, **more: Any) -> tuple[int, str, str | None]:
        """And what the name stood for before is what it stands for."""
        before = self.adapters.listed
        answer = self.load(name, path, **more)
        error = answer.json()["error"]
        assert self.adapters.listed == before
        return answer.status_code, error["holdfast"]["code"], error["param"]

    def pause(self) -> None:
        self._server.loop.call_soon_threadsafe(self.engine.pause)

    def resume(self) -> None:
        self._server.loop.call_soon_threadsafe(self.engine.resume)

    def wait(self, happening: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(happening, self._server.loop).result(PATIENCE_S)


@pytest.fixture(scope="module")
def lacks(folder: Path) -> None:
    for name in ("lacks", "odd"):
        shutil.copytree(folder / "sql", folder / name)


@pytest.fixture
def of_nodes(launch: Callable[..., Any], folder: Path, lacks: None) -> Iterator[Nodes]:
    found = Nodes(launch, folder)
    yield found
    found.http.close()


def test_a_load_over_several_nodes_is_over_when_all_have_it(of_nodes: Nodes) -> None:
    """As the ranks say by a request of one token; where one has not got it, what there was before is served on."""
    assert of_nodes.engine.asked == [of_nodes.law.ref]
    for name, more in (("new", {}), ("law", {"load_inplace": True})):
        assert of_nodes.refused(name, "lacks", **more) == (400, "HF379", "lora_path")
    of_nodes.engine.wrong["odd"] = EngineError("rank 1 (node 1): the LoRA adapter could not be read: OSError")
    assert of_nodes.refused("new", "odd") == (500, "HF400", None)
    of_nodes.wait(of_nodes.engine.sleep())
    assert of_nodes.refused("law", "sql", load_inplace=True) == (503, "HF421", None)
    assert of_nodes.load("new", "lacks").status_code == 200, "of which nobody can be asked now"
    assert [one.ref.name for one in of_nodes.adapters.listed] == ["law", "new"]


def test_a_name_stands_for_what_it_did_until_all_nodes_have_another(of_nodes: Nodes) -> None:
    """The request that takes it to the ranks stands still meanwhile. Nobody waits for it to unload another."""
    assert of_nodes.load("two", "sql").status_code == 200
    of_nodes.pause()
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(of_nodes.load, "law", "lacks", load_inplace=True)
        try:
            of_nodes.wait(of_nodes.engine.until(lambda: len(of_nodes.engine.received) == 3))
            assert of_nodes.adapters.known("law") == of_nodes.law
            assert of_nodes.http.post("/v1/unload_lora_adapter", json={"lora_name": "two"}).status_code == 200
            assert not loading.done()
        finally:
            of_nodes.resume()
    assert loading.result().status_code == 400
    assert of_nodes.adapters.listed == [of_nodes.law]


def test_one_that_had_no_turn_replaces_nothing(of_nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora, "TURN_LIMIT_S", 0.2)
    of_nodes.pause()
    assert of_nodes.refused("law", "odd", load_inplace=True) == (429, "HF340", "lora_name")
    assert of_nodes.load("new", "odd").status_code == 200
    assert len(of_nodes.engine.aborted) == 2


def test_one_that_is_read_for_long_is_refused(of_nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks have their time for it from when its turn has come, and say what is wrong before the server gives up."""
    assert lora.ARRIVAL_LIMIT_S > READ_LIMIT_S
    monkeypatch.setattr(lora, "TURN_LIMIT_S", 0.2)
    monkeypatch.setattr(lora, "ARRIVAL_LIMIT_S", 0.2)
    of_nodes.engine.reading = True
    of_nodes.pause()
    assert of_nodes.refused("new", "odd") == (400, "HF378", "lora_path")
    monkeypatch.setattr(lora, "ARRIVAL_LIMIT_S", PATIENCE_S)
    of_nodes.engine.wrong["odd"] = AdapterError("rank 1 (node 1): too slow", code="HF378", field="model")
    told, stats = threading.Event(), of_nodes.engine.stats
    monkeypatch.setattr(of_nodes.engine, "stats", lambda: told.set() or stats())
    with ThreadPoolExecutor(1) as pool:
        told.clear()
        loading = pool.submit(of_nodes.refused, "new", "odd")
        assert told.wait(PATIENCE_S)
        of_nodes.resume()
    assert loading.result() == (400, "HF378", "lora_path")
