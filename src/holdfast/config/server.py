"""Settings of the HTTP front: where it listens, who may come in, and how it leaves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.config import unsupported
from holdfast.config.setting import (
    choice,
    flag,
    flag_name,
    listed,
    number,
    optional,
    setting,
    size,
    text,
    texts,
    texts_or_tables,
    whole,
)
from holdfast.config.structured_output import form_settings
from holdfast.errors import ConfigurationError

_ALWAYS_ON = (
    "enable_prompt_tokens_details",
    "enable_server_load_tracking",
    "enable_request_id_headers",
    "disable_log_requests",
)

REFUSED: Mapping[str, str] = unsupported.SERVER

TOOL_CALL_PARSERS = (
    "hermes", "llama3_json", "llama4_json", "mistral", "json", "qwen", "qwen2", "qwen2_5", "qwen3", "qwen3_json",
    "granite4", "llama3",
)  # fmt: skip
REASONING_PARSERS = (
    "deepseek_r1", "qwen3", "deepseek_v3", "ernie45", "glm45", "holo2", "kimi_k2", "minimax_m2", "mistral", "olmo3",
    "seed_oss", "step3", "none",
)  # fmt: skip
"""Both by vLLM's names; what they mean is `text`'s."""
_UNREAD = (
    "xml",
    "coder",
    "pythonic",
    "deepseek",
    "glm",
    "kimi",
    "minimax",
    "gemma",
    "openai",
    "granite",
    "step3",
    "xlam",
)
"""In vLLM's names of parsers for calls that are not JSON, or stand in other marks."""


