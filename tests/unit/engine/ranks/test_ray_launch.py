"""A server that is to use Ray: what it says without it, and what it does when its driver ends. No Ray."""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
import time
from types import ModuleType, SimpleNamespace

import pytest
from free_ports import free_port

import holdfast
from holdfast.config import EngineConfig
from holdfast.engine.ranks.ray_cluster import address, driver, launch, messages
from holdfast.engine.startup.select_device import settle_device
from holdfast.errors import ConfigurationError, EngineError
from holdfast.hardware.nvidia import NvidiaGpu, NvidiaMachine
from holdfast.hardware.torch_build import TorchBuild

CONFIG = EngineConfig(tensor_parallel_size=2, distributed_executor_backend="ray", device="cpu")
SOON_S = 10.0


def test_without_ray_the_command_that_installs_it_is_said(monkeypatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ray" else found(name))
    with pytest.raises(ConfigurationError, match="Ray is not installed") as refused, launch.on_ray(CONFIG, "a model"):
        pass
    assert (refused.value.code, refused.value.fix) == ("HF154", "pip install 'holdfast[ray]'")


def test_settings_that_do_not_ask_for_ray_stay_as_they_are() -> None:
    config = EngineConfig(tensor_parallel_size=2, device="cpu")
    with launch.on_ray(config, "a model") as settled:
        assert settled is config
    assert launch.driver_bytes(config) == 0
    assert "ray" not in sys.modules


@pytest.mark.parametrize("named", ["ray://10.0.0.1:10001", "local"])
def test_an_address_that_is_no_cluster_of_this_machine_is_refused(monkeypatch, named: str) -> None:
    monkeypatch.setenv("RAY_ADDRESS", named)
    with pytest.raises(ConfigurationError, match="no Ray cluster to use") as refused:
        driver.connect()
    assert refused.value.found is not None
    assert refused.value.found.startswith(f"RAY_ADDRESS is {named}")


def refused_address() -> ConfigurationError:
    """By an address that is asked before Ray is, which would wait for minutes."""
    began_s = time.monotonic()
    with pytest.raises(ConfigurationError, match="no Ray cluster to use") as refused:
        driver.connect()
    assert time.monotonic() - began_s < SOON_S
    assert refused.value.code == "HF154"
    return refused.value


def test_an_address_where_nobody_answers_is_refused_soon(monkeypatch) -> None:
    named = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv("RAY_ADDRESS", named)
    refused = refused_address()
    assert f"RAY_ADDRESS is {named}, where nobody answers" in (refused.found or "")
    assert f"ray start --address={named} on this machine" in (refused.fix or "")


def test_an_address_that_takes_no_connection_is_refused_soon(monkeypatch) -> None:
    """A machine that is gone, or a firewall: neither yes nor no."""
    monkeypatch.setattr(address, "ANSWERS_S", 0.3)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        place = listener.getsockname()
        with socket.create_connection(place):  # Which nobody takes: there is no room for another.
            monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{place[1]}")
            assert "nobody within 0.3 s" in (refused_address().found or "")


@pytest.mark.parametrize("named", ["head", "head:", ":6379", "head:port"])
def test_an_address_without_a_port_is_refused(monkeypatch, named: str) -> None:
    monkeypatch.setenv("RAY_ADDRESS", named)
    assert refused_address().found == f"RAY_ADDRESS is {named}, which is not HOST:PORT"


def test_a_cluster_that_this_machine_was_a_node_of_and_is_gone_is_refused_soon(monkeypatch) -> None:
    last = f"127.0.0.1:{free_port()}"
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    services = SimpleNamespace(canonicalize_bootstrap_address_or_die=lambda named: last)
    monkeypatch.setitem(sys.modules, "ray._private.services", services)
    for parent in ("ray", "ray._private"):
        monkeypatch.setitem(sys.modules, parent, SimpleNamespace())
    assert f"was at {last}, where nobody answers" in (refused_address().found or "")


@pytest.mark.parametrize(
    ("module", "name", "use"),
    [
        ("ray._private.services", "canonicalize_bootstrap_address_or_die", address.cluster_address),
        ("ray._private.state", "available_resources_per_node", driver.cluster_nodes),
    ],
)
@pytest.mark.parametrize("gone", ["module", "name"])
def test_a_ray_without_what_is_used_of_it_is_refused(monkeypatch, module: str, name: str, use, gone: str) -> None:
    """None of its versions promises these."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for parent in ("ray", "ray._private"):
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    monkeypatch.setitem(sys.modules, module, None if gone == "module" else ModuleType(module))
    with pytest.raises(ConfigurationError, match=f"this version of Ray has no {module}.{name}") as refused:
        use()
    assert refused.value.code == "HF154"
    assert (refused.value.found or "").startswith("ray ")
    assert "pip install 'ray==" in (refused.value.fix or "")


def test_a_driver_has_time_to_say_why_nothing_was_placed() -> None:
    """Also where all that it waits for, each for itself and one after the other, takes its whole time."""
    waits_s = launch.CONNECTED_S + driver.RELEASED_S + driver.RESERVED_S + driver.HELLO_S
    assert waits_s + 30.0 <= launch.PLACED_S


def test_agents_are_awaited_together(monkeypatch) -> None:
    """They start at the same time: each more would take longer than the server waits for all."""
    limits, now_s = list[float](), [100.0]

    def get(hello: object, timeout: float) -> dict[str, str]:
        limits.append(timeout)
        now_s[0] += 45.0
        return {"version": holdfast.__version__, "name": "big-machine", "python": "python"}

    ray = SimpleNamespace(get=get, exceptions=SimpleNamespace(RayError=RuntimeError))
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(driver.time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(
        driver._Agent, "__init__", lambda self, group, node, *rest: vars(self).update(_node=node, _hello=0)
    )
    monkeypatch.setattr(driver._Agent, "run", lambda self: None)
    one = driver.RayDriver.__new__(driver.RayDriver)
    one._group = one._asked = None
    one._start_agents(SimpleNamespace(nodes=4), None)
    assert limits == [60.0, 15.0, 0.0]


def test_a_driver_that_is_not_let_into_a_cluster_is_ended_soon(monkeypatch, tmp_path) -> None:
    """What answers is no cluster, or none that this machine is a node of: Ray would try on."""
    mute = tmp_path / "mute"
    mute.write_text("#!/bin/sh\nexec sleep 600\n")
    mute.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(mute))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(launch, "CONNECTED_S", 0.5)
    began_s = time.monotonic()
    with pytest.raises(ConfigurationError, match="no Ray cluster to use") as refused, launch.on_ray(CONFIG, "a model"):
        pass
    assert time.monotonic() - began_s < SOON_S
    assert refused.value.code == "HF154"
    assert refused.value.found is not None
    assert refused.value.found.endswith("has not let this machine in within 0.5 s")


def test_a_driver_that_ends_before_it_has_placed_anything_is_said(monkeypatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(EngineError, match="the Ray driver has ended: exit code 1"), launch.on_ray(CONFIG, "a model"):
        pass


def test_a_port_that_somebody_has_is_not_chosen() -> None:
    port = launch._free_port()
    with socket.create_server(("", port)):
        assert launch._free_port() != port


def test_gpus_that_ray_has_chosen_are_those_that_are_visible_until_the_end(monkeypatch) -> None:
    """To engine processes that are started meanwhile; on another node Ray shows them to the agent itself."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    nodes = launch.RayNodes.__new__(launch.RayNodes)
    monkeypatch.setattr(launch.RayNodes, "_run", lambda self: None)
    nodes.__init__(EngineConfig(tensor_parallel_size=2, distributed_executor_backend="ray", device="cuda"), "a model")
    assert nodes._asked().kind == "GPU"
    nodes._hear(messages.Placed(nodes=1, address="10.0.0.1", amount=2, names=["a"], gpus=["3", "1"]))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3,1"
    nodes.close()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"


def test_how_many_gpus_this_node_has_is_no_reason_to_refuse_what_ray_places() -> None:
    gpu = NvidiaGpu(index=0, uuid="GPU-0", name="one", total_bytes=1, free_bytes=1, capability=(9, 0))
    here, build = NvidiaMachine(gpus=(gpu,), cuda=(13, 0)), TorchBuild("2.11", "13.0")
    config = EngineConfig(pipeline_parallel_size=2, distributed_executor_backend="ray")
    assert settle_device(config, here=here, build=build).device == "cuda"
