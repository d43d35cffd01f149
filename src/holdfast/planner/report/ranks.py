"""What each of several ranks has, a row for each: for people, and for programs. Works out nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from holdfast.planner.fit.result import Plan
from holdfast.planner.sizing.rank_shares import whole_experts
from holdfast.units import format_bytes


def rank_rows(found: Plan) -> list[dict[str, Any]]:
    """Of this engine's own ranks, where there are several."""
    own = found.own
    if own is None or own.rank_count == 1:
        return []
    spec, rows = found.question.model.spec, list[dict[str, Any]]()
    for rank, weights in enumerate(own.rank_weights):
        stage, shard = own.part_of(rank)
        layers = spec.layers if stage is None else spec.layers[stage.first : stage.last]
        rows.append(
            {
                "rank": rank,
                "node": rank * found.question.settings.nodes // own.rank_count,
                "stage": 0 if stage is None else stage.index,
                "first_layer": 0 if stage is None else stage.first,
                "layers": len(layers),
                "heads": spec.heads if shard is None else shard.head_count,
                "kv_heads": spec.kv_heads if shard is None else shard.kv_head_count,
                "experts": whole_experts(spec, stage, shard),
                "weights_bytes": weights,
                "kv_pool_bytes": own.blocks * own.layout_of(rank).page_bytes,
            }
        )
    return rows


def rank_lines(found: Plan) -> Iterator[str]:
    rows = rank_rows(found)
    dealt_out = any(row["experts"] for row in rows)
    if rows:
        experts = f"  {'experts':>7}" if dealt_out else ""
        heads = f"  {'heads':>5}  {'KV heads':>8}"
        node = _of_node("node", found)
        yield f"{node}  {'rank':>4}  {'stage':>5}  {'layers':>9}{heads}{experts}  {'weights':>10}  {'KV':>10}"
    for row in rows:
        layers = f"{row['first_layer']} to {row['first_layer'] + row['layers'] - 1}"
        sizes = "".join(f"  {format_bytes(row[name]):>10}" for name in ("weights_bytes", "kv_pool_bytes"))
        experts = f"  {row['experts']:>7}" if dealt_out else ""
        heads = f"  {row['heads']:>5}  {row['kv_heads']:>8}"
        node = _of_node(row["node"], found)
        yield f"{node}  {row['rank']:>4}  {row['stage']:>5}  {layers:>9}{heads}{experts}{sizes}"


def _of_node(cell: object, found: Plan) -> str:
    """A column where there are several."""
    return f"  {cell!s:>4}" if found.question.settings.nodes > 1 else ""
