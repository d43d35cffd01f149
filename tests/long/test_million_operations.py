"""A million random operations on pool, prefix index and scheduler together, and as many on these with tiers below the
pool whose copies fail at random; every row proves what it reads."""

from __future__ import annotations

import os
import random
import time
from collections import Counter

import pytest
from simulated_engine import NO_MEMORY, NOT_FINITE, FakeStore, SimulatedEngine, SimulatedTiers

from holdfast.kvcache import KVCache, KVLayout, Tier, TierLimits, form_groups
from holdfast.records import Request, SamplingParams
from holdfast.scheduler import Scheduler, SchedulerLimits

OPERATIONS = int(os.environ.get("HOLDFAST_OPERATIONS", 1_000_000))
SEED = int(os.environ.get("HOLDFAST_SEED", 20))
OPERATIONS_A_WORLD = 500
VOCABULARY = 40
KINDS = ["full", "windows", "mixed"]


def random_windows(choice: random.Random) -> list[int | None]:
    kind = choice.choice(KINDS)
    windows: list[int | None] = []
    if kind in ("full", "mixed"):
        windows += [None] * choice.randint(1, 3)
    if kind in ("windows", "mixed"):
        windows += [choice.randint(1, 20)] * choice.randint(1, 3)
    if kind == "mixed" and choice.random() < 0.3:
        windows.append(choice.randint(1, 40))
    choice.shuffle(windows)
    return windows


