"""`holdfast bench`: a server under load, and whether it passes. Words in, a table, JSON or a page out; the work is in
the room `bench`. `holdfast bench serve | throughput | latency` are vLLM's, with its words and result keys.

Exit codes: 0 pass, 1 fail, 2 the run cannot be made as asked, 3 there was no server or it ended, 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from holdfast.cli.output import say, say_error, say_json
from holdfast.errors import ConfigurationError, EngineError
from holdfast.units import shorten

if TYPE_CHECKING:
    from holdfast.bench.client.answers import TimedAnswer
    from holdfast.bench.load.load import Load
    from holdfast.bench.report.compare import Comparison
    from holdfast.bench.result import BenchResult
    from holdfast.bench.run import RunOptions

HELP = """Put a server under load, and say whether it passes.

Any server with the OpenAI API: Holdfast, vLLM, SGLang, llama.cpp, TGI, Ollama. With the name of a model instead of an
address a server of Holdfast is started for the run. By default load rises for one minute, stays at its peak for five
and falls for one; latencies, throughput, errors and the server's memory are measured meanwhile, and judged."""

USAGE = "holdfast bench URL|MODEL [--concurrency N | --rate R | --traffic FILE] [--slo ttft=500ms,itl=50ms] [options]"

EXAMPLES = """examples:
  holdfast bench http://127.0.0.1:8000 --concurrency 64 --slo ttft=500ms,itl=50ms    64 at once, seven minutes
  holdfast bench smollm2 --concurrency 8 --peak 30s                      start a server first, 42 s of load
  holdfast bench URL --rate 10 --arrivals bursts --burst 20              open loop: sent whether it keeps up or not
  holdfast bench URL --find-knee --concurrency 128                       1, 2, 4 ... 128 at once
  holdfast bench URL --find-knee --rate 20 --slo ttft=500ms              2, 4, 6 ... 20 requests/s
  holdfast bench URL --traffic access.log                                replay, at the log's own times
  holdfast bench URL --prompt 100-4000 --output 50-500 --prefix-tokens 1000 --prefix-share 50%
  holdfast bench URL --save a.json --html a.html                         keep it; plots
  holdfast bench --compare a.json b.json                                 two runs, with confidence intervals
  holdfast bench serve --model NAME --num-prompts 200 --request-rate 4   vLLM's arguments; also throughput, latency

environment: HOLDFAST_API_KEY for a server with a key
exit codes: 0 pass, 1 fail, 2 usage error, 3 the server cannot be reached or started, or ended during the run,
            130 interrupted (what was measured until then is printed and saved)
"""
AS_VLLM = ("serve", "throughput", "latency")
VLLM_ALONE = ("startup", "sweep", "mm-processor")
"""Benchmarks of vLLM that are not there; a model would be taken for one."""
PASS, FAIL, NO_SERVER, INTERRUPTED = 0, 1, 3, 130
TERMINAL_S, LOG_S = 1.0, 30.0
"""Between two words of progress."""
_ADDRESS = re.compile(r"\d{1,5}|https?://.+|(?:[\w.-]+|\[[0-9a-fA-F:]+\]):\d{1,5}(?:/.*)?")

_MISTYPED = re.compile(r"[a-zA-Z]+:/|\[|\d+\.\d+\.\d+\.\d+|localhost[:/]")
"""How an address begins that lacks something, where no model does: http:/host, ftp://host, 127.0.0.1."""


