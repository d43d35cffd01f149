"""The runner's edges: wrong plans change nothing, profile run, closing, device and number type choices."""

from __future__ import annotations

import gc
import platform
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from holdfast.errors import ConfigurationError, EngineError
from holdfast.execution import memory
from holdfast.execution.device import compute_threads, lean_products, packs_weights
from holdfast.execution.kv_pool import KVPool
from holdfast.execution.memory import PeakMemory
from holdfast.execution.runner import Runner, RunnerLimits
from holdfast.execution.sampling.sampler import Sampler
from holdfast.execution.transformer import Transformer
from holdfast.execution.weights.load import load_weights
from holdfast.kvcache.groups import KVLayout, form_groups
from holdfast.records import BlockCopy, Row, SamplingParams, SequenceStart, StepPlan, TableWrite

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0)


def start(slot: int = 1, tokens: list[int] | None = None) -> SequenceStart:
    return SequenceStart(slot, "wrong", tokens or [1, 2, 3], 3, GREEDY)


WRONG: dict[str, dict[str, Any]] = {
    "slot beyond": {"starts": [start(8)]},
    "no tokens": {"starts": [SequenceStart(1, "r", [], 0, GREEDY)]},
    "too long": {"starts": [start(1, [1] * 257)]},
    "token beyond": {"starts": [start(1, [1, 300])]},
    "token negative": {"starts": [start(1, [-1])]},
    "block beyond": {"starts": [start()], "table_writes": [TableWrite(1, 0, 0, [400])]},
    "block negative": {"starts": [start()], "table_writes": [TableWrite(1, 0, 0, [-1])]},
    "entry beyond": {"starts": [start()], "table_writes": [TableWrite(1, 0, 64, [5])]},
    "group beyond": {"starts": [start()], "table_writes": [TableWrite(1, 1, 0, [5])]},
    "no page": {"starts": [start()], "rows": [Row(1, 0, 3, True)]},
    "null page": {"starts": [start()], "table_writes": [TableWrite(1, 0, 0, [0])], "rows": [Row(1, 0, 3, True)]},
    "beyond what is known": {
        "starts": [start()],
        "table_writes": [TableWrite(1, 0, 0, [90])],
        "rows": [Row(1, 0, 4, False)],
    },
    "samples early": {
        "starts": [start()],
        "table_writes": [TableWrite(1, 0, 0, [90])],
        "rows": [Row(1, 0, 2, True)],
    },
    "nothing to compute": {
        "starts": [start()],
        "table_writes": [TableWrite(1, 0, 0, [90])],
        "rows": [Row(1, 0, 0, False)],
    },
    "twice": {"rows": [Row(0, 6, 1, True), Row(0, 6, 1, True)]},
    "never started": {"rows": [Row(3, 0, 1, False)]},
    "over budget": {"starts": [start(1, [1] * 250)], "rows": [Row(1, 0, 250, False), Row(0, 6, 7, False)]},
    "copies between tiers": {"copies": [BlockCopy(0, 0, 1, 1, 2, True)]},
    "copies of no page": {"copies": [BlockCopy(0, 0, 0, 0, 2, True)]},
    "copies beyond the pool": {"copies": [BlockCopy(0, 0, 1, 0, 1 << 20, True)]},
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_plan_is_refused_whole_and_changes_nothing(
    name: str, oracles: Callable[..., Any], driver_for: Callable[..., Any]
) -> None:
    oracle = oracles("Llama")
    driver = driver_for(oracle)
    driver.start(0, [5, 6, 7, 8, 9, 10])
    driver.step({0: 6})
    with pytest.raises(EngineError, match="HF430"):
        driver.runner.execute(StepPlan(step_id=9, **WRONG[name]))
    driver.generate(0, 4)
    oracle.assert_greedy(driver.tokens[0], 6)


def test_plans_survive_serialization(oracles: Callable[..., Any], driver_for: Callable[..., Any]) -> None:
    driver = driver_for(oracles("Llama"))
    driver.start(0, [5, 6, 7], SamplingParams(temperature=0.7, seed=3, logit_bias={4: 1.0}))
    plan = driver.plan({0: 3})
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=StepPlan)
    assert again == plan
    assert driver.runner.submit(again).result().step_id == plan.step_id


def test_a_plan_without_rows_only_takes_over_what_it_brings(
    oracles: Callable[..., Any], driver_for: Callable[..., Any]
) -> None:
    driver = driver_for(oracles("Llama"))
    result = driver.runner.execute(StepPlan(step_id=4, starts=[start(0)], table_writes=[TableWrite(0, 0, 0, [3])]))
    assert result.token_ids == []
    assert len(driver.runner.execute(StepPlan(step_id=5, rows=[Row(0, 0, 3, True)])).token_ids) == 1


