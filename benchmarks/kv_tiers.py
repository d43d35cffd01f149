"""KV beyond the pool on a GPU: conversations that come back from RAM and disk, and what that costs those who decode.

    python -m benchmarks.kv_tiers nothing-to-reuse ram decode       three starts of an engine for all three rows
    python -m benchmarks.kv_tiers disk DIR                          two, of another model
        nothing-to-reuse    prompts that nobody asked before, twice with RAM below the pool, twice without it, and twice
                            with it again, three starts: tokens a second, seconds to the first token, the share of
                            those with it (before and after) in those without, and what after is of before
        ram                 32 conversations of 16k tokens over a pool that holds 8 (8B bf16), with 72 GiB of --kv-ram:
                            each is asked once; all again at once; each again in turn; all at once again. Seconds to the
                            first token, computed and from RAM; the link's own rate says what is wanted in turn:
                            bytes / that rate x 1.3 + 20 ms
        decode              tokens a second of 32 that decode, in turns: alone, and with four conversations a second
                            that come from RAM; then with four short prompts a second: what comes of rows, and not of
                            pages; and how long they waited between two tokens
        disk DIR            four conversations of 16k tokens of a 70B in int4, asked twice; the disk's own rate by raw
                            reads of what was written; a restart; the four again, and two that are new
        disk-again DIR      the second half of that alone, in a process of its own
        nothing-to-reuse-disk DIR       as above, with --kv-store in a new folder there
        computing-pays DIR  conversations of the 8B, which a GPU computes sooner than a disk reads: written there, and
                            after a restart asked again, each beside one that nobody asked before; seconds to the first
                            token in all, of those computed
        shrink-moved, shrink-swapped    a pool of 40 GiB becomes one of 20 while streams run: benchmarks/kv_shrink.py
    --small     tries rows on a CPU, with a tiny model, and a store on disk in place of RAM
    --out FILE  gets the lines too, as they come

Dummy weights in real shapes, token ids, no tokenizer; a line of JSON for each part of a row as soon as it is measured,
with what is wanted of it, and whether it holds. Engines are stepped in this process, and one that the next row can use
stays, with the conversations that it knows; for each part of `nothing-to-reuse` nothing is cached.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks import kv_shrink
from benchmarks.gpu_worker import SHAPES
from benchmarks.prefix_store import raw_reads
from benchmarks.random_checkpoints import awq_config
from benchmarks.tiers import LLAMA_70B
from holdfast import LLM, SamplingParams
from holdfast.engine.core.loop import EngineCore
from holdfast.records import EngineStats, LinkUse, Request

TOKENS = 16_384
KV_8B = TOKENS * 131_072
"""Bytes of one conversation."""
LONG = {"max_model_len": TOKENS + 2048, "max_num_batched_tokens": 8192, "max_num_seqs": 64}
ANSWERED = 16
"""Tokens behind each prompt that nobody asked before."""
RAW_BYTES = 4 << 30
"""Of the disk, read as it is."""


@dataclass(frozen=True)
class Scale:
    """`tier`: what lies below the pool. `again_after`: how often a conversation is asked until it is there."""

    config: dict[str, Any]
    disk_config: dict[str, Any]
    settings: dict[str, Any]
    disk_settings: dict[str, Any]
    tier: dict[str, Any]
    ram_bytes: int
    again_after: int
    tokens: int
    conversations: int
    bytes_each: int
    new_tokens: int
    new_turns: int
    vocabulary: int
    decoders: int
    decoded_s: float


def whole() -> Scale:
    return Scale(
        config=SHAPES["llama-8b"] | {"max_position_embeddings": 32_768},
        disk_config=awq_config(LLAMA_70B | {"max_position_embeddings": 32_768}),
        settings={"kv_cache_memory_bytes": str(int(8.3 * KV_8B)), "device": "cuda", **LONG},
        disk_settings={"kv_store_size": "60GiB", "device": "cuda", **LONG},
        tier={"kv_ram": "72GiB"}, ram_bytes=72 << 30, again_after=1,
        tokens=TOKENS, conversations=32, bytes_each=KV_8B, new_tokens=4096, new_turns=13, vocabulary=120_000,
        decoders=32, decoded_s=6.0,
    )  # fmt: skip


def small(folder: str) -> Scale:
    steps = {"max_num_batched_tokens": 256, "max_num_seqs": 8, "max_model_len": 1024, "dtype": "float32"}
    usual = {"kv_cache_memory_bytes": "5MiB", "device": "cpu", **steps}
    return Scale(
        config=kv_shrink.MODELS["tiny"], disk_config=kv_shrink.MODELS["tiny"], settings=usual,
        disk_settings=usual | {"kv_store_size": "1GiB"},
        tier={"kv_store": folder, "kv_store_size": "1GiB"}, ram_bytes=0, again_after=2,
        tokens=480, conversations=8, bytes_each=480 * 2048, new_tokens=128, new_turns=2, vocabulary=1700,
        decoders=4, decoded_s=1.0,
    )  # fmt: skip


@dataclass(frozen=True)
class Figures:
    tok_per_s: float
    p50_s: float
    p99_s: float


@dataclass(frozen=True)
class Report:
    """`out`: gets the lines too. `judges`: what is wanted is of the whole machine, and says nothing of a small one."""

    out: Path | None
    judges: bool

    def say(self, row: str, **figures: Any) -> None:
        rounded = {name: round(value, 4) if isinstance(value, float) else value for name, value in figures.items()}
        line = json.dumps({"row": row, **rounded})
        print(line, flush=True)
        if self.out is not None:
            with self.out.open("a") as out:
                out.write(line + "\n")

    def judge(
        self, row: str, what: str, measured: float, *, most: float | None = None, least: float | None = None
    ) -> None:
        if not self.judges:
            self.say(row, figure=what, measured=measured)
            return
        holds = (most is None or measured <= most) and (least is None or measured >= least)
        wanted = {"at_most": most} if most is not None else {"at_least": least}
        self.say(row, verdict=what, measured=measured, **wanted, holds=holds)


class Engines:
    """One is open at a time."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self._open: tuple[str, LLM, EngineCore] | None = None
        self.known = 0
        """Conversations that it was asked, and may have."""

    def core(self, config: dict[str, Any], *, knows: int = 0, **settings: Any) -> EngineCore:
        """Nothing is cached, but where it knows so many conversations."""
        name = json.dumps([config, settings], sort_keys=True)
        if self._open is None or self._open[0] != name:
            self.close()
            began_s = time.perf_counter()
            self._open = (name, *open_llm(config, **settings))
            self.report.say(
                "start", seconds=time.perf_counter() - began_s, settings={k: str(v) for k, v in settings.items()}
            )
        core = self._open[2]
        settle(core)
        if not knows or self.known < knows:
            core.scheduler.reset_prefix_cache()
            self.known = 0
        return core

    def close(self) -> None:
        if self._open is not None:
            self._open[1].close()
            self._open, self.known = None, 0


