"""What crosses the network between machines (nodes) in a step, and how long that takes at a rate that is assumed. Of
ranks on GPUs: nothing here was measured."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.observability.decisions import Decision
from holdfast.planner.fit.result import Plan
from holdfast.planner.sizing.sharded_weights import DTYPE_BYTES
from holdfast.units import format_bytes

GB = 10**9
NETWORK_GB_S = 3.125
"""25 Gbit/s, of one connection between two nodes: assumed."""


def network_s(fit: Plan, tokens: int, answers: int) -> float:
    """Of a step from its first stage to its last, and back. Where several steps are under way others compute meanwhile,
    and less of it is waited for."""
    nodes = fit.question.settings.nodes
    if nodes == 1:
        return 0.0
    handed, shown = _bytes(fit)
    return ((nodes - 1) * tokens * handed + answers * shown) / (NETWORK_GB_S * GB)


def _bytes(fit: Plan) -> tuple[int, int]:
    """Of a token, from one node to the next: each rank of a stage sends to the one at its place. Of an answer, from the
    last node to the first: its logits."""
    spec, size = fit.question.model.spec, DTYPE_BYTES[fit.dtype]
    return fit.tensor_parallel * spec.hidden_size * size, spec.vocab_size * size


def network_said(fit: Plan) -> Iterator[Decision]:
    if fit.question.settings.nodes == 1 or fit.question.machine.kind != "gpu":
        return
    handed, shown = _bytes(fit)
    alone, prompt = (1e6 * network_s(fit, tokens, 1) for tokens in (1, 4096))
    reason = (
        f"assumed: {format_bytes(handed)} of a token from node to node, {format_bytes(shown)} of logits of an answer"
        f" back to the first; {alone:,.0f} us of a step of one answer, {prompt:,.0f} us of 4,096 tokens of a prompt"
    )
    yield Decision("network", f"{8 * NETWORK_GB_S:g} Gbit/s", reason, "default")
