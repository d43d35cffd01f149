"""Which paths are alike: second names, those that need the engine, those whose errors have vLLM's words.

Knows nothing of what answers there.
"""

from __future__ import annotations

ALIASES = {
    "/chat/completions": "/v1/chat/completions",
    "/chat/completions/input_tokens": "/v1/chat/completions/input_tokens",
    "/completions": "/v1/completions",
    "/embeddings": "/v1/embeddings",
    "/responses": "/v1/responses",
    "/score": "/v1/score",
    "/rerank": "/v1/rerank",
    "/v2/rerank": "/v1/rerank",
    "/reranking": "/v1/rerank",
    "/v1/reranking": "/v1/rerank",
    "/v1/classify": "/classify",
    "/models": "/v1/models",
}
"""All in OpenAI's shapes: in llama.cpp /completions and /embeddings without /v1 have shapes of their own, but who
leaves /v1 out of an address has an OpenAI client. Its own completion is /completion."""

INVOCATIONS = "/invocations"
"""SageMaker's path for every kind of request."""

NEEDS_ENGINE = (
    "/v1/", "/tokenize", "/detokenize", "/completion", "/props", "/apply-template", "/pooling", "/classify",
    "/tokenizer_info", INVOCATIONS, *ALIASES,
)  # fmt: skip
"""Beginnings of paths that are of no use before the engine is there, or when it is gone."""

_COMPUTING = frozenset(
    {
        "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/completion", "/v1/messages", "/v1/responses",
        "/pooling", "/v1/score", "/v1/rerank", "/classify", INVOCATIONS,
    }
)  # fmt: skip
COMPUTING = _COMPUTING | {alias for alias, path in ALIASES.items() if path in _COMPUTING}
"""Paths that a sleeping engine cannot answer."""

VLLM_WORDED = (COMPUTING - {"/completion", "/v1/messages", "/v1/responses", "/responses"}) | {
    "/tokenize",
    "/detokenize",
}
"""Where an error's type is vLLM's; the Responses API's and llama.cpp's clients look for OpenAI's, as do all others."""

UI_PAGES = {
    "index.html": "/ui",
    **{
        name: f"/ui/{name}"
        for name in ("style.css", "page.js", "panels.js", "plots.js", "chat.js", "dom.js", "icon.svg")
    },
}
"""The files of the page, and where they are served."""
UI_OPEN = frozenset({"/", "/ui/", *UI_PAGES.values()})
"""Of the page, what needs no key: it asks for one itself, and holds nothing of this server."""
UI_STATE = "/ui/state"
UI_QUIET = UI_OPEN | {UI_STATE}
"""Asked every other second by each page that is open: not logged and not counted, unless refused."""
