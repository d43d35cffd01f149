"""Several ranks compute one model: the tokens of one rank, whatever the division, and nothing left behind."""

from __future__ import annotations

import pytest
from rank_engines import make, tokens


@pytest.fixture(scope="module")
def of_one(tiny_model) -> list[list[int]]:
    with make(tiny_model, 1) as llm:
        return tokens(llm)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_say_what_one_says(tiny_model, of_one, ranks: int) -> None:
    """With four ranks, two KV heads are on two of them each."""
    with make(tiny_model, ranks) as llm:
        assert tokens(llm) == of_one


def test_sums_may_go_over_sockets(tiny_model, of_one) -> None:
    with make(tiny_model, 2, disable_custom_all_reduce=True) as llm:
        assert tokens(llm) == of_one
