"""A rank of another node dies or stands still, a node is lost, the head's engine dies: all ranks are ended everywhere,
nodes join again, and nobody's answer changes. Nodes are process groups of this machine (support/node_processes.py).
What rank 0 says of such a death is in tests/cpu/engine/test_nodes.py, which is no long test.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
import openai
import psutil
import pytest
from deadlines import PATIENCE_S
from free_ports import free_port
from lora_adapters import write_adapter
from node_processes import SECRET, Node, node_flags
from story_streams import STREAMS, all_streams, prompt_of, stream

pytestmark = pytest.mark.usefixtures("forked_starts")

SAID = {
    "rank": "has ended: signal SIGKILL",
    "stopped": "has not come to where the other ranks wait for it",
    "first": "restarting it",
    "node": "node 1 is lost",
}
WAITING = re.compile(r"^vllm:num_requests_waiting(?:\{.*\})? (.*)$", re.MULTILINE)


class Cluster:
    """The head with its API, and one other node."""

    def __init__(self, folder: Path, start_server: Callable, arguments: list[str], sizes: tuple[int, int]) -> None:
        flags = node_flags(sizes, 2, free_port())
        self._folder, self._arguments = folder, [*arguments, *flags, "--engine-hang-timeout", "8"]
        self.other = Node(folder, 1, *self._arguments)
        self.head = start_server(*self._arguments, environment={"HOLDFAST_NODE_SECRET": SECRET}).wait_ready()

    def processes(self) -> list[psutil.Process]:
        first = psutil.Process(self.head.engine_pid)
        return [first, *first.children(recursive=True), *self.other.ranks()]

    def strike(self, name: str) -> None:
        if name == "rank":
            self.other.ranks()[-1].kill()
        elif name == "stopped":
            self.other.ranks()[0].suspend()
        elif name == "first":
            psutil.Process(self.head.engine_pid).kill()
        else:
            self.other.lose()
            self.other = Node(self._folder, 1, *self._arguments)

    async def disturbed(self, name: str, models: Sequence[str] = ("tiny",)) -> tuple[list[str], list[psutil.Process]]:
        """What streams say while this happens in the middle of them, and which processes there were."""
        begun = asyncio.Semaphore(0)
        answers = asyncio.create_task(all_streams(self.head.url, begun, models))
        for _ in range(STREAMS // 4):
            await begun.acquire()
        before = self.processes()
        self.strike(name)
        return await answers, before


@pytest.mark.parametrize(
    ("sizes", "names"),
    [
        ((2, 1), ("rank", "stopped", "first", "node")),
        ((1, 2), ("rank", "stopped", "first", "node")),
        ((2, 2), ("rank", "stopped", "first", "node")),
    ],
    ids=["tp2", "pp2", "tp2-pp2"],
)
@pytest.mark.long
async def test_streams_outlive_ranks_of_nodes(
    start_server, tiny_arguments, tmp_path: Path, sizes: tuple[int, int], names: tuple[str, ...]
) -> None:
    cluster = Cluster(tmp_path, start_server, tiny_arguments, sizes)
    try:
        undisturbed, gone = await all_streams(cluster.head.url), list[psutil.Process]()
        for name in names:
            answers, before = await cluster.disturbed(name)
            assert answers == undisturbed, name
            assert SAID[name] in cluster.head.log, cluster.head.log[-3000:]
            gone += before
        assert not [one for one in gone if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
        last = cluster.processes()
        assert cluster.head.stop() == 0
        assert cluster.other.wait() == 0, cluster.other.log
        assert not [one for one in last if one.is_running()]
    finally:
        cluster.other.lose()


@pytest.mark.long
async def test_streams_with_adapters_outlive_a_node(
    start_server, tiny_arguments, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine that is started again has them on both nodes, with the same tokens. One that lies in the folder that a
    process is in, and only in the head's, is refused beside them."""
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate(("sql", "law")):
        write_adapter(tmp_path / name, tiny_model, seed=seed)
    modules = ["--lora-modules", *(f"{name}={tmp_path / name}" for name in ("sql", "law")), "lacks=/proc/self/cwd/law"]
    arguments = [*tiny_arguments, "--enable-lora", "--max-loras", "2", *modules]
    models = ("tiny", "sql", "law")
    cluster = Cluster(tmp_path, start_server, arguments, (1, 2))
    try:
        undisturbed = await all_streams(cluster.head.url, models=models)
        plain = await all_streams(cluster.head.url)
        alike = [place % 3 for place, said in enumerate(undisturbed) if said == plain[place]]
        assert set(alike) == {0}, "an adapter changes what is said"
        assert "LoRA adapter lacks cannot be used: rank 1 (node 1): the folder of lacks" in cluster.head.log
        asked = {"lora_name": "here", "lora_path": "/proc/self/cwd/sql"}
        refused = httpx.post(f"{cluster.head.url}/v1/load_lora_adapter", json=asked, timeout=PATIENCE_S)
        assert (refused.status_code, refused.json()["error"]["holdfast"]["code"]) == (400, "HF379")
        for name in ("node", "first"):
            answers, _ = await cluster.disturbed(name, models)
            assert answers == undisturbed, name
            assert SAID[name] in cluster.head.log, cluster.head.log[-3000:]
        assert cluster.head.stop() == 0
        assert cluster.other.wait() == 0, cluster.other.log
    finally:
        cluster.other.lose()


