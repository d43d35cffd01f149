"""Where `holdfast chat` gets its answers: a server over HTTP, or an engine started for this chat.

Owns the two ways to one stream of text. Knows nothing of terminals, history or keys.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from holdfast.config import EngineConfig
from holdfast.errors import ConfigurationError, EngineDiedError, EngineError, HoldfastError, RequestError
from holdfast.records import SamplingParams
from holdfast.units import shorten

if TYPE_CHECKING:
    import ssl

    import httpx

    from holdfast.engine.interface import Engine
    from holdfast.engine.startup.build import FoundModel
    from holdfast.planner import Plan
    from holdfast.text.tokenizer.tokenizer import Tokenizer

Messages = Sequence[Mapping[str, str]]

CONNECT_TIMEOUT_S = 10.0
INTERNAL = 500
TLS_FAILED = "HF162"
MAX_EVENT_BYTES = 16 << 20
"""One event of a stream; a server that sends more without a line's end is not speaking SSE."""


class ChatBackend(Protocol):
    @property
    def name(self) -> str:
        """Of the model, for people."""

    @property
    def failure(self) -> HoldfastError | None:
        """Why there will be no more answers; None while there may be."""

    @property
    def tokens(self) -> int | None:
        """Of the last answer; None: nobody counted them."""

    def stream(self, messages: Messages, options: Mapping[str, Any]) -> AsyncGenerator[str, None]:
        """The answer's text as it comes. Closing it, or cancelling who waits for it, aborts the request.

        `options` are sampling options by their vLLM names, only those that were asked for.
        """

    async def close(self) -> None: ...


class UrlBackend:
    """A server with the OpenAI API; this one, or another."""

    def __init__(self, client: httpx.AsyncClient, name: str) -> None:
        self._client = client
        self._name = name
        self.tokens: int | None = None

    @classmethod
    async def open(
        cls, url: str, *, model: str | None = None, api_key: str | None = None, certificate: str = ""
    ) -> UrlBackend:
        """`url` as people write it: see `api_of`. With no model named, the server's first one is asked. `certificate`:
        see `trust`."""
        import httpx

        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
        client = httpx.AsyncClient(base_url=api_of(url), headers=headers, timeout=timeout, verify=trust(certificate))
        try:
            with _said_plainly(url):
                name = model or await _first_model(client)
        except BaseException:
            await client.aclose()
            raise
        return cls(client, name)

    @property
    def name(self) -> str:
        return self._name

    @property
    def failure(self) -> HoldfastError | None:
        return None  # A server that is gone may be back at the next question.

    async def stream(self, messages: Messages, options: Mapping[str, Any]) -> AsyncGenerator[str, None]:
        usage = {"stream_options": {"include_usage": True}}
        body = {"model": self._name, "messages": list(messages), "stream": True, **usage, **options}
        self.tokens = None
        with _said_plainly(str(self._client.base_url)):
            async with self._client.stream("POST", "chat/completions", json=body) as response:
                if response.status_code != 200:
                    await response.aread()
                    raise _refusal(response.status_code, response.content)
                async for event in _events(response.aiter_bytes()):
                    text, tokens = _read_event(event)
                    self.tokens = self.tokens if tokens is None else tokens
                    if text:
                        yield text

    async def close(self) -> None:
        await self._client.aclose()