def chosen(words: Sequence[str]) -> tuple[ModuleType | None, list[str]]:
    """The module that takes these words, where it is not this one, and what is left of them."""
    if words and words[0] in AS_VLLM:
        return importlib.import_module(f"holdfast.bench.as_vllm.{words[0]}"), list(words[1:])
    if words and words[0] in VLLM_ALONE:
        raise ConfigurationError(
            f"bench {words[0]} of vLLM is not there",
            needed=f"one of {', '.join(AS_VLLM)}, an address or a model",
            fix="holdfast serve prints how long each part of its start took"
            if words[0] == "startup"
            else "holdfast bench serve, once for each setting",
            field="target",
        )
    return None, list(words)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", nargs="?", metavar="URL|MODEL", help="a server's address, or a model to serve first")
    load = parser.add_argument_group("load")
    load.add_argument("--concurrency", type=_positive, metavar="N", help="closed loop: so many at once (default: 16)")
    load.add_argument(
        "--rate",
        type=_rate,
        metavar="R",
        help="open loop: requests a second, sent in any case; inf: all --requests at once; of --find-knee also A-B",
    )
    load.add_argument(
        "--arrivals", choices=("poisson", "constant", "bursts"), help="of an open loop (default: poisson)"
    )
    load.add_argument("--burst", type=_positive, metavar="N", help="requests of a burst (default: 8)")
    load.add_argument(
        "--up", metavar="TIME", help="while load rises (default: 1m, at most a fifth of the peak; 0s: at once)"
    )
    load.add_argument("--peak", metavar="TIME", help="at full load, which is judged (default: 5m)")
    load.add_argument("--down", metavar="TIME", help="while load falls (default: as --up)")
    load.add_argument("--requests", type=_positive, metavar="N", help="end after so many, instead of after a time")
    load.add_argument(
        "--find-knee",
        action="store_true",
        help="1, 2, 4 ... up to --concurrency (default: 64) at once; with --rate: ten rates, until one is missed",
    )
    load.add_argument("--step", metavar="TIME", help="at each of these (default: 15s)")
    load.add_argument("--traffic", metavar="FILE", help="replay an access log or any JSON lines with tokens and times")
    load.add_argument("--speed", type=_positive_float, metavar="X", help="of the replay (default: 1)")
    load.add_argument("--workers", type=_positive, default=1, metavar="N", help="client processes (default: 1)")
    load.add_argument("--timeout", default="600s", metavar="TIME", help="of one request (default: 600s)")
    load.add_argument("--seed", type=int, default=0, help="of prompts and arrivals")
    _add_what_is_asked(parser)
    judged = parser.add_argument_group("verdict")
    judged.add_argument("--slo", metavar="SLO", help="ttft=500ms,itl=50ms,e2e.p95=20s; p99 where no percentile is said")
    judged.add_argument("--headroom", default="5%", metavar="SHARE", help="RAM and VRAM to stay free (default: 5%%)")
    judged.add_argument("--max-errors", default="0.1%", metavar="SHARE", help="of requests (default: 0.1%%)")
    said = parser.add_argument_group("output")
    said.add_argument("--json", action="store_true", help="print JSON (docs/bench.md)")
    said.add_argument("--save", metavar="FILE", help="write the same JSON to a file")
    said.add_argument("--html", metavar="FILE", help="write a page with plots, which needs no network")
    said.add_argument(
        "--compare", nargs=2, metavar=("A", "B"), help="two results of --save, or two servers under the same load"
    )
    said.add_argument("--quiet", action="store_true", help="no progress on standard error")
    parser.add_argument("--serve-flags", default="", metavar='"FLAGS"', help="flags of the server that is started")
    parser.add_argument(
        "--certificate", default="", metavar="FILE", help="a certificate to trust, of a server with TLS"
    )
    parser.add_argument("--insecure", action="store_true", help="trust any certificate")


def _add_what_is_asked(parser: argparse.ArgumentParser) -> None:
    asked = parser.add_argument_group("requests")
    asked.add_argument("--model", metavar="NAME", help="as the server calls it (default: the first it lists)")
    asked.add_argument("--endpoint", default="/v1/chat/completions", metavar="PATH", help="or /v1/completions")
    asked.add_argument("--prompt", default="256", metavar="TOKENS", help="512, or 100-1000 (default: 256)")
    asked.add_argument("--output", default="128", metavar="TOKENS", help="likewise (default: 128)")
    asked.add_argument(
        "--token-ids", action="store_true", help="prompts are token ids: of a server without a tokenizer"
    )
    asked.add_argument("--prompts", metavar="FILE", help="lines of text or JSON, a batch file, or ShareGPT's JSON")
    asked.add_argument("--prefix-tokens", type=_positive, default=0, metavar="N", help="that prompts begin with alike")
    asked.add_argument("--prefix-share", default="100%", metavar="SHARE", help="of prompts (default: 100%%)")
    asked.add_argument("--prefixes", type=_positive, default=1, metavar="N", help="different ones (default: 1)")
    asked.add_argument("--turns", type=_positive, default=1, metavar="N", help="of each conversation (default: 1)")
    asked.add_argument("--think", default="0s", metavar="TIME", help="between turns (default: 0s)")
    asked.add_argument("--cancel", default="0%", metavar="SHARE", help="requests whose client leaves before the end")
    asked.add_argument("--schema", metavar="FILE", help="JSON schema that answers must follow")
    asked.add_argument("--schema-share", default="100%", metavar="SHARE", help="of requests (default: 100%%)")
    asked.add_argument("--lora", nargs="+", default=[], metavar="NAME", help="adapters, drawn evenly")
    asked.add_argument(
        "--ignore-eos", action=argparse.BooleanOptionalAction, default=True, help="answers have their whole length"
    )
    asked.add_argument("--extra-body", metavar="JSON", help="fields for every request")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError("must be a whole number, 1 or more")
    return int(text)


def _positive_float(text: str) -> float:
    with contextlib.suppress(ValueError):
        if float(text) > 0:
            return float(text)
    raise argparse.ArgumentTypeError("must be a number above 0")


