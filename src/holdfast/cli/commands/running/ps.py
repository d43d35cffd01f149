"""`holdfast ps`: which servers are ready, and what memory they hold. Asks their /health and /memory; starts nothing.

Those of this machine are found by their entries (`servers.registry`); others are named by their addresses.
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

from holdfast.cli.output import say, say_json
from holdfast.cli.servers.reach import DEFAULT_URL

if TYPE_CHECKING:
    import httpx

    from holdfast.cli.servers.registry import NodeState, RunningServer

HELP = (
    """Show which servers run on this machine, whether they are ready and what memory they use, planned and measured."""
)

USAGE = "holdfast ps [URL ...] [-v] [--json]"

EXAMPLES = """examples:
  holdfast ps                                       every server on this machine
  holdfast ps 8000 localhost:9000                   two servers, the first by its local port
  holdfast ps -v                                    every memory term and every decision, with its reason
  holdfast ps --json | jq '.[0].memory.terms'       for programs

Where none is known on this machine, http://127.0.0.1:8000 is asked.

A machine that is not the head of several (--nnodes) has no API: it is shown as a node, with its head and its ranks.

exit codes: 0 all are ready or joined, 1 one is not or there is none, 2 an address is not valid
"""

NONE_KNOWN = (
    "  no server of this machine is known; start one: holdfast run smollm2",
    "  a server elsewhere: holdfast ps localhost:8123",
)
READY, NOT_READY = 0, 1
JOINED, WAITING = "joined", "waiting"
"""Of a node that is not the head."""
HEAD_IS_SOUGHT = "  it serves no API; the head is the same command with --node-rank 0, on the machine with that address"
OK = 200
NEEDS_A_KEY = (401, 403)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("urls", nargs="*", metavar="URL", help="addresses of servers; default: all on this machine")
    parser.add_argument("-v", "--verbose", action="store_true", help="also show every memory term and every decision")
    parser.add_argument(
        "--json", action="store_true", help="print JSON: one list of objects, each with the server's /memory"
    )


def run(arguments: argparse.Namespace) -> int:
    from holdfast.cli.servers.reach import ServerAddress, addresses_of

    known = addresses_of(arguments.urls)
    found = []
    for address in known or [ServerAddress(DEFAULT_URL)]:
        node = None if address.server is None else address.server.node
        if node is not None:
            answer = node_answer(node)
        else:
            with address.client() as client:
                answer = ask(client, address.base)
        process = None if address.server is None else _process(address.server)
        found.append(answer | {"url": address.url, "process": process})
    if arguments.json:
        say_json(found)
    else:
        say(line for answer in found for line in lines(answer, verbose=arguments.verbose))
        if not known and found[0]["status"] == "unreachable":
            say(NONE_KNOWN)
    return READY if all(answer["status"] in ("ready", JOINED) for answer in found) else NOT_READY


def node_answer(node: NodeState) -> dict[str, Any]:
    """Of a node without an API: nobody is asked, its entry says it."""
    import msgspec

    from holdfast.units import format_duration

    since = "" if node.joined is None else f" for {format_duration(time.time() - node.since_s)}"
    ranks = f"{node.named_ranks} of {node.all_ranks}"
    status, reason = {
        True: (JOINED, f"to the head at {node.head}{since}, with {ranks}"),
        False: (WAITING, f"for the head at {node.head}{since}; {ranks} will run here"),
        None: ("running", f"for the head at {node.head}, with {ranks}"),
    }[node.joined]
    known = msgspec.to_builtins(node)
    return {"url": "", "status": status, "reason": reason, "memory": None, "node": known}


def ask(client: httpx.Client, address: str) -> dict[str, Any]:
    """`status` as /health says it, or unreachable; `memory` as /memory says it, where it does."""
    import httpx

    from holdfast.cli.chat_backends import certificate_problem

    answer: dict[str, Any] = {"url": address, "status": "unreachable", "reason": None, "memory": None}
    try:
        health = client.get(f"{address}/health")
        said = _object(health)
        ready = "ready" if health.status_code == OK else f"HTTP {health.status_code}"
        answer |= {"status": str(said.get("status", ready)), "reason": said.get("reason")}
        memory = client.get(f"{address}/memory")
        if memory.status_code == OK:
            answer["memory"] = _object(memory) or None
        elif memory.status_code in NEEDS_A_KEY:
            answer["reason"] = "its memory report needs a key: set HOLDFAST_API_KEY"
    except httpx.HTTPError as error:
        told = certificate_problem(address, error)
        answer |= {"reason": f"{told.message}; {told.fix}" if told else str(error) or type(error).__name__}
        if isinstance(error, httpx.ConnectError) and told is None:
            answer["reason"] = f"nothing answers there ({answer['reason']})"
    return answer


def _process(server: RunningServer) -> dict[str, Any]:
    fields = ("pid", "model", "names", "path", "log", "user", "command")
    return {name: getattr(server, name) for name in fields} | {"since_s": server.created_s}


def _process_line(process: dict[str, Any]) -> str:
    from holdfast.units import format_duration

    names = ", ".join(process["names"]) or process["model"]
    parts = [f"pid {process['pid']}, up {format_duration(time.time() - process['since_s'])}", names]
    parts += [f"of user {process['user']}"] if process["user"] else []
    parts += [f"log: {process['log']}"] if process["log"] else []
    parts += [] if process["user"] else [f"to end it: holdfast stop {process['pid']}"]
    return "  " + "; ".join(part for part in parts if part)


def _object(response: httpx.Response) -> dict[str, Any]:
    """Its JSON, when it is an object: other servers answer /health with nothing."""
    try:
        found = response.json()
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def lines(answer: dict[str, Any], *, verbose: bool = False) -> list[str]:
    """For people. A ledger of another version is named, not read."""
    import msgspec

    from holdfast.observability.decisions import SAMPLING
    from holdfast.observability.ledger import VERSION, Ledger, ledger_lines, summary_lines

    if answer.get("node"):
        said = f"{answer['url']}  {answer['status']} {answer['reason']}"
        looks = [HEAD_IS_SOUGHT] if answer["status"] == WAITING else []
        return [said, *([_process_line(answer["process"])] if answer.get("process") else []), *looks]
    reason = f": {answer['reason']}" if answer["reason"] else ""
    said, memory = f"{answer['url']}  {answer['status']}{reason}", answer["memory"]
    process = [_process_line(answer["process"])] if answer.get("process") else []
    if memory is None:
        silent = answer["status"] == "ready" and not reason
        return [said, *process, *(["  it does not report its memory"] if silent else [])]
    try:
        ledger = msgspec.convert(memory, Ledger)
    except (msgspec.ValidationError, ValueError) as error:
        return [said, *process, f"  its memory report cannot be read: {error}"]
    if ledger.version != VERSION:
        return [said, f"  its memory report has version {ledger.version}, this program reads {VERSION}: try --json"]
    shown = ledger_lines(ledger) if verbose else summary_lines(ledger)
    decisions = [line for line in ledger.decisions if verbose or line.startswith(SAMPLING)]
    return [f"{said}  {ledger.model}", *process, *(f"  {line}" for line in (*shown, *decisions))]
