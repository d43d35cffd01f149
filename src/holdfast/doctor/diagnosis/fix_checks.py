"""Checks a fix before it is offered: the flag exists in that release, limits are consistent, the log's numbers allow
it.

    renamed in that release         is renamed
    conflicts with another limit    that limit is changed too
    contradicted by the numbers     is dropped, or set to the value that holds

The planner's part is in fix_plans.py. Only arithmetic: what the log does not show is not held against a fix.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from holdfast.doctor.command.parse import ServerCommand
from holdfast.doctor.diagnosis.catalogue_sizes import kv_token_gib, ranks_of
from holdfast.doctor.diagnosis.llama_layers import STEP_GIB as LLAMA_STEP_GIB
from holdfast.engine_profiles.profile import profile, release

Changes = dict[str, str | None]
Say = Callable[[str], None]
_BACKEND_FLAG, _CAPTURE_FLAG, _JSON_LIMITS = (0, 13), (0, 11, 1), (0, 8, 5)
_CAPTURE_SIZES = (0, 9)
_V0 = (0, 8)
"""Before it, a prompt is computed in one step unless chunks are asked for; contexts beyond CHUNKED_ALONE have them."""
CHUNKED_ALONE = 32_768
_NOT_IN_HALF = re.compile(r"gemma-?[23](?!\.?\d*b)|glm-?4|plamo-?2", re.I)
"""Models that vLLM refuses in float16: their activations overflow. Gemma 2, and not the first Gemma of 2 billion."""
STEP_GIB = 0.5
"""Of a card, beside weights and KV, at the least: the context of CUDA and a small step."""
Q8_SHARE = 34 / 64
"""Of KV in 8 bits by blocks of 32, of the same in 16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    engine: str
    version: str | None
    command: ServerCommand | None
    whole: bool
    """All of the command is known."""
    model: str | None
    numbers: Mapping[str, float]
    assumed: frozenset[str] = frozenset()
    """Settings whose value the log does not show."""
    told: frozenset[str] = frozenset()
    """Of the numbers, those of the message itself."""

    def flag(self, ours: str) -> str:
        return profile(self.engine).spelling(ours) or f"--{ours}"

    def before(self, release_of: tuple[int, ...]) -> bool:
        """Whether it is known to be older."""
        return self.engine == "vllm" and self.version is not None and () < release(self.version) < release_of

    def after(self, changes: Changes, ours: str, number: str) -> float | None:
        """A limit as it would be with the change."""
        value = changes.get(self.flag(ours))
        try:
            return self.numbers.get(number) if value is None else float(value)
        except ValueError:
            return None


UNIFIED_SHARE = 0.85
"""Of memory that CPU and GPU share, up to which a share may be raised."""


def sound(facts: Facts, changes: Changes) -> tuple[Changes, str] | None:
    """The changes as they hold, and what to say where they are others than were asked for; None: they do not hold."""
    said: list[str] = []
    for check in (_spelled, _number_type, _ranks, _limits, _share, _context):
        found = check(facts, dict(changes), said.append)
        if found is None:
            return None
        changes = found
    return changes, "; ".join(said)


def _spelled(facts: Facts, changes: Changes, say: Say) -> Changes | None:
    """As that release takes it."""
    if facts.before(_BACKEND_FLAG) and changes.get("--attention-backend") is not None:
        changes["VLLM_ATTENTION_BACKEND"] = changes.pop("--attention-backend")
    if facts.before(_CAPTURE_FLAG) and "--max-cudagraph-capture-size" in changes:
        if facts.before(_CAPTURE_SIZES):
            return None
        changes["--cuda-graph-sizes"] = changes.pop("--max-cudagraph-capture-size")
    if facts.before(_JSON_LIMITS) and changes.get("--limit-mm-per-prompt"):
        changes["--limit-mm-per-prompt"] = "image=1"
    added = [name for name, value in changes.items() if value is not None and name.startswith("-")]
    known = profile(facts.engine)
    if facts.version and any(known.takes(known.canonical(one), facts.version) is False for one in added):
        return None
    gone = [name for name, value in changes.items() if value is None and name.startswith("-")]
    if gone and facts.whole and facts.command is not None and not any(facts.command.has(name) for name in gone):
        return None if len(gone) == len(changes) else {name: changes[name] for name in changes if name not in gone}
    return changes


def _number_type(facts: Facts, changes: Changes, say: Say) -> Changes | None:
    overflows = _NOT_IN_HALF.search(facts.model or "") is not None
    if changes.get("--dtype") in ("half", "float16") and overflows:
        if "awq" in (facts.model or "").lower():
            return None  # Its kernels compute in float16 alone.
        changes["--dtype"] = "float32"
        say("float16 overflows with this model, so the engine refuses it: float32 runs on this GPU")
    return changes


def _ranks(facts: Facts, changes: Changes, say: Say) -> Changes | None:
    """A parallel size that the model splits over: not above what was asked for where heads were the matter, else not
    below."""
    flag = facts.flag("tensor-parallel-size")
    asked = changes.get(flag)
    if asked is None or not asked.isdecimal():
        return changes
    size, sizes = int(asked), ranks_of(facts.model)
    if not sizes or size in sizes:
        return changes
    now = facts.numbers.get("tp", 1)
    fewer = "asked" in facts.numbers or size <= now
    able = [one for one in sizes if (one <= size if fewer else one > now)]
    if not able:
        return None
    chosen = max(able) if fewer else min((one for one in able if one >= size), default=max(able))
    changes[flag] = str(chosen)
    say(f"this model can be split over {', '.join(map(str, sizes[:6]))}")
    return changes


