"""The GPU runner, one step ahead, with KV pages in RAM or on a disk below its pool: what left the pool comes back over
a link that is as late as it may be, alone or behind layers that come for every step, from the disk also to another
engine, and tokens are transformers' own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from late_tiers import disk_places
from lora_adapters import write_adapter
from simulated_copies import SimulatedCopies
from streamed_tiny import Streamed
from tiny_gpu import LLAMA, Tiny, prompt, run, tokens_of

from holdfast.config import EngineConfig
from holdfast.engine.core.loop import EngineCore
from holdfast.engine.requests.adapters import Adapters
from holdfast.execution.batch import RunnerLimits
from holdfast.execution.gpu.memory import pinned_staging
from holdfast.execution.gpu.runner import GpuRunner
from holdfast.execution.lora.slots import LoraLimits
from holdfast.execution.streaming.copies import CudaCopies
from holdfast.execution.streaming.pinned_memory import PinnedMemory
from holdfast.execution.tiers.gpu import DiskPlaces, GpuPageCopies, HostMemory
from holdfast.kvcache import KVCache, Tier, TierLimits
from holdfast.prefix_store import PrefixStore
from holdfast.records import EngineOutput, Request, SamplingParams
from holdfast.scheduler import Scheduler, SchedulerLimits
from holdfast.units import MIB

PAGES = 32


def host_memory(page: int, device: torch.device) -> HostMemory:
    assert page * PAGES % 4096 == 0
    if device.type == "cuda":
        memory = PinnedMemory([page * PAGES], device, background=[0])
    else:
        memory = PinnedMemory([page * PAGES], device, pin=lambda at, nbytes: 0, unpin=lambda at, one: None)
    memory.wait(0)
    return HostMemory(memory, page)


def with_tiers(
    core: EngineCore, device: torch.device, blocks: int, host: HostMemory | None, store: PrefixStore | None
) -> EngineCore:
    runner, page = core.runner, core.scheduler.kv.layout.page_bytes
    on_gpu, disk = device.type == "cuda", None
    if store is not None:
        disk = DiskPlaces.pinned(store, page, 4, device) if on_gpu else disk_places(store, page)
    link = runner.link or (CudaCopies(device) if on_gpu else SimulatedCopies(1))
    runner.use_tiers(GpuPageCopies(lambda: runner.kv.pages, page, link, lambda: runner.weights_come, host, disk))
    limits = TierLimits(spare_pages=blocks, most_storing=8, most_loading_disk=4, most_writing=4)
    kv = KVCache(core.scheduler.kv.layout, blocks, True, limits, store)
    return EngineCore(Scheduler(core.scheduler.limits, kv), runner, steps_ahead=1)


def with_ram(core: EngineCore, device: torch.device, blocks: int) -> EngineCore:
    return with_tiers(core, device, blocks, host_memory(core.scheduler.kv.layout.page_bytes, device), None)


def ask_again(core: EngineCore, tiny: Tiny) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)]
    for number in (1, 2, 1):
        asked = prompt(number, 21)
        (outputs,) = run(core, [asked], params)
        tiny.assert_greedy(asked, tokens_of(outputs))
    tiers, page = core.scheduler.kv.tiers, core.scheduler.kv.layout.page_bytes
    assert tiers is not None
    assert tiers.stored_pages[Tier.HOST] > 0
    to_gpu, to_host = core.runner.link_use()
    assert to_gpu.copied_bytes >= page * tiers.loaded_pages[Tier.HOST]
    assert to_host.copied_bytes >= page * tiers.stored_pages[Tier.HOST]


@pytest.mark.usefixtures("few_programs")
def test_what_left_the_pool_comes_back(tiny: Tiny, device: torch.device) -> None:
    blocks = 1 + 7 * len(tiny.layout().groups)
    core = with_ram(tiny.core(device, gpu=True, blocks=blocks, slots=2, step=32), device, blocks)
    ask_again(core, tiny)
    windowed = tiny.spec.layers[0].window is not None  # Its pages may all have stayed in the pool.
    assert windowed or core.scheduler.kv.below_hits_total[Tier.HOST] >= 8
    core.close()


@pytest.mark.usefixtures("few_programs")
def test_what_a_step_says_and_is_told_passes_pages_by(
    tiny: Tiny, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No engine that copies pages is asked for it: to each step its rows, from each its tokens."""
    moved, move = list[tuple[str, str]](), pinned_staging.move_words

    def counted(target: torch.Tensor, source: torch.Tensor) -> None:
        own = {one.data_ptr() for one in core.runner._sampled}
        moved.append(("told" if target.data_ptr() in own else "said", str(source.dtype)))
        move(target, source)

    core = tiny.core(device, gpu=True, blocks=20, slots=2, step=32)
    monkeypatch.setattr(pinned_staging, "move_words", counted)
    params = [SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)]
    run(core, [prompt(1, 9)], params)
    assert not moved, "without tiers the engines have nothing else to do"
    core = with_ram(core, device, 20)
    moved.clear()
    (outputs,) = run(core, [prompt(2, 9)], params)
    tiny.assert_greedy(prompt(2, 9), tokens_of(outputs))
    assert moved.count(("told", "torch.int32")) == 3
    assert moved.count(("said", "torch.int32")) >= 4, "the prompt and its table, and the rows of each step"
    core.close()


