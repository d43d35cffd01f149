"""An answer as JSON, as docs/plan-json.md describes it; its keys only grow within a version. Works out nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from holdfast.planner.advice.offload import Tiers
from holdfast.planner.advice.presets import Configuration
from holdfast.planner.advice.remedy import Remedy
from holdfast.planner.advice.throughput import DecodeRate, Estimate, Throughput, throughput
from holdfast.planner.compat.vllm_release import Vllm
from holdfast.planner.engines.command import Command
from holdfast.planner.fit.search import Plan, Rank
from holdfast.planner.report.offload import offload_document
from holdfast.planner.report.ranks import rank_rows
from holdfast.planner.report.wrapping import rounded_down
from holdfast.planner.serve.shares.nodes import node_shares

if TYPE_CHECKING:
    from holdfast.planner.report.findings import PlanFindings

VERSION = 1


def document(answer: PlanFindings) -> dict[str, Any]:
    found = answer.fit
    return {
        "version": VERSION,
        "fits": answer.fits,
        "runs": answer.runs,
        "short_bytes": found.short_bytes,
        "problem": answer.problem,
        "lacks": list(answer.lacks),
        "model": _model(answer),
        "weights_bytes": found.weights_bytes,
        "kv_bytes_per_token": answer.kv_bytes_per_token,
        "kv_bytes_per_token_all_ranks": found.kv_bytes_per_token,
        "kv_bytes_fixed_per_sequence": answer.kv_bytes_fixed_per_sequence,
        "kv_bytes_fixed_per_sequence_all_ranks": found.kv_bytes_fixed_per_sequence,
        "kv_tokens": found.kv_tokens,
        "max_model_len": answer.max_model_len,
        "longest_model_len": found.longest_tokens,
        "concurrency": _rounded(answer.concurrency),
        "concurrency_at_traffic": _rounded(answer.concurrency_at_traffic),
        "replicas": answer.replicas,
        "settings": _settings(found),
        "traffic": _traffic(found),
        "devices": _devices(found),
        "ranks": rank_rows(found),
        "interval": _interval(found),
        "safe": _configuration(answer.safe, answer.vllm),
        "max": _configuration(answer.max, answer.vllm),
        "warnings": [
            {"code": one.code, "message": one.message, "field": one.field, "fix": one.fix} for one in answer.warnings
        ],
        "decisions": [
            {"field": one.field, "value": one.value, "reason": one.reason, "source": one.source}
            for one in answer.decisions
        ],
        "ways_out": [_way(way, answer.vllm) for way in answer.ways_out],
        "rules_of_thumb": [
            {
                "name": one.name,
                "rule": one.rule,
                "rule_bytes": one.rule_bytes,
                "exact_bytes": one.exact_bytes,
                "right": one.right,
                "verdict": one.verdict,
            }
            for one in answer.rules_of_thumb
        ],
        **_commands(answer.commands),
        "commands_of": answer.commands_of,
        "as_requested": None
        if answer.as_requested is None
        else {
            "kv_tokens": answer.as_requested.kv_tokens,
            "max_model_len": answer.as_requested.max_model_len,
            "lacks": list(answer.as_requested.lacks),
        },
        "offload": offload_document(answer.offload, _throughput),
        "throughput": _throughput(answer.throughput),
        "no_throughput": answer.no_throughput,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else rounded_down(value, 2)


def _model(answer: PlanFindings) -> dict[str, Any]:
    model = answer.question.model
    spec = model.spec
    return {
        "name": model.name,
        "architecture": spec.architecture,
        "parameters": spec.parameters,
        "active_parameters": spec.active_parameters,
        "quantization": None if spec.quantization is None else spec.quantization.method,
        "max_position": spec.max_position,
        "origin": model.origin,
        "weights_exact": model.exact,
        "runs_on_holdfast": spec.runnable,
        "not_counted": list(spec.not_counted),
    }


def _settings(found: Plan) -> dict[str, Any]:
    return {
        "dtype": found.dtype,
        "kv_cache_dtype": found.kv_dtype,
        "max_model_len": found.limits.max_model_len,
        "max_num_seqs": found.limits.max_num_seqs,
        "max_num_batched_tokens": found.limits.max_num_batched_tokens,
        "gpu_memory_utilization": found.utilization,
        "tensor_parallel_size": found.tensor_parallel,
        "pipeline_parallel_size": found.pipeline_parallel,
        "block_size": found.question.settings.block_tokens,
    }


def _traffic(found: Plan) -> dict[str, Any] | None:
    traffic = found.question.traffic
    if traffic is None:
        return None
    return {
        "concurrency": traffic.concurrency,
        "prompt_tokens": traffic.prompt_tokens,
        "output_tokens": traffic.output_tokens,
        "length_tokens": traffic.length,
        "source": traffic.source,
        "requests": traffic.requests,
        "at_least": traffic.at_least,
        "without_output": traffic.without_output,
    }


def _devices(found: Plan) -> list[dict[str, Any]]:
    rows = [_rank(rank, found) for rank in node_shares(found)]
    for device in found.question.machine.all_devices[len(found.ranks) :]:
        rows.append(
            {
                "index": device.index,
                "name": device.name,
                "kind": device.kind,
                "used": False,
                "total_bytes": device.total_bytes,
                "free_bytes": device.free_bytes,
                "budget_bytes": 0,
                "held_by": list(device.held_by),
                "stage": None,
                "terms": {},
                "loading": None,
                "unused_bytes": 0,
                "kv_needed_bytes": 0,
                "short_bytes": 0,
                "uncertain_bytes": 0,
                "interval": {},
            }
        )
    return rows


def _rank(rank: Rank, found: Plan) -> dict[str, Any]:
    needed = found.needed_bytes(rank)
    return {
        "index": rank.device.index,
        "name": rank.device.name,
        "kind": rank.device.kind,
        "used": True,
        "total_bytes": rank.device.total_bytes,
        "free_bytes": rank.device.free_bytes,
        "budget_bytes": rank.budget_bytes,
        "held_by": list(rank.device.held_by),
        "stage": rank.stage,
        "terms": {**{term.name: term.nbytes for term in rank.terms}, "kv_pool": rank.pool_bytes},
        "loading": _loading(rank),
        "unused_bytes": rank.unused_bytes,
        "kv_needed_bytes": needed,
        "short_bytes": max(0, needed - rank.room_bytes),
        "uncertain_bytes": rank.uncertain_bytes,
        "interval": {
            term.name: [int(term.nbytes * (1 - term.uncertainty)), int(term.nbytes * (1 + term.uncertainty))]
            for term in rank.terms
            if term.uncertainty
        },
    }


def _loading(rank: Rank) -> dict[str, Any] | None:
    """Before activations and KV are there."""
    if not rank.loading:
        return None
    return {
        "terms": {term.name: term.nbytes for term in rank.loading},
        "peak_bytes": rank.loading_bytes,
        "short_bytes": rank.loading_short_bytes,
    }


def _interval(found: Plan) -> dict[str, list[int]]:
    """If every estimate is off in the same direction."""

    def at(sign: int) -> tuple[int, int]:
        rooms = [(rank, rank.room_bytes + sign * rank.uncertain_bytes) for rank in found.ranks]
        most = found.question.model.spec.max_position
        tokens = min(rank.kv.held_tokens(room, max(1, found.limits.max_model_len)) for rank, room in rooms)
        return tokens, min(rank.kv.longest(max(0, room), most) for rank, room in rooms)

    low, high = at(-1), at(1)
    return {"kv_tokens": [low[0], high[0]], "longest_model_len": [low[1], high[1]]}


def _configuration(one: Configuration | None, vllm: Vllm) -> dict[str, Any] | None:
    if one is None:
        return None
    return {
        "settings": dict(one.settings),
        "reason": one.reason,
        "kv_tokens": one.fit.kv_tokens,
        "concurrency": _rounded(one.fit.concurrency(max(1, one.fit.limits.max_model_len))),
        **_commands(one.commands(vllm)),
    }


def _commands(by_engine: Mapping[str, Command]) -> dict[str, Any]:
    return {
        "commands": {name: command.text for name, command in by_engine.items()},
        "node_commands": {name: list(command.nodes) for name, command in by_engine.items() if command.nodes},
        "command_notes": {name: _notes(command) for name, command in by_engine.items()},
    }


def _way(way: Remedy, vllm: Vllm) -> dict[str, Any]:
    found = way.fit
    document: dict[str, Any] = {
        "kind": way.kind,
        "change": way.change,
        "settings": dict(way.settings),
        "flags": way.flags,
        "available": way.available,
        "meets_request": way.meets_request,
        "note": way.note,
        "weights_bytes": found.weights_bytes,
        # Of tiers that nobody runs no pool is planned: what they would hold is in `tiers`.
        "max_model_len": None,
        "kv_tokens": None,
        "concurrency": None,
        "tokens_per_s": None,
        "tiers": None,
    }
    if way.tiers is not None:
        document |= {"tiers": _tiers(way.tiers), "tokens_per_s": _estimate(way.tiers.one)}
    if not found.fits:
        return {**document, **_commands({})}
    rate = throughput(found)
    return {
        **document,
        "max_model_len": found.limits.max_model_len,
        "kv_tokens": found.kv_tokens,
        "concurrency": _rounded(found.concurrency(max(1, found.limits.max_model_len))),
        "tokens_per_s": None if rate is None else _estimate(rate.one.estimate),
        **_commands(way.commands(vllm)),
    }


def _tiers(tiers: Tiers) -> dict[str, Any]:
    return {
        "resident_layers": tiers.resident_layers,
        "layers": tiers.layers,
        "gpu_bytes": tiers.gpu_bytes,
        "ram_bytes": tiers.ram_bytes,
        "nvme_bytes": tiers.nvme_bytes,
        "moved_bytes_per_step": tiers.moved_bytes,
        "batch": tiers.batch,
        "at_batch": _estimate(tiers.at_batch),
    }


def _notes(command: Command) -> dict[str, Any]:
    return {
        "available": command.available,
        "lacks": list(command.lacks),
        "notes": list(command.notes),
        "kv_tokens": command.kv_tokens,
        "max_model_len": command.max_model_len,
    }


def _estimate(one: Estimate | None) -> dict[str, Any] | None:
    if one is None:
        return None
    return {"tokens_per_s": round(one.tokens_per_s, 2), "interval": [round(one.low, 2), round(one.high, 2)]}


def _decode(rate: DecodeRate | None) -> dict[str, Any] | None:
    if rate is None:
        return None
    estimate = _estimate(rate.estimate)
    assert estimate is not None
    return {"batch": rate.batch, **estimate, "limited_by": rate.limited_by}


def _throughput(one: Throughput | None) -> dict[str, Any] | None:
    if one is None:
        return None
    prefill = _estimate(one.prefill)
    assert prefill is not None
    return {
        "context_tokens": one.context_tokens,
        "prompt_tokens": one.prompt_tokens,
        "one": _decode(one.one),
        "at_traffic": _decode(one.at_traffic),
        "largest": _decode(one.largest),
        "full_length": _decode(one.full_length),
        "batches": [_decode(rate) for rate in one.batches],
        "prefill": {**prefill, "limited_by": one.prefill_limited_by},
        "limited_by": one.largest.limited_by,
        "evidence": one.evidence,
    }
