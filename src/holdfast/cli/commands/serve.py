"""`holdfast serve`: settings in, a running server out. Says what it is doing; the work is engine's and server's."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import ipaddress
import logging
import os
import shlex
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.cli.fatal import command_line, say_fatal
from holdfast.cli.working_command import Parse, command_instead, with_working_command
from holdfast.config import EngineConfig, ServerConfig
from holdfast.config.engine import REFUSED as ENGINE_REFUSED
from holdfast.config.server import LOG_LEVELS
from holdfast.config.server import REFUSED as SERVER_REFUSED
from holdfast.config.setting import Refusal, flag_name, refusals, without_effect
from holdfast.config.sources import FLAG, Gathered, add_flags, add_refused, gather, split
from holdfast.config.tuning import TUNING
from holdfast.engine.startup.prespawn import EarlyProcess
from holdfast.errors import CheckpointError, ConfigurationError, HoldfastError
from holdfast.observability.nonblocking_output import unblock_output

if TYPE_CHECKING:
    import ssl

    from starlette.applications import Starlette

    from holdfast.engine.interface import Engine
    from holdfast.engine.requests.adapters import Adapters
    from holdfast.engine.startup.build import FoundModel
    from holdfast.server.settings import ServerSettings

log = logging.getLogger("holdfast")

VLLM_LEVEL = "VLLM_LOGGING_LEVEL"

HELP = """Serve a model over the OpenAI API, within the memory that is actually free.

Each setting can also be an environment variable (HOLDFAST_PORT=9000) or a line of a TOML or YAML file given with
--config; a flag wins over the environment, and the environment over the file."""

USAGE = "holdfast serve [MODEL] [settings]"

EXAMPLES = """examples:
  holdfast serve                                        the built-in SmolLM2-135M-Instruct
  holdfast serve ./my-model --max-model-len 8K          a folder with config.json and safetensors
  holdfast serve model-q4_1.gguf --port 9000            a GGUF file
  holdfast serve owner/name --api-key secret            a hub id (HF_TOKEN, HF_HOME and HF_ENDPOINT are honoured)

exit codes: 0 stopped in order, 1 failed, 2 a setting cannot be honoured, 130 or 143 ended by a second signal
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model_positional", nargs="?", metavar="MODEL", help="same as --model")
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings from a TOML or YAML file")
    add_flags(parser, EngineConfig, title="model and engine")
    add_flags(parser, ServerConfig, title="server")
    add_refused(parser, (*ENGINE_REFUSED, *SERVER_REFUSED, *TUNING))


def read_settings(arguments: argparse.Namespace) -> tuple[EngineConfig, ServerConfig]:
    return split(gathered_settings(arguments), (EngineConfig, ENGINE_REFUSED), (ServerConfig, SERVER_REFUSED))


def gathered_settings(arguments: argparse.Namespace) -> Gathered:
    """From flags, the environment and a file, as they were written."""
    given = vars(arguments).copy()
    positional, file = given.pop("model_positional", None), given.pop("config", None)
    if positional is not None:
        if given.get("model") not in (None, positional):
            raise ConfigurationError(f"two models are given: {positional} and {given['model']}", field="model")
        given["model"] = positional
    gathered = gather([EngineConfig, ServerConfig], given, file=file)
    if gathered.values.get("model") is None:
        _check_swallowed(given)
    # Anyone who comes from vLLM must not find the door open; as there, flags and the file come first.
    return Gathered({**vllm_settings(os.environ), **gathered.values}, gathered.origins)


def said_of(arguments: argparse.Namespace) -> str | None:
    """Of vLLM's settings that are taken and do nothing here."""
    gathered = gathered_settings(arguments)
    return without_effect(gathered.values, gathered.origin)


def refused_settings(arguments: argparse.Namespace) -> list[Refusal]:
    """Of the flags alone."""
    return refusals(vars(arguments), {**ENGINE_REFUSED, **SERVER_REFUSED}, lambda name: FLAG)


def _check_swallowed(given: Mapping[str, Any]) -> None:
    """A flag that takes several words takes a MODEL behind them too: a public name would become a key."""
    for name in ("api_key", "served_model_name", "lora_folders", "lora_modules"):
        words = given.get(name) or []
        if len(words) < 2 or (name == "lora_modules" and ("=" in words[-1] or words[-1].startswith("{"))):
            continue
        written = flag_name(name)
        raise ConfigurationError(
            f"{written} is followed by {len(words)} words, and no model is given: the last of them may be one",
            needed="the model before such a flag, or with --model",
            fix=f"holdfast serve MODEL {written} ...; the built-in model is called smollm2",
            field="model",
        )


