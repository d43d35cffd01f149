"""Logs of one engine on several machines that have not found one another, or do not go together."""

from __future__ import annotations

import errno
import os

import pytest
from node_lines import NodeLines, node_lines

from holdfast.doctor import diagnose_lines
from holdfast.doctor.findings import Finding
from holdfast.engine.ranks.nodes.hub import other_secret

BEGIN = ["2026-11-18 14:15:10 INFO holdfast: holdfast 0.1.0"]
COMMAND = "holdfast serve m --device cpu -pp 2 --nnodes 2 --node-rank {} --master-addr 10.0.0.5"
RAN = "2026-11-18 14:15:10 INFO holdfast: command: {}"
NODE = [
    *BEGIN,
    RAN.format(COMMAND.format(1) + " --headless"),
    "2026-11-18 14:15:13 INFO holdfast: node 1 of 2: model m",
]
HEAD = [*BEGIN, RAN.format(COMMAND.format(0) + " --port 9000"), "2026-11-18 14:15:13 INFO holdfast: model m: llama"]
REFUSED = ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))


@pytest.fixture(scope="module", params=["10.0.0.5", "head-0.svc", "fd00::5"])
def said(request) -> NodeLines:
    return node_lines(request.param, REFUSED)


def only(lines: list[str]) -> Finding:
    (finding,) = diagnose_lines(lines, "log").findings
    assert finding.cause == "nodes_apart"
    assert finding.fix is not None
    return finding


@pytest.mark.parametrize("ends", [False, True])
def test_a_node_without_a_head_is_told_which_head_and_how_to_start_it(said: NodeLines, ends: bool) -> None:
    finding = only([*NODE, said.seeks, said.seeks, *(said.no_head if ends else [])])
    assert said.head in finding.what
    assert "29501" in finding.what
    assert finding.code == "HF446"
    assert finding.fix is not None
    assert finding.fix.command == COMMAND.format(0)
    assert f"nc -vz {said.head} 29501" in finding.fix.why
    assert finding.confidence == ("high" if ends else "medium")


@pytest.mark.parametrize(
    ("why", "words"),
    [
        (OSError(-2, "Name or service not known"), "10.0.0.5 is no name that this machine knows"),
        (OSError("what answers there is no head"), "another program answers at 10.0.0.5 port 29501"),
        (TimeoutError("timed out"), "let this machine through to port 29501"),
    ],
)
def test_how_the_head_was_not_reached_decides_what_helps(why: OSError, words: str) -> None:
    finding = only([*NODE, node_lines("10.0.0.5", why).no_head[0]])
    assert finding.fix is not None
    assert words in finding.fix.why
    assert not finding.alternatives


@pytest.mark.parametrize("ends", [False, True])
def test_a_head_without_its_node_is_told_which_and_its_command(said: NodeLines, ends: bool) -> None:
    finding = only([*HEAD, said.waits, said.waits, *(said.no_node if ends else [])])
    assert "node 1" in finding.what
    assert finding.fix is not None
    assert finding.fix.command == COMMAND.format(1) + " --headless"


def test_nodes_that_have_found_one_another_are_no_finding(said: NodeLines) -> None:
    joined = f"2026-11-18 14:16:00 INFO holdfast: joined the head at {said.head} port 29501"
    assert "nodes_apart" not in {one.cause for one in diagnose_lines([*NODE, said.seeks, joined], "log").findings}
    loads = ["INFO engine: node 1 of 2 has joined: b at 10.0.0.6", "INFO holdfast: loading tensors: 1 of 136"]
    assert "nodes_apart" not in {one.cause for one in diagnose_lines([*HEAD, said.waits, *loads], "log").findings}


def test_another_secret_is_named_on_both_sides(said: NodeLines) -> None:
    finding = only([*NODE, *f"holdfast: {other_secret()}".splitlines()])
    assert finding.fix is not None
    assert "HOLDFAST_NODE_SECRET" in finding.fix.why
    refused = "WARNING engine: a node at 10.0.0.6 was refused: it has another secret"
    finding = only([*HEAD, said.waits, refused, said.waits, *said.no_node])
    assert "10.0.0.6" in finding.what
    assert finding.fix is not None
    assert finding.fix.why.startswith("on 10.0.0.6: export HOLDFAST_NODE_SECRET")


def test_a_port_of_nodes_that_is_taken_is_not_the_port_of_the_api() -> None:
    said = (
        "holdfast: rank 0 cannot listen for other nodes at 10.0.0.5 port 29501: [Errno 98] Address already in use"
        " (while attempting to bind on address ('10.0.0.5', 29501)) [HF139]"
    )
    finding = only([*HEAD, said])
    assert finding.fix is not None
    assert finding.fix.changes == {"--master-port": "29502"}
    assert "the same on all nodes" in finding.fix.why
    wrong = "holdfast: rank 0 cannot listen for other nodes at 10.0.0.5 port 29501: [Errno 99] Cannot assign [HF139]"
    finding = only([*HEAD, wrong, "  fix:    --master-addr with an address of the head"])
    assert finding.fix is not None
    assert finding.fix.why == "--master-addr with an address of the head"


def test_another_checkpoint_names_the_node() -> None:
    said = "holdfast: node 1 (b, rank 1) has another checkpoint than the head [HF139]"
    finding = only([*HEAD, said, "  fix:    start all nodes with the same files, version and sizes"])
    assert "node 1 (b, rank 1)" in finding.what


@pytest.mark.parametrize(
    ("said", "found", "code"),
    [
        ("there is no Ray cluster to use", "Could not reach the GCS at 10.0.0.5:6379: Connection refused", "HF154"),
        ("the Ray cluster has no room for 4 ranks", "0 of 2 CPUs free", "HF155"),
    ],
)
def test_a_dead_or_full_ray_cluster_is_one_finding_with_its_fix(said: str, found: str, code: str) -> None:
    ran = RAN.format("holdfast serve m --device cpu -tp 4 --distributed-executor-backend ray")
    gcs = (
        "[2026-11-18 14:30:52,210 W 1 1] rpc_client.h:153: Failed to connect to GCS at address 10.0.0.5:6379 within 5 s"
    )
    lines = [
        *BEGIN,
        ran,
        gcs,
        f"holdfast: {said} [{code}]",
        f"  found:  {found}",
        "  fix:    ray start --address=HEAD:6379",
    ]
    (finding,) = diagnose_lines(lines, "log").findings
    assert finding.code == code
    assert finding.fix is not None
    assert "ray start" in finding.fix.why
