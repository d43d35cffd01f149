"""MLPs of streamed layers that the host computes: which ones, whether it is worth it, and that layers whose second
halves stay where they are disturb no others, whatever order a simulated GPU does things in."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from simulated_copies import QueuedCopies, SimulatedCopies, unpinned_memory

from holdfast.errors import EngineError
from holdfast.execution import native
from holdfast.execution.gpu.batch_sizes import padded
from holdfast.execution.link import contention
from holdfast.execution.streaming import expert_host, host_mlps
from holdfast.execution.streaming.copies import Piece
from holdfast.execution.streaming.device_layers import DeviceLayers
from holdfast.execution.streaming.expert_exchange import LayerExchange
from holdfast.execution.streaming.host_mlps import HostMlps, MlpOffer
from holdfast.footprint.streamed import WORTH, estimated_speedup, hosted_layers, speedup, streamed_layers
from holdfast.records import LinkUse
from holdfast.units import GIB

CPU = torch.device("cpu")
LLAMA_70B = {"attention_bytes": 78e6, "mlp_bytes": 363e6, "link_bytes_per_s": 55e9}


@pytest.fixture(autouse=True)
def short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contention, "WINDOW_S", 0.01)


def filled(layers: DeviceLayers, cuts: dict[int, int], sizes: dict[int, int]) -> None:
    """Every byte of a layer is its number, in its second half 100 more."""
    for layer, size in sizes.items():
        arena = layers.arena(layer)
        arena.tensor((cuts[layer],), torch.uint8, CPU).fill_(layer)
        layers.divide(layer)
        arena.tensor((size - cuts[layer],), torch.uint8, CPU).fill_(100 + layer)
        layers.keep(layer)


@pytest.mark.parametrize("seed", range(40))
def test_the_others_are_in_their_slots(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randint(1, 9)
    streamed = streamed_layers([rng.randint(1024, 16384) for _ in range(count)], rng.randint(1, count), 0)
    sizes = dict(zip(streamed.layers, streamed.sizes, strict=True))
    cuts = {layer: 256 * (1 + layer % 3 if seed % 2 else 1) for layer in sizes}
    copies = QueuedCopies(seed)
    layers = DeviceLayers(streamed, CPU, copies, unpinned_memory(streamed.pinned_sizes))
    filled(layers, cuts, sizes)
    looked: list[tuple[int, int]] = []

    def look(layer: int, half: int) -> None:
        place = layers.place(layer)[: sizes[layer]].split((cuts[layer], sizes[layer] - cuts[layer]))[half]
        assert place.eq(layer + 100 * half).all(), (layer, half)
        looked.append((layer, half))

    wanted = 0
    for _ in range(6):
        hosted = rng.sample(streamed.layers, rng.randint(0, len(streamed.layers)))
        layers.hosted = frozenset(hosted)
        for layer in range(count):
            layers.begin(layer)
            for half in (0, 1):
                if layer in sizes and not (half and layer in hosted):
                    copies.launch(lambda layer=layer, half=half: look(layer, half))
                    wanted += 1
                copies.run_some()
                (layers.end if half else layers.halfway)(layer)
            copies.run_some()
    copies.run_all()
    assert len(looked) == wanted
    layers.close()


def test_second_halves_that_are_not_read_are_not_copied() -> None:
    streamed = streamed_layers([4096] * 6, 6, 0)
    sizes = dict(zip(streamed.layers, streamed.sizes, strict=True))
    copies = SimulatedCopies()
    layers = DeviceLayers(streamed, CPU, copies, unpinned_memory(streamed.pinned_sizes))
    filled(layers, dict.fromkeys(sizes, 256), sizes)
    moved = []
    for hosted in ((), (1, 4)):
        layers.hosted = frozenset(hosted)
        for step in range(3):
            if step == 1:
                copies.copied.clear()
            for layer in range(6):
                layers.begin(layer)
                layers.halfway(layer)
                layers.end(layer)
        moved.append(sum(copies.copied) // 2)
    assert moved == [sum(sizes.values()), sum(sizes.values()) - 2 * (streamed.sizes[0] - 256)]
    layers.close()


def test_which_layers_the_host_has() -> None:
    assert hosted_layers(range(1, 9), 1, 9) == (2, 4, 6, 8)
    assert hosted_layers(range(1, 9), 2, 9) == (2, 3, 5, 6, 8)
    assert hosted_layers(range(1, 9), 1, 2) == (2, 6)
    assert hosted_layers(range(1, 9), 0, 9) == hosted_layers(range(1, 9), 1, 0) == ()


def test_what_a_step_gains() -> None:
    """Beside a link that takes 7 ms for an MLP: cores that take 4, 8 and 40 alone."""
    fast, even, slow = (
        [estimated_speedup(row, **LLAMA_70B, host_mlp_s=taken, tokens=1) for row in (1, 2)]
        for taken in (4e-3, 8e-3, 4e-2)
    )
    assert 1.6 < min(fast) < max(fast) < 1.8
    assert 1.4 < even[0] < 1.5
    assert max(slow) < 0.5


def test_what_a_step_gains_as_both_are_beside_each_other() -> None:
    """As on an H200's host, with what an MLP must have taken there. One token: 5.2 a second in place of 3.1. Eight:
    30.7 in place of 24.7 with two in a row, while the link copied 36 GB/s; on a day with slower cores 24.8 with one in
    a row, and 32.5 GB/s."""

    def gained(row: int, beside: float, taken_s: float) -> float:
        return speedup(row, **LLAMA_70B, beside_bytes_per_s=beside, host_mlp_s=taken_s)

    assert gained(2, 52e9, 3.9e-3) == pytest.approx(1.7, abs=0.1)
    assert gained(2, 36e9, 7.3e-3) == pytest.approx(30.7 / 24.7, abs=0.05)
    assert max(gained(row, 32.5e9, 14.7e-3) for row in (1, 2)) < WORTH
    # Copies are as slow as that only while the cores compute.
    assert gained(2, 20e9, 1e-3) > gained(2, 55e9, 1e-3) * 20 / 55
    assert gained(1, 55e9, 1e-3) == pytest.approx(2 * (78 + 363) / (2 * 78 + 363))


def offered(streamed: Sequence[int], room: int, mlp: native.ExpertLayer | None) -> MlpOffer:
    return MlpOffer(
        order=tuple(streamed),
        attention_bytes=1 << 20,
        mlp_bytes=4 << 20,
        hidden=64,
        dtype=torch.float32,
        tokens=8,
        threads=2,
        room_bytes=lambda: room,
        load=lambda layer: mlp,
    )


@pytest.fixture
def mlp() -> native.ExpertLayer:
    if not native.available():
        pytest.skip(str(native.why_not()))
    gate_up, down = (torch.zeros(rows, 4 * columns, dtype=torch.uint8) for rows, columns in ((256, 64), (64, 128)))
    return native.ExpertLayer(
        gate_up=[[native.BlockMatrix(gate_up, "F32")]],
        down=[native.BlockMatrix(down, "F32")],
        per_token=1,
        normalized=False,
        activation="silu",
    )


@pytest.fixture
def layers() -> Iterator[DeviceLayers]:
    streamed = streamed_layers([4096] * 8, 8, 0)
    sizes = dict(zip(streamed.layers, streamed.sizes, strict=True))
    made = DeviceLayers(streamed, CPU, SimulatedCopies(), unpinned_memory(streamed.pinned_sizes))
    filled(made, dict.fromkeys(sizes, 256), sizes)
    made.decisions()
    made._possible = 10e9
    yield made
    made.close()


def decided(layers: DeviceLayers, room: int, mlp: native.ExpertLayer | None) -> HostMlps:
    """As the thread decides that makes the copies."""
    hosts = HostMlps(offered(range(8), room, mlp), layers, CPU, lambda sizes, device: unpinned_memory(sizes))
    assert hosts.joined is None
    hosts.begin()
    hosts.calibrate()
    hosts.wait(30)
    return hosts


class OfOneThread(SimulatedCopies):
    """Its times are collected by whoever asks for them: of two threads one would take an event that is not over."""

    def __init__(self) -> None:
        super().__init__()
        self._owner = threading.get_ident()

    def use(self) -> LinkUse:
        assert threading.get_ident() == self._owner
        return super().use()

    def timed(self) -> tuple[float, int]:
        assert threading.get_ident() == self._owner
        return super().timed()


def use_link(monkeypatch: pytest.MonkeyPatch, layers: DeviceLayers, link: SimulatedCopies) -> None:
    monkeypatch.setattr(layers, "_copies", link)
    monkeypatch.setattr(layers, "link", link)


def test_who_decides_leaves_the_link_to_the_thread_that_launches_steps(
    layers: DeviceLayers, mlp: native.ExpertLayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_mlps, "measure_layers", lambda *given: 1e-9)
    use_link(monkeypatch, layers, OfOneThread())
    hosts = decided(layers, GIB, mlp)
    assert hosts.joined is not None
    assert layers.use().possible_bytes_per_s == 10e9
    hosts.close()


def test_as_many_as_are_worth_it_and_ram_holds(
    layers: DeviceLayers,
    mlp: native.ExpertLayer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "holdfast")
    taken_s = dict.fromkeys(host_mlps.FEW_SIZES, 1e-4) | {8: 1.0}
    monkeypatch.setattr(host_mlps, "measure_layers", lambda made, per_token, tokens, *rest: taken_s[tokens])
    hosts = decided(layers, GIB, mlp)
    assert hosts.joined is not None
    assert (tuple(hosts.joined.exchanges), hosts.joined.few_tokens) == ((1, 2, 4, 5, 7), 4)
    assert "the host computes the MLPs of 5 streamed layers in steps of up to 4 tokens" in caplog.text
    hosts.close()
    fewer = decided(layers, (9 + 48) << 20, mlp)
    assert fewer.joined is not None
    assert tuple(fewer.joined.exchanges) == (1, 4)
    whole = offered(range(8), GIB, mlp).estimated(2, 10e9, 1e-4, 1)
    for joined, share in ((hosts.joined, 1.0), (fewer.joined, 2 / 5)):
        assert f"expected {1 / (1 - share + share / whole):.2f}x as fast" in joined.reason
    fewer.close()
    for room, one, said in (
        ((5 + 48) << 20, mlp, "RAM has room for 1 MLP"),
        (GIB, None, "compiled kernels do not read them"),
    ):
        none = decided(layers, room, one)
        assert none.joined is None
        assert said in caplog.text
        none.close()
    taken_s[1] = taken_s[2] = taken_s[4] = 1.0
    decided(layers, GIB, mlp).close()
    assert "(1) they would be 0." in caplog.text


def test_a_step_of_few_tokens_leaves_second_halves_where_they_are(
    layers: DeviceLayers, mlp: native.ExpertLayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And an engine whose host does not answer says so."""
    monkeypatch.setattr(host_mlps, "measure_layers", lambda *given: 1e-9)
    monkeypatch.setattr("holdfast.execution.streaming.expert_host.PATIENCE_S", 0.01)
    hosts = decided(layers, GIB, mlp)
    assert hosts.joined is not None
    with hosts.step(64):
        assert not layers.hosted
        assert hosts.exchange(1) is None
    with hosts.step(1):
        assert layers.hosted == set(hosts.joined.exchanges)
        assert hosts.exchange(1) is hosts.joined.exchanges[1]
    assert hosts.exchange(1) is None
    hosts.close()
    with pytest.raises(EngineError, match="HF445"):
        hosts.check()