def _rate(text: str) -> tuple[float | None, float]:
    """`4`, or `4-12` of a search: the lowest, where it was said, and the highest."""
    low, _, high = text.partition("-")
    with contextlib.suppress(argparse.ArgumentTypeError):
        return None, _positive_float(text)
    with contextlib.suppress(argparse.ArgumentTypeError):
        return _positive_float(low), _positive_float(high)
    raise argparse.ArgumentTypeError("must be a number above 0, or of --find-knee two with a dash between them")


def run(arguments: argparse.Namespace) -> int:
    from holdfast.bench.target import NO_ANSWER

    try:
        return _run(arguments) if arguments.compare is None else _compare(arguments)
    except EngineError as error:
        if error.code not in NO_ANSWER:
            raise
        say_error(error)
        return NO_SERVER


def _run(arguments: argparse.Namespace) -> int:
    from holdfast.bench.measure.verdict import SERVER_PROCESS

    if arguments.target is None:
        raise ConfigurationError(
            "nothing to benchmark was named",
            needed="the address of a server, or a model",
            fix="holdfast bench http://127.0.0.1:8000, or holdfast bench smollm2",
            field="target",
        )
    for field in ("save", "html"):
        _check_can_be_written(getattr(arguments, field), field)
    asked = _asked(arguments)  # Before a server is started for what cannot be asked.
    with _server(arguments) as (url, model):
        result = measured(arguments, asked, url, model)
    if arguments.json:
        say_json(as_json(result))
    else:
        from holdfast.bench.report.text import lines

        say(lines(result))
    _keep(arguments, result)  # Last: a disk that is full takes no figures with it.
    if result.interrupted:
        return INTERRUPTED
    ended = any(check.name == SERVER_PROCESS and not check.passed for check in result.verdict.checks)
    return PASS if result.verdict.passed else NO_SERVER if ended else FAIL


