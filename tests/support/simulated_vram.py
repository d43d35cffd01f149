"""A simulated GPU with layers, or experts, that come and go beside pages of KV, and the arbiter of its memory."""

from __future__ import annotations

import mmap
from dataclasses import replace
from types import SimpleNamespace

import torch
from aliased_memory import AliasedMemory
from fake_cuda_driver import FakeDriver, fake_kv_range
from simulated_copies import SimulatedCopies, unpinned_memory

from holdfast.execution.gpu.memory.arbiter import VramArbiter
from holdfast.execution.gpu.memory.layer_ranges import LayerRanges
from holdfast.execution.streaming.device_layers import DeviceLayers
from holdfast.footprint.streamed import beside_gpu, streamed_layers
from holdfast.kvcache import KVLayout, form_groups
from holdfast.records import VramBudget, VramGrant

CPU, PAGE = torch.device("cpu"), mmap.PAGESIZE
LAYERS, STREAMED, LEAST_BLOCKS = 20, 8, 3
OTHERS = 50 * PAGE


class Gpu:
    """Layers, pages of KV, and others that are always the same."""

    def __init__(self, ram_layers: int = 100) -> None:
        self.total = 1000 * PAGE
        by_layer = [PAGE] * LAYERS
        placed = replace(beside_gpu(streamed_layers(by_layer, STREAMED, 0), by_layer), ahead=0)
        self.size = placed.sizes[0]
        self.driver, self.kv_driver = AliasedMemory(), FakeDriver(PAGE)
        memory, most = unpinned_memory(placed.pinned_sizes), placed.pinned_bytes + ram_layers * self.size
        ranges = LayerRanges(placed.all_sizes, CPU, self.driver)
        self.layers = DeviceLayers(placed, CPU, SimulatedCopies(), memory, None, ranges, lambda: most - memory.nbytes)
        for layer in range(LAYERS):
            self.layers.arena(layer).tensor((self.size,), torch.uint8, CPU).fill_(layer)
            self.layers.divide(layer)
            self.layers.keep(layer)
        groups, places = form_groups((None,))
        layout = KVLayout(
            groups=groups, block_tokens=4, layers_per_page=places, kv_heads=1, head_dim=PAGE // 32, element_bytes=4
        )
        self.kv = fake_kv_range(layout, 2000, torch.float32, self.kv_driver)
        self.kv.resize(40)
        held: dict[str, int] = {
            "context": OTHERS, "weights": self.layers.resident_bytes, "layer_slots": self.layers.nbytes
        }  # fmt: skip
        self.budget = sum(held.values()) + self.kv.nbytes
        self.arbiter = VramArbiter(self, self.kv, self.budget, held, sum(held.values()), self.layers)  # type: ignore[arg-type]
        self.arbiter.pool_is_backed()
        self.most_own = 0

    def told_bytes(self) -> int:
        return OTHERS + sum(self.driver.handles.values()) + sum(self.kv_driver.handles.values())

    def held(self) -> SimpleNamespace:
        return SimpleNamespace(free_bytes=self.total - self.told_bytes(), own_bytes=self.told_bytes())

    def look_again(self) -> None:
        pass

    def resize_kv(self, blocks: int) -> None:
        self.kv.resize(blocks)
        self.most_own = max(self.most_own, self.told_bytes())

    def change(self, budget: int) -> VramGrant:
        return self.arbiter.change(VramBudget(budget_bytes=budget), LEAST_BLOCKS, self.resize_kv)

    def close(self) -> None:
        self.layers.close()
        self.kv.close()
        assert self.driver.handles == self.kv_driver.handles == {}


class Experts:
    """Eight of each of four layers, and two slots for those that wait. `ram`: of these, at most."""

    experts, layers, size = 8, 4, 6 * PAGE

    def __init__(self, count: int, ram: int) -> None:
        self.count, self._ram = count, ram

    @property
    def resident_counts(self) -> tuple[int, ...]:
        return tuple(self.count // self.layers + (number < self.count % self.layers) for number in range(self.layers))

    @property
    def resident_bytes(self) -> int:
        return self.count * self.size

    @property
    def nbytes(self) -> int:
        return self.bytes_with(self.count) - self.resident_bytes

    @property
    def pinned_bytes(self) -> int:
        return (self.experts * self.layers - self.count) * self.size

    @property
    def most_resident(self) -> int:
        return (self.experts - 1) * self.layers

    def bytes_with(self, count: int) -> int:
        return count * self.size + 2 * (self.experts - count // self.layers) * self.size

    def fits_ram(self, count: int) -> bool:
        return self.experts * self.layers - count <= self._ram

    def change(self, count: int) -> None:
        self.count = count


class ExpertGpu(Gpu):
    def __init__(self, count: int = 16, ram: int = 32) -> None:
        self.total, self.kv_driver = 1000 * PAGE, FakeDriver(PAGE)
        self.experts, self.most_own = Experts(count, ram), 0
        groups, places = form_groups((None,))
        layout = KVLayout(
            groups=groups, block_tokens=4, layers_per_page=places, kv_heads=1, head_dim=PAGE // 32, element_bytes=4
        )
        self.kv = fake_kv_range(layout, 2000, torch.float32, self.kv_driver)
        self.kv.resize(40)
        held = {"context": OTHERS, "weights": self.experts.resident_bytes, "expert_slots": self.experts.nbytes}
        self.budget = sum(held.values()) + self.kv.nbytes
        self.arbiter = VramArbiter(
            self,
            self.kv,
            self.budget,
            held,
            sum(held.values()),
            None,
            self.experts,
            self.change_experts,  # type: ignore[arg-type]
        )
        self.arbiter.pool_is_backed()

    def told_bytes(self) -> int:
        return OTHERS + self.experts.resident_bytes + self.experts.nbytes + sum(self.kv_driver.handles.values())

    def change_experts(self, count: int) -> None:
        self.experts.change(count)
        self.most_own = max(self.most_own, self.told_bytes())

    def close(self) -> None:
        self.kv.close()