def test_a_long_step_before_one_of_few_tokens_may_take_its_time(
    layers: DeviceLayers, mlp: native.ExpertLayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All layers come over the link for it, before the host is asked for anything."""
    monkeypatch.setattr(host_mlps, "measure_layers", lambda *given: 1e-9)
    monkeypatch.setattr(expert_host, "PATIENCE_S", 0.05)
    asked, times = list[LayerExchange](), list[int]()

    def reached() -> bool:
        times.append(len(times) + 1)
        if len(times) == 3:
            for exchange in asked:
                exchange.request.copy_(exchange.step)
        return len(times) == 3

    monkeypatch.setattr(expert_host, "computed_so_far", lambda device: reached)
    hosts = decided(layers, GIB, mlp)
    assert hosts.joined is not None
    asked += hosts.joined.exchanges.values()
    with hosts.step(1):
        pass
    hosts.close()
    hosts.check()
    assert times == [1, 2, 3]


@pytest.mark.parametrize("sequences", [1, 3, 6, 20])
def test_a_step_of_all_sequences_is_one_of_few_however_it_is_padded(
    sequences: int, layers: DeviceLayers, mlp: native.ExpertLayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_mlps, "measure_layers", lambda *given: 1e-9)
    offer = replace(offered(range(8), GIB, mlp), tokens=sequences)
    hosts = HostMlps(offer, layers, CPU, lambda sizes, device: unpinned_memory(sizes))
    hosts.begin()
    hosts.calibrate()
    hosts.wait(30)
    assert hosts.joined is not None
    assert padded(sequences, 2048) <= hosts.joined.few_tokens < 2 * sequences
    hosts.close()


def test_an_mlp_in_another_format_leaves_all_to_the_gpu(
    layers: DeviceLayers,
    mlp: native.ExpertLayer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Of the last layer, say."""
    caplog.set_level("INFO", "holdfast")
    monkeypatch.setattr(host_mlps, "measure_layers", lambda *given: 1e-9)
    offer = replace(offered(range(8), GIB, mlp), load=lambda layer: None if layer == 7 else mlp)
    hosts = HostMlps(offer, layers, CPU, lambda sizes, device: unpinned_memory(sizes))
    hosts.begin()
    hosts.calibrate()
    hosts.wait(30)
    assert hosts.joined is None
    assert layers.host_bytes == 0
    assert "the GPU computes all MLPs (compiled kernels do not read them)" in caplog.text
    hosts.close()


@pytest.mark.parametrize(
    ("free", "hosted", "said"),
    [
        (0, (1, 2, 4), "12.00 MiB of RAM, which had no room for 5 of them"),
        (-1, (1, 2), "8.00 MiB of RAM, which had no room for 5 of them"),
        (-GIB, (), "the GPU computes all MLPs (RAM had no room for copies of them by then)"),
    ],
)
def test_of_ram_that_becomes_short_the_host_computes_what_it_has(
    free: int,
    hosted: tuple[int, ...],
    said: str,
    layers: DeviceLayers,
    mlp: native.ExpertLayer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """By its copies, or by others: nobody is blamed. Less than nothing is free where others took more."""
    caplog.set_level("INFO", "holdfast")
    monkeypatch.setattr(host_mlps, "measure_layers", lambda *given: 1e-9)
    loaded = list[int]()

    def load(layer: int) -> native.ExpertLayer:
        loaded.append(layer)
        return mlp

    offer = replace(offered(range(8), GIB, mlp), load=load, room_bytes=lambda: GIB if len(loaded) < 3 else free)
    monkeypatch.setattr(host_mlps, "LOADERS", 1)
    hosts = HostMlps(offer, layers, CPU, lambda sizes, device: unpinned_memory(sizes))
    hosts.begin()
    hosts.calibrate()
    hosts.wait(30)
    assert hosted == (() if hosts.joined is None else tuple(hosts.joined.exchanges))
    assert (len(loaded), layers.host_bytes) == (3, len(hosted) * offer.mlp_bytes)
    assert said in caplog.text
    assert "other processes" not in caplog.text
    with hosts.step(1):
        assert layers.hosted == set(hosted)
        for layer in hosted:
            exchange = hosts.exchange(layer)
            assert exchange is not None
            exchange.request.copy_(exchange.step)
    hosts.close()
    hosts.check()


def test_a_layer_that_came_to_stay_is_the_gpus(
    layers: DeviceLayers, mlp: native.ExpertLayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_mlps, "measure_layers", lambda *given: 1e-9)
    hosts = decided(layers, GIB, mlp)
    assert hosts.joined is not None
    assert tuple(hosts.joined.exchanges) == (1, 2, 4, 5, 7)
    for streamed, hosted in (((0, 1, 2, 3), {1, 2}), ((0, 3), set())):
        monkeypatch.setattr(layers, "_order", streamed)
        with hosts.step(1):
            assert layers.hosted == hosted
            asked = [exchange for layer in range(8) if (exchange := hosts.exchange(layer)) is not None]
            assert len(asked) == len(hosted)
            for exchange in asked:
                exchange.request.copy_(exchange.step)
    hosts.close()
    hosts.check()


def test_an_engine_that_is_closed_waits_for_no_copies(layers: DeviceLayers, mlp: native.ExpertLayer) -> None:
    begun, going_on = threading.Event(), threading.Event()

    def load(layer: int) -> native.ExpertLayer:
        begun.set()
        going_on.wait(30)
        return mlp

    offer = replace(offered(range(8), GIB, mlp), load=load)
    hosts = HostMlps(offer, layers, CPU, lambda sizes, device: unpinned_memory(sizes))
    hosts.begin()
    assert begun.wait(30)
    hosts._stopping.set()
    going_on.set()
    hosts.close()
    assert hosts.joined is None


class SharedMemory(SimulatedCopies):
    """A link, and cores that take turns with it in reading the same memory. `cores`: what they keep of their rate
    beside copies; `link`: what is left of 10 GB/s beside cores that compute for so many tokens."""

    def __init__(self, alone_s: dict[int, float], cores: float = 1.0, link: dict[int, float] | None = None) -> None:
        super().__init__()
        self._alone_s, self._cores, self._kept = alone_s, cores, link or {}
        self._computing: int | None = None
        self._busy_s, self._bytes = 0.0, 0

    def copy_pieces(self, pieces: Sequence[Piece], after: object, done: Sequence[object]) -> None:
        super().copy_pieces(pieces, after, done)  # type: ignore[arg-type]
        nbytes, kept = sum(source.nbytes for source, _ in pieces), self._kept.get(self._computing or 0, 1.0)
        self._busy_s, self._bytes = self._busy_s + nbytes / (10e9 * kept), self._bytes + nbytes

    def timed(self) -> tuple[float, int]:
        return self._busy_s, self._bytes

    def measure_layers(self, made: object, per_token: int, tokens: int, *rest: object) -> float:
        """Alone where nothing is copied meanwhile."""
        self._computing, before, ends_s = tokens, len(self.copied), time.monotonic() + 0.05
        while len(self.copied) < before + 2 and time.monotonic() < ends_s:
            time.sleep(1e-4)
        return self._alone_s[tokens] / (self._cores if len(self.copied) > before else 1.0)


EVEN = {1: 3e-4, 2: 3.2e-4, 4: 3.5e-4, 8: 4.5e-4}
"""Seconds for an MLP, which the link brings in 0.42 ms."""


@pytest.mark.parametrize(
    ("cores", "link", "hosted", "few", "said"),
    [
        (1.0, {}, 5, 8, "cores read 14/13/12/9 GB/s beside copies (14 alone for one), and the link brings 10/10/10/10"),
        # Their reading halved: copies and MLPs in a row come to more than one between two that come whole.
        (0.5, {}, 4, 4, "cores read 7/7/6/5 GB/s beside copies (14 alone for one), and the link brings 10/10/10/10"),
        # The link slower, the more they compute.
        (1.0, {1: 0.98, 2: 0.9, 4: 0.8, 8: 0.1}, 5, 4, "link brings 10/9/8/"),
        (0.2, {}, 0, 0, "read 3 GB/s beside copies (14 alone for one), and the link brings 10 beside them (10 alone)"),
    ],
)
def test_as_many_as_are_worth_it_beside_copies(
    cores: float,
    link: dict[int, float],
    hosted: int,
    few: int,
    said: str,
    layers: DeviceLayers,
    mlp: native.ExpertLayer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "holdfast")
    memory = SharedMemory(EVEN, cores, link)
    use_link(monkeypatch, layers, memory)
    monkeypatch.setattr(host_mlps, "measure_layers", memory.measure_layers)
    hosts = decided(layers, GIB, mlp)
    assert (0 if hosts.joined is None else len(hosts.joined.exchanges)) == hosted
    assert (0 if hosts.joined is None else hosts.joined.few_tokens) == few
    line = hosts.decision.line()
    value = f"MLPs of {hosted} streamed layers, in steps of up to {few} tokens" if hosted else "none"
    assert line.startswith(f"cpu_compute = {value} (measured): ")
    assert said in line
    assert said in caplog.text
    hosts.close()


def test_what_was_measured_counts_where_a_larger_step_cannot_be(
    layers: DeviceLayers, mlp: native.ExpertLayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = SharedMemory(EVEN)
    use_link(monkeypatch, layers, memory)
    monkeypatch.setattr(host_mlps, "measure_layers", memory.measure_layers)
    bring = layers.bring_more

    def fail_beside_four() -> tuple[float, int]:
        if memory._computing == 4:
            raise RuntimeError("CUDA error: simulated")
        return bring()

    monkeypatch.setattr(layers, "bring_more", fail_beside_four)
    hosts = decided(layers, GIB, mlp)
    assert hosts.joined is not None
    assert (hosts.joined.few_tokens, hosts.decision.source) == (2, "measured")
    assert "by tokens of a step (1/2)" in hosts.joined.reason
    assert "larger steps were not measured (copies failed: CUDA error: simulated)" in hosts.joined.reason
    hosts.close()


@pytest.mark.parametrize("how", ["not timed", "failed"])
def test_what_cannot_be_measured_at_once_is_estimated_as_in_plans(
    how: str, layers: DeviceLayers, mlp: native.ExpertLayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = SharedMemory(EVEN)
    use_link(monkeypatch, layers, memory)
    monkeypatch.setattr(host_mlps, "measure_layers", memory.measure_layers)
    why = "the link's copies were not timed"
    if how == "failed":
        why = "copies failed: CUDA error: simulated"

        def fail() -> tuple[float, int]:
            raise RuntimeError("CUDA error: simulated\nwith more of it")

        monkeypatch.setattr(layers, "bring_more", fail)
    else:
        monkeypatch.setattr(memory, "timed", lambda: (0.0, 0))
    hosts = decided(layers, GIB, mlp)
    assert hosts.joined is not None
    assert f"at once they could not be measured ({why}), and are taken, as in plans, to keep 80%" in hosts.joined.reason
    assert hosts.decision.source == "planner"
    found = [estimated_speedup(1, 1 << 20, 4 << 20, 10e9, taken, tokens) for tokens, taken in EVEN.items()]
    assert "/".join(f"{one:.2f}" for one in found) in hosts.joined.reason
    hosts.close()


def test_a_gpu_that_has_failed_for_good_is_no_matter_of_the_hosts(
    layers: DeviceLayers, mlp: native.ExpertLayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: object) -> tuple[float, int]:
        raise RuntimeError("CUDA error: simulated")

    monkeypatch.setattr(host_mlps, "measure_layers", lambda *given: 1e-4)
    monkeypatch.setattr(layers, "bring_more", fail)
    monkeypatch.setattr(layers.link, "settle", fail)
    hosts = HostMlps(offered(range(8), GIB, mlp), layers, CPU, lambda sizes, device: unpinned_memory(sizes))
    hosts.begin()
    with pytest.raises(RuntimeError, match="simulated"):
        hosts.calibrate()
    hosts.close()
    assert not hosts._thread.is_alive()


def test_a_start_does_not_wait_for_mlps_for_long(
    layers: DeviceLayers, mlp: native.ExpertLayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a slow disk, say."""
    monkeypatch.setattr(host_mlps, "measure_layers", lambda *given: 1e-4)
    monkeypatch.setattr(host_mlps, "LOADED_PATIENCE_S", 0.02)
    going_on = threading.Event()

    def load(layer: int) -> native.ExpertLayer:
        going_on.wait(30)
        return mlp

    offer = replace(offered(range(8), GIB, mlp), load=load)
    hosts = HostMlps(offer, layers, CPU, lambda sizes, device: unpinned_memory(sizes))
    hosts.begin()
    hosts.calibrate()
    assert "nothing was there to be timed within 0.02 s), but estimated as in plans" in hosts.decision.line()
    going_on.set()
    hosts.wait(30)
    assert hosts.joined is not None
    assert "they could not be measured (nothing was there to be timed" in hosts.joined.reason
    hosts.close()


def test_a_start_that_waits_for_mlps_is_heard(
    layers: DeviceLayers, mlp: native.ExpertLayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short --engine-hang-timeout would end it else."""
    monkeypatch.setattr(host_mlps, "measure_layers", lambda *given: 1e-4)
    monkeypatch.setattr(contention, "BEAT_S", 0.001)
    heard, going_on = list[int](), threading.Event()

    def beat() -> None:
        heard.append(1)
        if len(heard) == 3:
            going_on.set()

    def load(layer: int) -> native.ExpertLayer:
        assert going_on.wait(30)
        return mlp

    hosts = HostMlps(
        replace(offered(range(8), GIB, mlp), load=load), layers, CPU, lambda sizes, device: unpinned_memory(sizes)
    )
    hosts.begin()
    hosts.calibrate(beat)
    hosts.wait(30)
    assert len(heard) > 3  # While copies are timed, too.
    assert hosts.joined is not None
    hosts.close()


def test_ctrl_c_while_cores_are_timed_leaves_nothing_running(
    layers: DeviceLayers, mlp: native.ExpertLayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_mlps, "measure_layers", lambda *given: 1e-4)
    calls = list[int]()

    def bring() -> tuple[float, int]:
        calls.append(1)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return 0.0, 0

    monkeypatch.setattr(layers, "bring_more", bring)
    hosts = HostMlps(offered(range(8), GIB, mlp), layers, CPU, lambda sizes, device: unpinned_memory(sizes))
    hosts.begin()
    with pytest.raises(KeyboardInterrupt):
        hosts.calibrate()
    hosts.close()
    assert not hosts._thread.is_alive()


def test_a_start_that_fails_before_cores_are_timed_leaves_nothing_running(
    layers: DeviceLayers, mlp: native.ExpertLayer
) -> None:
    hosts = HostMlps(offered(range(8), GIB, mlp), layers, CPU, lambda sizes, device: unpinned_memory(sizes))
    hosts.begin()
    hosts.close()
    assert not hosts._thread.is_alive()
    assert hosts.joined is None


@pytest.mark.parametrize("seed", range(10))
def test_layers_that_came_to_be_measured_are_right_in_the_next_step(seed: int) -> None:
    rng = random.Random(seed)
    streamed = streamed_layers([rng.randint(1024, 16384) for _ in range(6)], rng.randint(2, 6), 0)
    sizes = dict(zip(streamed.layers, streamed.sizes, strict=True))
    copies = QueuedCopies(seed)
    layers = DeviceLayers(streamed, CPU, copies, unpinned_memory(streamed.pinned_sizes))
    filled(layers, dict.fromkeys(sizes, 256), sizes)
    looked: list[tuple[int, int]] = []

    def look(layer: int, half: int) -> None:
        place = layers.place(layer)[: sizes[layer]].split((256, sizes[layer] - 256))[half]
        assert place.eq(layer + 100 * half).all(), (layer, half)
        looked.append((layer, half))

    for _ in range(rng.randint(0, 2)):
        layers.bring_more()
    try:
        copies.wait, kept = lambda mark: (_ for _ in ()).throw(KeyboardInterrupt), copies.wait  # type: ignore[method-assign,assignment]
        layers.bring_more()
    except KeyboardInterrupt:
        copies.wait = kept  # type: ignore[method-assign]
    for _ in range(2):
        for layer in range(6):
            layers.begin(layer)
            for half in (0, 1):
                if layer in sizes:
                    copies.launch(lambda layer=layer, half=half: look(layer, half))
                copies.run_some()
                (layers.end if half else layers.halfway)(layer)
    copies.run_all()
    assert len(looked) == 4 * len(sizes)
    layers.close()