def _limits(facts: Facts, changes: Changes, say: Say) -> Changes | None:
    """vLLM's: a step holds a token of each sequence, and without chunks a whole prompt. TGI's: a prompt."""
    if facts.engine == "tgi":
        return _prompts(facts, changes, say)
    if facts.engine not in ("vllm", "holdfast"):
        return changes
    batched, seqs = facts.flag("max-num-batched-tokens"), facts.flag("max-num-seqs")
    tokens = facts.after(changes, "max-num-batched-tokens", "batched")
    sequences = facts.after(changes, "max-num-seqs", "max_num_seqs")
    if tokens is None or not {batched, seqs, facts.flag("max-model-len")} & changes.keys():
        return changes
    if sequences is not None and tokens < sequences:
        changes[seqs] = str(int(tokens))
        say(f"and at most {int(tokens)} sequences: a step needs a token for each")
    length = facts.after(changes, "max-model-len", "max_model_len")
    if not facts.before(_V0) or length is None or tokens >= length or length > CHUNKED_ALONE:
        return changes
    command = facts.command
    if command is not None and command.value("enable-chunked-prefill") == "False":
        return None
    if command is None or not command.has("enable-chunked-prefill"):
        changes["--enable-chunked-prefill"] = ""
        say(f"with chunked prefill: without it this version needs a step as long as the context ({int(length):,})")
    return changes


def _prompts(facts: Facts, changes: Changes, say: Say) -> Changes:
    """TGI refuses to start with prompts that may be longer than a step."""
    step, longest = changes.get("--max-batch-prefill-tokens"), facts.numbers.get("input_tokens")
    if step is None or longest is None or longest <= float(step):
        return changes
    older = facts.command is not None and facts.command.has("max-input-length")
    changes["--max-input-length" if older else "--max-input-tokens"] = step
    say(f"and prompts of at most as many tokens: a step does not hold {int(longest):,}")
    return changes


def _share(facts: Facts, changes: Changes, say: Say) -> Changes | None:
    """Of the card: the weights must fit it, and the KV cache still hold one request."""
    asked = changes.get(facts.flag("gpu-memory-utilization"))
    if asked is None or facts.engine not in ("vllm", "sglang"):
        return changes
    numbers, share = facts.numbers, float(asked)
    total, weights = numbers.get("total_gib"), numbers.get("weights_gib")
    if not 0 < share <= 1:
        return None
    shared = (facts.after(changes, "tensor-parallel-size", "tp") or 1.0) / max(1.0, numbers.get("tp", 1.0))
    weights = None if weights is None else weights / max(1.0, shared)
    if total is not None and weights is not None and weights + STEP_GIB > share * total:
        return None
    now, short = numbers.get("utilization"), numbers.get("kv_short_gib")
    if numbers.get("unified") and share > max(now or 0.0, UNIFIED_SHARE):
        return None  # The system lives in the same memory.
    if now is None or shared > 1:
        return changes
    if short is not None and total is not None:
        peak = max(numbers.get("activations_gib", 0.0), numbers.get("peak_gib", 0.0) - (weights or 0.0))
        smaller = 0.75 * peak if facts.flag("max-num-batched-tokens") in changes else 0.0
        return changes if (share - now) * total + smaller > short else None
    return changes if share >= now or _holds_one(facts, changes, now, share) else None


def _holds_one(facts: Facts, changes: Changes, now: float, share: float) -> bool:
    """Whether KV holds a whole request with a smaller share. Where it is not told what a token takes, KV is taken to be
    all of the card: it loses that much at the least."""
    numbers = facts.numbers
    tokens, length = numbers.get("kv_tokens"), facts.after(changes, "max-model-len", "max_model_len")
    if tokens is None or length is None:
        return True
    total, token = numbers.get("total_gib"), kv_token_gib(facts.model)
    if token is None and "kv_gib" in numbers:
        token = numbers["kv_gib"] / tokens
    ranks = max(1.0, numbers.get("tp", 1.0))
    lost = tokens * (now - share) / now if token is None or total is None else (now - share) * total / (token / ranks)
    return tokens - lost >= length


def _context(facts: Facts, changes: Changes, say: Say) -> Changes | None:
    """llama.cpp's, whose KV takes what it tried to allocate: the longest that the device holds beside the weights."""
    numbers = facts.numbers
    known = ("device_free_gib", "device_weights_gib", "tried_gib", "max_model_len")
    if facts.engine != "llama.cpp" or not all(name in numbers for name in known):
        return changes
    left = numbers["device_free_gib"] - numbers["device_weights_gib"] - LLAMA_STEP_GIB
    length, tried = numbers["max_model_len"], numbers["tried_gib"]
    share = Q8_SHARE if "--cache-type-k" in changes else 1.0
    most = int(max(0.0, left) / (tried * share) * length) // 256 * 256
    asked = changes.get("--ctx-size")
    wanted = int(asked) if asked is not None and asked.isdecimal() else int(length)
    if wanted <= most:
        return changes
    if asked is None or most < 512:
        return None
    changes["--ctx-size"] = str(most)
    room = f"{max(0.0, left):.2f} GiB are left after the weights and the buffers of a step"
    say(f"{room}, and {int(length):,} tokens take {tried:.2f}")
    return changes
