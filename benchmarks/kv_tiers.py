"""KV beyond the pool on a GPU: conversations that come back from RAM and disk, and what that costs those who decode.

    python -m benchmarks.kv_tiers ROW [ROW...]      rows: ram, recompute, at-once, decode, nothing-to-reuse,
                                                    nothing-to-reuse-disk DIR, disk DIR, disk-again DIR, shrink-moved,
                                                    shrink-swapped
        ram, recompute      32 conversations of 16k tokens over a pool that holds 8 (8B bf16), each asked twice in turn,
                            with 72 GiB of --kv-ram and without: seconds to the first token of the second round, the
                            rate of the link in it, and what is wanted: bytes / that rate x 1.3 + 20 ms
        at-once             the same with RAM, the second round all at once: the last first token
        decode              tokens a second of 32 that decode: alone, with four conversations a second that come from
                            RAM, and with four short prompts a second: what comes of rows, and not of pages; and how
                            long they waited between two tokens
        nothing-to-reuse    prompts that nobody asked before, with RAM and without: tokens a second, seconds to the
                            first token, and the shares of both
        nothing-to-reuse-disk DIR   the same with --kv-store in a new folder there, and without; `--small` before it
                            tries it on a CPU, with a tiny model
        disk DIR            four conversations of 16k tokens of a 70B in int4, asked twice, to be run before
        disk-again DIR      the same four after a restart: seconds to the first token, and of ones that are new
        shrink-moved, shrink-swapped    a pool of 40 GiB becomes one of 20 while streams run: benchmarks/kv_shrink.py

Dummy weights in real shapes, token ids, no tokenizer; a line of JSON each. Engines are stepped in this process, and one
that the next row can use stays, without what it had cached: rows with RAM beside each other make the model once.
"""

from __future__ import annotations

import gc
import json
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import kv_shrink
from benchmarks.gpu_worker import SHAPES
from benchmarks.random_checkpoints import awq_config
from benchmarks.tiers import LLAMA_70B
from holdfast import LLM, SamplingParams
from holdfast.engine.core.loop import EngineCore
from holdfast.records import EngineStats, LinkUse, Request

TOKENS = 16_384
LONG = {"max_model_len": TOKENS + 2048, "max_num_batched_tokens": 8192, "max_num_seqs": 64}
KV_8B = TOKENS * 131_072
"""Bytes of one conversation."""
POOL = {"kv_cache_memory_bytes": str(int(8.3 * KV_8B))}
RAM = {"kv_ram": "72GiB"}
DECODERS, DECODED_S = 32, 10.0
ANSWERED = 16
"""Tokens behind each prompt that nobody asked before."""


@dataclass(frozen=True)
class Scale:
    """Of prompts that nobody asked before."""

    config: dict[str, Any]
    settings: dict[str, Any]
    tokens: int
    turns: int
    vocabulary: int


@dataclass(frozen=True)
class Figures:
    tok_per_s: float
    p50_s: float
    p99_s: float


class Engines:
    """One is open at a time."""

    def __init__(self) -> None:
        self._open: tuple[str, LLM, EngineCore] | None = None

    def core(self, config: dict[str, Any], **settings: Any) -> EngineCore:
        name = json.dumps([config, settings], sort_keys=True)
        if self._open is None or self._open[0] != name:
            self.close()
            self._open = (name, *open_llm(config, **settings))
        core = self._open[2]
        settle(core)
        core.scheduler.reset_prefix_cache()
        return core

    def close(self) -> None:
        if self._open is not None:
            self._open[1].close()
            self._open = None


def open_llm(config: dict[str, Any], **settings: Any) -> tuple[LLM, EngineCore]:
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(config))
    usual = {"load_format": "dummy", "device": "cuda", "skip_tokenizer_init": True}
    llm = LLM(str(folder), **(usual | LONG | settings))
    core = llm._engine()
    ask(core, [list(range(3, 67))])
    gc.collect()
    gc.freeze()  # As the engine process of a server does: else a collection looks through all of torch.
    return llm, core


def config_8b() -> dict[str, Any]:
    return SHAPES["llama-8b"] | {"max_position_embeddings": 32_768}


def prompt(number: int, vocabulary: int = 120_000) -> list[int]:
    draw = random.Random(number)
    return [draw.randrange(vocabulary) for _ in range(TOKENS)]


def add(core: EngineCore, name: str, ids: list[int], max_tokens: int = 1) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    core.add(Request(request_id=name, prompt_token_ids=ids, params=params, arrival_s=time.monotonic()))


def ask(core: EngineCore, prompts: list[list[int]]) -> list[float]:
    """Seconds to the first token of each, asked at once."""
    begin, firsts = time.perf_counter(), dict[str, float]()
    for number, ids in enumerate(prompts):
        add(core, f"{begin}-{number}", ids)
    while len(firsts) < len(prompts):
        for output in core.step():
            if output.token_ids:
                firsts[output.request_id] = time.perf_counter() - begin
    return list(firsts.values())


