"""Settings of the HTTP front: where it listens, who may come in, and how it leaves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.config import unsupported
from holdfast.config.setting import (
    Parser,
    choice,
    flag,
    flag_name,
    listed,
    number,
    optional,
    setting,
    size,
    table,
    text,
    texts,
    texts_or_tables,
    whole,
)
from holdfast.config.structured_output import form_settings
from holdfast.config.tuning import or_auto
from holdfast.errors import ConfigurationError

LOG_LEVELS = ("debug", "info", "warning", "error")
_ALWAYS_ON = (
    "enable_prompt_tokens_details",
    "enable_server_load_tracking",
    "enable_request_id_headers",
    "disable_log_requests",
)

REFUSED: Mapping[str, str] = unsupported.SERVER

TOOL_CALL_PARSERS = (
    "hermes", "llama3_json", "llama4_json", "mistral", "json", "qwen", "qwen2", "qwen2_5", "qwen3", "qwen3_json",
    "granite4", "llama3", "qwen3_coder", "qwen3_xml", "mimo", "seed_oss", "granite", "phi4_mini_json", "jamba",
    "hunyuan_a13b", "pythonic", "llama4_pythonic", "olmo3", "xlam",
)  # fmt: skip
REASONING_PARSERS = (
    "deepseek_r1", "qwen3", "deepseek_v3", "ernie45", "glm45", "holo2", "kimi_k2", "minimax_m2", "mistral", "olmo3",
    "seed_oss", "step3", "granite", "none",
)  # fmt: skip
"""Both by vLLM's names; what they mean is `text`'s."""
_NOT_PARSED = {
    "tool_call_parser": (("functiongemma", "granite-20b-fc", "minicpm5"), "calls",
                         "a model whose own format is not known is asked for calls in plain JSON"),
    "reasoning_parser": ((), "reasoning", "reasoning then stays in the answer's content"),
}  # fmt: skip
"""vLLM's parsers for models that are served, what they find, and what happens without."""


def _format_of(name: str, known: tuple[str, ...]) -> Parser:
    """A parser's name; of one that is vLLM's and not there, what happens without it."""

    def parse(field: str, value: Any) -> str:
        names, what, without = _NOT_PARSED[name]
        if value in names:
            raise ConfigurationError(
                f"{field}: {what} in the format {value!r} cannot be parsed",
                needed="one of " + ", ".join(known),
                found=str(value),
                fix=f"leave it out: {without}",
                field=field,
            )
        return str(choice(*known)(field, value))

    return parse