def vllm_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """From the variables of vLLM that are read: its key, and its log level where we have the same."""
    found = {"api_key": environment.get("VLLM_API_KEY", ""), "log_level": environment.get(VLLM_LEVEL, "").lower()}
    found["log_level"] = {"critical": "error"}.get(found["log_level"], found["log_level"])
    if found["log_level"] not in LOG_LEVELS:
        del found["log_level"]
    return {name: value for name, value in found.items() if value}


def unread_variables(environment: Mapping[str, str]) -> list[str]:
    """vLLM's own, which somebody may rely on."""
    read = {"VLLM_API_KEY", VLLM_LEVEL if "log_level" in vllm_settings(environment) else ""}
    return sorted(name for name in environment if name.startswith("VLLM_") and name not in read)


def server_settings(engine_config: EngineConfig, server_config: ServerConfig, model: FoundModel) -> ServerSettings:
    """What the application is told, whoever runs it."""
    import holdfast
    from holdfast.engine.requests.sampling_defaults import chat_limit, default_sampling
    from holdfast.observability.logs import json_lines
    from holdfast.server.settings import ServerSettings

    return ServerSettings(
        served_model_names=server_config.served_model_name or (model.files.name,),
        any_model_name=not server_config.served_model_name and not engine_config.enable_lora,
        api_key=server_config.api_key,
        api_key_file=None if server_config.api_key_file is None else Path(server_config.api_key_file),
        public_metrics=server_config.public_metrics,
        strict_fields=server_config.strict_fields,
        disable_docs=server_config.disable_docs,
        ui=server_config.ui,
        enable_tokenizer_info_endpoint=server_config.enable_tokenizer_info_endpoint,
        force_include_usage=server_config.enable_force_include_usage,
        enable_sleep_mode=engine_config.enable_sleep_mode,
        may_change_memory=_trusted(server_config),
        loopback_only=_trusted(server_config),
        allowed_origins=server_config.allowed_origins,
        allowed_methods=server_config.allowed_methods,
        allowed_headers=server_config.allowed_headers,
        allow_credentials=server_config.allow_credentials,
        max_body_bytes=server_config.max_body_size,
        max_queued_requests=engine_config.max_queued_requests,
        scheduling_policy=engine_config.scheduling_policy,
        default_sampling=default_sampling(engine_config, model.files),
        chat_max_tokens=chat_limit(engine_config, model.files, model.spec),
        trust_request_chat_template=server_config.trust_request_chat_template,
        scores_by_template=engine_config.chat_template is not None,
        enable_auto_tool_choice=server_config.enable_auto_tool_choice,
        tool_call_parser=server_config.tool_call_parser,
        reasoning_parser=server_config.reasoning_parser,
        structured_outputs=server_config.structured_outputs_config or {},
        adapters=_adapters(engine_config, server_config, model),
        access_log=json_lines() if server_config.logs_access else None,
        unlogged_paths=frozenset(server_config.disable_access_log_for_endpoints),
        root_path=server_config.root_path,
        max_logprobs=engine_config.max_logprobs,
        vocabulary=model.spec.vocab_size,
        tokens_as_ids=server_config.return_tokens_as_token_ids,
        joins_parts=server_config.chat_template_content_format == "string",
        default_chat_template_kwargs=server_config.default_chat_template_kwargs or {},
        version=holdfast.__version__,
    )


def _adapters(engine_config: EngineConfig, server_config: ServerConfig, model: FoundModel) -> Adapters | None:
    """With those loaded that are named at start; what is wrong with one is said before the server is up."""
    from holdfast.engine.requests.adapters import Adapters, load_modules

    if not engine_config.enable_lora:
        for name in ("lora_modules", "lora_folders"):
            if getattr(server_config, name):
                raise ConfigurationError(
                    f"{flag_name(name)} is a LoRA setting, but LoRA is not enabled", fix="--enable-lora", field=name
                )
        return None
    folders = [Path(folder) for folder in server_config.lora_folders] if server_config.lora_folders else None
    if folders is None and not _trusted(server_config):
        folders = []
        log.info("/v1/load_lora_adapter loads from no folder: others may reach this server; see --lora-folders")
    missing = next((folder for folder in folders or () if not folder.is_dir()), None)
    if missing is not None:
        raise ConfigurationError(f"--lora-folders: there is no folder {missing}", field="lora_folders")
    adapters = Adapters(model.spec, model.files.name, engine_config, folders)
    load_modules(adapters, server_config.lora_modules, server_config.served_model_name or (model.files.name,))
    return adapters


