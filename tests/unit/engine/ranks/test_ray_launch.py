"""A server that is to use Ray: what it says without it, and what it does when its driver ends. No Ray."""

from __future__ import annotations

import importlib.util
import socket
import sys

import pytest

from holdfast.config import EngineConfig
from holdfast.engine.ranks.ray_cluster import driver, launch
from holdfast.errors import ConfigurationError, EngineError

CONFIG = EngineConfig(tensor_parallel_size=2, distributed_executor_backend="ray", device="cpu")


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


@pytest.mark.parametrize("address", ["ray://10.0.0.1:10001", "local"])
def test_an_address_that_is_no_cluster_of_this_machine_is_refused(monkeypatch, address: str) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigurationError, match="no Ray cluster to use") as refused:
        driver.connect()
    assert refused.value.found is not None
    assert refused.value.found.startswith(f"RAY_ADDRESS is {address}")


def test_a_driver_that_ends_before_it_has_placed_anything_is_said(monkeypatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(EngineError, match="the Ray driver has ended: exit code 1"), launch.on_ray(CONFIG, "a model"):
        pass


def test_a_port_that_somebody_has_is_not_chosen() -> None:
    port = launch._free_port()
    with socket.create_server(("", port)):
        assert launch._free_port() != port
