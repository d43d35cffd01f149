"""Settings of the HTTP front: where it listens, who may come in, and how it leaves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.config.setting import choice, flag, number, optional, setting, size, text, texts, whole

REFUSED: Mapping[str, str] = {
    "enable_auto_tool_choice": "tool calls are not there yet",
    "tool_call_parser": "tool calls are not there yet",
    "reasoning_parser": "reasoning is not split off yet",
    "ssl_keyfile": "TLS is the business of a proxy in front",
    "ssl_certfile": "TLS is the business of a proxy in front",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    host: str = setting("127.0.0.1", "address to listen on; 0.0.0.0 for every interface", text)
    port: int = setting(8000, "port to listen on; 0: any free one", whole(0, 65535))
    api_key: str | None = setting(None, "ask for this key (Authorization: Bearer KEY)", optional(text))
    served_model_name: tuple[str, ...] = setting(
        (), "name or names that requests call the model by; left out: as it was named to us", texts, metavar="NAME"
    )
    trust_request_chat_template: bool = setting(
        False, "let a request bring its own chat_template; a template is a program, run in a sandbox", flag
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
    max_body_size: int | None = setting(
        None,
        "largest request body; left out: 128 bytes for each token of the context, but from 4MiB to 16MiB",
        optional(size),
        metavar="SIZE",
    )
    disable_log_stats: bool = setting(False, "no periodic throughput line", flag)
    disable_access_log: bool = setting(False, "no JSON line for each request", flag)
    log_level: str = setting(
        "info", "debug, info, warning or error", choice("debug", "info", "warning", "error"), metavar="LEVEL"
    )