@pytest.mark.usefixtures("few_programs")
def test_pages_in_fp8_of_an_adapter_come_back_and_are_nobody_elses(tmp_path: Path, device: torch.device) -> None:
    """The base model's own pages of the same prompt push them out."""
    tiny = Tiny(tmp_path / "model", **LLAMA)
    limits = RunnerLimits(max_num_seqs=2, max_num_batched_tokens=32, max_model_len=96, max_loras=1)
    layout, lora = tiny.layout(1), LoraLimits(max_loras=1, max_rank=4, cached=1)
    runner = GpuRunner(tiny.spec, tiny.weights(device), layout, limits, device, kv_dtype=torch.float8_e4m3fn, lora=lora)
    runner.calibrate_kv()
    runner.back_kv(8)
    books = SchedulerLimits(
        max_num_seqs=2, max_num_batched_tokens=32, max_model_len=96, max_steps_in_flight=2, max_loras=1
    )
    core = with_ram(EngineCore(Scheduler(books, KVCache(layout, 8, True)), runner, steps_ahead=1), device, 8)
    write_adapter(tmp_path / "adapter", tiny.folder, seed=1, rank=4)
    known = Adapters(tiny.spec, "tiny", EngineConfig(enable_lora=True, max_lora_rank=4))
    adapter = known.load("adapter", str(tmp_path / "adapter"), anywhere=True)
    params, told = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True), list[list[int]]()
    for number, ref in enumerate((adapter, None, adapter)):
        request = Request(request_id=str(number), prompt_token_ids=prompt(1, 21), params=params, adapter=ref)
        core.add(request)
        outputs = [output for output in iter_steps(core) if output.request_id == str(number)]
        told.append(tokens_of(outputs))
        assert outputs[-1].cached_tokens == (20 if number == 2 else 0)
    assert told[0] == told[2] != told[1]
    assert core.scheduler.kv.below_hits_total[Tier.HOST] >= 16
    core.close()


def iter_steps(core: EngineCore) -> Iterator[EngineOutput]:
    while core.has_work:
        yield from core.step()
        core.scheduler.check_invariants()


@pytest.mark.usefixtures("few_programs")
def test_what_left_the_pool_comes_back_behind_layers(tmp_path: Path, device: torch.device) -> None:
    """Over the link of the layers, which keep their places in it: none is poisoned when it is read."""
    tiny = Streamed(tmp_path, "Llama", num_hidden_layers=4)
    core = with_ram(tiny.core(device, gpu=True, blocks=8, slots=2, step=32), device, 8)
    ask_again(core, tiny)
    assert core.scheduler.kv.below_hits_total[Tier.HOST] >= 8
    if isinstance(tiny.copies, SimulatedCopies):
        assert tiny.copies.later
        assert tiny.copies.back
        assert len(tiny.copies.later) < len(tiny.copies.copied)
    tiny.layers.change([])
    run(core, [prompt(3, 2)], [SamplingParams(temperature=0.0, max_tokens=1)])
    # All layers stay from now on: pages have the link for themselves.
    before = [len(getattr(tiny.copies, kind, [])) for kind in ("copied", "later")]
    ask_again(core, tiny)
    if isinstance(tiny.copies, SimulatedCopies):
        assert len(tiny.copies.copied) > before[0]
        assert len(tiny.copies.later) == before[1]
    core.close()


