"""A KV pool that becomes half as large while streams run: how long that takes, and what they see of it.

    python -m benchmarks.kv_shrink ROW [ROW...]     rows: moved, swapped
        moved       a pool of 40 GiB becomes one of 20 with 15 GiB in use, scattered over all of it
        swapped     the same with 30 GiB in use: the youngest go to RAM, and come back
    --model tiny --device cpu --pool 64MiB --to 32MiB --prompt 256 --answer 64     tries it without a GPU: nothing is
                                                                                   swapped there, so it is computed

Dummy weights in the shape of Llama 8B in bfloat16, token ids, no tokenizer; both rows with one engine, whose pool grows
again between them. A line of JSON for each row, and one for each thing that is wanted of it: seconds from
the question to the smaller pool (`shrunk_s`), how long no step ran (`stood_still_s`), the longest time between two
tokens of streams that stayed and of those that were sent back, tokens computed twice beside those that may be (of each
that was sent back its last block, which was not full), and streams whose tokens are those of an undisturbed run (all in
float32: --model 1b --dtype float32). Steps of other sizes are summed in another order, so one in ten thousands of
tokens is decided by a rounding: where a stream says another token, both are asked for once more in a run of their own,
and count as equal if they are as likely there (`ties`: how far they are apart, of the distance to the twentieth).
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.gpu_worker import LLAMA, SHAPES
from holdfast import LLM, SamplingParams
from holdfast.engine.core.loop import EngineCore
from holdfast.records import Request, StepPlan
from holdfast.units import parse_bytes

MODELS: dict[str, dict[str, Any]] = {
    "8b": SHAPES["llama-8b"],
    "1b": LLAMA | {
        "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64,
        "num_attention_heads": 32, "max_position_embeddings": 131072, "tie_word_embeddings": True,
    },
    "tiny": LLAMA | {
        "vocab_size": 2048, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "head_dim": 32,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 8192,
        "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float32",
    },
}  # fmt: skip
IN_USE = {"moved": 15 / 40, "swapped": 30 / 40}
"""Of the pool before."""
TIE = 1e-3
"""Of the distance from the likeliest token to the twentieth. A page that is not what was computed moves all of them by
more."""


@dataclass
class Seen:
    """What came of a round, by stream."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    at_s: dict[str, list[float]] = field(default_factory=dict)

    def note(self, core: EngineCore) -> None:
        outputs = core.step()
        now_s = time.perf_counter()
        for output in outputs:
            assert output.failure is None, output.failure
            if output.token_ids:
                self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
                self.at_s.setdefault(output.request_id, []).append(now_s)

    def longest_gap(self, names: set[str], since_s: float) -> float:
        """Between two tokens of one of them, the second of them after `since_s`."""
        times = (self.at_s[name] for name in names)
        gaps = (b - a for one in times for a, b in pairwise(one) if b >= since_s)
        return max(gaps, default=0.0)


class Counted:
    """A runner whose rows are counted."""

    def __init__(self, core: EngineCore) -> None:
        self.tokens, self.submit = 0, core.runner.submit

        def counting(plan: StepPlan, masks: Any = None) -> Any:
            self.tokens += plan.token_count
            return self.submit(plan, masks)

        core.runner.submit = counting  # type: ignore[method-assign]


def open_core(asked: argparse.Namespace) -> tuple[LLM, EngineCore]:
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(MODELS[asked.model]))
    ram = {"kv_ram": str(asked.pool)} if asked.device == "cuda" else {}
    llm = LLM(
        str(folder), load_format="dummy", device=asked.device, dtype=asked.dtype, skip_tokenizer_init=True,
        kv_cache_memory_bytes=str(asked.pool), max_model_len=2 * (asked.prompt + asked.answer), max_num_seqs=512,
        max_num_batched_tokens=max(512, min(8192, 4 * asked.prompt)), **ram,
    )  # fmt: skip
    core = llm._engine()
    while ram and not any(one.total_bytes >= 0.95 * asked.pool for one in core.stats().kv_tiers if one.tier == "ram"):
        add(core, "pin", [7, 8, 9], 1)
        while core.has_work:
            core.step()
        time.sleep(0.2)
    return llm, core


