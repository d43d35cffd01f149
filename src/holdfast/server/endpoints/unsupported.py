"""Paths of vLLM and other engines that are not there: refused by name and with the reason, as flags and fields are."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from holdfast.errors import UnsupportedOptionError
from holdfast.server.http.errors import NOT_FOUND, describe, error_response

_NO_SOUND = "only text input and output are supported"
_CHAT = "POST /v1/chat/completions"
_OPENAI = "an OpenAI client with http://HOST:PORT/v1 as its address"

PATHS: dict[str, tuple[str, str]] = {
    **dict.fromkeys(
        ("/v1/messages/batches", "/v1/messages/batches/{name:path}"),
        ("jobs are not stored; a batch file is processed by a command", "holdfast run-batch"),
    ),
    **dict.fromkeys(
        ("/v1/conversations", "/v1/conversations/{name:path}"),
        ("only single responses are stored", "send previous_response_id to POST /v1/responses"),
    ),
    "/v2/embed": ("it is Cohere's API; this server implements OpenAI's", "POST /v1/embeddings"),
    **dict.fromkeys(
        ("/v1/audio/transcriptions", "/v1/audio/translations", "/v1/audio/speech", "/v1/images/generations",
         "/v1/realtime"),
        (_NO_SOUND, _CHAT),
    ),
    **dict.fromkeys(
        ("/v1/files", "/v1/batches", "/v1/fine_tuning/jobs"),
        ("files and jobs are not stored; a batch file is processed by a command", "holdfast run-batch"),
    ),
    "/tokenizer_info": (
        "it is not enabled on this server",
        "start the server with --enable-tokenizer-info-endpoint",
    ),
    "/server_info": ("it would expose settings of this machine", "GET /memory, or holdfast ps on that machine"),
    **dict.fromkeys(
        ("/api/chat", "/api/generate", "/api/tags", "/api/show", "/api/ps", "/api/pull", "/api/embed",
         "/api/embeddings", "/api/version"),
        ("it is Ollama's own API; this server has OpenAI's", _OPENAI),
    ),
    **dict.fromkeys(
        ("/generate", "/generate_stream", "/get_model_info", "/get_server_info", "/health_generate", "/flush_cache"),
        ("it is an API of SGLang or TGI; this server has OpenAI's", _OPENAI),
    ),
    "/infill": ("fill-in-the-middle is not implemented", "POST /completion with the model's own marks in the prompt"),
    "/embedding": ("llama.cpp's own shape is not implemented", "POST /v1/embeddings"),
    **dict.fromkeys(
        ("/slots", "/slots/{name:path}"), ("there are no slots: requests are batched", "GET /metrics, or GET /ui/state")
    ),
    "/lora-adapters": ("adapters are chosen by model name here", "--enable-lora, and GET /v1/models"),
    "/v1/moderations": ("there is no moderation model", "POST /classify with a classifier"),
    "/v1/responses/compact": ("conversations are not compacted", "send fewer items as input"),
    **dict.fromkeys(
        ("/v1/chat/completions/render", "/v1/completions/render"),
        ("llama.cpp's path renders a chat", "POST /apply-template, or POST /tokenize"),
    ),
    "/inference/v1/generate": ("/v1/completions accepts and returns token ids", "POST /v1/completions"),
    **dict.fromkeys(
        ("/start_profile", "/stop_profile", "/collective_rpc", "/pause", "/resume", "/is_paused", "/scale_elastic_ep",
         "/is_scaling_elastic_ep", "/init_weight_transfer_engine", "/update_weights", "/reset_mm_cache",
         "/reset_encoder_cache", "/abort_requests"),
        ("it is a development endpoint of vLLM", "GET /metrics and GET /memory show the state of the engine"),
    ),
}  # fmt: skip
"""Path, why it is not there, and what helps instead."""
LORA = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
_WITHOUT_LORA = ("LoRA is not enabled on this server", "start the server with --enable-lora")


def absent_routes(*, lora: bool) -> list[Route]:
    """`lora`: whether the server has those for adapters itself."""
    paths = PATHS if lora else PATHS | dict.fromkeys(LORA, _WITHOUT_LORA)
    return [Route(path, _refusal(path, *why), methods=["GET", "POST", "DELETE"]) for path, why in paths.items()]


def _refusal(path: str, reason: str, fix: str):  # type: ignore[no-untyped-def]  # An endpoint is whatever Route takes.
    async def refuse(request: Request) -> Response:
        body = describe(UnsupportedOptionError(f"{path} is not supported here: {reason}", fix=fix))[1]
        body["code"] = "not_found"
        request.scope["holdfast.record"].fail(body)
        return error_response(request.scope, NOT_FOUND, body)

    return refuse
