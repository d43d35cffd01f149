"""A simulated GPU with layers, or experts, that come and go beside pages of KV, and the arbiter of its memory."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import replace

import torch
from aliased_memory import AliasedMemory
from fake_cuda_driver import FakeDriver, fake_kv_range
from simulated_copies import SimulatedCopies, unpinned_memory

from holdfast.execution.gpu.graphs.graphs_room import GraphsRoom
from holdfast.execution.gpu.memory.accounting import GpuHeld
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
    """Layers, pages of KV, and others that are always the same. `graphs_bytes`: room of graphs that steps are captured
    in while all layers stay; the first takes two fifths of it, the others a page each."""

    tells = True
    """The driver tells what this process holds."""
    captured_bytes = 0
    unaccounted_bytes = 0
    """That no share has."""
    graphs_kept_bytes = 0
    """By the driver, of those that were closed."""

    def __init__(self, ram_layers: int = 100, graphs_bytes: int = 0) -> None:
        self.total, self.first_graph_bytes = 1000 * PAGE, 2 * graphs_bytes // 5
        self.room = GraphsRoom(self, graphs_bytes // 2, graphs_bytes, PAGE)
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
        self.arbiter = VramArbiter(
            self,
            self.kv,
            self.budget,
            held,
            sum(held.values()),
            self.layers,
            graphs=self.room if graphs_bytes else None,
            close_graphs=self.close_graphs,
        )
        self.change_layers, self.layers.change = self.layers.change, self.watched_change  # type: ignore[method-assign]
        self.arbiter.pool_is_backed()
        self.most_own = 0

    def told_bytes(self) -> int | None:
        return self.held_bytes() if self.tells else None

    def held_bytes(self) -> int:
        handles = (*self.driver.handles.values(), *self.kv_driver.handles.values())
        return OTHERS + self.captured_bytes + self.unaccounted_bytes + sum(handles)

    def kept_by_torch(self) -> int:
        return 0

    def close_graphs(self) -> None:
        if not self.room.any_measured:
            return
        with self.room.closed():
            self.unaccounted_bytes += min(self.captured_bytes, self.graphs_kept_bytes)
            self.captured_bytes = 0

    def watched_change(self, streamed: Sequence[int]) -> None:
        assert not self.captured_bytes, "no layer goes from under a graph"
        self.change_layers(streamed)

    def step(self) -> None:
        """All layers are themselves in it; it is captured where it may be."""
        if self.room.nbytes and not self.layers.comes and self.room.may_capture():
            assert not self.layers.streamed
            with self.room.counted():
                self.captured_bytes += PAGE if self.captured_bytes else self.first_graph_bytes
        for layer in range(LAYERS):
            self.layers.begin(layer)
            assert self.layers.place(layer)[:PAGE].eq(layer).all()
            self.layers.halfway(layer)
            self.layers.end(layer)
        self.most_own = max(self.most_own, self.held_bytes())
        if self.room.exceeded:
            self.close_graphs()

    def held(self) -> GpuHeld:
        return GpuHeld(self.held_bytes(), self.total - self.held_bytes(), self.total)

    def look_again(self) -> None:
        pass

    def resize_kv(self, blocks: int) -> None:
        self.kv.resize(blocks)
        self.most_own = max(self.most_own, self.held_bytes())

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

    def held_bytes(self) -> int:
        return OTHERS + self.experts.resident_bytes + self.experts.nbytes + sum(self.kv_driver.handles.values())

    def change_experts(self, count: int) -> None:
        self.experts.change(count)
        self.most_own = max(self.most_own, self.held_bytes())

    def close(self) -> None:
        self.kv.close()