@pytest.mark.long
async def test_a_replacement_that_a_node_has_not_got_is_noticed_by_nobody(
    start_server, endless_arguments, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is one place, and a stream with the old adapter has it: the new one waits for that, and behind it a request
    for the same name, which came after the load and is answered with the old one, whose place the new one had."""
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate(("sql", "new")):
        write_adapter(tmp_path / name, tiny_model, seed=seed)
    arguments = [*endless_arguments, "--enable-lora", "--lora-modules", f"sql={tmp_path / 'sql'}"]
    cluster = Cluster(tmp_path, start_server, arguments, (1, 2))
    url, begun = cluster.head.url, asyncio.Semaphore(0)
    try:
        async with (
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client,
            httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http,
        ):

            async def until_waiting(count: int) -> None:
                until_s = time.monotonic() + PATIENCE_S
                while [float(found) for found in WAITING.findall((await http.get("/metrics")).text)] != [count]:
                    assert time.monotonic() < until_s, cluster.head.log
                    await asyncio.sleep(0.02)

            old = await stream(client, 0, begun, "sql")
            assert old != await stream(client, 0, begun), "an adapter changes what is said"
            endless = await client.completions.create(
                model="sql",
                prompt=prompt_of(1),
                max_tokens=60_000,
                temperature=0.0,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            await anext(endless)
            asked = {"lora_name": "sql", "lora_path": "/proc/self/cwd/new", "load_inplace": True}
            loading = asyncio.create_task(http.post("/v1/load_lora_adapter", json=asked))
            await until_waiting(1)
            meanwhile = asyncio.create_task(stream(client, 0, begun, "sql"))
            await until_waiting(2)
            await endless.close()
            refused = await loading
            assert (refused.status_code, refused.json()["error"]["holdfast"]["code"]) == (400, "HF379")
            assert await meanwhile == old
            assert await stream(client, 0, begun, "sql") == old
    finally:
        cluster.other.lose()


@pytest.mark.long
async def test_streams_outlive_a_restart_that_fails_because_a_node_is_gone_for_long(
    start_server, tiny_arguments, tmp_path: Path
) -> None:
    """The node that is well is needed for the next try, and joins that."""
    layers = ["--hf-overrides", '{"num_hidden_layers": 3}']
    arguments = [*tiny_arguments, *layers, *node_flags((1, 3), 3, free_port())]
    well, other = Node(tmp_path, 1, *arguments), Node(tmp_path, 2, *arguments)
    try:
        secret = {"HOLDFAST_NODE_SECRET": SECRET}
        head = start_server(*arguments, "--node-timeout", "5", environment=secret).wait_ready()
        undisturbed, begun = await all_streams(head.url), asyncio.Semaphore(0)
        answers = asyncio.create_task(all_streams(head.url, begun))
        for _ in range(STREAMS // 4):
            await begun.acquire()
        other.lose()
        until_s = time.monotonic() + PATIENCE_S
        while "node 2 (rank 2) has not joined" not in head.log:
            assert time.monotonic() < until_s, head.log
            await asyncio.sleep(0.1)
        other = Node(tmp_path, 2, *arguments)
        assert await answers == undisturbed
        assert well.process.poll() is None
        assert "the head has not started again: node 2 (rank 2) has not joined" in well.log
        assert head.stop() == 0
        assert (well.wait(), other.wait()) == (0, 0)
    finally:
        well.lose()
        other.lose()
