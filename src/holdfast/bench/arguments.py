"""From the words of `holdfast bench` to a load and what is allowed of it; what contradicts itself is refused.

Reads the files that words name. Sends nothing.
"""

from __future__ import annotations

import argparse
import json
import math
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
RATE_STEPS = 10
"""Of a search for the knee by rates."""
LEAST_OF_A_STEP = 15
"""Requests by which a rate can be told."""
PEAK_SHARE = 5
"""Of the peak, a part of so many is the longest that load rises or falls unless that was set: a short run is short."""
OF_A_LOAD = {"arrivals": "rate", "burst": "rate", "step": "find_knee", "speed": "traffic"}
"""Settings that mean nothing without another."""


def read_load(arguments: argparse.Namespace, url: str) -> tuple[Load, RunOptions]:
    _refuse_contradictions(arguments)
    _check_certificate(arguments.certificate)
    key = os.environ.get("HOLDFAST_API_KEY")
    phases, steps, rates = _phases(arguments)
    rate = None if arguments.rate is None else arguments.rate[1]
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
        rate=rate,
        arrivals=arguments.arrivals or "poisson",
        burst=arguments.burst or DEFAULT_BURST,
        requests=arguments.requests,
        replay=read_replay(arguments.traffic, speed=arguments.speed or 1.0) if arguments.traffic else (),
        speed=arguments.speed or 1.0,
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
    return load, RunOptions(allowed=allowed, workers=arguments.workers, steps=steps, rates=rates, api_key=key)


def _phases(arguments: argparse.Namespace) -> tuple[tuple[Phase, ...], tuple[int, ...], tuple[float, ...]]:
    """And the levels of a search for the knee: requests at once, or rates."""
    if arguments.find_knee:
        step_s = parse_duration(arguments.step or DEFAULT_STEP, field="step")
        if arguments.rate is not None:
            low, high = arguments.rate
            rates = _rates(low, high, step_s, arguments.burst or DEFAULT_BURST, arguments.arrivals)
            return steps_profile(rates, step_s), (), rates
        most = arguments.concurrency or DEFAULT_KNEE
        steps = (*(level for power in range(20) if (level := 1 << power) < most), most)
        return steps_profile(steps, step_s), steps, ()
    if arguments.requests is not None or arguments.traffic:
        return (Phase(PEAK, float("inf")),), (), ()
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
    return default_profile(up, peak, down), (), ()


def _rates(low: float | None, high: float, seconds: float, burst: int, arrivals: str | None) -> tuple[float, ...]:
    """Ten even steps up to the highest, or from the lowest to it."""
    if math.isinf(high) or (low is not None and low >= high):
        raise ConfigurationError(
            "--rate: no range to search for the knee",
            needed="the highest number of requests a second, or the lowest and the highest",
            found=f"{'' if low is None else f'{low:g}-'}{high:g}",
            fix="--find-knee --rate 20, or --find-knee --rate 10-20",
            field="rate",
        )
    first = high / RATE_STEPS if low is None else low
    whole = RATE_STEPS - 1 if low is None else RATE_STEPS
    # As they are named: no two phases may be called the same.
    rates = tuple(dict.fromkeys(float(f"{first + (high - first) * at / whole:g}") for at in range(whole + 1)))
    least = max(LEAST_OF_A_STEP, burst if arrivals == "bursts" else 0)
    if rates[0] * seconds < least:
        raise ConfigurationError(
            f"--step: {seconds:g} s at {rates[0]:g} requests/s are too few requests to tell a rate by",
            needed=f"{least} requests in every step",
            found=f"{rates[0] * seconds:.3g} in the first",
            fix=f"--step {math.ceil(least / rates[0])}s, or a range that begins higher: --rate"
            f" {math.ceil(least / seconds)}-{max(high, 2 * math.ceil(least / seconds)):g}",
            field="step",
        )
    return rates


def _refuse_contradictions(arguments: argparse.Namespace) -> None:
    _refuse_mixed_loads(arguments)
    low, rate = arguments.rate or (None, None)
    if low is not None and not arguments.find_knee:
        raise ConfigurationError(
            f"--rate {low:g}-{rate:g} is a range to search, and no search was asked for",
            fix=f"--find-knee --rate {low:g}-{rate:g}, or --rate {rate:g}",
            field="rate",
        )
    if rate is not None and math.isinf(rate) and arguments.requests is None and not arguments.find_knee:
        raise ConfigurationError(
            "--rate inf sends all requests at once, and how many was not said",
            needed="--requests N",
            fix="--rate inf --requests 200",
            field="rate",
        )
    if rate is not None and arguments.find_knee and arguments.requests is not None:
        raise ConfigurationError(
            "--find-knee --rate sends for a time at each rate, and --requests would end it",
            fix="leave --requests out; --step says how long",
            field="requests",
        )


def _refuse_mixed_loads(arguments: argparse.Namespace) -> None:
    loads = {"--rate": arguments.rate, "--traffic": arguments.traffic, "--find-knee": arguments.find_knee}
    given = [flag for flag, value in loads.items() if value]
    if len(given) > 1 and given != ["--rate", "--find-knee"]:  # That is a search by rates.
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
    texts = {"--prompts": arguments.prompts, "--turns": arguments.turns > 1}
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
