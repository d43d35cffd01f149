"""Literals that a regular expression cannot match without. Conservative: every literal returned is required; some may
be missed.

A small parser of its own: that of `re` is private and may change with any version of Python.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

SHORTEST = 3
"""Characters of a literal that is worth looking for."""
LONG_ENOUGH = 6
_QUANTIFIER = re.compile(r"(?:[*+?]|\{(\d*)(,?)(\d*)\})[?+]?")
_COMMON = b"etaoinsrhldcumfpgwybvkxjqz"
_EVERYDAY = b"""
(APIServer pid=1) INFO: 10.0.0.1:40000 - "POST /v1/chat/completions HTTP/1.1" 200 OK "GET /metrics HTTP/1.1" /health
(EngineCore_DP0 pid=1) DEBUG 10-01 12:00:00 [core.py:1] WARNING ERROR error File read: server.py", line 1, in process
Received request chatcmpl-: prompt: params: SamplingParams(n=1, temperature=0.7, top_p=1.0, max_tokens=16, stop=[]),
prompt_token_ids: None, lora_request: None, reasoning_content tool_calls. Added request cmpl- Finished request
Receive: obj=GenerateReqInput(rid=, text=, input_ids=, sampling_params={}, stream=False) Finish: obj=, out={'text': ''}
Engine 000: Avg prompt throughput: 1.2 tokens/s, Avg generation throughput: 1.2 tokens/s, Running: 1 reqs, Waiting: 0
reqs, GPU KV cache usage: 1.2%, Prefix cache hit rate: 0.0% Prefill batch, #new-seq: 1, Decode batch, #running-req: 1
Loading safetensors checkpoint shards: 10% Completed | 1/10 [00:01<00:10, 1.01s/it] Capturing CUDA graph shapes
Error in preprocessing prompt inputs Traceback (most recent call last): File "/usr/local/lib/python3.12/dist-packages/
vllm/v1/entrypoints/openai/serving_chat.py", line 1, in create_chat_completion vllm/engine/processor.py process_inputs
site-packages/torch/nn/modules/module.py", line 1, in _call_impl return forward(*args, **kwargs) KeyError: 'user-1'
request_id= tenant= path= status=200 latency_ms= "level": "info", "timestamp": "message": "id": "time": "logger":
slot update_slots: id 0 | task 1 | prompt done, n_tokens = 1, progress = 1.0 srv log_server_r: request: POST 127.0.0.1
the a of to and in is that it for was on are with as be at by this have from or had not but what all were when can
there use an each which she do how their if will up other about out many then them these so some her would make like
him into time has look two more write go see number no way could people my than first water been call who oil its now
find long down day did get come made may part memory cache model request error file trace server token batch failed
available loading worker process cuda allocate timeout value device engine size length version status sampling
"""
"""What lines that say nothing are made of: a literal is looked for by what stands seldom in them."""
_WORN_BYTES = 4
_ZERO_WIDTH = "bBAZ"
_CLASSES = "dDwWsS"
_PLAIN_GROUP = re.compile(r"\((?:\?:|\?P<\w+>|(?!\?))")
_LOOK = re.compile(r"\(\?<?[=!]")


@dataclass(slots=True)
class _Item:
    """One step of a sequence: text, branches, or (neither) anything at all."""

    text: str = ""
    branches: list[list[_Item]] = field(default_factory=list)
    least: int = 1
    once: bool = True


class _Unknown(Exception):
    """Something this reader does not understand."""


def needed(expression: str) -> tuple[str, ...]:
    """Such that every match holds at least one of them; empty where nothing can be said."""
    try:
        branches, end = _branches(expression, 0)
    except _Unknown:
        return ()
    if end != len(expression):
        return ()
    return tuple(dict.fromkeys(_of_branches(branches) or ()))


def rarest(literal: bytes, size: int) -> int:
    """Where those bytes of it begin that stand least often in what people and programs write: by their pieces that
    stand in everyday lines, and then by their letters.
    """
    piece = min(size, _WORN_BYTES)
    worn, weights = _worn(piece), _weights()
    pieces = [200 * worn.get(literal[at : at + piece], 0) for at in range(len(literal) - piece + 1)]
    letters = [weights[one] for one in literal]
    more = size - piece + 1
    return min(
        range(len(literal) - size + 1), key=lambda at: sum(pieces[at : at + more]) + sum(letters[at : at + size])
    )


@cache
def _worn(size: int) -> Mapping[bytes, int]:
    return Counter(_EVERYDAY[at : at + size] for at in range(len(_EVERYDAY) - size + 1))


@cache
def _weights() -> Sequence[int]:
    """Of letters, by how often they are written; what is no small one is rare."""
    weights = [2] * 256
    weights[ord(" ")] = 30
    for place, letter in enumerate(_COMMON):
        weights[letter] = 26 - place
    return weights


def _branches(text: str, at: int) -> tuple[list[list[_Item]], int]:
    branches: list[list[_Item]] = [[]]
    while at < len(text) and text[at] != ")":
        if text[at] == "|":
            branches.append([])
            at += 1
            continue
        item, at = _item(text, at)
        found = _QUANTIFIER.match(text, at)
        if found is not None and item is not None:
            item.least = 1 if found[0][0] == "+" else int(found[1] or 0) if found[0][0] == "{" else 0
            item.once = False
            at = found.end()
        if item is not None:
            branches[-1].append(item)
    return branches, at


def _item(text: str, at: int) -> tuple[_Item | None, int]:
    """None for what takes up no room."""
    character = text[at]
    if character == "\\":
        return _escaped(text[at + 1 : at + 2]), at + 2
    if character == "[":
        end = text.find("]", at + (3 if text[at + 1 : at + 2] == "^" else 2))
        while end > 0 and text[end - 1] == "\\" and text[end - 2] != "\\":
            end = text.find("]", end + 1)
        if end < 0:
            raise _Unknown
        return _Item(), end + 1
    if character == "(":
        return _group(text, at)
    if character in "^$":
        return None, at + 1
    return (_Item() if character == "." else _Item(text=character)), at + 1


def _escaped(character: str) -> _Item | None:
    if character and character in _ZERO_WIDTH:
        return None
    if character in _CLASSES:
        return _Item()
    if character == "t":
        return _Item(text="\t")
    if not character or character.isalnum():
        raise _Unknown
    return _Item(text=character)


def _group(text: str, at: int) -> tuple[_Item | None, int]:
    looks = _LOOK.match(text, at)
    opened = looks or _PLAIN_GROUP.match(text, at)
    if opened is None:
        raise _Unknown  # Flags change what the letters mean.
    branches, end = _branches(text, opened.end())
    if end >= len(text):
        raise _Unknown
    return (None if looks else _Item(branches=branches)), end + 1


def _of_branches(branches: list[list[_Item]]) -> list[str] | None:
    each = [_of_sequence(branch) for branch in branches]
    if any(one is None for one in each):
        return None
    return [literal for one in each for literal in one or ()]


def _of_sequence(items: list[_Item]) -> list[str] | None:
    best: list[str] | None = None
    run = ""
    for item in [*_flat(items), _Item()]:
        if item.text and item.least:
            run += item.text
            if item.once:
                continue
        best, run = _better(best, [run] if len(run) >= SHORTEST else None), ""
        if item.branches and item.least:
            best = _better(best, _of_branches(item.branches))
    return best


def _flat(items: list[_Item]) -> list[_Item]:
    """Groups that stand once and have no choice in them are as good as what they hold."""
    flat: list[_Item] = []
    for item in items:
        alone = item.once and len(item.branches) == 1
        flat += _flat(item.branches[0]) if alone else [item]
    return flat


def _better(one: list[str] | None, other: list[str] | None) -> list[str] | None:
    """Long ones rule out more; among those that are long enough, fewer."""
    if one is None or other is None:
        return one if other is None else other
    return other if _worth(other) > _worth(one) else one


def _worth(literals: list[str]) -> tuple[int, int]:
    return min(LONG_ENOUGH, *map(len, literals)), -len(literals)
