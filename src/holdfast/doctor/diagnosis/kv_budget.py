"""From the shortage in a log: the memory share that leaves KV for one request, and the tensor parallel size for the
weights.

    vllm     share x GPU memory - weights - steps = KV    a shortage is a negative KV size in the log
    sglang   share x free at start = weights and KV       the log has free memory before and after the weights

Where the log does not have the GPU's size, it is at least what the budget held, and the weights, which were loaded; if
it does not have the share either, nothing is reckoned. And of Ollama, which says what RAM a model needs and what there
is: the context whose KV cache that holds. Arithmetic; knows no flag.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

ONE_REQUEST_GIB = 0.5
"""Of KV, where the model is not known: some thousand tokens of a middling one."""
STEP_GIB = 2.0
"""Beside the weights of a rank, for its steps and some KV."""
USUAL_SHARE, MOST_SHARE = 0.9, 0.95
_SGLANG_SHARE = 0.83
"""Its own choice on GPUs of 80 GB, which is its lowest."""


def room_for_kv(
    engine: str, numbers: Mapping[str, float], token_gib: float | None, longest: int | None = None
) -> dict[str, float]:
    """`share_needed`, what is `missing_gib` with the largest that is wise, and `ranks_needed` in all, where they can be
    reckoned. `token_gib`: of KV, on one GPU; `longest`: what the model reads, which is served where nothing else is
    set. `request_tokens` of one request, where both are known; `share_tokens`: as many as the largest share holds."""
    one, tokens = ONE_REQUEST_GIB, numbers.get("max_model_len")
    if tokens is None and engine == "vllm" and longest is not None:
        tokens = float(longest)  # SGLang starts with a pool that holds less than the longest context.
    if token_gib is not None and tokens is not None:
        token_gib /= max(1.0, numbers.get("tp", 1.0))
        one = token_gib * tokens
    found = _vllm(numbers, one) if engine == "vllm" else _sglang(numbers, one) if engine == "sglang" else None
    if found is None:
        return {}
    card, share = found
    told = {"share_needed": math.ceil(share * 100) / 100, "missing_gib": max(0.0, share - MOST_SHARE) * card}
    if token_gib is not None and tokens is not None:
        left = one - told["missing_gib"]
        told |= {"request_tokens": tokens, "request_gib": one}
        told["share_tokens"] = math.floor(left / token_gib * 0.98 / 16) * 16.0
    weights, room = numbers.get("weights_gib"), _usable(engine, numbers) * card - STEP_GIB
    if weights is not None and room > 0:
        ranks = max(2.0, 2.0 ** math.ceil(math.log2(max(1.0, weights / room))))
        told["ranks_needed"] = max(1.0, numbers.get("tp", 1.0)) * ranks
    return told


def _usable(engine: str, numbers: Mapping[str, float]) -> float:
    """The share that each of several ranks would have: vLLM's is raised to the usual one, SGLang's stays."""
    if engine == "sglang":
        return min(USUAL_SHARE, numbers.get("utilization", _SGLANG_SHARE))
    return max(USUAL_SHARE, min(MOST_SHARE, numbers.get("utilization", USUAL_SHARE)))


def _vllm(numbers: Mapping[str, float], one: float) -> tuple[float, float] | None:
    """The card, and the share of it."""
    share, short, weights = (numbers.get(name) for name in ("utilization", "kv_short_gib", "weights_gib"))
    card = numbers.get("total_gib")
    if share is None or share <= 0:
        return None
    if card is None and short is not None and weights is not None and "share_told" in numbers:
        card = max((weights - short) / share, weights)
    if card is None or card <= 0:
        return None
    if short is not None:
        return card, share + (short + one) / card
    # How much is missing is not told: the weights alone may be enough to say that no share does.
    return None if weights is None or weights < USUAL_SHARE * card else (card, weights / card)


def _sglang(numbers: Mapping[str, float], one: float) -> tuple[float, float] | None:
    after, weights = numbers.get("after_load_gib"), numbers.get("weights_gib")
    free = numbers.get("free_at_start_gib")
    if free is None and after is not None and weights is not None:
        free = after + weights
    if free is None or after is None or free <= 0:
        return None
    # It refused the share that was set, whatever the sum says: more than that is needed.
    refused = numbers.get("utilization", 0.0)
    return free, max((free - after + one) / free, refused + one / free if refused else 0.0)


CONTEXT_STEP, LEAST_CONTEXT = 512, 2048
SPARE_SHARE = 0.95
"""Of the RAM that is free, for KV: buffers and what else is started take some."""


def context_in_ram(numbers: Mapping[str, float]) -> dict[str, float]:
    """`context_asked` for one request and `context_kv_gib` of all of them, as Ollama's log has them; `context_fit`:
    the longest whose KV the RAM holds beside the rest of what the model needs there, where that can be reckoned."""
    cells, slots = numbers.get("kv_cells", numbers.get("max_model_len")), max(1.0, numbers.get("kv_slots", 1.0))
    if not cells:
        return {}
    told = {"context_asked": cells / slots}
    kv = numbers.get("ram_kv_gib")
    if kv is None and "split_kv_gib" in numbers and numbers.get("split_layers"):
        kv = numbers["split_kv_gib"] * (1 - numbers["split_offloaded"] / numbers["split_layers"])
    needed, available = numbers.get("needed_gib"), numbers.get("available_gib")
    if kv is None or needed is None or available is None or not 0 < kv <= needed:
        return told
    told["context_kv_gib"] = kv
    room = available * SPARE_SHARE - (needed - kv)
    fit = math.floor(cells * room / kv / slots / CONTEXT_STEP) * CONTEXT_STEP
    return told | ({"context_fit": float(fit)} if fit >= LEAST_CONTEXT else {"context_fits_not": 1.0})
