"""What Holdfast itself says in a log: an error with its code, and below it what was needed, what was found and its fix.

The codes and what each is a case of are in observability/codes.toml, so that no rule repeats them: a finding has the
code of the error, its fix is the error's own, written into the command.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from functools import cache

from holdfast.doctor.command.parse import ServerCommand
from holdfast.doctor.evidence.node_errors import NODES_MISSING, WRONG_NODES, node_fixes
from holdfast.doctor.findings import Basis, Fix
from holdfast.doctor.rules.load import Rule, rulebook
from holdfast.observability.codes import codes
from holdfast.units import parse_bytes

RULE = "holdfast_error"
"""The entry of the rules that sees them all."""
BELOW_LINES = 6
"""After the message, in which the rest of it stands."""
DOES_NOT_FIT, DIED = "HF110", "HF410"
RANKS_WITHOUT_MEMORY = ("HF447", "HF448")
_BELOW = re.compile(r"^\s*(needed|found|fix):\s+(\S.*)")
_AMOUNT = re.compile(r"([\d.]+) ?([KMGT]iB|B)\b")
_BUDGET = re.compile(r"([\d.]+ [KMGT]?i?B) of budget")
_WEIGHTS = re.compile(r"\bweights ([\d.]+ [KMGT]?i?B)")


@cache
def own_rule(code: str) -> Rule | None:
    """The rule for one code; None where the code is not known, or says nothing of a server."""
    rule, known = rulebook().rule(RULE), codes().get(code)
    if known is None or known.kind not in ("class", "case") or not known.cause:
        return None
    return Rule(
        id=code,
        code=code,
        cause=known.cause,
        kind="request" if known.phase == "request" else "fatal",
        engines=("holdfast",),
        phase=known.phase,
        what=rule.what,
        why=known.means,
        source=rule.source,
    )


def below(text: str) -> tuple[str, str] | None:
    """`needed`, `found` or `fix`, and what stands there."""
    found = _BELOW.match(text)
    return None if found is None else (found[1], found[2])


def refined(rule: Rule, words: Mapping[str, str]) -> str:
    """The cause, where one code has several: what does not fit is weights, all that is held beside KV, or KV."""
    if rule.code == DIED and "(signal 9)" in words.get("message", ""):
        return "host_ram_oom"  # Nobody else kills a process of its own accord.
    if rule.code in RANKS_WITHOUT_MEMORY and "out of memory" in words.get("message", ""):
        return "host_ram_oom"  # Of a GPU it is "out of GPU memory".
    needed, found = words.get("needed", ""), words.get("found", "")
    budget = _BUDGET.search(found)
    if rule.code != DOES_NOT_FIT or budget is None:
        return rule.cause
    most = parse_bytes(budget[1])
    weights = _WEIGHTS.search(needed)
    if weights is not None and parse_bytes(weights[1]) > most:
        return "weights_do_not_fit"
    beside = sum(parse_bytes(f"{number}{unit}") for number, unit in _AMOUNT.findall(needed.partition(", and ")[0]))
    return "no_memory_for_kv_blocks" if beside >= most else rule.cause


def own_fixes(words: Mapping[str, str], command: ServerCommand | None) -> Iterator[Fix]:
    """Each way the message names; one that is flags as the whole command."""
    if words.get("code") in (NODES_MISSING, WRONG_NODES):
        of_nodes = list(node_fixes(words.get("message", ""), command))
        if of_nodes:  # The message's own, for the machine that it is for.
            yield from of_nodes
            return
    written = words.get("fix", "")
    planned = words.get("code") == DOES_NOT_FIT
    why = "the server planned it: it fits" if planned else "as the error message says"
    basis: Basis = "planned" if planned else "stated"
    for way in re.split(r",? or (?=-|leave|\w)", written) if written.startswith("-") else [written]:
        changes = _changes(way) if command is not None else {}
        if changes and command is not None:
            yield Fix(changes=changes, command=command.with_changes(changes), why=why, basis=basis)
        elif way:
            command_of_it = way if way.startswith("holdfast ") else None
            yield Fix(command=command_of_it, why=why if command_of_it else way, basis=basis)


def _changes(way: str) -> dict[str, str | None]:
    """`--ram 1024MiB --max-num-seqs 4` as changes; nothing where there are words besides."""
    try:
        words = shlex.split(way)
    except ValueError:
        return {}
    changes: dict[str, str | None] = {}
    flag = ""
    for word in words:
        if word.startswith("--"):
            flag = word
            changes[flag] = ""
        elif flag and not changes[flag]:
            changes[flag] = word
        else:
            return {}
    return changes
