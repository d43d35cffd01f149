"""From the words of `holdfast bench` to a load and what is allowed of it; what contradicts itself is refused.

Reads the files that words name. Sends nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import ssl
from pathlib import Path
from typing import Any

from holdfast.bench.load.inputs import parse_lengths, parse_share, read_prompts, read_replay
from holdfast.bench.load.load import Load
from holdfast.bench.load.profile import PEAK, Phase, default_profile, steps_profile
from holdfast.bench.measure.objectives import parse_slo
from holdfast.bench.measure.verdict import Allowed
from holdfast.bench.run import RunOptions
from holdfast.errors import ConfigurationError
from holdfast.units import parse_duration, shorten

DEFAULT_CONCURRENCY, DEFAULT_KNEE, DEFAULT_BURST, DEFAULT_STEP = 16, 64, 8, "15s"
DEFAULT_PROFILE = {"up": "1m", "peak": "5m", "down": "1m"}
PEAK_SHARE = 5
"""Of the peak, a part of so many is the longest that load rises or falls unless that was set: a short run is short."""
OF_A_LOAD = {"arrivals": "rate", "burst": "rate", "step": "find_knee", "speed": "traffic"}
"""Settings that mean nothing without another."""


def read_load(arguments: argparse.Namespace, url: str) -> tuple[Load, RunOptions]:
    _refuse_contradictions(arguments)
    _check_certificate(arguments.certificate)
    key = os.environ.get("HOLDFAST_API_KEY")
    phases, steps = _phases(arguments)
    concurrency = steps[-1] if steps else arguments.concurrency
    if arguments.rate is None and not arguments.traffic:
        concurrency = concurrency or DEFAULT_CONCURRENCY
    load = Load(
        url=url,
        path="/v1/completions" if arguments.token_ids else arguments.endpoint,
        headers={"Authorization": f"Bearer {key}"} if key else {},
        certificate="insecure" if arguments.insecure else arguments.certificate,
        phases=phases,
        concurrency=concurrency,
        rate=arguments.rate,
        arrivals=arguments.arrivals or "poisson",
        burst=arguments.burst or DEFAULT_BURST,
        requests=arguments.requests,
        replay=read_replay(arguments.traffic, speed=arguments.speed or 1.0) if arguments.traffic else (),
        timeout_s=parse_duration(arguments.timeout, field="timeout"),
        seed=arguments.seed,
        prompt=parse_lengths(arguments.prompt, field="prompt"),
        output=parse_lengths(arguments.output, field="output"),
        prompts=read_prompts(arguments.prompts) if arguments.prompts else (),
        token_ids=arguments.token_ids,
        prefix_tokens=arguments.prefix_tokens,
        prefix_share=parse_share(arguments.prefix_share, field="prefix-share"),
        prefixes=arguments.prefixes,
        turns=arguments.turns,
        think_s=parse_duration(arguments.think, field="think"),
        cancel_share=parse_share(arguments.cancel, field="cancel"),
        schema=_json_object(_text_of(arguments.schema), "schema") if arguments.schema else None,
        schema_share=parse_share(arguments.schema_share, field="schema-share"),
        adapters=tuple(arguments.lora),
        ignore_eos=arguments.ignore_eos,
        extra_body=_json_object(arguments.extra_body, "extra-body") if arguments.extra_body else {},
    )
    allowed = Allowed(
        objectives=() if arguments.slo is None else parse_slo(arguments.slo),  # An empty one is a script's mistake.
        headroom=parse_share(arguments.headroom, field="headroom"),
        error_share=parse_share(arguments.max_errors, field="max-errors"),
        limited_client=arguments.rate is not None and arguments.concurrency is not None,
    )
    return load, RunOptions(allowed=allowed, workers=arguments.workers, steps=steps, api_key=key)


def _phases(arguments: argparse.Namespace) -> tuple[Any, tuple[int, ...]]:
    """And the levels of a search for the knee."""
    if arguments.find_knee:
        most = arguments.concurrency or DEFAULT_KNEE
        steps = (*(level for power in range(20) if (level := 1 << power) < most), most)
        return steps_profile(steps, parse_duration(arguments.step or DEFAULT_STEP, field="step")), steps
    if arguments.requests is not None or arguments.traffic:
        return (Phase(PEAK, float("inf")),), ()
    seconds = {
        name: parse_duration(usual if getattr(arguments, name) is None else getattr(arguments, name), field=name)
        for name, usual in DEFAULT_PROFILE.items()
    }
    peak = seconds["peak"]
    if not peak:
        raise ConfigurationError("--peak: no time is left to measure", fix="--peak 30s", field="peak")
    up, down = (
        min(seconds[name], peak / PEAK_SHARE) if getattr(arguments, name) is None else seconds[name]
        for name in ("up", "down")
    )
    return default_profile(up, peak, down), ()


def _refuse_contradictions(arguments: argparse.Namespace) -> None:
    loads = {"--rate": arguments.rate, "--traffic": arguments.traffic, "--find-knee": arguments.find_knee}
    given = [flag for flag, value in loads.items() if value]
    if len(given) > 1:
        raise ConfigurationError(
            f"{' and '.join(given)} are different loads", fix=f"leave all but {given[0]} out", field=given[1][2:]
        )
    for name, needed in OF_A_LOAD.items():
        if getattr(arguments, name) is not None and not getattr(arguments, needed):
            flag = f"--{needed.replace('_', '-')}"
            raise ConfigurationError(f"--{name} is a part of {flag}", fix=f"{flag}, or leave it out", field=name)
    other = next((name for name in ("requests", "find_knee", "traffic") if getattr(arguments, name)), None)
    timed = next((name for name in DEFAULT_PROFILE if getattr(arguments, name) is not None), None)
    if other is not None and timed is not None:
        flag = f"--{other.replace('_', '-')}"
        raise ConfigurationError(
            f"{flag} decides how long the run is, and --{timed} would too", fix=f"leave --{timed} out", field=timed
        )
    texts = {"--prompts": arguments.prompts, "--turns": arguments.turns > 1, "--prefix-tokens": arguments.prefix_tokens}
    text = next((flag for flag, value in texts.items() if value), None)
    if arguments.token_ids and text:
        raise ConfigurationError(
            f"--token-ids makes prompts of ids, and {text} of text", fix=f"leave {text} out", field="token_ids"
        )
    if arguments.turns > 1 and not arguments.endpoint.endswith("/chat/completions"):
        raise ConfigurationError(
            "conversations of several turns need a chat endpoint",
            needed="--endpoint /v1/chat/completions",
            found=shorten(arguments.endpoint),
            fix="leave --endpoint or --turns out",
            field="turns",
        )


def _text_of(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"--schema: {shorten(path)} cannot be read",
            found=str(error),
            fix="a file with a JSON schema",
            field="schema",
        ) from error


def _check_certificate(path: str) -> None:
    try:
        if path:
            ssl.create_default_context(cafile=path)
    except OSError as error:  # ssl.SSLError is one.
        raise ConfigurationError(
            f"--certificate: {shorten(path)} cannot be read",
            needed="a file with certificates in PEM format",
            found=str(error),
            fix="the server's --ssl-certfile",
            field="certificate",
        ) from error


def _json_object(text: str, field: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigurationError(f"--{field}: not JSON: {error}", fix="a JSON object", field=field) from error
    if not isinstance(found, dict):
        raise ConfigurationError(f"--{field}: not an object", found=shorten(text), fix="a JSON object", field=field)
    return found
