"""A KV pool of a GPU that is resized at random while answers go on: the same tokens, whatever was moved or had to wait.

On a GPU as it is used, graphs included; elsewhere kernels run in the interpreter, over a fake driver. Pages that are
gone read as NaN.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from fake_cuda_driver import POISON, FakeDriver, fake_kv_range
from tiny_gpu import Tiny, prompt, run, tokens_of

from holdfast.engine.core.loop import EngineCore
from holdfast.execution.batch import RunnerLimits
from holdfast.execution.gpu import slots
from holdfast.execution.gpu.memory import virtual_memory
from holdfast.execution.gpu.memory.kv_range import KVRange
from holdfast.kvcache import KVLayout, form_groups
from holdfast.records import BlockCopy, EngineOutput, SamplingParams

MOST = 90
GRANULE = 1 << 11


@pytest.fixture
def pool(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the range of a runner one that grows and shrinks."""
    drivers = list[FakeDriver]()

    def reserve(self: Any, most_blocks: int) -> None:
        if device.type == "cuda":
            self._kv = KVRange(self.layout, MOST, self.device, self.kv_dtype)
            return
        drivers.append(FakeDriver(GRANULE))
        self._kv = fake_kv_range(self.layout, MOST, self.kv_dtype, drivers[-1])

    monkeypatch.setattr("holdfast.execution.gpu.runner.GpuRunner.reserve_kv", reserve)
    monkeypatch.setattr(virtual_memory, "PIECE_BYTES", 4 * GRANULE if device.type == "cpu" else 4 << 20)
    yield
    for driver in drivers:
        assert driver.handles == driver.mapped == {}


def resized_at_random(core: EngineCore, sizes: list[int]) -> None:
    """Between steps, also while one is in flight."""
    dice, step = random.Random(7), core.step
    dice.shuffle(core.scheduler.kv._pool._free)

    def then() -> list[EngineOutput]:
        if dice.random() < 0.5:
            least = core.scheduler.least_blocks
            sizes.append(dice.randint(least, MOST) if len(sizes) % 3 else least)
            core.resize_kv(sizes[-1])
            dice.shuffle(core.scheduler.kv._pool._free)  # Else pages that go are hardly ever used.
            pool = core.runner.kv  # type: ignore[attr-defined]
            assert pool.blocks == core.scheduler.kv.blocks_total + 1 == sizes[-1]
            # Those too that are gone by the books, and share a piece with others.
            pool.pages.view(torch.uint8)[sizes[-1] : pool.nbytes // pool.layout.page_bytes] = POISON
        return step()

    core.step = then  # type: ignore[method-assign]


@pytest.mark.usefixtures("few_programs", "pool")
@pytest.mark.parametrize("tiny", ["llama", pytest.param("window", marks=pytest.mark.long)], indirect=True)
@pytest.mark.parametrize(
    "kv_dtype",
    [torch.float32, pytest.param(torch.float8_e4m3fn, marks=pytest.mark.long)],
    ids=["float32", "float8"],
)
def test_tokens_are_the_same_while_pages_come_and_go(tiny: Tiny, device: torch.device, kv_dtype: torch.dtype) -> None:
    many = device.type == "cuda"
    if not many and kv_dtype != torch.float32 and tiny.spec.layers[0].window is not None:
        pytest.skip("the interpreter takes its time, and has both by themselves")
    lengths = [5 + 11 * number % 40 for number in range(32)] if many else [22, 9, 3]
    prompts = [prompt(number, length) for number, length in enumerate(lengths)]
    params = [
        SamplingParams(temperature=0.7, seed=number, top_k=5, max_tokens=6 + number, ignore_eos=True)
        for number in range(len(prompts))
    ]
    settings: dict[str, Any] = {"gpu": True, "blocks": MOST, "slots": 32 if many else 3, "step": 64 if many else 16}
    plain = tiny.core(device, kv_dtype=kv_dtype, **settings)
    expected = [tokens_of(outputs) for outputs in run(plain, prompts, params)]
    plain.close()
    core, sizes = tiny.core(device, kv_dtype=kv_dtype, **settings), list[int]()
    resized_at_random(core, sizes)
    assert [tokens_of(outputs) for outputs in run(core, prompts, params)] == expected
    assert core.scheduler.least_blocks in sizes
    print(f"{len(sizes)} sizes, {core.stats().preemptions_total} preemptions")
    core.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("at_once", [2, 16])
def test_pages_are_moved_whole_and_no_other_is_touched(
    at_once: int, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In as many launches as it takes, and with no memory but what was there before: there may be none."""
    monkeypatch.setattr(slots, "UPDATE_WORDS", at_once)
    groups, places = form_groups((None,))
    layout = KVLayout(groups=groups, block_tokens=4, layers_per_page=places, kv_heads=2, head_dim=36, element_bytes=4)
    limits = RunnerLimits(max_num_seqs=2, max_num_batched_tokens=16, max_model_len=32)
    books, launches = slots.DeviceSlots(layout, limits, device), list[int]()

    def watched(pages: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
        held = books._updates.arrived.untyped_storage().data_ptr()
        assert {one.untyped_storage().data_ptr() for one in (sources, targets)} == {held}
        launches.append(len(sources))
        move_device_pages(pages, sources, targets)

    move_device_pages = slots.move_device_pages
    monkeypatch.setattr(slots, "move_device_pages", watched)
    bits = torch.randint(0, 256, (40, 3, 2, 4, 2, 36 * dtype.itemsize), dtype=torch.uint8, device=device)
    pages, before = bits.view(dtype), bits.clone()
    moved = {39: 2, 17: 30, 21: 1}
    books.move_pages(pages, [BlockCopy(0, 0, source, 0, target, True) for source, target in moved.items()])
    books.load_mover(pages)
    assert launches == ([2, 1, 1] if at_once == 2 else [3, 1])
    for page in range(40):
        source = next((source for source, target in moved.items() if target == page), page)
        assert torch.equal(bits[page], before[source]), page
