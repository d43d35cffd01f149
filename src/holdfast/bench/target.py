"""The server under test: whether it answers, which model it serves, and how many tokens its words make.

Asks a few short requests before a run. Starts nothing.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec

from holdfast.bench.client.wire import trusted
from holdfast.bench.load.load import CHAT, Load
from holdfast.bench.load.prompts import WORDS
from holdfast.doctor.probe.metrics_page import OK, Reply, client_for, get
from holdfast.errors import ConfigurationError, EngineError
from holdfast.units import shorten

FEW_WORDS, MORE_WORDS = 16, 144
SAMPLE_TEXTS, SAMPLE_CHARS_EACH, SAMPLE_CHARS = 40, 60, 2400
"""Fewer tokens than any context that is served."""
USUAL_TOKENS_PER_CHAR = 0.25
ASK_TIMEOUT_S = 120.0
OWNERS = {"holdfast": "holdfast", "vllm": "vllm", "sglang": "sglang", "llamacpp": "llama.cpp"}
"""What /v1/models says of who owns a model."""
UNREACHABLE, REFUSED, NOT_READY = "HF164", "HF165", "HF166"
NEEDS_A_KEY = (401, 403)
NO_ANSWER = (UNREACHABLE, REFUSED, NOT_READY)
"""There is no server, or none that answers."""


class Target(msgspec.Struct, frozen=True, kw_only=True):
    url: str
    model: str
    root: str | None = None
    """What the server loaded, where it says so."""
    max_model_len: int | None = None
    engine: str | None = None
    """Who made the server, where it says so."""


def find_target(url: str, key: str | None, model: str | None, certificate: str = "") -> Target:
    """`url`: scheme, host, port and perhaps a path, without /v1."""
    if "@" in urlsplit(url).netloc:
        raise ConfigurationError(
            "the address has a user or a password in it, which would stand in every report",
            needed="an address without, and a key",
            fix="set HOLDFAST_API_KEY, and leave out what stands before the @",
            field="target",
        )
    with client_for(key, trusted(certificate)) as client:
        reply = get(client, f"{url}/v1/models")
    if reply.status != OK and model is None:
        raise EngineError(
            f"{url} does not list its models",
            code=UNREACHABLE,
            needed="an answer of GET /v1/models, or --model NAME",
            found=reply.said or f"HTTP {reply.status}",
            fix=_way_out(url, reply),
        )
    if reply.status == 0:
        raise EngineError(
            f"{url} cannot be reached",
            code=UNREACHABLE,
            needed="a server with the OpenAI API",
            found=reply.said,
            fix=_way_out(url, reply),
        )
    listed = reply.json().get("data")
    entries = [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
    if not entries and model is None:
        raise EngineError(
            f"{url} lists no model", code=UNREACHABLE, found=shorten(reply.body.decode("utf-8", "replace")),
            fix="--model NAME, as the server calls it",
        )  # fmt: skip
    entry = next((one for one in entries if one.get("id") == model), entries[0] if entries else {})
    length, root = entry.get("max_model_len"), entry.get("root")
    return Target(
        url=url,
        model=model or str(entry.get("id", "")),
        root=root if isinstance(root, str) else None,
        max_model_len=length if isinstance(length, int) else None,
        engine=OWNERS.get(str(entry.get("owned_by"))),
    )


def _way_out(url: str, reply: Reply) -> str:
    """By the step on which a first request failed."""
    rest = url.partition("://")[2]
    if reply.status in NEEDS_A_KEY:
        return "set HOLDFAST_API_KEY to a key of the server"
    if reply.status:
        return "--model NAME, as the server calls it"
    if reply.failure == "tls":
        verified = "CERTIFICATE" in reply.said
        return (
            "--certificate FILE, the server's --ssl-certfile, or --insecure"
            if verified
            else f"http://{rest}, where the server has no TLS"
        )
    if reply.failure == "name":
        return "check the name of the host"
    if reply.failure == "broken" and url.startswith("http://"):
        return f"https://{rest}, where the server has TLS; else its log: holdfast doctor LOGFILE"
    return (
        "check the port, and that the server runs: holdfast ps lists those on this machine, holdfast serve starts one"
    )


def check_lengths(load: Load, target: Target) -> None:
    """Refuses a load of which the server would refuse requests, where it says how long they may be."""
    most = target.max_model_len
    lengths = [(one.prompt_tokens, one.output_tokens) for one in load.replay] or load.lengths
    if most is None or (load.prompts and not lengths):  # How long a file's prompts are, the server counts.
        return
    prompt, output = max(lengths or [(load.prompt.high, load.output.high)], key=sum)
    if prompt + output <= most:
        return
    raise ConfigurationError(
        "requests would be longer than the server's context",
        needed=f"{prompt:,} tokens of prompt and {output:,} of output",
        found=f"max_model_len {most:,} at {target.url}",
        fix="a file with shorter requests, or a server with a longer --max-model-len"
        if lengths
        else f"--prompt {max(1, most - output)}, or a server with a longer --max-model-len",
        field="traffic" if lengths else "prompt",
    )


def calibrated(load: Load) -> Load:
    """With what a word and the chat template cost, by the server's own count; unchanged where it gives none. Raises
    where the server refuses what the run would ask. Ids are tokens already."""
    if load.token_ids:
        return load
    counts = [_prompt_tokens(load, _of_words(count)) for count in (FEW_WORDS, MORE_WORDS)]
    few, more = counts
    if few is None or more is None or more <= few:
        return load
    tokens_per_word = (more - few) / (MORE_WORDS - FEW_WORDS)
    return msgspec.structs.replace(
        load,
        words_per_token=1 / tokens_per_word,
        template_tokens=max(0.0, few - tokens_per_word * FEW_WORDS),
    )


def counted_by_server(load: Load, texts: Sequence[str]) -> tuple[float, float]:
    """Tokens of a character of such texts, and those that the server adds to a prompt, by its own count of a sample;
    where it gives none, what is usual."""
    # Drawn: of what takes turns, as prompts and answers do, every so many-th may be of one kind.
    drawn = random.Random("sample").sample(texts, min(len(texts), SAMPLE_TEXTS))
    chosen = (drawn[at % len(drawn)] for at in range(SAMPLE_TEXTS))
    sample = "\n".join(text[:SAMPLE_CHARS_EACH] for text in chosen)[:SAMPLE_CHARS]
    part = sample[: len(sample) // 4]
    few, more = (_prompt_tokens(load, text) if text else None for text in (part, sample))
    if few is None or more is None or more <= few:
        return USUAL_TOKENS_PER_CHAR, 0.0
    each = (more - few) / (len(sample) - len(part))
    return each, max(0.0, few - each * len(part))


def _of_words(count: int) -> str:
    return " ".join((WORDS * (1 + count // len(WORDS)))[:count])


def _prompt_tokens(load: Load, text: str) -> int | None:
    import httpx

    body: dict[str, Any] = {"model": load.model, "max_tokens": 1, **load.extra_body}
    body |= {"messages": [{"role": "user", "content": text}]} if load.path == CHAT else {"prompt": text}
    base = load.url.rstrip("/").removesuffix("/v1")
    try:
        reply = httpx.post(
            base + load.path,
            json=body,
            headers=dict(load.headers),
            timeout=ASK_TIMEOUT_S,
            verify=trusted(load.certificate),
        )
    except (httpx.HTTPError, OSError) as error:
        raise EngineError(
            f"{base} does not answer a short request",
            code=REFUSED,
            needed=f"an answer of POST {load.path}",
            found=str(error) or type(error).__name__,
            fix="check the server's log: holdfast doctor URL",
        ) from error
    if reply.status_code != OK:
        raise EngineError(
            f"{base} refuses a short request",
            code=REFUSED,
            needed=f"an answer of POST {load.path}",
            found=f"HTTP {reply.status_code}: {shorten(reply.text, 300)}",
            fix="--model NAME as the server calls it, --endpoint /v1/completions for a model without a chat template,"
            " HOLDFAST_API_KEY for a server with a key",
        )
    try:
        count = json.loads(reply.content)["usage"]["prompt_tokens"]
    except (ValueError, LookupError, TypeError):
        return None
    return count if isinstance(count, int) and count > 0 else None