def _prefix(field: str, value: object) -> str:
    found = text(field, value).rstrip("/")
    if found and (not found.startswith("/") or any(mark in found for mark in "?# %")):
        raise ConfigurationError(
            f"{field}: {value!r} is no prefix of a path",
            needed="/ and plain words",
            fix="--root-path /llm",
            field="root_path",
        )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    host: str = setting("127.0.0.1", "address to listen on; 0.0.0.0 for every interface", text)
    port: int = setting(8000, "port to listen on; 0: any free one", whole(0, 65535))
    headless: bool = setting(
        False, "serve no API: this is a node of several, whose ranks compute for the head; with --node-rank", flag
    )
    uds: str | None = setting(
        None, "listen on this Unix domain socket instead of an address and a port", optional(text), metavar="PATH"
    )
    root_path: str = setting(
        "",
        "prefix of all paths that a proxy in front does not strip: /llm for /llm/v1/models",
        _prefix,
        metavar="PREFIX",
    )
    api_key: tuple[str, ...] = setting(
        (),
        "require this key, or one of these (Authorization: Bearer KEY), but on /health, /ping, /version and the page",
        texts,
        metavar="KEY",
    )
    api_key_file: str | None = setting(
        None, "file with more keys, one per line; reloaded when it changes", optional(text), metavar="FILE"
    )
    public_metrics: bool = setting(False, "serve /metrics without a key, as vLLM does", flag)
    served_model_name: tuple[str, ...] = setting(
        (), "model name or names used in the API; default: the name given as MODEL", texts, metavar="NAME"
    )
    lora_modules: tuple[str, ...] = setting(
        (),
        "LoRA adapters: NAME=FOLDER, or JSON with name, path and base_model_name; needs --enable-lora",
        texts_or_tables,
        metavar="NAME=FOLDER",
    )
    lora_folders: tuple[str, ...] = setting(
        (),
        "folders from which /v1/load_lora_adapter may load adapters; default: any with a key or on a loopback "
        "address (without --root-path), otherwise only those of --lora-modules",
        texts,
        metavar="FOLDER",
    )
    strict_fields: bool = setting(
        False,
        "refuse requests with unknown fields; default: they are ignored, with a warning and a response header",
        flag,
    )
    trust_request_chat_template: bool = setting(
        False,
        "allow requests to supply a chat_template: it is a program, run in a sandbox in a separate process",
        flag,
    )
    chat_template_content_format: str = setting(
        "auto",
        "how a chat template gets content that came in parts: auto (in parts where it takes them, which is vLLM's "
        "openai) or string (always joined)",
        choice("auto", "string"),
    )
    default_chat_template_kwargs: Mapping[str, Any] | None = setting(
        None,
        'variables for the chat template where a request sets no others: JSON such as {"enable_thinking": false}',
        optional(table),
        metavar="JSON",
    )
    return_tokens_as_token_ids: bool = setting(
        False, "in log-probabilities write tokens as token_id:ID, unless a request says otherwise", flag
    )
    enable_auto_tool_choice: bool = setting(
        True, "let the model decide whether to call a tool; false: only tools that a request requires are called", flag
    )
    tool_call_parser: str | None = setting(
        None,
        "tool call format of the model: " + ", ".join(TOOL_CALL_PARSERS[:5]) + "; default: from its chat template",
        or_auto("tool_call_parser", optional(_format_of("tool_call_parser", TOOL_CALL_PARSERS)), None),
        metavar="NAME",
    )
    reasoning_parser: str | None = setting(
        None,
        "parser that separates reasoning from the answer: deepseek_r1, qwen3, ...; none: reasoning stays in the "
        "content; default: from the chat template",
        or_auto("reasoning_parser", optional(_format_of("reasoning_parser", REASONING_PARSERS)), None),
        metavar="NAME",
    )
    structured_outputs_config: Mapping[str, bool] | None = setting(
        None,
        'structured output settings: {"disable_any_whitespace": true} for JSON without whitespace, '
        '{"disable_additional_properties": true} for objects with only the properties that the schema names',
        optional(form_settings),
        metavar="JSON",
    )
    drain_timeout: float = setting(
        30.0,
        "seconds that running requests have to finish after SIGTERM",
        number(0, 86400),
        metavar="SECONDS",
        flags=("--shutdown-timeout",),
    )
    write_timeout: float = setting(
        60.0,
        "seconds after which a client that reads nothing is disconnected and its request aborted",
        number(0.1, 86400),
        metavar="SECONDS",
    )
    max_connections: int = setting(
        2048,
        "maximum number of connections; idle ones are closed to make room for new ones, oldest first; when all carry "
        "requests, new ones get a 503, and probes are still answered",
        whole(1, 1_000_000),
        metavar="NUMBER",
    )
    max_body_size: int | None = setting(
        None,
        "maximum request body; default: 128 bytes per token of the context, at least 4MiB and at most 16MiB",
        optional(size),
        metavar="SIZE",
    )
    allowed_origins: tuple[str, ...] = setting(
        (),
        'allowed CORS origins: ["https://a.example"], or ["*"]; default: none',
        listed,
        metavar="LIST",
    )
    allowed_methods: tuple[str, ...] = setting(("*",), "allowed CORS methods", listed, metavar="LIST")
    allowed_headers: tuple[str, ...] = setting(("*",), "allowed CORS headers", listed, metavar="LIST")
    allow_credentials: bool = setting(False, "allow credentials such as cookies in CORS requests", flag)
    ssl_keyfile: str | None = setting(None, "serve HTTPS with this private key (PEM)", optional(text), metavar="FILE")
    ssl_certfile: str | None = setting(None, "and this certificate (PEM)", optional(text), metavar="FILE")
    ssl_ca_certs: str | None = setting(
        None, "CA certificates that verify client certificates (PEM)", optional(text), metavar="FILE"
    )
    ssl_cert_reqs: int = setting(
        0, "client certificates: 0 none, 1 optional, 2 required", whole(0, 2), metavar="NUMBER"
    )
    ssl_ciphers: str | None = setting(None, "TLS 1.2 ciphers, in OpenSSL's syntax", optional(text))
    enable_tokenizer_info_endpoint: bool = setting(
        False, "serve GET /tokenizer_info: special tokens and the chat template", flag
    )
    disable_docs: bool = setting(False, "do not serve /docs and /openapi.json", flag, flags=("--disable-fastapi-docs",))
    ui: bool = setting(True, "serve the page to watch and try the server at / and /ui; --no-ui leaves it out", flag)
    enable_force_include_usage: bool = setting(
        False, "include usage at the end of every stream, even if not requested", flag
    )
    enable_prompt_tokens_details: bool = setting(True, "report cached tokens in usage; always on", flag)
    enable_server_load_tracking: bool = setting(True, "count requests on /load; always on", flag)
    enable_request_id_headers: bool = setting(True, "responses have an X-Request-Id header; always on", flag)
    disable_log_requests: bool = setting(True, "do not log the content of requests; always on", flag)
    response_role: str = setting("assistant", "role of responses", choice("assistant"))
    api_server_count: int = setting(
        1, "number of API server processes; there is always one", or_auto("api_server_count", whole(1, 1), 1)
    )
    disable_log_stats: bool = setting(False, "do not log throughput periodically", flag)
    disable_access_log: bool = setting(
        False, "do not log a JSON line for each request", flag, flags=("--disable-uvicorn-access-log",)
    )
    disable_access_log_for_endpoints: tuple[str, ...] = setting(
        (),
        "do not log requests for these paths: /v1/models,/tokenize; probes are never logged",
        listed,
        metavar="PATHS",
    )
    uvicorn_log_level: str = setting(
        "info",
        "warning, error and critical: same as --disable-access-log; otherwise see --log-level",
        choice("trace", "debug", "info", "warning", "error", "critical"),
        metavar="LEVEL",
    )
    log_level: str = setting("info", "debug, info, warning or error", choice(*LOG_LEVELS), metavar="LEVEL")
    verbose: bool = setting(
        False, "log every decision and the whole memory ledger; same as --log-level debug", flag, flags=("-v",)
    )

    @property
    def logs_access(self) -> bool:
        """uvicorn's level, in vLLM's commands, hides the lines of requests."""
        return not self.disable_access_log and self.uvicorn_log_level not in ("warning", "error", "critical")

    @property
    def level(self) -> str:
        """Of the log."""
        return "debug" if self.verbose else self.log_level

    def __post_init__(self) -> None:
        for name in _ALWAYS_ON:
            if not getattr(self, name):
                raise ConfigurationError(
                    f"{flag_name(name)} cannot be switched off", fix=f"leave {flag_name(name)} out", field=name
                )
        if not all(self.api_key):
            raise ConfigurationError(
                "an empty key would let everyone in", needed="a key, or no --api-key", field="api_key"
            )
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            lacking = "ssl_keyfile" if self.ssl_keyfile is None else "ssl_certfile"
            raise ConfigurationError(
                "HTTPS needs a private key and a certificate",
                needed=flag_name(lacking),
                fix="--ssl-keyfile FILE --ssl-certfile FILE",
                field=lacking,
            )
        for name in ("ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers"):
            if getattr(self, name) and self.ssl_certfile is None:
                raise ConfigurationError(
                    f"{flag_name(name)} is an HTTPS setting, but this server would serve plain HTTP",
                    fix="--ssl-keyfile FILE --ssl-certfile FILE",
                    field=name,
                )
