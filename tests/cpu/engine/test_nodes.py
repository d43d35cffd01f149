"""One model over several nodes: the tokens of one rank, rows of each, and an end in order. Nodes are process groups of
this machine (support/node_processes.py)."""

from __future__ import annotations

from pathlib import Path

import pytest
from node_processes import nodes
from rank_engines import make, tokens


@pytest.fixture(scope="module")
def of_one(tiny_model) -> list[list[int]]:
    with make(tiny_model, 1) as llm:
        return tokens(llm)


@pytest.mark.parametrize(
    "sizes", [(2, 1), (1, 2), pytest.param((2, 2), marks=pytest.mark.long)], ids=["tp2", "pp2", "tp2-pp2"]
)
def test_two_nodes_say_what_one_rank_says(tiny_model, tmp_path: Path, of_one, sizes: tuple[int, int]) -> None:
    with nodes(tmp_path, tiny_model, sizes) as (settings, [other]):
        with make(tiny_model, sizes[0], **settings) as llm:
            assert tokens(llm) == of_one
            rows = llm.info.memory.ranks
            assert [row.node for row in rows] == [0] * (len(rows) // 2) + [1] * (len(rows) // 2)
            assert [row.pid for row in rows if row.node == 1] == [one.pid for one in other.ranks()]
        assert other.wait() == 0
        assert not other.ranks()