def _keep(arguments: argparse.Namespace, result: BenchResult) -> None:
    from holdfast.bench.report.page import page

    try:
        if arguments.save:
            Path(arguments.save).write_text(json.dumps(as_json(result)) + "\n", encoding="utf-8")
        if arguments.html:
            Path(arguments.html).write_text(page(result), encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(
            "the run is over, and its result could not be written; its figures are above",
            found=str(error),
            fix="free space, or another folder for --save and --html; then run it again",
            field="save",
        ) from error


def _compare(arguments: argparse.Namespace) -> int:
    """0 where both could be measured or read: a difference is no fault."""
    from holdfast.bench.report.compare import compare, compare_lines

    if arguments.target is not None or arguments.html or arguments.save:
        raise ConfigurationError(
            "--compare takes two results or servers, and prints; it runs nothing else and keeps nothing",
            fix="leave the address, --html and --save out; --json prints it for programs",
            field="compare",
        )
    first, second = (_result_of(arguments, name) for name in arguments.compare)
    found = compare(first, second, names=tuple(arguments.compare))
    if arguments.json:
        say_json(as_json(found))
    else:
        say(compare_lines(found))
    return PASS


def _result_of(arguments: argparse.Namespace, name: str) -> BenchResult:
    """Of a file, or measured now at an address."""
    import msgspec

    from holdfast.bench.result import VERSION, BenchResult
    from holdfast.cli.chat_backends import api_of

    if _ADDRESS.fullmatch(name) and not Path(name).exists():
        return measured(arguments, _asked(arguments), api_of(name, written="--compare").removesuffix("/v1/"), None)
    try:
        found = msgspec.json.decode(Path(name).read_bytes(), type=BenchResult)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigurationError(
            f"--compare: {shorten(name)} cannot be read",
            needed="a file of holdfast bench --save, or the address of a server",
            found=str(error),
            fix="holdfast bench URL --save a.json",
            field="compare",
        ) from error
    if found.version != VERSION:
        raise ConfigurationError(
            f"--compare: {shorten(name)} is of another version",
            needed=f"version {VERSION}",
            found=str(found.version),
            fix="run it again with this version of Holdfast",
            field="compare",
        )
    return found


def as_json(result: BenchResult | Comparison) -> Any:
    import msgspec

    return json.loads(msgspec.json.encode(result))


@contextlib.contextmanager
def _server(arguments: argparse.Namespace) -> Iterator[tuple[str, str | None]]:
    """The address, and what the planner calls the model where that is known."""
    from holdfast.bench.own_server import own_server
    from holdfast.cli.chat_backends import api_of

    if _ADDRESS.fullmatch(arguments.target):
        if arguments.serve_flags:
            raise ConfigurationError(
                "--serve-flags are of a server that is started here, and an address was given",
                fix="leave them out, or name a model instead of the address",
                field="serve_flags",
            )
        yield api_of(arguments.target, written="URL").removesuffix("/v1/"), None
        return
    _refuse_mistyped(arguments.target)
    if not arguments.quiet:
        print(f"holdfast: starting a server for {arguments.target}", file=sys.stderr, flush=True)
    with own_server(arguments.target, shlex.split(arguments.serve_flags)) as url:
        yield url, arguments.target


def _refuse_mistyped(target: str) -> None:
    """What can only be meant as an address is not taken for a model."""
    if (_MISTYPED.match(target) is None and target != "localhost") or Path(target).exists():
        return
    raise ConfigurationError(
        f"{shorten(target)!r} is neither an address nor a model",
        needed="http:// or https:// with a host and perhaps a port, HOST:PORT, a port, or a model",
        found="nothing that could be asked, and no such file",
        fix="holdfast bench http://127.0.0.1:8000",
        field="target",
    )


def _asked(arguments: argparse.Namespace) -> tuple[Load, RunOptions]:
    """Of no server yet."""
    from holdfast.bench.arguments import read_load

    return read_load(arguments, "")


def measured(arguments: argparse.Namespace, asked: tuple[Load, RunOptions], url: str, model: str | None) -> BenchResult:
    from holdfast.bench.run import run_bench
    from holdfast.bench.target import calibrated, check_lengths, find_target

    load, options = _with(asked[0], url=url), asked[1]
    target = find_target(url, options.api_key, arguments.model, load.certificate)
    check_lengths(load, target)
    load = calibrated(_with(load, model=target.model))
    progress = None if arguments.quiet else _StatusLine(load, terminal=sys.stderr.isatty())
    try:
        with sigterm_as_ctrl_c():
            return run_bench(target, load, _with(options, model=model, command=_started_as(arguments, model)), progress)
    except KeyboardInterrupt:
        print("holdfast: interrupted before anything was answered: no figures, nothing written", file=sys.stderr)
        raise
    finally:
        if progress is not None:
            progress.clear()


@contextlib.contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """Whoever ends a run early wants its figures until then, however it is ended."""
    usual = signal.signal(signal.SIGTERM, lambda number, frame: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, usual)


def _started_as(arguments: argparse.Namespace, model: str | None) -> str | None:
    """As a person would start what was started here; None: it was not."""
    return None if model is None else f"{shlex.join(['holdfast', 'serve', model])} {arguments.serve_flags}".strip()


def _with(record: Any, **changes: Any) -> Any:
    import msgspec

    return msgspec.structs.replace(record, **changes)


def _check_can_be_written(path: str | None, field: str) -> None:
    """Before the run: its figures must not be lost after minutes."""
    if path is None:
        return
    folder = Path(path).absolute().parent
    reason = ""
    if not folder.is_dir():
        reason = f"there is no folder {folder}"
    elif Path(path).is_dir():
        reason = "it is a folder"
    elif not os.access(path if Path(path).exists() else folder, os.W_OK):
        reason = "no permission"
    if reason:
        raise ConfigurationError(
            f"--{field}: {shorten(path)} cannot be written",
            needed="a file in an existing folder",
            found=reason,
            fix=f"--{field} {'result.json' if field == 'save' else 'report.html'}",
            field=field,
        )


class _StatusLine:
    """How far it is: on one line of a terminal; elsewhere, in a log, a line now and then."""

    def __init__(self, load: Load, *, terminal: bool) -> None:
        from holdfast.bench.client.drive import run_seconds

        self._seconds, self._terminal = run_seconds(load), terminal
        self._said_s = 0.0 if terminal else time.monotonic()

    def __call__(self, at_s: float, answers: Sequence[TimedAnswer]) -> None:
        if time.monotonic() - self._said_s < (TERMINAL_S if self._terminal else LOG_S) or at_s < 0:
            return
        self._said_s = time.monotonic()
        failed = sum(bool(answer.error) for answer in answers[-1000:])
        timed = 0 < self._seconds < float("inf")
        whole = f" of {self._seconds:.0f}" if timed and at_s <= self._seconds else ""
        last = f", waiting for the last since {self._seconds:.0f} s" if timed and at_s > self._seconds + 1 else ""
        trouble = f", {failed} of the last {min(1000, len(answers))} failed" if failed else ""
        said = f"{at_s:.0f}{whole} s, {len(answers):,} requests answered{trouble}{last}"
        sys.stderr.write(f"\r\033[K{said}" if self._terminal else f"holdfast: {said}\n")
        sys.stderr.flush()

    def clear(self) -> None:
        if not self._terminal:
            return
        sys.stderr.write("\r\033[K")
        sys.stderr.flush()