class Restarted:
    """Engines over one store, one after the other, and what each prompt was answered without any tier."""

    def __init__(self, tiny: Tiny, device: torch.device, folder: Path) -> None:
        self.tiny, self._device, self._folder = tiny, device, folder
        self._blocks = 1 + 7 * len(tiny.layout().groups)
        self.plain: dict[int, list[int]] = {}

    def core(self) -> EngineCore:
        return self.tiny.core(self._device, gpu=True, blocks=self._blocks, slots=2, step=32)

    def over_the_store(self, core: EngineCore, *, ram: bool = False) -> tuple[EngineCore, PrefixStore]:
        page = core.scheduler.kv.layout.page_bytes
        store = PrefixStore.open(self._folder, size_bytes=4 * MIB, page_bytes=page, model=b"tiny", beat_s=0.05)
        host = host_memory(page, self._device) if ram else None
        return with_tiers(core, self._device, self._blocks, host, store), store

    def ask(self, core: EngineCore, number: int) -> int:
        """How many tokens of the prompt were found. The answer is the one without tiers."""
        params = [SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)]
        (outputs,) = run(core, [prompt(number, 21)], params)
        told = tokens_of(outputs)
        if number not in self.plain:
            self.tiny.assert_greedy(prompt(number, 21), told)
        assert told == self.plain.setdefault(number, told), f"prompt {number}"
        return outputs[-1].cached_tokens


def ask_over_restarts(engines: Restarted, *, ram: bool = False) -> None:
    """Three engines: one that writes, and two that know the prompts by the folder alone."""
    core = engines.core()
    assert [engines.ask(core, number) for number in (1, 2)] == [0, 0]
    core, store = engines.over_the_store(core, ram=ram)
    assert [engines.ask(core, number) for number in (1, 1, 2, 2)] == [0, 20, 0, 20], "each is used for the second time"
    assert core.scheduler.kv.tiers is not None
    written = core.scheduler.kv.tiers.stored_pages[Tier.DISK]
    core.close()  # What waits to be written is.
    assert 0 < written <= store.stats().pages
    for first, then in ((1, 2), (2, 1)):
        core, store = engines.over_the_store(engines.core(), ram=ram)
        assert engines.ask(core, first) == 20, "it is in no memory of this engine"
        kv = core.scheduler.kv
        assert kv.tiers is not None
        assert kv.below_hits_total[Tier.HOST] == 0 < kv.below_hits_total[Tier.DISK]
        assert 0 < kv.tiers.loaded_pages[Tier.DISK] == store.stats().pages_read
        engines.ask(core, then)  # By now it may be sooner to compute than to fetch.
        engines.ask(core, first)
        assert not any(kv.tiers.lost_pages.values())
        core.close()


@pytest.mark.usefixtures("few_programs")
def test_what_was_written_to_the_disk_comes_back_to_another_engine(
    tiny: Tiny, device: torch.device, tmp_path: Path
) -> None:
    ask_over_restarts(Restarted(tiny, device, tmp_path / "store"))


@pytest.mark.long
@pytest.mark.usefixtures("few_programs")
def test_what_was_written_to_the_disk_comes_back_beside_a_tier_in_ram(
    tiny: Tiny, device: torch.device, tmp_path: Path
) -> None:
    ask_over_restarts(Restarted(tiny, device, tmp_path / "store"), ram=True)


@pytest.mark.long
@pytest.mark.usefixtures("few_programs")
def test_what_was_written_to_the_disk_comes_back_behind_layers(device: torch.device, tmp_path: Path) -> None:
    """Over the link of the layers, behind them."""
    tiny = Streamed(tmp_path / "model", "Llama", num_hidden_layers=4)
    ask_over_restarts(Restarted(tiny, device, tmp_path / "store"))
    if isinstance(tiny.copies, SimulatedCopies):
        assert tiny.copies.later
