"""The host beside a GPU, when something goes wrong: nobody waits for it, and it reads nothing that is written over."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator

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
