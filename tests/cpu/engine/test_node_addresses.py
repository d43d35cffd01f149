"""Addresses of nodes: IPv6 with and without brackets, and names by which other machines would not find the head."""

from __future__ import annotations

import logging
import socket
import threading

import msgspec
import pytest
import torch
from node_processes import SECRET

from holdfast.config import EngineConfig
from holdfast.config.setting import Origin, build
from holdfast.engine.ranks.nodes import addresses
from holdfast.engine.ranks.nodes.hub import NodeHub
from holdfast.engine.ranks.nodes.join import join_head
from holdfast.engine.ranks.nodes.messages import NodeReport
from holdfast.errors import ConfigurationError, EngineError
from holdfast.execution.parallel.sockets.gloo import GlooCollectives, open_store
from holdfast.execution.parallel.sockets.key_proof import KEY_BYTES
from holdfast.execution.parallel.sockets.stage_lines import open_lines

pytestmark = pytest.mark.usefixtures("forked_starts")

SOON_S = 10.0
REPORT = NodeReport(
    node=0, nodes=2, tensor_parallel_size=2, pipeline_parallel_size=1, version="1", checkpoint={"config": "abc"},
    host="::1", name="here", pid=1, cores=2, total_bytes=1, free_bytes=1, kernels=True,
)  # fmt: skip


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")


@needs_ipv6
@pytest.mark.parametrize("written", ["::1", "[::1]"])
def test_nodes_join_over_ipv6(written: str) -> None:
    def settings(**changed) -> EngineConfig:
        given = {"master_addr": written, "tensor_parallel_size": 2, "nnodes": 2, "node_secret": SECRET, "device": "cpu"}
        return build(EngineConfig, given | changed, refused={}, origin=lambda name: Origin(str))

    hub = NodeHub(settings().master_addr, 0, SECRET, REPORT, 1, 2)
    config = settings(node_addr=written, node_rank=1, master_port=hub.port, node_timeout=SOON_S)
    wire = join_head(config, lambda: msgspec.structs.replace(REPORT, node=1))
    hub.await_nodes(SOON_S, lambda done, total: None)
    assert hub.reports[1].host == "::1"
    wire.close()
    hub.close(again=False)


@needs_ipv6
def test_ranks_find_one_another_and_exchange_numbers_over_ipv6() -> None:
    first = open_store(None, 2, "::1")
    stores = [first, open_store(first.port, 2, "::1")]
    sums = [torch.ones(3), torch.full((3,), 2.0)]
    handed = torch.arange(4.0)
    taken = torch.zeros(4)

    def meet(rank: int) -> None:
        sources, targets = open_lines(
            stores[rank],
            rank,
            [0] * rank,
            [1] * (1 - rank),
            host="::1",
            key=b"k" * KEY_BYTES,
            watch=lambda waited: None,
        )
        GlooCollectives(stores[rank], rank, 2, SOON_S, "::1").all_reduce(sums[rank])
        if rank == 0:
            targets[1].put(handed)
        else:
            sources[0].take(taken)
            sources[0].close()

    threads = [threading.Thread(target=meet, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * SOON_S)
    assert [one.tolist() for one in sums] == [[3.0] * 3] * 2
    assert taken.tolist() == handed.tolist()


@pytest.fixture
def debian(monkeypatch) -> None:
    """A machine whose name is itself, as Debian's installer writes it into /etc/hosts."""
    found = socket.getaddrinfo

    def look_up(name, *given, **more):
        return found("127.0.1.1" if name == "big-machine" else name, *given, **more)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)


@pytest.mark.usefixtures("debian")
def test_a_name_that_only_this_machine_has_is_refused_with_an_address_that_others_reach(monkeypatch) -> None:
    monkeypatch.setattr(addresses, "outgoing_address", lambda: "10.0.0.5")
    with pytest.raises(ConfigurationError, match=r"big-machine is 127\.0\.1\.1 on this machine, which no") as refused:
        NodeHub("big-machine", 0, SECRET, REPORT, 1, 2)
    assert refused.value.code == "HF139"
    assert refused.value.fix is not None
    assert refused.value.fix.startswith("--master-addr 10.0.0.5 on all nodes")
    assert "/etc/hosts" in refused.value.fix


@pytest.mark.parametrize("name", ["127.0.0.1", "127.0.1.1", "localhost"])
def test_an_address_that_is_written_as_one_is_taken_as_it_is(name: str) -> None:
    """Nodes of one machine, to try it."""
    NodeHub(name, 0, SECRET, REPORT, 1, 2).close(again=False)


@pytest.mark.usefixtures("debian")
def test_a_place_is_told_with_the_address_of_a_name() -> None:
    assert addresses.named_place("big-machine", 29501) == "big-machine (127.0.1.1) port 29501"
    assert addresses.named_place("::1", 29501) == "::1 port 29501"
    assert addresses.named_place("no-such-machine.invalid", 1) == "no-such-machine.invalid port 1"


def test_a_name_that_is_unknown_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"cannot listen for other nodes at no-such-machine\.invalid"):
        NodeHub("no-such-machine.invalid", 0, SECRET, REPORT, 1, 2)


def test_who_waits_says_at_once_for_whom_and_where(caplog) -> None:
    """Not only that it waits: an address that is mistyped is seen there."""
    caplog.set_level(logging.INFO, logger="holdfast")
    hub = NodeHub("127.0.0.1", 0, SECRET, REPORT, 1, 2)
    with pytest.raises(EngineError, match="has not joined") as missing:
        hub.await_nodes(0.3, lambda done, total: None)
    port = hub.port
    hub.close(again=False)
    assert f"waiting for node 1 (rank 1) at 127.0.0.1 port {port}" in caplog.messages
    assert missing.value.found == f"1 of them at 127.0.0.1 port {port}"
    config = EngineConfig(
        tensor_parallel_size=2, nnodes=2, node_rank=1, node_secret=SECRET, device="cpu", master_addr="localhost",
        master_port=port, node_timeout=1.0,
    )  # fmt: skip
    with pytest.raises(EngineError, match=r"has not reached the head at localhost \(.*1\) port"):
        join_head(config, lambda: REPORT)
    assert caplog.messages[-1].startswith("looking for the head at localhost (")
