"""Ranks on two nodes whose GPU is the same one: stages on each say what one rank says, and streams outlive a node that
is killed. Nodes are process groups of this machine (support/node_processes.py); what lies between them goes through
pinned memory and sockets, and not over CUDA IPC. Time slices of one GPU say nothing of speed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from deadlines import PATIENCE_S
from ended_processes import still_running
from free_ports import free_port
from left_on_gpu import LEFT_MIB, assert_nothing_is_left, on_the_gpu, used_mib
from lora_adapters import write_adapter
from node_processes import SECRET, Node, node_flags
from standing_still import StandingStill
from story_streams import all_streams
from struck_ranks import disturbed
from tiny_gpu import Tiny, prompt

from holdfast import LLM, SamplingParams
from holdfast.records import LoRARequest

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 16, "num_hidden_layers": 3, "vocab_size": 224, "max_position_embeddings": 512}  # fmt: skip
PROMPTS = [prompt(1, 5), prompt(2, 150), prompt(3, 33)]
"""The second is computed in chunks."""


def engine(model: Path, **settings: Any) -> LLM:
    given = {"device": "cuda", "dtype": "float32", "max_model_len": 400, "max_num_seqs": 4,
             "max_num_batched_tokens": 64, "kv_cache_memory_bytes": "32MiB", "vram": "4GiB",
             "skip_tokenizer_init": True, "enable_lora": True, "max_lora_rank": 8}  # fmt: skip
    return LLM(str(model), **given | settings)


def said(llm: LLM, adapter: LoRARequest | None = None) -> list[list[int]]:
    outputs = llm.generate(
        prompt_token_ids=PROMPTS, sampling_params=GREEDY, lora_request=adapter, use_tqdm=False
    )  # fmt: skip
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("sizes", [(1, 2), (2, 2)], ids=["pp2", "tp2-pp2"])
def test_stages_on_two_nodes_say_what_one_rank_says(
    sizes: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of single tokens are graphs, with what goes to the other node and comes from it; with an adapter too."""
    model = tmp_path / "model"
    model.mkdir()
    tiny, port = Tiny(model, architecture="Llama", **WIDE), free_port()
    adapter = LoRARequest("adapted", 1, str(write_adapter(tmp_path / "adapted", model, seed=1, rank=5)))
    with engine(model) as llm:
        of_one, adapted_of_one = said(llm), said(llm, adapter)
    assert adapted_of_one != of_one
    monkeypatch.setenv("HOLDFAST_RANK_GPUS", ",".join(["0"] * sizes[0]))
    began_s = time.monotonic()
    other = Node(tmp_path, 1, str(model), *node_flags(sizes, 2, port, device="cuda"))
    try:
        with engine(
            model, tensor_parallel_size=sizes[0], pipeline_parallel_size=sizes[1], nnodes=2, master_addr="127.0.0.1",
            master_port=port, node_secret=SECRET, node_timeout=PATIENCE_S,
        ) as llm:  # fmt: skip
            print(f"start of {sizes[0]} x {sizes[1]} ranks on two nodes: {time.monotonic() - began_s:.1f} s")
            decisions = "\n".join(llm.info.decisions)
            print(decisions)
            assert "stage_lines = sockets between nodes" in decisions
            assert ("all_reduce = CUDA IPC" in decisions) == (sizes[0] > 1)
            rows = llm.info.memory.ranks
            print(rows)
            assert [(row.node, row.device) for row in rows] == [
                *[(0, "GPU 0")] * sizes[0], *[(1, "GPU 0")] * sizes[0],
            ]  # fmt: skip
            assert [row.weights_bytes for row in rows] == [row.planned_weights_bytes for row in rows]
            assert {row.pid for row in rows if row.node == 1} == {one.pid for one in other.ranks()}
            found, again, adapted = said(llm), said(llm), said(llm, adapter)
            began_s = time.monotonic()
            said(llm)
            print(f"three answers of 12 tokens: {time.monotonic() - began_s:.2f} s, time-sliced")
        assert found == of_one
        assert again == of_one, "with cached prefixes, and graphs that are there already"
        assert adapted == adapted_of_one
        for one, tokens in zip(PROMPTS[::2], found[::2], strict=True):
            tiny.assert_greedy(one, tokens)
        assert other.wait() == 0
        assert not other.ranks()
    except BaseException:
        print(other.log)
        raise
    finally:
        other.lose()


async def test_streams_outlive_a_node_that_is_killed(
    start_server: Callable[..., Any], tiny_arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `kill -9`, all of it at once; another takes its place."""
    torch.zeros(1, device="cuda")
    monkeypatch.setenv("HOLDFAST_RANK_GPUS", "0")
    before_mib, before, standing_still = used_mib(), on_the_gpu() | {os.getpid()}, StandingStill(tmp_path)
    arguments = [
        *tiny_arguments, *node_flags((1, 2), 2, free_port(), device="cuda"), "--max-model-len", "400",
        "--max-num-seqs", "32", "--max-num-batched-tokens", "256", "--vram", "8GiB", "--engine-hang-timeout", "20",
    ]  # fmt: skip
    nodes = [Node(tmp_path, 1, *arguments)]
    server = start_server(*arguments, environment={"HOLDFAST_NODE_SECRET": SECRET} | standing_still.environment)
    gone = list[psutil.Process]()

    def lose_node(ranks: list[psutil.Process]) -> None:
        gone.extend(nodes[-1].ranks())
        nodes[-1].lose()
        nodes.append(Node(tmp_path, 1, *arguments))

    try:
        server.wait_ready(180.0)
        undisturbed = await all_streams(server.url)
        assert await all_streams(server.url) == undisturbed, "and with graphs that are there already"
        serving_mib, began_s = used_mib(), time.monotonic()
        answers, ranks = await disturbed(server, standing_still, lose_node, count=1)
        print(f"a node was killed: 32 streams in {time.monotonic() - began_s:.1f} s")
        assert answers == undisturbed
        assert "node 1 is lost" in server.log
        assert len(gone) == 1
        assert not still_running([*gone, *ranks])
        assert used_mib() <= serving_mib + LEFT_MIB, "the new ranks have what the old ones had"
        last = nodes[-1].ranks()
        assert server.stop() == 0
        assert nodes[-1].wait() == 0
        assert not still_running(last)
        assert_nothing_is_left(before_mib, before)
    except BaseException:
        print(server.log, *(node.log for node in nodes), sep="\n---- node 1:\n")
        raise
    finally:
        nodes[-1].lose()