def add(core: EngineCore, name: str, ids: list[int], max_tokens: int, logprobs: int | None = None) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=logprobs)
    core.add(Request(request_id=name, prompt_token_ids=ids, params=params, arrival_s=time.monotonic()))


def prompts(asked: argparse.Namespace, in_use: float, page_bytes: int, block_tokens: int) -> Iterator[tuple[str, int]]:
    """Names, and how many tokens of each answer: streams, and between them such as leave pages behind."""
    # Streams are counted when they have a part of their answers: see `measure`.
    live = -(-(asked.prompt + asked.answer // 4) // block_tokens) * page_bytes
    streams, leaves = -(-int(in_use * asked.pool) // live), -(-(asked.prompt + 1) // block_tokens) * page_bytes
    between = (0.97 * asked.pool - streams * live) / leaves / streams if in_use < 0.5 else 0.0
    left = 0.0
    for number in range(streams):
        yield f"stream {number}", asked.answer
        left += between
        while left >= 1:
            left -= 1
            yield f"leaves {number} {left:.2f}", 1


def prompt_of(name: str, asked: argparse.Namespace) -> list[int]:
    draw, vocabulary = random.Random(name), MODELS[asked.model]["vocab_size"] - 300
    return [draw.randrange(3, vocabulary) for _ in range(asked.prompt)]


def start(core: EngineCore, asked: argparse.Namespace, in_use: float, seen: Seen) -> set[str]:
    """Until all streams have a token; those that leave pages behind have left."""
    layout, names = core.scheduler.kv.layout, list[tuple[str, int]]()
    names = list(prompts(asked, in_use, layout.page_bytes * len(layout.groups), layout.block_tokens))
    for name, count in names:
        add(core, name, prompt_of(name, asked), count)
    while len(seen.tokens) < len(names):
        seen.note(core)
    return {name for name, count in names if count > 1}


def shrink(core: EngineCore, blocks: int, seen: Seen) -> float:
    """As POST /memory does it; returns the seconds that it took."""
    begin_s = time.perf_counter()
    core.prepare_resize(blocks)
    while not core.may_resize:
        seen.note(core)
    core.set_pool(blocks)
    return time.perf_counter() - begin_s


def apart(core: EngineCore, name: str, asked: argparse.Namespace, one: list[int], other: list[int]) -> float:
    """How far the two tokens are from each other at the first place where they differ, computed by itself."""
    place = next(place for place, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1])
    core.scheduler.reset_prefix_cache()
    add(core, "apart", prompt_of(name, asked) + one[:place], 1, logprobs=20)
    found = dict[int, float]()
    while core.has_work:
        for output in core.step():
            for told in output.logprobs or []:
                found.update(zip(told.token_ids, told.logprobs, strict=True))
    values = sorted(found.values())
    if not {one[place], other[place]} <= found.keys():
        return 1.0
    return abs(found[one[place]] - found[other[place]]) / (values[-1] - values[0])


def measure(core: EngineCore, row: str, asked: argparse.Namespace) -> dict[str, Any]:
    kv = core.scheduler.kv
    whole, plain = kv.blocks_total + 1, Seen()
    core.scheduler.reset_prefix_cache()
    start(core, asked, IN_USE[row], plain)
    while core.has_work:
        plain.note(core)
    core.scheduler.reset_prefix_cache()
    seen, counted = Seen(), Counted(core)
    streams = start(core, asked, IN_USE[row], seen)
    if row == "moved":  # What was left behind is nobody's: pages are free, all over the pool.
        core.scheduler.reset_prefix_cache()
    page = kv.layout.page_bytes
    while kv.blocks_used * page < IN_USE[row] * asked.pool and all(
        len(seen.tokens[name]) < asked.answer for name in streams
    ):
        seen.note(core)
    before = core.stats()
    used, highest, blocks = kv.blocks_used, kv.blocks_touched, asked.to // page
    computed, answered = counted.tokens, sum(map(len, seen.tokens.values()))
    begin_s = time.perf_counter()
    shrunk_s = shrink(core, blocks, seen)
    staying = streams & {one.request.request_id for one in core.scheduler._running}
    sent_back = streams - staying
    while core.has_work:
        seen.note(core)
        going_on = {one.request.request_id for one in core.scheduler._running}
        staying -= {name for name in staying - going_on if len(seen.tokens[name]) < asked.answer}
    after = core.stats()
    preemptions = after.preemptions_total - before.preemptions_total
    # Of each stream the last token that it had was computed by the step after; its own last one by none.
    twice = counted.tokens - computed - (sum(map(len, seen.tokens.values())) - answered)
    found = {
        "row": row, "pool_gib": asked.pool / 2**30, "to_gib": blocks * page / 2**30, "in_use_gib": used * page / 2**30,
        "reached_page": highest, "blocks": blocks, "streams": len(streams), "sent_back": len(sent_back),
        "shrunk_s": shrunk_s, "stood_still_s": core.stood_still_s,
        "parts_ms": {name: round(1000 * seconds, 1) for name, seconds in core._resizes.parts.items()},
        "gap_stayed_s": seen.longest_gap(staying, begin_s), "gap_sent_back_s": seen.longest_gap(sent_back, begin_s),
        "computed_twice": max(0, twice), "computed_twice_allowed": preemptions * (kv.layout.block_tokens - 1),
        "preemptions": preemptions,
        "from_ram_gib": sum(one.loaded_bytes_total for one in after.kv_tiers if one.tier == "ram") / 2**30,
        "not_worth": after.fetches_not_worth_total,
    }  # fmt: skip
    core.scheduler.check_invariants()
    core.set_pool(whole)
    core.runner.submit = counted.submit  # type: ignore[method-assign]
    unlike = [name for name in sorted(streams) if seen.tokens[name] != plain.tokens[name]]
    found["equal"] = len(streams) - len(unlike)
    if in_float32(asked):
        found["ties"] = [apart(core, name, asked, plain.tokens[name], seen.tokens[name]) for name in unlike]
    return found


def in_float32(asked: argparse.Namespace) -> bool:
    return "float32" in (asked.dtype, MODELS[asked.model].get("torch_dtype"))


def judge(found: dict[str, Any], asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What is wanted, and whether it holds."""
    wanted = {"shrunk_s": 1.0, "gap_stayed_s": 0.5, "computed_twice": found["computed_twice_allowed"]}
    for name, most in wanted.items():
        yield {
            "row": found["row"], "verdict": name, "measured": found[name], "at_most": most,
            "holds": found[name] <= most,
        }  # fmt: skip
    if in_float32(asked):
        equal = found["equal"] + sum(one <= TIE for one in found["ties"])
        yield {
            "row": found["row"], "verdict": "streams with equal tokens, or tokens that are as likely",
            "measured": equal, "at_least": found["streams"], "holds": equal == found["streams"],
        }  # fmt: skip


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="+", choices=sorted(IN_USE))
    parser.add_argument("--model", choices=sorted(MODELS), default="8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--pool", type=parse_bytes, default="40GiB")
    parser.add_argument("--to", type=parse_bytes, default="20GiB")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens")
    parser.add_argument("--answer", type=int, default=200, help="tokens")
    parser.add_argument("--out", type=Path, help="gets the lines too, as they come")
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> None:
    asked = arguments(given)
    logging.getLogger("holdfast").setLevel(logging.INFO)
    llm, core = open_core(asked)
    for row in asked.rows:
        found = measure(core, row, asked)
        for figures in (found, *judge(found, asked)):
            rounded = {name: round(one, 4) if isinstance(one, float) else one for name, one in figures.items()}
            print(json.dumps(rounded), flush=True)
            if asked.out is not None:
                with asked.out.open("a") as out:
                    out.write(json.dumps(rounded) + "\n")
    llm.close()


if __name__ == "__main__":
    main()
