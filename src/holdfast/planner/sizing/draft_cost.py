"""What a draft model takes on a rank beside the model that it guesses for: its weights, and KV of the same tokens.

Split like the model where its heads allow it, else whole on every rank. Its activations are within the model's.
"""

from __future__ import annotations

from functools import lru_cache

from holdfast.footprint.identity_key import Same
from holdfast.planner.inputs.question import PlannedModel
from holdfast.planner.sizing.kv_cost import kv_cost
from holdfast.planner.sizing.sharded_weights import rank_bytes, weights_of, why_not_parallel


def draft_ranks(model: PlannedModel, tensor_parallel: int) -> int:
    """Over how many ranks the draft is split: vLLM takes as many as for the model, or one."""
    whole = model.draft is None or why_not_parallel(model.draft.spec, tensor_parallel) is not None
    return 1 if whole else tensor_parallel


def draft_weights(model: PlannedModel, *, dtype: str, tensor_parallel: int) -> int:
    """Of one rank of the last stage; 0: there is no draft model."""
    if model.draft is None:
        return 0
    return _weights(Same(model.draft), dtype, draft_ranks(model, tensor_parallel))


@lru_cache(maxsize=64)
def _weights(key: Same[PlannedModel], dtype: str, ranks: int) -> int:
    return rank_bytes(tuple(weights_of(key.held, dtype=dtype)), key.held.spec, tensor_parallel=ranks)


def draft_token_bytes(model: PlannedModel, *, element_bytes: int, tensor_parallel: int) -> int:
    """Of KV for each token. Windows of a draft are short of nothing: they are counted as growing."""
    if model.draft is None:
        return 0
    ranks = draft_ranks(model, tensor_parallel)
    cost = kv_cost(model.draft.spec, element_bytes=element_bytes, state_bytes=element_bytes, tensor_parallel=ranks)
    return cost.growing_bytes + sum(size for _, size in cost.windows)
