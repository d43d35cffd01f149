"""Ranks on GPUs on two nodes, as processes: joined, planned for what each node has, loaded, measured, stepped; and the
other node, or its rank, that is killed. Kernels run in Triton's interpreter; what lies between nodes is real but for
what kernels do at its ends. On a GPU: tests/gpu/test_node_ranks.py."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import fake_gpu_nodes
import fake_rank_gpus
import pytest
import torch
from adapted_answers import require_adapted
from deadlines import PATIENCE_S
from ended_processes import still_running
from free_ports import free_port
from node_processes import SECRET, Node, node_flags
from tiny_gpu import Tiny, prompt, run, tokens_of

from holdfast.checkpoints import match, open_checkpoint
from holdfast.config import EngineConfig
from holdfast.config.unsupported import RANK_GPUS
from holdfast.engine.core.loop import EngineCore
from holdfast.engine.ranks.gpu import together
from holdfast.engine.startup.build import _build_on_gpu, find_model
from holdfast.engine.startup.engine_info import EngineInfo
from holdfast.errors import EngineDiedError, EngineError
from holdfast.planner.serve.gpu_plan import make_gpu_plan
from holdfast.records import SamplingParams

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="its ranks have no GPU")
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)

Start = Callable[[], tuple[EngineCore, EngineInfo]]


@contextmanager
def two_nodes(folder: Path, sizes: tuple[int, int]) -> Iterator[tuple[Tiny, Start, Callable[[], Node]]]:
    """`sizes`: -tp and -pp. The head is this process: it starts engines, one after another, that another node joins."""
    (folder / "model").mkdir()
    layers, each = max(2, sizes[1]), sizes[0] * sizes[1] // 2
    tiny, port = Tiny(folder / "model", architecture="Llama", num_hidden_layers=layers), free_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RANK_GPUS, ",".join(["0"] * each))
        patch.setenv(fake_rank_gpus.NODES, "1")
        if sizes[1] > 2:
            patch.setenv(fake_rank_gpus.STAGED, "1")
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        fake_rank_gpus.install(patch)
        fake_rank_gpus.start_ranks_here(patch, folder)
        gpu = fake_rank_gpus.show_a_gpu(patch)
        flags = node_flags(sizes, 2, port, device="cuda")
        nodes = list[Node]()

        def join() -> Node:
            nodes.append(Node(folder, 1, str(tiny.folder), *flags, program=(fake_gpu_nodes.__file__,)))
            return nodes[-1]

        config = EngineConfig(
            model=str(tiny.folder), device="cuda", dtype="float32", max_model_len=96, max_num_seqs=4,
            max_num_batched_tokens=16, kv_cache_memory_bytes=1 << 20, skip_tokenizer_init=True,
            tensor_parallel_size=sizes[0], pipeline_parallel_size=sizes[1], nnodes=2, master_addr="127.0.0.1",
            master_port=port, node_secret=SECRET, node_timeout=PATIENCE_S, enable_lora=True, max_lora_rank=8,
        )  # fmt: skip
        model = find_model(config, progress=False, text=False)
        plan = make_gpu_plan(model.spec, match(model.spec, open_checkpoint(model.files)), config, [gpu], name="tiny")
        started = list[EngineCore]()

        def start() -> tuple[EngineCore, EngineInfo]:
            core, info = _build_on_gpu(config, model, lambda *_: None, plan, None, None)
            started.append(core)
            return core, info

        try:
            yield tiny, start, join
        except BaseException:
            print(*(node.log for node in nodes), sep="\n----\n")
            raise
        finally:
            for core in started:
                core.runner.close()
            for node in nodes:
                node.lose()


@pytest.mark.long
@pytest.mark.parametrize("sizes", [(1, 2), (2, 2), (1, 4)], ids=["pp2", "tp2-pp2", "pp4"])
def test_stages_on_two_nodes_say_what_one_rank_says(sizes: tuple[int, int], tmp_path: Path) -> None:
    with two_nodes(tmp_path, sizes) as (tiny, start, join):
        other = join()
        core, info = start()
        rows, each = info.memory.ranks, sizes[0] * sizes[1] // 2
        assert [row.node for row in rows] == [0] * each + [1] * each
        assert [row.weights_bytes for row in rows] == [row.planned_weights_bytes for row in rows]
        assert {row.pid for row in rows if row.node == 1} == {one.pid for one in other.ranks()}
        assert [(row.first_layer, row.layers) for row in rows] == [
            (stage, 1) for stage in range(sizes[1]) for _ in range(sizes[0])
        ]
        [tier] = info.memory.below
        assert [(term.term, term.planned_bytes > 0) for term in tier.terms] == [("node_lines", True)]
        assert any(line.startswith("stage_lines = sockets between nodes") for line in info.decisions)
        prompts = [prompt(1, 18), prompt(2, 3)]
        found = run(core, prompts, [GREEDY, GREEDY])
        for one, outputs in zip(prompts, found, strict=True):
            tiny.assert_greedy(one, tokens_of(outputs))
        require_adapted(tiny, core, tmp_path, nnodes=2, tensor_parallel_size=sizes[0], pipeline_parallel_size=sizes[1])
        core.runner.close()
        assert other.wait() == 0
        assert not other.ranks()


@pytest.mark.long
@pytest.mark.parametrize("what", ["rank", "node"])
def test_what_is_killed_of_the_other_node_is_named_and_the_next_engine_says_the_same(what: str, tmp_path: Path) -> None:
    """Of a rank its node looks for the head of that engine; of a node another takes the place."""
    with two_nodes(tmp_path, (1, 2)) as (tiny, start, join):
        other = join()
        core, _ = start()
        [rank] = other.ranks()
        steps, strike = iter(range(1000)), rank.kill if what == "rank" else other.lose
        why = r"has ended: signal SIGKILL" if what == "rank" else "has ended: node 1 is lost"
        with pytest.raises(EngineDiedError, match=rf"rank 1 \(node 1, .*, pid {rank.pid}\) {why}"):
            run(core, [prompt(1, 5)], [LONG], between=lambda: strike() if next(steps) == 3 else None)
        assert not still_running([rank])
        core.runner.close()
        other = other if what == "rank" else join()
        core, info = start()
        assert ("joining the head again" in other.log) == (what == "rank")
        [again] = other.ranks()
        assert again.pid != rank.pid
        assert info.memory.ranks[1].pid == again.pid
        [outputs] = run(core, [prompt(1, 5)], [GREEDY])
        tiny.assert_greedy(prompt(1, 5), tokens_of(outputs))


@pytest.mark.long
def test_a_start_that_fails_after_nodes_have_met_leaves_nothing_open(tmp_path: Path) -> None:
    """In a program that goes on, as one that has asked for an `LLM` does; its nodes find the next engine."""

    def fail(*_: object) -> None:
        raise EngineError("this rank is not to be measured")

    with two_nodes(tmp_path, (1, 2)) as (tiny, start, join):
        join()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(together, "profile_gpu_rank", fail)
            with pytest.raises(EngineError, match="not to be measured"):
                start()
        assert not [one for one in threading.enumerate() if one.name.startswith("line-")]
        core, _ = start()
        assert len([one for one in threading.enumerate() if one.name.startswith("line-")]) == 2
        [outputs] = run(core, [prompt(1, 5)], [GREEDY])
        tiny.assert_greedy(prompt(1, 5), tokens_of(outputs))