def api_of(url: str, *, written: str = "--url") -> str:
    """Where the API begins: `8000`, `localhost:8000`, `http://localhost:8000/` and `http://localhost:8000/v1` are the
    same.

    `written`: as what the user gave it.
    """
    import httpx

    found, reason = url.strip(), "it has no host"
    if found.isdecimal():
        found = "localhost:" + found
    if "://" not in found:
        found = "http://" + found
    base = found.rstrip("/").removesuffix("/v1").rstrip("/") + "/v1/"
    try:
        parsed = httpx.URL(base)
        plain = not parsed.query and not parsed.fragment and not any(map(str.isspace, base))
        if parsed.scheme in ("http", "https") and parsed.host and plain and (parsed.port or 0) < 1 << 16:
            return base
        if parsed.host:
            reason = "not http:// or https:// with a host, a port up to 65535 and an optional path"
    except (httpx.InvalidURL, ValueError) as problem:
        reason = str(problem)
    raise ConfigurationError(
        f"{written}: {shorten(url)!r} is not the address of a server",
        needed="an address such as http://127.0.0.1:8000 or http://127.0.0.1:8000/v1",
        found=reason,
        fix=f"{written} http://127.0.0.1:8000" if written.startswith("-") else "http://127.0.0.1:8000",
        field="url",
    )


def trust(certificate: str) -> ssl.SSLContext | bool:
    """For a server of this machine: its own certificate, which names some host; else what the system trusts."""
    if not certificate:
        return True
    import ssl

    context = ssl.create_default_context(cafile=certificate)
    context.check_hostname = False
    return context


async def _first_model(client: httpx.AsyncClient) -> str:
    response = await client.get("models")
    if response.status_code != 200:
        raise _refusal(response.status_code, response.content)
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError) as problem:
        raise EngineError(
            "the server does not list its models", fix="check --url: it must be a server with the OpenAI API"
        ) from problem