@pytest.mark.parametrize("window", [None, 10])
@pytest.mark.parametrize(("slots", "budget"), [(1, 1), (8, 8), (4, 256), (3, 600)])
def test_the_profile_run_leaves_no_trace(
    window: int | None, slots: int, budget: int, oracles: Callable[..., Any], driver_for: Callable[..., Any]
) -> None:
    oracle = oracles("Mistral", sliding_window=window)
    driver = driver_for(oracle, slots=slots, budget=budget)
    driver.runner.back_kv(2)
    assert driver.runner.profile_run().given_back_bytes >= 0
    driver.runner.back_kv(400)
    driver.runner.kv.pages[1:].fill_(float("nan"))
    driver.start(0, [5])
    driver.generate(0, 5)
    oracle.assert_greedy(driver.tokens[0], 1)
    with pytest.raises(EngineError):
        driver.runner.execute(StepPlan(step_id=0, rows=[Row(slots - 1, 5, 250, False)]))


def test_the_profile_run_samples_one_turn_of_rows(
    oracles: Callable[..., Any], driver_for: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Further turns would take time at every start, and no more memory."""
    monkeypatch.setattr("holdfast.footprint.cpu.LOGITS_BYTES", 4 * 300 * 2)
    runner, turns = driver_for(oracles("Llama"), slots=7).runner, list[int]()
    sample = Sampler.sample

    def counted(sampler: Sampler, logits: torch.Tensor, *others: Any) -> Any:
        turns.append(len(logits))
        return sample(sampler, logits, *others)

    monkeypatch.setattr(Sampler, "sample", counted)
    runner.profile_run()
    assert turns == [2]


def test_a_step_is_heard_of_after_each_layer(oracles: Callable[..., Any], driver_for: Callable[..., Any]) -> None:
    beats: list[int] = []
    oracle = oracles("Llama")
    driver = driver_for(oracle, beat=lambda: beats.append(len(beats)))
    driver.start(0, [1, 2, 3])
    driver.step({0: 3})
    assert len(beats) == len(oracle.spec.layers)  # The last layer of a chunk is cut short, and logits follow it.


def test_many_sampling_rows_are_sampled_in_turns(
    oracles: Callable[..., Any], driver_for: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logprobs of some rows, none of others, over several turns: each result stands at its row."""
    oracle = oracles("Llama")
    monkeypatch.setattr("holdfast.footprint.cpu.LOGITS_BYTES", 4 * 300 * 2)
    driver = driver_for(oracle, slots=7)
    logits, computed = Transformer.logits, list[int]()

    def counted(transformer: Transformer, hidden: torch.Tensor, out: torch.Tensor) -> None:
        computed.append(len(hidden))
        logits(transformer, hidden, out)

    monkeypatch.setattr(Transformer, "logits", counted)
    for slot in range(7):
        params = GREEDY.replace(logprobs=2) if slot in (2, 6) else GREEDY
        driver.start(slot, [slot + 1, 2 * slot + 1], params)
    result = driver.step(dict.fromkeys(range(7), 2))
    assert computed == [7]  # The head's weights are read once for all turns.
    assert [entry is not None for entry in result.logprobs] == [slot in (2, 6) for slot in range(7)]
    for slot in range(7):
        oracle.assert_greedy(driver.tokens[slot], 2)
        entry = result.logprobs[slot]
        assert entry is None or entry.token_ids[0] == result.token_ids[slot]


def test_a_closed_or_unbacked_runner_says_so(oracles: Callable[..., Any], driver_for: Callable[..., Any]) -> None:
    oracle = oracles("Llama")
    runner = driver_for(oracle).runner
    runner.close()
    with pytest.raises(EngineError, match="closed"):
        runner.execute(StepPlan(step_id=0))
    weights = load_weights(oracle.spec, None, dtype=torch.float32, device=CPU, expand=True)
    fresh = Runner(oracle.spec, weights, runner.layout, runner.limits, CPU)
    with pytest.raises(EngineError, match="back_kv"):
        fresh.execute(StepPlan(step_id=0))


def test_runners_in_a_row_leave_memory_flat(oracles: Callable[..., Any]) -> None:
    """Each holds some 60 MB of weights and pages; what stays after five of them is far less than one."""
    spec = oracles("Llama", vocab_size=40_000).spec
    groups, places = form_groups([layer.window for layer in spec.layers])
    layout = KVLayout(
        groups=groups,
        block_tokens=16,
        layers_per_page=places,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        element_bytes=4,
    )
    limits = RunnerLimits(max_num_seqs=4, max_num_batched_tokens=128, max_model_len=512)

    def once() -> int:
        weights = load_weights(spec, None, dtype=torch.float32, device=CPU, expand=True)
        runner = Runner(spec, weights, layout, limits, CPU)
        del weights
        runner.back_kv(2000)
        runner.kv.pages.zero_()
        runner.profile_run()
        held = runner.weights_bytes + runner.kv.nbytes
        runner.close()
        return held

    assert once() > 40 << 20
    before, after = PeakMemory.resident_bytes(), []
    for _ in range(5):
        once()
        gc.collect()
        after.append(PeakMemory.resident_bytes())
    # What is lost stays lost; what an allocator gives back a little later does not.
    assert min(after[-3:]) - before < 10 << 20, [size >> 20 for size in (before, *after)]


def test_kv_store_refuses_what_does_not_belong_together(oracles: Callable[..., Any]) -> None:
    layout = KVLayout(
        groups=form_groups([None])[0], block_tokens=4, layers_per_page=1, kv_heads=1, head_dim=8, element_bytes=4
    )
    with pytest.raises(EngineError, match="another dtype"):
        KVPool(layout, 4, CPU, torch.bfloat16)
    with pytest.raises(EngineError, match="null page"):
        KVPool(layout, 1, CPU, torch.float32)


def test_packing_needs_products_in_hardware() -> None:
    assert not packs_weights(torch.float32, CPU, {"amx_bf16"})
    assert not packs_weights(torch.bfloat16, CPU, {"asimd"})


def test_threads() -> None:
    assert compute_threads(2).count == 2
    with pytest.raises(ConfigurationError):
        compute_threads(0)


def test_products_leave_torch_as_they_found_it() -> None:
    before = bool(torch.backends.mkldnn.enabled)
    arm = platform.machine() in ("aarch64", "arm64")

    def fail_within() -> None:
        with lean_products(torch.float32, CPU):
            assert bool(torch.backends.mkldnn.enabled) == (before and not arm)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_within()
    assert bool(torch.backends.mkldnn.enabled) == before
    with lean_products(torch.bfloat16, CPU):
        assert bool(torch.backends.mkldnn.enabled) == before


def test_a_pool_that_cannot_grow_gives_its_memory_back_too(monkeypatch, tmp_path) -> None:
    """Being as large as can be of use, or where addresses count as memory."""
    layout = KVLayout(
        groups=form_groups([None])[0], block_tokens=16, layers_per_page=1, kv_heads=8, head_dim=1024, element_bytes=4
    )
    blocks = (64 << 20) // layout.page_bytes
    (tmp_path / "overcommit_memory").write_text("2\n")
    for most_blocks, overcommit in ((blocks, memory.OVERCOMMIT), (1 << 40, tmp_path / "overcommit_memory")):
        monkeypatch.setattr(memory, "OVERCOMMIT", overcommit)
        kv = KVPool(layout, blocks, CPU, torch.float32, most_blocks=most_blocks)
        assert kv.most_blocks == blocks
        kv.pages.fill_(1.0)
        full = PeakMemory.resident_bytes()
        kv.resize(2)
        assert full - PeakMemory.resident_bytes() > 50 << 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_a_smaller_pool_gives_its_memory_back(dtype: torch.dtype) -> None:
    layout = KVLayout(
        groups=form_groups([None])[0], block_tokens=16, layers_per_page=1, kv_heads=8, head_dim=1024,
        element_bytes=dtype.itemsize,
    )  # fmt: skip
    blocks = (64 << 20) // layout.page_bytes
    kv = KVPool(layout, blocks // 2, CPU, dtype, most_blocks=blocks)
    before = PeakMemory.resident_bytes()
    kv.resize(blocks)
    raw = kv.pages.view(torch.uint8)
    raw[1:] = torch.arange(1, blocks, dtype=torch.uint8).view(-1, *[1] * (raw.dim() - 1))
    full = PeakMemory.resident_bytes()
    assert full - before > 60 << 20
    kv.move([BlockCopy(0, 0, blocks - 1, 0, 2, True), BlockCopy(0, 0, blocks - 2, 0, 5, True)])
    kv.resize(8)
    assert full - PeakMemory.resident_bytes() > 50 << 20
    held = [0, 1, blocks - 1, 3, 4, blocks - 2, 6, 7]
    assert [int(page.max()) for page in raw[:8]] == [int(page.min()) for page in raw[:8]] == [one % 256 for one in held]
    assert not raw[9:].any()
    for wrong in (1, blocks + 1):
        with pytest.raises(EngineError, match="so many pages"):
            kv.resize(wrong)