def _tool_call_parser(field: str, value: object) -> str:
    if isinstance(value, str) and value not in TOOL_CALL_PARSERS and any(part in value for part in _UNREAD):
        raise ConfigurationError(
            f"{field}: calls in the form {value!r} are not read here",
            needed="one of " + ", ".join(TOOL_CALL_PARSERS),
            found=value,
            fix=f"leave {field} out: a model whose own form is not known is asked for calls in plain JSON",
            field="tool_call_parser",
        )
    return str(choice(*TOOL_CALL_PARSERS)(field, value))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    host: str = setting("127.0.0.1", "address to listen on; 0.0.0.0 for every interface", text)
    port: int = setting(8000, "port to listen on; 0: any free one", whole(0, 65535))
    api_key: tuple[str, ...] = setting(
        (),
        "ask for this key, or one of these (Authorization: Bearer KEY), everywhere but on /health and /ping",
        texts,
        metavar="KEY",
    )
    api_key_file: str | None = setting(
        None, "a file with further keys, one a line; read again when it changes", optional(text), metavar="FILE"
    )
    public_metrics: bool = setting(False, "answer /metrics without a key too, as vLLM does", flag)
    served_model_name: tuple[str, ...] = setting(
        (), "name or names that requests call the model by; left out: as it was named to us", texts, metavar="NAME"
    )
    lora_modules: tuple[str, ...] = setting(
        (),
        "LoRA adapters: NAME=FOLDER, or JSON with name, path and base_model_name; needs --enable-lora",
        texts_or_tables,
        metavar="NAME=FOLDER",
    )
    lora_folders: tuple[str, ...] = setting(
        (),
        "folders below which /v1/load_lora_adapter may load adapters; left out: only those of --lora-modules",
        texts,
        metavar="FOLDER",
    )
    trust_request_chat_template: bool = setting(
        False,
        "let a request bring its own chat_template: a program, run in a sandbox and in a process of its own",
        flag,
    )
    enable_auto_tool_choice: bool = setting(
        True, "let the model decide whether it calls a tool; false: only what a request demands is called", flag
    )
    tool_call_parser: str | None = setting(
        None,
        "how the model writes tool calls: " + ", ".join(TOOL_CALL_PARSERS[:5]) + "; left out: as its template says",
        optional(_tool_call_parser),
        metavar="NAME",
    )
    reasoning_parser: str | None = setting(
        None,
        "whose marks divide thoughts from the answer: deepseek_r1, qwen3, ...; none: they stay in the content; "
        "left out: as its template says",
        optional(choice(*REASONING_PARSERS)),
        metavar="NAME",
    )
    structured_outputs_config: Mapping[str, bool] | None = setting(
        None,
        'of all answers that must have a form: {"disable_any_whitespace": true} for JSON without blanks, '
        '{"disable_additional_properties": true} for objects of the properties a schema names',
        optional(form_settings),
        metavar="JSON",
    )
    drain_timeout: float = setting(
        30.0, "seconds that running requests get to finish after SIGTERM", number(0, 86400), metavar="SECONDS"
    )
    write_timeout: float = setting(
        60.0,
        "a client that takes nothing of its answer for so many seconds is given up, and its request ended",
        number(0.1, 86400),
        metavar="SECONDS",
    )
    max_connections: int = setting(
        2048,
        "connections at a time; idle ones are closed for new ones, the oldest first; when all carry requests, new ones "
        "get a 503 and probes are answered",
        whole(1, 1_000_000),
        metavar="NUMBER",
    )
    max_body_size: int | None = setting(
        None,
        "largest request body; left out: 128 bytes for each token of the context, but from 4MiB to 16MiB",
        optional(size),
        metavar="SIZE",
    )
    allowed_origins: tuple[str, ...] = setting(
        (),
        'web pages that browsers let read answers (CORS): ["https://a.example"], or ["*"]; left out: none',
        listed,
        metavar="LIST",
    )
    allowed_methods: tuple[str, ...] = setting(("*",), "methods for such pages", listed, metavar="LIST")
    allowed_headers: tuple[str, ...] = setting(("*",), "headers for such pages", listed, metavar="LIST")
    allow_credentials: bool = setting(False, "let such pages send cookies and the like", flag)
    ssl_keyfile: str | None = setting(None, "serve HTTPS with this private key (PEM)", optional(text), metavar="FILE")
    ssl_certfile: str | None = setting(None, "and this certificate (PEM)", optional(text), metavar="FILE")
    ssl_ca_certs: str | None = setting(
        None, "certificates of those who sign clients' certificates (PEM)", optional(text), metavar="FILE"
    )
    ssl_cert_reqs: int = setting(
        0, "ask clients for a certificate: 0 no, 1 if they have one, 2 always", whole(0, 2), metavar="NUMBER"
    )
    ssl_ciphers: str | None = setting(None, "ciphers of TLS 1.2, as OpenSSL writes them", optional(text))
    disable_docs: bool = setting(False, "no /docs and no /openapi.json", flag, flags=("--disable-fastapi-docs",))
    enable_force_include_usage: bool = setting(False, "every stream ends with its usage, asked for or not", flag)
    enable_prompt_tokens_details: bool = setting(True, "usage tells cached tokens; always on", flag)
    enable_server_load_tracking: bool = setting(True, "/load counts requests; always on", flag)
    enable_request_id_headers: bool = setting(True, "answers carry X-Request-Id; always on", flag)
    disable_log_requests: bool = setting(True, "what clients write is not logged; always on", flag)
    response_role: str = setting("assistant", "the role of answers", choice("assistant"))
    api_server_count: int = setting(1, "processes of the front; only 1", whole(1, 1))
    disable_log_stats: bool = setting(False, "no periodic throughput line", flag)
    disable_access_log: bool = setting(
        False, "no JSON line for each request", flag, flags=("--disable-uvicorn-access-log",)
    )
    log_level: str = setting(
        "info", "debug, info, warning or error", choice("debug", "info", "warning", "error"), metavar="LEVEL"
    )

    def __post_init__(self) -> None:
        for name in _ALWAYS_ON:
            if not getattr(self, name):
                raise ConfigurationError(
                    f"{flag_name(name)} cannot be switched off", fix=f"leave {flag_name(name)} out", field=name
                )
        if not all(self.api_key):
            raise ConfigurationError(
                "an empty key would let everybody in", needed="a key, or no --api-key", field="api_key"
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
                    f"{flag_name(name)} is of HTTPS, and this server would speak HTTP",
                    fix="--ssl-keyfile FILE --ssl-certfile FILE",
                    field=name,
                )