def open_llm(config: dict[str, Any], **settings: Any) -> tuple[LLM, EngineCore]:
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(config))
    llm = LLM(str(folder), **({"load_format": "dummy", "skip_tokenizer_init": True} | settings))
    core = llm._engine()
    ask(core, [list(range(3, 67))])
    gc.collect()
    gc.freeze()  # As the engine process of a server does: else a collection looks through all of torch.
    return llm, core


def prompt(number: int, scale: Scale, tokens: int | None = None) -> list[int]:
    """`tokens`: the first so many of it."""
    draw = random.Random(number)
    return [draw.randrange(scale.vocabulary) for _ in range(scale.tokens if tokens is None else tokens)]


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


def tiers_of(stats: EngineStats) -> dict[str, Any]:
    found = {f"{one.tier}_hit_tokens": one.hit_tokens_total for one in stats.kv_tiers}
    loaded = {f"{one.tier}_loaded_gb": one.loaded_bytes_total / 1e9 for one in stats.kv_tiers}
    return found | loaded | {"preemptions": stats.preemptions_total, "not_worth": stats.fetches_not_worth_total}


def conversations(engines: Engines, scale: Scale) -> None:
    core, row = with_tier(engines, scale), "ram"
    prompts = [prompt(number, scale) for number in range(scale.conversations)]
    first_s = median([median([ask(core, [ids])[0] for ids in prompts]) for _ in range(scale.again_after)])
    settle(core)
    engines.known = len(prompts)
    engines.report.say(row, part="first round, computed", p50_s=first_s, **tiers_of(core.stats()))

    def again(part: str, work: Callable[[], list[float]]) -> tuple[list[float], float | None]:
        before, counted = link_of(core), tiers_of(core.stats())
        seconds = sorted(work())
        settle(core)
        figures = {"p50_s": median(seconds), "p99_s": seconds[len(seconds) * 99 // 100], "most_s": seconds[-1]}
        rate = link_rate(before, link_of(core))
        gb_s = None if rate is None else rate / 1e9
        engines.report.say(row, part=part, **figures, link_gb_s=gb_s, **since(counted, tiers_of(core.stats())))
        return seconds, rate

    seconds, _ = again("all at once", lambda: ask(core, prompts))
    engines.report.judge(row, "all at once: seconds to the last first token", seconds[-1], most=1.8)
    seconds, rate = again("in turn", lambda: [ask(core, [ids])[0] for ids in prompts])
    if rate is not None:
        wanted_s = scale.bytes_each / rate * 1.3 + 0.02
        engines.report.judge(row, "in turn: seconds to the first token, p50", median(seconds), most=wanted_s)
        engines.report.judge(row, "in turn: seconds to the first token, the slowest", seconds[-1], most=wanted_s)
    engines.report.judge(row, "in turn: times as fast as computing", first_s / median(seconds), least=6.0)
    seconds, _ = again("all at once, again", lambda: ask(core, prompts))
    engines.report.judge(row, "all at once, again: seconds to the last first token", seconds[-1], most=1.8)


def with_tier(engines: Engines, scale: Scale, knows: int = 0) -> EngineCore:
    core = engines.core(scale.config, knows=knows, **scale.settings, **scale.tier)
    wait_for_ram(engines.report, core, scale.ram_bytes)
    return core


def link_of(core: EngineCore) -> tuple[int, float]:
    """Bytes that came to the GPU so far, and seconds in which the link was busy with them."""
    uses = [use for use in core.stats().links if use.link == LinkUse().link]
    return sum(use.copied_bytes for use in uses), sum(use.busy_s for use in uses)


def link_rate(before: tuple[int, float], after: tuple[int, float]) -> float | None:
    """Bytes a second between these."""
    nbytes, seconds = after[0] - before[0], after[1] - before[1]
    return nbytes / seconds if seconds > 0 else None


def since(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    return {name: value - before.get(name, 0) for name, value in after.items()}


def wait_for_ram(report: Report, core: EngineCore, nbytes: int) -> None:
    """Until all of it is pinned; steps tell. Launches wait for the driver while it pins."""
    began_s = time.perf_counter()
    while nbytes and not any(one.tier == "ram" and one.total_bytes == nbytes for one in core.stats().kv_tiers):
        ask(core, [[7, 8, 9]])
        time.sleep(0.2)
    if (seconds := time.perf_counter() - began_s) > 1:
        report.say("pinned", seconds=seconds)


def decode(engines: Engines, scale: Scale) -> None:
    few, row = min(12, scale.conversations), "decode"
    core = with_tier(engines, scale, knows=few)
    prompts = [prompt(number, scale) for number in range(few)]
    if engines.known < few:
        for ids in prompts * scale.again_after:
            ask(core, [ids])
        engines.known = few
    settle(core)
    found: dict[str, list[float]] = {"nobody": [], "conversations": [], "short prompts": []}
    longest = int(scale.settings["max_model_len"]) - 128
    for beside in (*("nobody", "conversations") * 3, "nobody", "short prompts"):
        for number in range(scale.decoders):
            add(core, f"d{number}-{time.monotonic()}", [number + 3] * 64, min(1900, longest))
        before, asked = tiers_of(core.stats()), [] if beside == "nobody" else prompts
        figures = decode_beside(core, asked, scale.decoded_s, short=beside == "short prompts")
        engines.report.say(row, beside=beside, **figures, **since(before, tiers_of(core.stats())))
        found[beside].append(figures["tok_per_s"])
        for request_id in list(core.scheduler._sequences):
            core.abort(request_id)
        settle(core)
    share = mean(found["conversations"]) / mean(found["nobody"])
    engines.report.judge(row, "tokens a second while pages move, of those without", share, least=0.95)


def decode_beside(core: EngineCore, prompts: list[list[int]], for_s: float, *, short: bool) -> dict[str, Any]:
    """While these are asked in turn, four a second. `short`: as many of their tokens as are left to compute."""
    tokens, asked, begin = 0, 0, time.perf_counter()
    took, before = list[float](), begin
    while (seconds := time.perf_counter() - begin) < for_s:
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


def nothing_to_reuse(engines: Engines, scale: Scale, folder: str | None) -> None:
    """With a tier, without, and with it again: the store in `folder`, or else what conversations have below the pool.
    A machine that becomes slower does so for both: what is compared with the middle is the mean of before and after.
    How much these differ, and the two turns of one engine, says how much is noise. Begun and ended with the tier since
    other rows use that engine."""
    found: list[list[Figures]] = []
    row = "nothing-to-reuse" if folder is None else "nothing-to-reuse-disk"
    for place, tier in enumerate((True, False, True)):
        with tempfile.TemporaryDirectory(dir=folder) as store:
            on = {} if not tier else scale.tier if folder is None else {"kv_store": store, "kv_store_size": "20GiB"}
            found.append([])
            for turn in range(3):
                core = engines.core(scale.config, **scale.settings, **on)
                wait_for_ram(engines.report, core, scale.ram_bytes if tier and folder is None else 0)
                if not turn:  # Graphs are captured.
                    new_prompts(core, scale, 0, 1)
                    continue
                before = tiers_of(core.stats())
                found[place].append(figures := new_prompts(core, scale, turn, scale.new_turns))
                engines.report.say(
                    row, tier=tier, tok_per_s=figures.tok_per_s, p50_s=figures.p50_s, p99_s=figures.p99_s,
                    **since(before, tiers_of(core.stats())),
                )  # fmt: skip
            if folder is not None:
                engines.close()  # Before its folder goes.
    for name in ("tok_per_s", "p50_s", "p99_s"):
        first, without, last = (mean(getattr(one, name) for one in figures) for figures in found)
        engines.report.say(row, drift=f"{name} with it, after of before", measured=last / first)
        wanted = {"least": 0.98} if name == "tok_per_s" else {"most": 1.02}
        engines.report.judge(row, f"{name}, of that without", mean([first, last]) / without, **wanted)


def new_prompts(core: EngineCore, scale: Scale, series: int, turns: int) -> Figures:
    """Eight at a time, each with an answer. Drawn before any is timed."""
    each = [
        {f"{turn}-{one}": prompt(1000 * (1 + series) + 10 * turn + one, scale, scale.new_tokens) for one in range(8)}
        for turn in range(turns)
    ]
    firsts, begin = list[float](), time.perf_counter()
    for asked in each:
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
    return Figures(
        len(firsts) * (scale.new_tokens + ANSWERED) / seconds, median(firsts), firsts[len(firsts) * 99 // 100]
    )


def disk(engines: Engines, scale: Scale, folder: str, *, again: bool) -> None:
    row, prompts = "disk", [prompt(number, scale) for number in range(4)]
    engines.close()
    if not again:
        core = engines.core(scale.disk_config, kv_store=folder, **scale.disk_settings)
        for part in ("computed", "from the pool, and written"):
            firsts, began_s = [ask(core, [ids])[0] for ids in prompts], time.perf_counter()
            settle(core)
            engines.report.say(row, part=part, firsts_s=rounded(firsts), settled_s=time.perf_counter() - began_s)
        engines.close()
    raw = disk_rate(folder)
    engines.report.say(row, part="raw reads of the disk", gb_s=raw / 1e9)
    core = engines.core(scale.disk_config, kv_store=folder, **scale.disk_settings)  # It knows nothing but the folder.
    firsts, loaded = list[float](), list[float]()
    for ids in prompts:
        before = tiers_of(core.stats())
        firsts += ask(core, [ids])
        loaded.append(since(before, tiers_of(core.stats())).get("disk_loaded_gb", 0.0) * 1e9)
    counted = tiers_of(core.stats())
    engines.report.say(row, part="from the disk after a restart", firsts_s=rounded(firsts), **counted)
    shares = [seconds / (nbytes / raw) for seconds, nbytes in zip(firsts, loaded, strict=True) if nbytes]
    engines.report.judge(row, "conversations that were fetched, and not computed", len(shares), least=len(prompts))
    if shares:
        engines.report.judge(row, "seconds to the first token, of bytes / measured rate", median(shares), most=1.15)
    new = [ask(core, [ids])[0] for ids in [prompt(100 + number, scale) for number in range(2)]]
    engines.report.say(row, part="computed", firsts_s=rounded(new))
    engines.report.judge(row, "times as fast as computing", median(new) / median(firsts), least=1.6)
    engines.close()


def computing_pays(engines: Engines, scale: Scale, folder: str) -> None:
    """Twelve are stored, and asked twice, each beside one that is new: what asking the disk costs where computing is
    sooner. Which of the two is sooner the engine finds by itself, from what it tries."""
    row, count = "computing-pays", min(12, scale.conversations)
    engines.close()
    with tempfile.TemporaryDirectory(dir=folder) as store:
        on: dict[str, Any] = {"kv_store": store, "kv_store_size": "60GiB", "kv_store_daily_writes": "1TiB"}
        core = engines.core(scale.config, **scale.settings, **on)
        stored = [prompt(number, scale) for number in range(count)]
        for ids in [one for one in stored for _ in range(2)]:
            ask(core, [ids])
        settle(core)
        engines.close()
        core = engines.core(scale.config, **scale.settings, **on)
        before = tiers_of(core.stats())
        again, new = list[float](), list[float]()
        for number, ids in enumerate(stored * 2):  # The pool holds less than one round.
            again += ask(core, [ids])
            new += ask(core, [prompt(100 + number, scale)])
        engines.report.say(
            row, again_s=rounded(again), new_s=rounded(new), slowest=max(again) / median(new),
            **since(before, tiers_of(core.stats())),
        )  # fmt: skip
        engines.report.judge(row, "seconds to first tokens in all, of those computed", sum(again) / sum(new), most=1.05)
        engines.close()


def rounded(seconds: list[float]) -> list[float]:
    return [round(one, 3) for one in seconds]


def disk_rate(folder: str) -> float:
    """Bytes a second of raw reads of what the store has written, all over it, as many at once as it has threads."""
    path = max(Path(folder).glob("*.pages"), key=lambda one: one.stat().st_size)
    size, piece = path.stat().st_size, 4 << 20 if path.stat().st_size > 1 << 30 else 1 << 16
    order = list(range(size // piece))
    random.Random(1).shuffle(order)
    order = order[: RAW_BYTES // piece]
    began_s = time.perf_counter()
    raw_reads(path, piece, order)
    return len(order) * piece / (time.perf_counter() - began_s)


WITH_FOLDER = ("disk", "disk-again", "nothing-to-reuse-disk", "computing-pays")
ROWS = ("ram", "decode", "nothing-to-reuse", "shrink-moved", "shrink-swapped", *WITH_FOLDER)


def asked_rows(parser: argparse.ArgumentParser, given: list[str]) -> list[tuple[str, str | None]]:
    """With their folders. All are looked at before the first is measured."""
    found, words = list[tuple[str, str | None]](), iter(given)
    for row in words:
        if row not in ROWS:
            parser.error(f"{row!r} is none of {', '.join(ROWS)}")
        folder = next(words, None) if row in WITH_FOLDER else None
        if row in WITH_FOLDER and (folder is None or not Path(folder).is_dir()):
            parser.error(f"{row} wants a folder that is there, and {folder!r} is none")
        found.append((row, folder))
    return found


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("rows", nargs="+", metavar="ROW [DIR]")
    asked = parser.parse_args(given)
    rows = asked_rows(parser, asked.rows)
    scratch = tempfile.TemporaryDirectory()
    scale, engines = (
        small(scratch.name + "/store") if asked.small else whole(),
        Engines(Report(asked.out, judges=not asked.small)),
    )
    for row, folder in rows:
        if row == "ram":
            conversations(engines, scale)
        elif row == "decode":
            decode(engines, scale)
        elif row in ("nothing-to-reuse", "nothing-to-reuse-disk"):
            nothing_to_reuse(engines, scale, folder)
        elif folder is not None and row == "computing-pays":
            computing_pays(engines, scale, folder)
        elif folder is not None:
            disk(engines, scale, folder, again=row == "disk-again")
        else:
            engines.close()
            out = [] if asked.out is None else ["--out", str(asked.out)]
            kv_shrink.main([row.removeprefix("shrink-"), *out])
    engines.close()
    scratch.cleanup()


if __name__ == "__main__":
    main()
