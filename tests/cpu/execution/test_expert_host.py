"""The host beside a GPU, when something goes wrong: nobody waits for it, and it reads nothing that is written over."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from ctrl_c import ctrl_c
from deadlines import PATIENCE_S
from simulated_copies import unpinned_memory

from holdfast.errors import EngineError
from holdfast.execution import native
from holdfast.execution.streaming import expert_host
from holdfast.execution.streaming.expert_host import ExpertHost
from holdfast.footprint.experts import ExchangeLayout

LAYERS, HIDDEN, INNER = 3, 64, 64


def made() -> ExpertHost:
    if not native.available():
        pytest.skip(str(native.why_not()))
    gate_up, down = (torch.zeros(rows, 4 * HIDDEN, dtype=torch.uint8) for rows in (2 * INNER, HIDDEN))
    mlp = native.ExpertLayer(
        gate_up=[[native.BlockMatrix(gate_up, "F32")]],
        down=[native.BlockMatrix(down, "F32")],
        per_token=1,
        normalized=False,
        activation="silu",
    )
    layout = ExchangeLayout(LAYERS, 1, 1, HIDDEN, 4)
    return ExpertHost([mlp] * LAYERS, layout, unpinned_memory([4096]), torch.float32, torch.device("cpu"), 1)


@pytest.fixture
def host() -> Iterator[ExpertHost]:
    host = made()
    yield host
    host.close()


def replies(host: ExpertHost) -> list[int]:
    return [int(exchange.reply) for exchange in host.exchanges]


def test_a_step_that_was_given_up_is_over_before_the_next(host: ExpertHost, monkeypatch: pytest.MonkeyPatch) -> None:
    serve = native.HostExperts.serve

    def slowly(*given: object) -> object:
        time.sleep(0.1)
        return serve(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(native.HostExperts, "serve", slowly)
    with pytest.raises(KeyError), host.step(1):
        raise KeyError
    assert replies(host) == [1] * LAYERS
    host.check()


def test_a_gpu_waits_for_no_host_that_failed(host: ExpertHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a step that was launched after it."""

    def fail(*given: object) -> object:
        raise EngineError("no scratch memory")

    monkeypatch.setattr(native.HostExperts, "serve", fail)
    for number in (1, 2):
        with host.step(1):
            pass
        while replies(host) != [number] * LAYERS:  # As the GPU waits for it.
            time.sleep(0.001)
        with pytest.raises(EngineError, match="no scratch memory"):
            host.check()


def test_ctrl_c_before_any_line_leaves_nobody_waiting(host: ExpertHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the host for a step that is not launched, nor the next step for the host."""
    monkeypatch.setattr(expert_host, "PATIENCE_S", 0.3)

    def compute() -> None:
        """As the GPU does, a layer after the other."""
        with host.step(1):
            for exchange in host.exchanges:
                exchange.request.copy_(exchange.step)
                deadline_s = time.monotonic() + PATIENCE_S
                while int(exchange.reply) != int(exchange.step) and time.monotonic() < deadline_s:
                    time.sleep(0.001)

    with ctrl_c(expert_host) as lines:
        compute()
    assert lines.count > 8
    for at in range(1, lines.count + 1):
        with ctrl_c(expert_host, at):
            compute()
        compute()
        host.check()
        assert replies(host) == [int(host.exchanges[0].step)] * LAYERS


def looked_at(monkeypatch: pytest.MonkeyPatch, reached: Callable[[int], bool]) -> list[int]:
    """A device that has come to the step, or not yet, when it is asked for the first time, the second, ...; patience
    has ended between two of them. Returns the times it was asked so far."""
    times = list[int]()

    def look() -> bool:
        times.append(len(times) + 1)
        return reached(times[-1])

    monkeypatch.setattr(expert_host, "PATIENCE_S", 0.05)
    monkeypatch.setattr(expert_host, "computed_so_far", lambda device: look)
    return times


def launched(host: ExpertHost) -> None:
    with host.step(1):
        pass
    while host._answered != host._number:
        time.sleep(0.001)


def test_the_gpu_may_compute_other_steps_for_longer_than_the_host_is_patient(
    host: ExpertHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long prompt, over a slow link."""

    def reached(time: int) -> bool:
        if time == 4:
            for exchange in host.exchanges:
                exchange.request.fill_(1)
        return time == 4

    times = looked_at(monkeypatch, reached)
    launched(host)
    host.check()
    assert (replies(host), times) == ([1] * LAYERS, [1, 2, 3, 4])


def test_a_gpu_that_has_come_to_a_step_and_does_not_ask_is_not_waited_for(
    host: ExpertHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = looked_at(monkeypatch, lambda time: time == 3)
    launched(host)
    with pytest.raises(EngineError, match="HF445"):
        host.check()
    assert times == [1, 2, 3]


def test_a_gpu_that_stops_in_the_middle_of_a_step_is_not_waited_for(
    host: ExpertHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is what it asked for computed twice."""
    times = looked_at(monkeypatch, lambda time: False)
    host.exchanges[0].request.fill_(1)
    launched(host)
    with pytest.raises(EngineError, match="could not compute layer 1 of those"):
        host.check()
    assert times == [1]


def test_layers_that_are_not_asked_for_are_left_out(host: ExpertHost) -> None:
    for number, layers in ((1, (0, 2)), (2, None), (3, (1,))):
        with host.step(1, layers):
            for layer in range(LAYERS) if layers is None else layers:
                host.exchanges[layer].request.fill_(number)
                while int(host.exchanges[layer].reply) != number:
                    time.sleep(0.001)
    assert replies(host) == [2, 3, 2]
    assert host.pairs == 6


def test_nothing_is_kept_of_one_that_nobody_has() -> None:
    """As after a start that failed and is tried again."""
    host = made()
    thread, kept = host._thread, weakref.ref(host)
    with host.step(1):
        for exchange in host.exchanges:
            exchange.request.fill_(1)
            while int(exchange.reply) != 1:
                time.sleep(0.001)
    del host, exchange
    gc.collect()
    thread.join(30)
    assert kept() is None
    assert not thread.is_alive()