def random_engine(choice: random.Random, *, tiers: bool = False) -> SimulatedEngine:
    groups, places = form_groups(random_windows(choice))
    layout = KVLayout(
        groups=groups,
        block_tokens=choice.choice([1, 2, 4, 8, 16]),
        layers_per_page=places,
        kv_heads=1,
        head_dim=4,
        element_bytes=4,
    )
    max_num_seqs = choice.randint(1, 8)
    limits = SchedulerLimits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + choice.choice([0, 1, 2, 4, 12, 60]),
        max_model_len=choice.choice([24, 64, 100]),
        policy=choice.choice(["fcfs", "priority"]),
        max_steps_in_flight=choice.choice([1, 2]),
    )
    # From barely enough for the longest request to enough for a few of them: pages must run out.
    alone = layout.peak_blocks(limits.max_model_len, 1)
    blocks = 1 + int(alone * choice.choice([0.6, 1.0, 1.2, 1.5, 2.0, 3.0])) + 1
    if not tiers:
        return SimulatedEngine(
            Scheduler(limits, KVCache(layout, blocks, choice.random() < 0.85)), vocabulary=VOCABULARY
        )
    store = FakeStore(choice, most=choice.choice([5, 100, 1000]), late=choice.choice([0.0, 0.7]))
    disk = store if choice.random() < 0.6 else None
    below = TierLimits(
        host_pages=choice.choice([0, 2, blocks, 4 * blocks]),
        most_loading=choice.choice([2, 16, 500]),
        most_loading_disk=choice.choice([1, 8]),
        most_storing=choice.choice([1, 8, 64]),
        spare_pages=choice.choice([2, blocks // 3, 2 * blocks]),
        saves_ahead=choice.choice([0, 1, 8]),
        stores_a_plan=choice.choice([1, 8, 1024]),
        loads_a_plan=choice.choice([1, 16, 256]),
    )
    return SimulatedEngine(
        Scheduler(limits, KVCache(layout, blocks, True, below, disk)),
        vocabulary=VOCABULARY,
        tiers=SimulatedTiers(choice, disk, failing=choice.choice([0.0, 0.1, 0.5])),
    )


def random_request(choice: random.Random, number: int, families: list[list[int]], longest: int) -> Request:
    prefix = choice.choice(families)
    prompt = prefix[: choice.choice([0, 4, 17, 40])] + [
        choice.randint(0, 3) for _ in range(choice.choice([1, 3, 12, 30]))
    ]
    max_tokens = choice.choice([1, 8, 40, 60])
    return Request(
        request_id=str(number),
        prompt_token_ids=prompt if choice.random() < 0.05 else prompt[: longest - 8],
        arrival_s=choice.choice([0.0, 1.0, float(number)]),
        params=SamplingParams(
            max_tokens=max_tokens,
            min_tokens=choice.choice([0, 0, 1]),
            stop_token_ids=choice.choice([None, None, [3], [11, 12]]),
        ),
        eos_token_ids=choice.choice([(), (), (7,)]),
        priority=choice.randint(0, 3),
        cache_salt=choice.choice(["", "", "", "other"]),
        output_token_ids=[choice.randrange(VOCABULARY) for _ in range(choice.choice([0] * 9 + [3]))],
    )


def run_world(choice: random.Random, counts: Counter[str], *, tiers: bool = False) -> None:
    """One engine from its first request until all have ended."""
    engine = random_engine(choice, tiers=tiers)
    families = [[choice.randint(0, 3) for _ in range(40)] for _ in range(3)]
    crowd = choice.choice([3, 10, 30])
    for number in range(OPERATIONS_A_WORLD):
        draw = choice.random()
        if not engine.unfinished or (draw < 0.2 and len(engine.unfinished) < crowd):
            engine.add(random_request(choice, number, families, engine.scheduler.limits.max_model_len))
            counts["add"] += 1
        elif 0.2 <= draw < 0.205:
            engine.abort(choice.choice(list(engine.unfinished)))
            counts["abort"] += 1
        elif 0.205 <= draw < 0.207:
            engine.scheduler.reset_prefix_cache()
            counts["reset"] += 1
        elif 0.207 <= draw < 0.209 and tiers:
            engine.resize(engine.scheduler.least_blocks + choice.randint(0, 40))
            counts["resize"] += 1
        elif engine.can_plan and (draw < 0.6 or not engine.plans_in_flight):
            engine.plan()
            counts["plan"] += 1
        elif engine.plans_in_flight:
            failing = choice.randrange(8) if tiers and choice.random() < 0.05 else None
            engine.execute(failing_row=failing, failure=choice.choice([NO_MEMORY, NOT_FINITE]))
            counts["execute"] += 1
        else:
            continue
        counts["operations"] += 1
        engine.scheduler.check_invariants()
    engine.finish()
    engine.scheduler.check_invariants()
    stats = engine.scheduler.stats()
    assert stats.blocks_used == 0
    counts["refused or failed"] += sum(news[-1].failure is not None for news in engine.outputs.values() if news)
    counts["preemptions"] += stats.preemptions_total
    counts["tokens hit"] += stats.prefix_hits_total
    counts["tokens computed"] += engine.runner.tokens_computed
    if (moved := engine.runner.tiers) is not None:
        counts["pages from RAM"] += moved.copied[Tier.HOST]
        counts["pages from disk"] += moved.copied[Tier.DISK]
        counts["copies failed"] += moved.failed
        hits = engine.scheduler.kv.below_hits_total
        counts["tokens from RAM"] += hits[Tier.HOST]
        counts["tokens from disk"] += hits[Tier.DISK]


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("tiers", [False, True], ids=["pool alone", "tiers"])
def test_a_million_operations_leak_nothing_and_share_nothing_wrongly(
    capsys: pytest.CaptureFixture[str], tiers: bool
) -> None:
    choice, counts = random.Random(SEED), Counter[str]()
    began_s = time.monotonic()
    while counts["operations"] < OPERATIONS:
        run_world(choice, counts, tiers=tiers)
    with capsys.disabled():
        print(f"\n{counts['operations']:,} operations, seed {SEED}, {time.monotonic() - began_s:.0f} s: {dict(counts)}")
    assert counts["preemptions"] > 0
    assert counts["tokens hit"] > 0
    assert not tiers or min(counts["tokens from RAM"], counts["tokens from disk"], counts["copies failed"]) > 0
