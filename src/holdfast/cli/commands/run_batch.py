"""`holdfast run-batch`: a file of OpenAI requests in, a file of answers out.

Owns settings, signals and exit codes; lines are in `batch/runner.py`, files in `batch/files.py`."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.cli.batch.files import REFUSED, UNUSABLE, Input, Output, read_lines
from holdfast.cli.commands.serve import read_settings, said_of, server_settings
from holdfast.cli.commands.serve import refused_settings as refused_settings  # Asked for by `main`.
from holdfast.config import EngineConfig, ServerConfig
from holdfast.config.engine import REFUSED as ENGINE_REFUSED
from holdfast.config.server import REFUSED as SERVER_REFUSED
from holdfast.config.setting import flag_name, whole
from holdfast.config.sources import add_flags, add_refused
from holdfast.config.tuning import TUNING
from holdfast.engine.startup.prespawn import EarlyProcess
from holdfast.errors import ConfigurationError
from holdfast.units import shorten

if TYPE_CHECKING:
    from collections.abc import Iterator

    from starlette.applications import Starlette

    from holdfast.cli.batch.files import InputLine
    from holdfast.engine.interface import Engine

HELP = """Run a file of requests (OpenAI's batch format: custom_id, method, url, body) as a server would, and write
the responses to another file.

The same command resumes a run that was interrupted, however that happened: lines that have a response are not run
again. Settings can also be environment variables or lines of a file, as for holdfast serve."""

USAGE = "holdfast run-batch -i FILE -o FILE [--model MODEL] [settings]"

EXAMPLES = """examples:
  holdfast run-batch -i requests.jsonl -o answers.jsonl
  holdfast run-batch -i requests.jsonl -o answers.jsonl --model ./my-model --max-concurrency 16

exit codes: 0 every line has a response (an error is one), 1 failed, a line has no response or is no request, 2 a
setting cannot be honoured, 130 or 143 stopped by a signal
"""

SERVER_NAMES = frozenset(
    {
        "served_model_name", "max_body_size", "trust_request_chat_template", "log_level", "verbose",
        "enable_auto_tool_choice", "tool_call_parser", "reasoning_parser", "lora_modules", "structured_outputs_config",
        "default_chat_template_kwargs", "return_tokens_as_token_ids", "chat_template_content_format",
    }
)  # fmt: skip
"""Settings of a server that shape answers; the others are of its network."""

NOT_HERE = {
    "output_tmp_dir": "responses are appended to the output file itself, and nothing is uploaded",
    "enable_metrics": "a batch has no port; the progress line shows tokens per second",
}
"""vLLM's flags of this command that mean nothing here."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-i", "--input-file", required=True, metavar="FILE", help="requests, one JSON object per line")
    parser.add_argument(
        "-o",
        "--output-file",
        required=True,
        metavar="FILE",
        help="responses, one per line, in the order they finish; an existing output file is resumed",
    )
    parser.add_argument(
        "--max-concurrency",
        metavar="NUMBER",
        help="maximum number of concurrent requests (default: twice --max-num-seqs, so that the next ones are queued)",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings from a file")
    add_flags(parser, EngineConfig, title="model and engine")
    unused = [field.name for field in dataclasses.fields(ServerConfig) if field.name not in SERVER_NAMES]
    add_flags(parser, ServerConfig, title="answers", skip=unused)
    add_refused(parser, (*ENGINE_REFUSED, *(SERVER_REFUSED.keys() & SERVER_NAMES), *TUNING))
    for name in NOT_HERE:
        parser.add_argument(flag_name(name), dest=name, nargs="*", default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    given = vars(arguments)
    for name, reason in NOT_HERE.items():
        if name in given:
            raise ConfigurationError(f"{flag_name(name)} is not supported: {reason}", fix="leave it out", field=name)
    concurrency = given.pop("max_concurrency")
    if concurrency is not None:
        concurrency = whole(1, 1 << 16)("--max-concurrency", concurrency)
    source, target = (_local(given.pop(name), name) for name in ("input_file", "output_file"))
    engine_config, server_config = read_settings(arguments)
    taken = said_of(arguments)
    if taken is not None:
        print(f"holdfast: {taken}", file=sys.stderr, flush=True)
    server_config = _without_network(server_config)
    lines = Input(source)
    if target.exists() and target.samefile(source):
        raise ConfigurationError("input and output are the same file", code=UNUSABLE, field="output_file")
    output = Output(target)
    early = EarlyProcess()
    try:
        return _run(lines, output, concurrency, engine_config, server_config, early)
    finally:
        early.end()  # Whatever stopped us.
        output.close()


def _without_network(config: ServerConfig) -> ServerConfig:
    """Only what shapes answers: keys and the like, which the environment may set for servers, are not asked of us."""
    kept = {name: getattr(config, name) for name in SERVER_NAMES if hasattr(config, name)}
    return ServerConfig(**kept, disable_access_log=True)


def _local(path: str, field: str) -> Path:
    if "://" in path:
        raise ConfigurationError(
            f"{flag_name(field)}: {shorten(path)!r} is not a local file; nothing is downloaded or uploaded",
            code=UNUSABLE,
            fix="download it first, and upload the output afterwards: curl does both",
            field=field,
        )
    return Path(path)


def _run(
    lines: Input,
    output: Output,
    concurrency: int | None,
    engine_config: EngineConfig,
    server_config: ServerConfig,
    early: EarlyProcess,
) -> int:
    from holdfast.engine.data_parallel.open import open_engine, plan_engines
    from holdfast.engine.ranks.ray_cluster.launch import driver_bytes, on_ray
    from holdfast.engine.startup.build import find_model, open_tokenizer
    from holdfast.engine.startup.progress import LoadProgress
    from holdfast.engine.startup.select_device import settle_device
    from holdfast.footprint.cpu import front_bytes
    from holdfast.observability.logs import set_up_logging
    from holdfast.records.sampling import WHOLE_VOCABULARY
    from holdfast.server.app import create_app

    set_up_logging(server_config.level)
    engine_config = settle_device(engine_config)
    model = find_model(engine_config)
    digests = lines.digests(model.files.name)
    answered = output.resume(digests)
    total, done, refused = sum(map(bool, digests)), sum(map(bool, answered)), answered.count(REFUSED)
    del digests  # Eight bytes a line, of many.
    if done == total:
        failed = f", {refused:,} of them errors" if refused else ""
        said = f"{total:,} of {total:,} lines answered{failed}; nothing left to do"
        print(f"holdfast: {said}", file=sys.stderr)
        return 0
    front = front_bytes(engine_config.max_logprobs == WHOLE_VOCABULARY) + driver_bytes(engine_config)
    with on_ray(engine_config, model.files.name) as engine_config:
        plans = plan_engines(engine_config, model, front_bytes=front, engine_pids=[early.pid])
        tokenizer = open_tokenizer(engine_config, model)
        engine = open_engine(engine_config, model, tokenizer, plans, on_progress=LoadProgress(), early=early)
        app = create_app(engine, server_settings(engine_config, server_config, model))
        left = (line for line in read_lines(lines.path, model.files.name) if not answered[line.number])
        return asyncio.run(_Run(app, engine, output, total=total, done=done, refused=refused).live(left, concurrency))


class _Run:
    """From starting the engine to its end; the first signal ends it."""

    def __init__(self, app: Starlette, engine: Engine, output: Output, *, total: int, done: int, refused: int) -> None:
        from holdfast.cli.batch.progress import BatchProgress

        self._app = app
        self._engine = engine
        self._output = output
        self._repeated = self._malformed = 0
        self._progress = BatchProgress(
            total=total, done=done, refused=refused, generated=lambda: app.state.metrics.token_totals()[1]
        )
        self._signal: signal.Signals | None = None

    async def live(self, lines: Iterator[InputLine], concurrency: int | None) -> int:
        from holdfast.server.app import close_app

        loop, working = asyncio.get_running_loop(), asyncio.create_task(self._work(lines, concurrency))

        def stop(number: signal.Signals) -> None:
            self._signal = self._signal or number
            working.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop, number)
        try:
            await working
        except asyncio.CancelledError:
            if self._signal is None:
                raise
        finally:
            await self._output.finish()
            await self._engine.stop()
            close_app(self._app)
            print(f"holdfast: {self._progress.story()}", file=sys.stderr, flush=True)
        if self._signal is not None:
            print("holdfast: stopped; the same command resumes from here", file=sys.stderr, flush=True)
            return 128 + self._signal
        if self._repeated:
            said = f"{self._repeated:,} lines repeat the custom_id of an earlier line; their ids differ"
            print(f"holdfast: {said}", file=sys.stderr, flush=True)
        if self._progress.lost:
            said = f"{self._progress.lost:,} lines have no response; the same command runs them again"
            print(f"holdfast: {said}", file=sys.stderr, flush=True)
            return 1
        if self._malformed:
            said = f"{self._malformed:,} lines are no batch requests; the output says what is wrong with each"
            print(f"holdfast: {said}", file=sys.stderr, flush=True)
            return 1
        return 0

    async def _work(self, lines: Iterator[InputLine], concurrency: int | None) -> None:
        from holdfast.cli.batch.runner import URLS, BatchRunner

        await self._engine.start()
        paths = {getattr(route, "path", None) for route in self._app.routes}
        urls = tuple(url for url in URLS if url in paths)
        runner = BatchRunner(
            self._app,
            self._engine,
            self._output.append,
            urls=urls,
            on_answer=self._progress.answered,
            on_lost=self._progress.lose,
        )
        with self._progress:
            await runner.run(lines, concurrency or 2 * self._engine.info.max_num_seqs)
        self._repeated, self._malformed = runner.repeated, runner.malformed
