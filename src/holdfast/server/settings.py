"""What the server needs to be told. Parsing flags and files is `config`'s business."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.engine.requests.adapters import Adapters
from holdfast.records import AdapterRef
from holdfast.records.sampling import MAX_LOGPROBS

AccessLog = Callable[[dict[str, Any]], None]
"""Called once a request, with what `server.http.middleware` says belongs in the line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    served_model_names: tuple[str, ...]
    """Names that requests may call the model by; the first is the one we answer with."""
    any_model_name: bool = False
    """Whether a request may call it by any other name too: where nobody chose one. The name of an adapter never is one
    of these, so that with adapters no other name is taken."""
    api_key: str | tuple[str, ...] | None = None
    """One of these is asked for on every path but those of probes (`server.http.middleware`)."""
    api_key_file: Path | None = None
    """Further ones, one a line; read again when it changes."""
    enable_sleep_mode: bool = False
    """Whether /sleep and /wake_up may be asked."""
    may_change_memory: bool = False
    """Whether POST /memory may be asked: by clients with a key, or where all are on this machine."""
    force_include_usage: bool = False
    """Whether every chunk of every stream tells its usage, asked for or not."""
    strict_fields: bool = False
    """Whether a field that is not known is refused; otherwise it is ignored, and told in a header and in the log."""
    enable_tokenizer_info_endpoint: bool = False
    """Whether /tokenizer_info is answered: a chat template may be its maker's secret."""
    disable_docs: bool = False
    """No /docs, no /openapi.json."""
    ui: bool = True
    """Whether the page is served at / and /ui."""
    public_metrics: bool = False
    """Whether /metrics is answered without a key, as in vLLM."""
    allowed_origins: tuple[str, ...] = ()
    """Of web pages in browsers that may read answers (CORS); none: no page but our own."""
    loopback_only: bool = False
    """Bound to addresses of this machine alone: pages in its browsers must name it by one of its own names."""
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    max_body_bytes: int | None = None
    """None: as the context asks for, see `body_limit`."""
    body_timeout_s: float = 60.0
    """A client that sends no byte of its body for so long is sent away, and one that sends few bytes a second."""
    max_queued_requests: int | None = None
    """Places to wait in. Together with those to run in, the most answers one body may ask for; None: no bound."""
    scheduling_policy: str = "fcfs"
    """Only under "priority" may a request bring one."""
    retry_after_s: int = 2
    """Told to clients that were refused for now."""
    access_log: AccessLog | Path | None = None
    """Where the JSON lines go; None: nowhere."""
    version: str = "0"
    unlogged_paths: frozenset[str] = frozenset()
    """Of which the access log has no line, beside those of probes."""
    root_path: str = ""
    """In front of every path, where the proxy before us does not strip it; both spellings are answered."""
    max_logprobs: int = MAX_LOGPROBS
    """Beside one token, that a request may ask for. -1: 20, and of a prompt's tokens the whole vocabulary."""
    vocabulary: int = 0
    """Tokens of the model."""
    tokens_as_ids: bool = False
    """Whether tokens in log-probabilities are written as token_id:ID where a request does not say."""
    joins_parts: bool = False
    """Whether a chat template gets text parts of a message as one string, also where it takes parts."""
    default_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template, for what a request leaves out."""
    default_sampling: Mapping[str, Any] = field(default_factory=dict)
    """SamplingParams of the model's own generation config, for what a request leaves out."""
    chat_max_tokens: int | None = None
    """Of a chat's answer, where neither the request nor default_sampling says; None: up to the context's end."""
    adapters: Adapters | None = None
    """LoRA adapters that requests may name beside the model; None: there are none."""
    trust_request_chat_template: bool = False
    """Whether a request may bring its own chat_template: a template is a program."""
    scores_by_template: bool = False
    """Whether the chat template was given at start, and so joins a query and a document for a classifier."""
    enable_auto_tool_choice: bool = True
    """Whether a model may be left to decide itself if it calls a tool."""
    tool_call_parser: str | None = None
    """A name in `text.tools.registry.DIALECTS`; None: as the chat template says."""
    structured_outputs: Mapping[str, bool] = field(default_factory=dict)
    """Switches of StructuredOutputsParams for what a request leaves out."""
    reasoning_parser: str | None = None
    """A name in `text.output.reasoning.FAMILIES`, or "none"; None: as the chat template says."""

    @property
    def all_names(self) -> list[str]:
        """That a request may name: the model's own, then adapters'."""
        adapters = [] if self.adapters is None else [loaded.ref.name for loaded in self.adapters.listed]
        return [*self.served_model_names, *adapters]

    def adapter(self, model: str) -> AdapterRef | None:
        """The one of this name; None: it is the model itself, or nothing here."""
        return None if self.adapters is None or model in self.served_model_names else self.adapters.named(model)


BYTES_PER_TOKEN = 128
"""Of a body. A token id takes about 7, a token of text about 5: room for more than a dozen prompts of full length."""
LEAST_BODY_BYTES, MOST_BODY_BYTES = 4 << 20, 16 << 20


def body_limit(settings: ServerSettings, max_model_len: int) -> int:
    """JSON is decoded in one piece that nothing else can interrupt, on the loop or in a thread: 4 MiB of token ids take
    0.07 s on an Arm core, 16 MiB 0.31 s. So by default a body is no larger than prompts for this context are."""
    if settings.max_body_bytes is not None:
        return settings.max_body_bytes
    return min(max(BYTES_PER_TOKEN * max_model_len, LEAST_BODY_BYTES), MOST_BODY_BYTES)