async def _events(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of server-sent events. Lines end at \\n alone: text may hold other characters that split lines."""
    waiting = b""
    async for chunk in chunks:
        *lines, waiting = (waiting + chunk).split(b"\n")
        if len(waiting) > MAX_EVENT_BYTES:
            raise EngineError("the server sent an event that does not end")
        for line in lines:
            if line.startswith(b"data:"):
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                yield data


def _read_event(event: bytes) -> tuple[str, int | None]:
    """Its text, and the answer's tokens where it counts them."""
    try:
        parsed = json.loads(event)
        failed = "error" in parsed
        choices = parsed.get("choices") or [{}]
        text = str((choices[0].get("delta") or {}).get("content") or "")
        tokens = (parsed.get("usage") or {}).get("completion_tokens")
    except (ValueError, RecursionError, AttributeError, LookupError, TypeError) as problem:
        raise EngineError("the server's stream does not follow the OpenAI API", found=repr(event[:200])) from problem
    if failed:
        raise _refusal(500, event)
    return text, tokens if isinstance(tokens, int) else None


def _refusal(status: int, content: bytes) -> HoldfastError:
    """The server's own words, where it has any."""
    message, details = f"the server answered {status}", dict[str, str]()
    with contextlib.suppress(ValueError, RecursionError, AttributeError, LookupError, TypeError):
        error = json.loads(content)["error"]
        message = str(error["message"])
        details = {"code": error.get("code")} | (error.get("holdfast") or {})  # Ours, where it is one of ours.
        details = {name: str(details[name]) for name in ("code", "needed", "found", "fix") if details.get(name)}
        message = message.removesuffix(f"; {details.get('fix')}")  # It has a line of its own here.
    if status in (401, 403):
        details["fix"] = "pass --api-key, or set HOLDFAST_API_KEY"
    kind = RequestError if status < INTERNAL else EngineError
    return kind(message, **details)


@contextlib.contextmanager
def _said_plainly(url: str) -> Iterator[None]:
    import httpx

    try:
        yield
    except httpx.HTTPError as problem:
        told = certificate_problem(url, problem)
        if told is not None:
            raise told from problem
        raise EngineError(
            f"{url} cannot be reached, or closed the connection",
            found=str(problem) or type(problem).__name__,
            fix="check that the server is running: holdfast serve",
        ) from problem


def certificate_problem(url: str, problem: BaseException) -> EngineError | None:
    """Of HTTPS that failed before anything was said: what is wrong with the certificate, or that there is none."""
    import ssl

    found: BaseException | None = problem
    while found is not None and not isinstance(found, ssl.SSLError):
        found = found.__cause__ or found.__context__
    if found is None:
        return None
    if not isinstance(found, ssl.SSLCertVerificationError):
        if "WRONG_VERSION_NUMBER" not in str(found) and "record layer" not in str(found):
            return EngineError(f"{url}: HTTPS failed", code=TLS_FAILED, found=str(found), fix="check the server's TLS")
        plain = url.replace("https://", "http://")
        return EngineError(
            f"{url} does not speak HTTPS", code=TLS_FAILED, found=str(found), fix=f"use {plain}, or another port"
        )
    said = found.verify_message or str(found)
    if "mismatch" in said.lower() or "not valid for" in said.lower():
        fix = "use a name that the certificate has, or a certificate with this one (subjectAltName)"
    elif "expired" in said or "not yet valid" in said:
        fix = "renew the server's certificate, and check the clocks of both machines"
    else:
        fix = "if you trust it: SSL_CERT_FILE=/path/to/the/server's/certificate.pem in front of the command"
    return EngineError(
        f"the certificate of {url} is not trusted: {said}",
        code=TLS_FAILED,
        needed="a certificate that this machine trusts, for this name, in its time",
        found=said,
        fix=fix,
    )


class LocalBackend:
    """Any engine; closing it stops the engine."""

    def __init__(self, engine: Engine, defaults: Mapping[str, Any] | None = None) -> None:
        if engine.tokenizer is None:
            raise RequestError("a chat needs a tokenizer", fix="leave skip_tokenizer_init out")
        self._engine = engine
        self._defaults = dict(defaults or {})
        self._tokenizer = engine.tokenizer
        self._numbers = itertools.count(1)
        self.tokens: int | None = None

    @property
    def name(self) -> str:
        return self._engine.info.model

    @property
    def failure(self) -> HoldfastError | None:
        failure = self._engine.failure
        return None if failure is None else EngineDiedError(failure.message, code=failure.code)

    async def stream(self, messages: Messages, options: Mapping[str, Any]) -> AsyncGenerator[str, None]:
        prompt = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        params = SamplingParams(**{"max_tokens": None, **self._defaults, **options})
        deltas = await self._engine.generate(prompt, params, request_id=f"chat-{next(self._numbers)}")
        self.tokens = 0
        try:
            async for delta in deltas:
                self.tokens += len(delta.token_ids)
                if delta.text:
                    yield delta.text
        finally:
            close = getattr(deltas, "aclose", None)
            if close is not None:
                await close()

    async def close(self) -> None:
        await self._engine.stop()


def find_local(config: EngineConfig) -> Coroutine[Any, Any, LocalBackend]:
    """Finds the model, fetching it if need be; what is returned loads and starts it."""
    from holdfast.engine.offline.unsupported import refuse_ray, refuse_several_engines
    from holdfast.engine.startup.build import find_model, open_tokenizer, plan_model
    from holdfast.engine.startup.select_device import settle_device
    from holdfast.footprint.cpu import FRONT_BYTES

    refuse_several_engines(config, "holdfast chat")
    refuse_ray(config, "holdfast chat")
    config = settle_device(config)
    model = find_model(config)
    plan = plan_model(config, model, front_bytes=FRONT_BYTES)
    return _start_local(config, model, plan, open_tokenizer(config, model))


async def _start_local(
    config: EngineConfig, model: FoundModel, plan: Plan, tokenizer: Tokenizer | None
) -> LocalBackend:
    """In an engine process of its own."""
    from holdfast.engine.process.client import ProcessEngine
    from holdfast.engine.requests.sampling_defaults import served_sampling
    from holdfast.engine.startup.progress import LoadProgress

    engine = ProcessEngine(config, model, tokenizer, plan=plan, on_progress=LoadProgress(restarts=False))
    try:
        await engine.start()
        return LocalBackend(engine, served_sampling(config, model.files, model.spec))
    except BaseException:
        # Also when Ctrl-C ends the waiting: the process must not stay behind.
        await engine.stop()
        raise
