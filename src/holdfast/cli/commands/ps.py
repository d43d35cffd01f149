"""`holdfast ps`: which servers are ready, and what memory they hold. Asks their /health and /memory; starts nothing."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

from holdfast.cli.output import say, say_json

if TYPE_CHECKING:
    import httpx

HELP = """Show whether one or more running servers are ready and what memory they use, planned and measured."""

USAGE = "holdfast ps [URL ...] [-v] [--json]"

EXAMPLES = """examples:
  holdfast ps                                       the server on http://127.0.0.1:8000
  holdfast ps 8000 localhost:9000                   two servers, the first by its local port
  holdfast ps -v                                    every memory term and every decision, with its reason
  holdfast ps --json | jq '.[0].memory.terms'       for programs

exit codes: 0 all are ready, 1 one is not, 2 an address is not valid
"""

DEFAULT_URL = "http://127.0.0.1:8000"
TIMEOUT_S = 5.0
READY, NOT_READY = 0, 1
OK = 200
NEEDS_A_KEY = (401, 403)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("urls", nargs="*", metavar="URL", help=f"addresses of servers; default: {DEFAULT_URL}")
    parser.add_argument("-v", "--verbose", action="store_true", help="also show every memory term and every decision")
    parser.add_argument(
        "--json", action="store_true", help="print JSON: one list of objects, each with the server's /memory"
    )


def run(arguments: argparse.Namespace) -> int:
    import httpx

    from holdfast.cli.chat_backends import api_of

    # Addresses are all read before the first is asked.
    addresses = [api_of(url, written="URL").removesuffix("/v1/") for url in arguments.urls or [DEFAULT_URL]]
    key = os.environ.get("HOLDFAST_API_KEY")
    with httpx.Client(timeout=TIMEOUT_S, headers={"Authorization": f"Bearer {key}"} if key else {}) as client:
        found = [ask(client, address) for address in addresses]
    if arguments.json:
        say_json(found)
    else:
        say(line for answer in found for line in lines(answer, verbose=arguments.verbose))
        if not arguments.urls and found[0]["status"] == "unreachable":
            say(["  a server elsewhere: holdfast ps localhost:8123"])
    return READY if all(answer["status"] == "ready" for answer in found) else NOT_READY


def ask(client: httpx.Client, address: str) -> dict[str, Any]:
    """`status` as /health says it, or unreachable; `memory` as /memory says it, where it does."""
    import httpx

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
        answer |= {"reason": str(error) or type(error).__name__}
        if isinstance(error, httpx.ConnectError):
            answer["reason"] = f"nothing answers there ({answer['reason']})"
    return answer


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

    reason = f": {answer['reason']}" if answer["reason"] else ""
    said, memory = f"{answer['url']}  {answer['status']}{reason}", answer["memory"]
    if memory is None:
        return [said, "  it does not report its memory"] if answer["status"] == "ready" and not reason else [said]
    try:
        ledger = msgspec.convert(memory, Ledger)
    except (msgspec.ValidationError, ValueError) as error:
        return [said, f"  its memory report cannot be read: {error}"]
    if ledger.version != VERSION:
        return [said, f"  its memory report has version {ledger.version}, this program reads {VERSION}: try --json"]
    shown = ledger_lines(ledger) if verbose else summary_lines(ledger)
    decisions = [line for line in ledger.decisions if verbose or line.startswith(SAMPLING)]
    return [f"{said}  {ledger.model}", *(f"  {line}" for line in (*shown, *decisions))]
