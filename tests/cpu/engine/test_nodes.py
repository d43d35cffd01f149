"""One model over several nodes: the tokens of one rank, rows of each, and an end in order. Nodes are process groups of
this machine (support/node_processes.py)."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import psutil
import pytest
from deadlines import PATIENCE_S
from node_processes import nodes
from rank_engines import PROMPTS, make, tokens

from holdfast import SamplingParams
from holdfast.errors import EngineDiedError

pytestmark = pytest.mark.usefixtures("forked_starts")


@pytest.fixture(scope="module")
def of_one(tiny_model) -> list[list[int]]:
    with make(tiny_model, 1) as llm:
        return tokens(llm)


def kill_at_step(llm, step: int, rank: psutil.Process) -> None:
    """When rank 0 is in the middle of that step."""
    runner, submit, counted = llm._core.runner._runner, llm._core.runner._runner.submit, itertools.count(1)

    def submitted(plan, masks=None):
        if next(counted) == step:
            rank.kill()
        return submit(plan, masks)

    runner.submit = submitted


LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)


@pytest.mark.parametrize("sizes", [(2, 1), pytest.param((2, 2), marks=pytest.mark.long)], ids=["tp2", "tp2-pp2"])
def test_two_nodes_say_what_one_rank_says(tiny_model, tmp_path: Path, of_one, sizes: tuple[int, int]) -> None:
    with nodes(tmp_path, tiny_model, sizes) as (settings, [other]):
        with make(tiny_model, sizes[0], **settings) as llm:
            assert tokens(llm) == of_one
            rows = llm.info.memory.ranks
            assert [row.node for row in rows] == [0] * (len(rows) // 2) + [1] * (len(rows) // 2)
            assert [row.pid for row in rows if row.node == 1] == [one.pid for one in other.ranks()]
        assert other.wait() == 0
        assert not other.ranks()


@pytest.mark.long
def test_an_orderly_end_is_one_for_a_node_whose_rank_does_not_leave(tiny_model, tmp_path: Path) -> None:
    """It is killed, and its node does not look for another head then."""
    with nodes(tmp_path, tiny_model, (2, 1)) as (settings, [other]):
        with make(tiny_model, 2, **settings):
            [rank] = other.ranks()
            rank.suspend()
        assert other.wait() == 0
        assert "joining the head again" not in other.log
        assert not rank.is_running()


def test_stages_on_two_nodes_say_the_same_and_a_rank_that_is_killed_is_named(tiny_model, tmp_path, of_one) -> None:
    """Its node goes back to joining: another engine may take the place of this one."""
    with nodes(tmp_path, tiny_model, (1, 2)) as (settings, [other]):
        with make(tiny_model, 1, **settings) as llm:
            assert tokens(llm) == of_one
            [rank] = other.ranks()
            kill_at_step(llm, 5, rank)
            named = rf"rank 1 \(node 1, .*, pid {rank.pid}\) has ended: signal SIGKILL"
            with pytest.raises(EngineDiedError, match=named):
                llm.generate(PROMPTS, LONG, use_tqdm=False)
        deadline_s = time.monotonic() + PATIENCE_S
        while "joining the head again" not in other.log:
            assert time.monotonic() < deadline_s, other.log
            time.sleep(0.05)
        assert other.process.poll() is None