def settle(core: EngineCore) -> None:
    """Until nothing is on its way."""
    while core.has_work:
        core.step()


def say(row: str, **figures: Any) -> None:
    rounded = {name: round(value, 4) if isinstance(value, float) else value for name, value in figures.items()}
    print(json.dumps({"row": row, **rounded}), flush=True)


def tiers_of(stats: EngineStats) -> dict[str, Any]:
    found = {f"{one.tier}_hit_tokens": one.hit_tokens_total for one in stats.kv_tiers}
    loaded = {f"{one.tier}_loaded_gb": one.loaded_bytes_total / 1e9 for one in stats.kv_tiers}
    return found | loaded | {"preemptions": stats.preemptions_total, "not_worth": stats.fetches_not_worth_total}


def conversations(engines: Engines, row: str, *, ram: bool, at_once: bool) -> None:
    core = engines.core(config_8b(), **POOL, **(RAM if ram else {}))
    wait_for_ram(core, ram)
    prompts = [prompt(number) for number in range(32)]
    first = [ask(core, [ids])[0] for ids in prompts]
    settle(core)
    before, counted = link_of(core), tiers_of(core.stats())
    second = sorted(ask(core, prompts) if at_once else [ask(core, [ids])[0] for ids in prompts])
    settle(core)
    link = {"link_gb_s": None, "wanted_s": None} if not ram else bound(before, link_of(core))
    say(
        row, first_round_s=median(first), p50_s=median(second), p99_s=second[len(second) * 99 // 100],
        most_s=second[-1], bytes_gb=KV_8B / 1e9, **link, **since(counted, tiers_of(core.stats())),
    )  # fmt: skip


def link_of(core: EngineCore) -> tuple[int, float]:
    """Bytes that came to the GPU so far, and seconds in which the link was busy with them."""
    uses = [use for use in core.stats().links if use.link == LinkUse().link]
    return sum(use.copied_bytes for use in uses), sum(use.busy_s for use in uses)


def bound(before: tuple[int, float], after: tuple[int, float]) -> dict[str, float | None]:
    """At the rate of the link between these, of a conversation that comes alone."""
    nbytes, seconds = after[0] - before[0], after[1] - before[1]
    if seconds <= 0:
        return {"link_gb_s": None, "wanted_s": None}
    rate = nbytes / seconds
    return {"link_gb_s": rate / 1e9, "wanted_s": KV_8B / rate * 1.3 + 0.02}


def since(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    return {name: value - before.get(name, 0) for name, value in after.items()}


def wait_for_ram(core: EngineCore, ram: bool) -> None:
    """Until all of it is pinned; steps tell. Launches wait for the driver while it pins."""
    while ram and not any(one.tier == "ram" and one.total_bytes == 72 << 30 for one in core.stats().kv_tiers):
        ask(core, [[7, 8, 9]])
        time.sleep(0.2)


def decode(engines: Engines, row: str) -> None:
    core = engines.core(config_8b(), **POOL, **RAM)
    wait_for_ram(core, True)
    prompts = [prompt(number) for number in range(12)]
    for ids in prompts:
        ask(core, [ids])
    settle(core)
    for beside in ("nobody", "conversations", "short prompts", "nobody"):
        for number in range(DECODERS):
            add(core, f"d{number}-{time.monotonic()}", [number + 3] * 64, 1900)
        before = tiers_of(core.stats())
        figures = decode_beside(core, [] if beside == "nobody" else prompts, short=beside == "short prompts")
        say(row, beside=beside, **figures, **since(before, tiers_of(core.stats())))
        for request_id in list(core.scheduler._sequences):
            core.abort(request_id)
        settle(core)


def decode_beside(core: EngineCore, prompts: list[list[int]], *, short: bool) -> dict[str, Any]:
    """While these are asked in turn, four a second. `short`: as many of their tokens as are left to compute."""
    tokens, asked, begin = 0, 0, time.perf_counter()
    took, before = list[float](), begin
    while (seconds := time.perf_counter() - begin) < DECODED_S:
        if prompts and asked < seconds * 4:
            ids = prompts[asked % len(prompts)]
            add(core, f"c{asked}-{begin}", [asked + 7, *ids[:15]] if short else ids)
            asked += 1
        new = sum(len(one.token_ids) for one in core.step() if one.request_id.startswith("d"))
        tokens += new
        if new:
            now = time.perf_counter()
            took.append(now - before)
            before = now
    took.sort()
    between = {f"between_tokens_p{p}_s": took[len(took) * p // 100] for p in (50, 90, 99)}
    return {"tok_per_s": tokens / seconds, "asked": asked, **between, "between_tokens_most_s": took[-1]}


def nothing_to_reuse(engines: Engines, row: str, scale: Scale, folder: str | None) -> None:
    """Without tiers and with one: the store in `folder`, or else RAM. Each twice, so that neither is always first."""
    found: dict[bool, list[Figures]] = {False: [], True: []}
    for tier in (False, True, True, False):
        with tempfile.TemporaryDirectory(dir=folder) as store:
            on = {} if not tier else RAM if folder is None else {"kv_store": store, "kv_store_size": "20GiB"}
            core = engines.core(scale.config, **scale.settings, **on)
            wait_for_ram(core, tier and folder is None)
            before = tiers_of(core.stats())
            found[tier].append(new_prompts(core, scale))
            figures = found[tier][-1]
            say(
                row, tier=tier, tok_per_s=figures.tok_per_s, p50_s=figures.p50_s, p99_s=figures.p99_s,
                **since(before, tiers_of(core.stats())),
            )  # fmt: skip
            if folder is not None:
                engines.close()  # Before its folder goes.
    shares = {
        name: sum(getattr(one, name) for one in found[True]) / sum(getattr(one, name) for one in found[False])
        for name in ("tok_per_s", "p50_s", "p99_s")
    }
    say(row, **{f"{name}_of_that_without": share for name, share in shares.items()})


def new_prompts(core: EngineCore, scale: Scale) -> Figures:
    """Eight at a time, each with an answer."""
    firsts, begin = list[float](), time.perf_counter()
    for turn in range(scale.turns):
        asked = {f"{turn}-{one}": prompt(1000 + 10 * turn + one, scale.vocabulary)[: scale.tokens] for one in range(8)}
        asked_s, unfinished = time.perf_counter(), set(asked)
        seen = set[str]()
        for name, ids in asked.items():
            add(core, name, ids, ANSWERED)
        while unfinished:
            for output in core.step():
                if output.token_ids and output.request_id not in seen:
                    seen.add(output.request_id)
                    firsts.append(time.perf_counter() - asked_s)
                if output.finish_reason is not None:
                    unfinished.remove(output.request_id)
    seconds = time.perf_counter() - begin
    firsts.sort()
    return Figures(len(firsts) * (scale.tokens + ANSWERED) / seconds, median(firsts), firsts[len(firsts) * 99 // 100])


def disk(engines: Engines, row: str, folder: str, *, again: bool) -> None:
    config = awq_config(LLAMA_70B | {"max_position_embeddings": 32_768})
    engines.close()  # Another row may have left this one: a start is what is measured.
    core = engines.core(config, kv_store=folder, kv_store_size="60GiB")
    prompts = [prompt(number) for number in range(4)]
    for _ in range(1 if again else 2):
        firsts = [ask(core, [ids])[0] for ids in prompts]
        settle(core)
        say(row, firsts_s=[round(one, 3) for one in firsts], **tiers_of(core.stats()))
    if again:
        new = [ask(core, [prompt(100 + number)])[0] for number in range(2)]
        use = core.stats().kv_store
        say(row, computed_s=[round(one, 3) for one in new], store_gb=0 if use is None else use.held_bytes / 1e9)
    engines.close()


def whole() -> Scale:
    return Scale(config_8b(), POOL, 4096, 13, 120_000)


def small() -> Scale:
    pool = {"kv_cache_memory_bytes": "4MiB", "device": "cpu", "dtype": "float32", "max_model_len": 1024}
    steps = {"max_num_batched_tokens": 256, "max_num_seqs": 8}
    return Scale(kv_shrink.MODELS["tiny"], pool | steps, 128, 3, 2000)


def main(arguments: list[str]) -> None:
    scale = whole()
    if arguments[:1] == ["--small"] and arguments[1:2] == ["nothing-to-reuse-disk"]:
        scale, arguments = small(), arguments[1:]
    engines = Engines()
    while arguments:
        row = arguments.pop(0)
        if row in ("ram", "recompute", "at-once"):
            conversations(engines, row, ram=row != "recompute", at_once=row == "at-once")
        elif row == "decode":
            decode(engines, row)
        elif row == "nothing-to-reuse":
            nothing_to_reuse(engines, row, scale, None)
        elif row == "nothing-to-reuse-disk" and arguments:
            nothing_to_reuse(engines, row, scale, arguments.pop(0))
        elif row in ("disk", "disk-again") and arguments:
            disk(engines, row, arguments.pop(0), again=row == "disk-again")
        elif row in ("shrink-moved", "shrink-swapped"):
            engines.close()
            kv_shrink.main([row.removeprefix("shrink-")])
        else:
            raise SystemExit(__doc__)
    engines.close()


if __name__ == "__main__":
    main(sys.argv[1:])
