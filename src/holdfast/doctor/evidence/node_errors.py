"""Errors of Holdfast over several machines (HF139, HF446): what helps, as the command for the machine that it is for.

The message names the head or the node that is missing; the log has the command of this machine, and that of another is
the same with another --node-rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from holdfast.doctor.command.parse import ServerCommand
from holdfast.doctor.findings import Fix

NODES_MISSING, WRONG_NODES = "HF446", "HF139"
_NO_HEAD = re.compile(r"has not reached the head at (\S+)(?: \([^)]*\))? port (\d+): (.*)")
_NO_NODE = re.compile(r"nodes? (\d+)\b.* has not joined")
_TAKEN = re.compile(r"cannot listen for other nodes at (\S+) port (\d+): (?=.*\[Errno (?:98|48)\])")
_NO_NAME = ("Name or service not known", "nodename nor servname", "Temporary failure in name resolution", "[Errno -")
_OF_THE_API: Mapping[str, None] = {"--port": None, "--host": None, "--api-key": None}


def node_fixes(message: str, command: ServerCommand | None) -> Iterator[Fix]:
    """None where the message says all there is to say."""
    if (found := _NO_HEAD.search(message)) is not None:
        yield _head_fix(found[1], found[2], found[3], command)
    elif (found := _NO_NODE.search(message)) is not None:
        changes: dict[str, str | None] = {"--node-rank": found[1], "--headless": "", **_OF_THE_API}
        why = f"on the machine that is node {found[1]}, with the head's secret; let it through to the head's port"
        yield _fix(changes, why, command)
    elif (found := _TAKEN.search(message)) is not None:
        changes = {"--master-port": str(int(found[2]) + 1)}
        why = f"another program has port {found[2]} of {found[1]}: another one, the same on all nodes"
        yield _fix(changes, why, command)
    elif "different secrets" in message:
        why = (
            "export HOLDFAST_NODE_SECRET with the head's value here, and start this node again; where none was set,"
            " the head has printed one at start"
        )
        yield Fix(why=why, basis="stated")


def _head_fix(head: str, port: str, said: str, command: ServerCommand | None) -> Fix:
    if any(words in said for words in _NO_NAME):
        return Fix(
            why=f"{head} is no name that this machine knows: --master-addr with the head's address", basis="stated"
        )
    if "is no head" in said:
        why = f"another program answers at {head} port {port}: another --master-port, the same on all nodes"
        return Fix(why=why, basis="stated")
    start: dict[str, str | None] = {"--node-rank": "0", "--headless": None, "--node-addr": None}
    reached = f"let this machine through to port {port} (nc -vz {head} {port})"
    if "refused" in said:
        return _fix(start, f"on {head}, where nothing listens at port {port}: start the head; or {reached}", command)
    return _fix(start, f"{reached}; and start the head there, if none runs", command)


def _fix(changes: dict[str, str | None], why: str, command: ServerCommand | None) -> Fix:
    if command is None:
        return Fix(why=why, basis="stated")
    return Fix(changes=changes, command=command.with_changes(changes), why=why, basis="stated")