def _trusted(config: ServerConfig) -> bool:
    """Whether only programs of this machine, or who has a key, can ask for anything. A Unix domain socket or a path
    prefix is how a server stands behind a proxy, through which anybody may ask."""
    if config.api_key or config.api_key_file:
        return True
    if config.uds or config.root_path:
        return False
    try:
        return ipaddress.ip_address(config.host.partition("%")[0]).is_loopback
    except ValueError:
        return config.host == "localhost"


def run(arguments: argparse.Namespace, words: tuple[str, ...], parse: Parse, early: EarlyProcess | None = None) -> int:
    """`words`: as they were typed after `holdfast`. `parse`: how they were read. `early`: an engine process that waits
    already; it is ended here."""
    unblock_output()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # It would end a process that is not ready to hear it.
    try:
        engine_config, server_config = read_settings(arguments)
    except ConfigurationError as error:
        with_working_command(error, words, parse)
        raise
    early = early or EarlyProcess()
    given = {field.name for field in dataclasses.fields(EngineConfig)} - {"model", "node_secret"}
    settings = {name: value for name, value in vars(arguments).items() if name in given}
    try:
        return _run(
            engine_config, server_config, early, words, settings, said_of(arguments), lambda: read_settings(arguments)
        )
    except HoldfastError as error:
        say_fatal(error, words, command_instead(error, words, parse))
        return 2 if isinstance(error, ConfigurationError | CheckpointError) else 1  # Of such files a plan's too.
    finally:
        early.end()  # Whatever stopped us.


def _run(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    early: EarlyProcess,
    words: tuple[str, ...],
    given: Mapping[str, Any],
    without_effect: str | None,
    read_again: Callable[[], tuple[EngineConfig, ServerConfig]],
) -> int:
    import holdfast
    from holdfast.checkpoints import DEFAULT_MODEL
    from holdfast.cli.servers.node import check_headless, run_node
    from holdfast.cli.servers.register import ServerEntry
    from holdfast.cli.servers.reload import SettingsReload
    from holdfast.engine.data_parallel.open import open_engine, plan_engines
    from holdfast.engine.ranks.nodes.secret import with_secret
    from holdfast.engine.ranks.ray_cluster.launch import driver_bytes, on_ray
    from holdfast.engine.startup.build import find_model, open_tokenizer
    from holdfast.engine.startup.progress import LoadProgress
    from holdfast.engine.startup.select_device import settle_device
    from holdfast.footprint.cpu import front_bytes
    from holdfast.observability.logs import ThroughputLog, set_up_logging
    from holdfast.records.sampling import WHOLE_VOCABULARY
    from holdfast.server.app import create_app
    from holdfast.server.http.tls import tls_of
    from holdfast.server.run import bind, bind_unix
    from holdfast.server.run import run as run_server

    set_up_logging(server_config.level)
    log.info("holdfast %s", holdfast.__version__)
    log.info("command: %s", command_line(words))
    if without_effect is not None:
        log.warning("%s", without_effect)
    for name in unread_variables(os.environ):
        log.warning("%s is set in the environment but ignored: settings are HOLDFAST_NAME", name)
    check_headless(engine_config, server_config)
    if engine_config.node_rank > 0:
        early.end()
        return run_node(engine_config, server_config, given, words)
    engine_config, made = with_secret(engine_config)
    if made:
        log.warning("start the other nodes with HOLDFAST_NODE_SECRET=%s", engine_config.node_secret)
    # A port in use is said before a model is fetched.
    uds = server_config.uds
    listener = bind(server_config.host, server_config.port) if uds is None else bind_unix(Path(uds))
    tls = tls_of(server_config)
    entry = ServerEntry(
        uds or listener.getsockname()[:2],
        model=engine_config.model or DEFAULT_MODEL,
        settings=given,
        certificate=server_config.ssl_certfile,
        words=words,
    )
    asked_config, engine_config = engine_config, settle_device(engine_config)
    model = find_model(engine_config)
    entry.found(names=server_config.served_model_name or (model.files.name,), path=model.files.path)
    log.info("model %s: %s, %s parameters", model.files.name, model.spec.architecture, f"{model.spec.parameters:,}")
    front = front_bytes(engine_config.max_logprobs == WHOLE_VOCABULARY) + driver_bytes(engine_config)
    with contextlib.ExitStack() as placed:
        with _told_meanwhile(engine_config, server_config, listener, tls):
            engine_config = placed.enter_context(on_ray(engine_config, model.files.name))
        plans = plan_engines(engine_config, model, front_bytes=front, engine_pids=[early.pid])
        tokenizer = open_tokenizer(engine_config, model)
        taken = None if _sees_too_little(asked_config, engine_config) else early
        engine = open_engine(engine_config, model, tokenizer, plans, on_progress=LoadProgress(), early=taken)
        settings = server_settings(engine_config, server_config, model)
        app = create_app(engine, settings)
        return run_server(
            app,
            engine,
            listener=listener,
            drain_timeout_s=server_config.drain_timeout,
            write_timeout_s=server_config.write_timeout,
            max_connections=server_config.max_connections,
            tls=tls,
            on_ready=lambda: _now_ready(app, engine, settings, _reach(listener, server_config, tls=tls is not None)),
            on_fatal=lambda error: say_fatal(error, words),
            on_reload=SettingsReload(engine, asked_config, server_config, read_again),
            throughput=None if server_config.disable_log_stats else ThroughputLog(app.state.metrics, engine.stats),
        )


