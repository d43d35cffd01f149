"""What the server needs to be told. Parsing flags and files is `config`'s business."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

AccessLog = Callable[[dict[str, Any]], None]
"""Called once a request, with what `server.access` says belongs in the line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    served_model_names: tuple[str, ...]
    """Names that requests may call the model by; the first is the one we answer with."""
    api_key: str | None = None
    """Asked for on every path below /v1."""
    max_body_bytes: int = 16 << 20
    body_timeout_s: float = 60.0
    """A client that sends no byte of its body for so long is sent away."""
    max_queued_requests: int | None = None
    """Places to wait in. Together with those to run in, the most answers one body may ask for; None: no bound."""
    scheduling_policy: str = "fcfs"
    """Only under "priority" may a request bring one."""
    retry_after_s: int = 2
    """Told to clients that were refused for now."""
    access_log: AccessLog | Path | None = None
    """Where the JSON lines go; None: nowhere."""
    version: str = "0"
    default_sampling: Mapping[str, Any] = field(default_factory=dict)
    """SamplingParams of the model's own generation config, for what a request leaves out."""
    trust_request_chat_template: bool = False
    """Whether a request may bring its own chat_template: a template is a program."""