def _sees_too_little(asked: EngineConfig, settled: EngineConfig) -> bool:
    """An engine process that was started before Ray had chosen its GPUs."""
    return asked.distributed_executor_backend == "ray" and settled.device == "cuda"


def _told_meanwhile(
    engine_config: EngineConfig, server_config: ServerConfig, listener: socket.socket, tls: ssl.SSLContext | None
) -> contextlib.AbstractContextManager[None]:
    """Who asks while Ray places the ranks is answered: probes take silence for a server that hangs."""
    if engine_config.distributed_executor_backend != "ray":
        return contextlib.nullcontext()
    from holdfast.server.waiting import answering

    reason = "Ray is asked for the nodes of the ranks"
    return answering(listener, reason, root_path=server_config.root_path, tls=tls)


@dataclasses.dataclass(frozen=True, slots=True)
class _Reach:
    """How clients reach the server, in words of a command line."""

    url: str
    socket_path: str | None = None
    """Of a server on a Unix domain socket: `url` is then what a client that opens it asks for."""
    loopback: bool = False
    """Whether only programs on this machine can."""


def _reach(listener: socket.socket, config: ServerConfig, *, tls: bool) -> _Reach:
    scheme = "https" if tls else "http"
    if config.uds is not None:
        return _Reach(f"{scheme}://localhost{config.root_path}", socket_path=config.uds)
    host, port = listener.getsockname()[:2]
    url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}{config.root_path}"
    return _Reach(url, loopback=ipaddress.ip_address(host.partition("%")[0]).is_loopback)


def _now_ready(app: Starlette, engine: Engine, settings: ServerSettings, reach: _Reach) -> None:
    _log_ready(engine, settings, reach)
    if app.state.lora is not None:
        app.state.lora.look_at_named()


def _log_ready(engine: Engine, settings: ServerSettings, reach: _Reach) -> None:
    """On one screen what is served, where, and with which memory; the rest with verbose logging."""
    from holdfast.observability.ledger import ledger_lines, summary_lines
    from holdfast.observability.logs import detail_lines, ready_lines

    info, ledger = engine.info, engine.memory()
    for line in (*(() if ledger is None else ledger_lines(ledger)), *detail_lines(info)):
        log.debug("%s", line)
    for line in (*ready_lines(info, settings.served_model_names), *(() if ledger is None else summary_lines(ledger))):
        log.info("%s", line)
    for line in info.lowered:
        log.warning("lowered to fit in memory: %s", line)
    needs_key = bool(settings.api_key or settings.api_key_file)
    url, key = reach.url, 'HOLDFAST_API_KEY="$API_KEY" ' if needs_key else ""
    header = ' -H "Authorization: Bearer $API_KEY"' if needs_key else ""
    if reach.socket_path is not None:
        curl = f"curl --unix-socket {shlex.quote(reach.socket_path)}{header}"
        log.info("Ready: %s (try: %s %s/v1/models)", reach.socket_path, curl, url)
        return
    page = f"{url}/, " if settings.ui else ""
    log.info("Watch: %s%sholdfast top, %sholdfast ps -v", page, key, key)
    if reach.loopback:
        safely = "" if needs_key else " --api-key KEY"
        log.info("Reached from this machine only; else --host 0.0.0.0%s", safely)
    log.info("Ready: %s/v1 (try: curl%s %s/v1/models)", url, header, url)
