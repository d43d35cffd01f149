"""`holdfast chat`: a conversation in the terminal, streamed. Owns history and commands; answers come from a backend,
lines from a screen.

Answers go to stdout and nothing else does; everything said to the person goes to stderr. When stdin is not a
terminal, each line is a message and the output is plain.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Coroutine, Mapping
from typing import Any

from holdfast.cli.background_loop import BackgroundLoop
from holdfast.cli.chat_backends import ChatBackend, UrlBackend, find_local
from holdfast.cli.chat_screen import ChatScreen
from holdfast.cli.terminal_keys import unseen_keys
from holdfast.config import EngineConfig
from holdfast.config.engine import REFUSED
from holdfast.config.setting import build, flag_name
from holdfast.config.sources import add_flags, gather
from holdfast.errors import ConfigurationError, HoldfastError

HELP = """Chat with a model in the terminal.

Without --url the model is loaded here, in a separate process; with --url a running server is used.
Ctrl-C stops an answer, not the program; Ctrl-D exits. Several lines: between \"\"\" and \"\"\", with \\ at an end,
or pasted. When stdin is not a terminal, each line is a message."""

USAGE = "holdfast chat [MODEL] [--url URL] [--system TEXT] [settings]"

EXAMPLES = """examples:
  holdfast chat                                      the built-in SmolLM2-135M-Instruct
  holdfast chat ./my-model --system "Be brief."      a folder, a .gguf file or a hub id
  holdfast chat --url http://127.0.0.1:8000          a server that is already running
  echo "What is 2 + 2?" | holdfast chat              one question, the answer on stdout

environment: HOLDFAST_API_KEY for --api-key; SSL_CERT_FILE for a certificate to trust; NO_COLOR for no colours
exit codes: 0 normal exit, 1 failed, 2 a setting cannot be honoured, 130 exited with Ctrl-C
"""

COMMANDS = '''/system TEXT   set the system prompt, from the next message on (without TEXT: remove it)
/reset         clear the conversation, keep the system prompt
/set quiet     no line on tokens and speed after an answer; /set verbose shows it again
"""            begins a message of several lines, and ends it; a \\ at a line's end continues it too
/help          this list
/exit          exit (also Ctrl-D)
Ctrl-C         stop the answer; what was generated so far stays in the conversation'''

_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a folder, a .gguf file, a hub id; with --url, a name the server knows",
    )
    chat = add_chat_arguments(parser)
    chat.add_argument("--url", metavar="URL", help="use this server instead of loading a model: http://127.0.0.1:8000")
    chat.add_argument("--api-key", metavar="KEY", default=os.environ.get("HOLDFAST_API_KEY"), help="API key for --url")
    add_flags(parser, EngineConfig, title="model and engine (without --url)", skip=("model", "seed"))


def add_chat_arguments(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Of the conversation, wherever its answers come from."""
    chat = parser.add_argument_group("chat")
    chat.add_argument("--system", metavar="TEXT", default="", help="system prompt")
    chat.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help="maximum answer length; default: the model's, else the context's end",
    )
    chat.add_argument("--temperature", type=float, metavar="T", help="0 always takes the most likely token")
    chat.add_argument(
        "--top-p", type=float, metavar="P", help="only the most likely tokens that add up to this probability"
    )
    chat.add_argument("--top-k", type=int, metavar="K", help="only the K most likely tokens")
    chat.add_argument("--seed", type=int, metavar="N", help="random seed, for reproducible answers")
    chat.add_argument("--stop", action="append", metavar="TEXT", help="end an answer before this text; may be repeated")
    chat.add_argument("--no-stats", action="store_true", help="no line on tokens and speed after an answer")
    return chat


def run(arguments: argparse.Namespace) -> int:
    given = vars(arguments).copy()
    options, system, screen = take_chat_arguments(given)
    url, api_key = given.pop("url"), given.pop("api_key")
    return hold_chat(_opening(url, api_key, given), options, system, screen)


def take_chat_arguments(given: dict[str, Any]) -> tuple[dict[str, Any], str, ChatScreen]:
    """What `add_chat_arguments` added, taken out of `given`: sampling options, the system prompt, the screen."""
    options = {name: value for name in _SAMPLING if (value := given.pop(name)) is not None}
    return options, given.pop("system"), ChatScreen(stats=not given.pop("no_stats"))


def hold_chat(
    opening: Coroutine[Any, Any, ChatBackend],
    options: Mapping[str, Any],
    system: str,
    screen: ChatScreen,
    message: str | None = None,
) -> int:
    """The whole conversation, and its exit code. `message`: it is this one alone."""
    from holdfast.observability.logs import log_lines_to

    with BackgroundLoop() as loop:
        backend = loop.run(opening, discard=lambda opened: opened.close())
        try:
            with log_lines_to(screen.write_log):
                chat = ChatHistory(backend, options, system, screen, loop)
                return chat.hold() if message is None else chat.answer_once(message)
        except BrokenPipeError:
            # Whoever read our output has left; Python must not fail again when it closes stdout.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        finally:
            loop.run(backend.close())


def _opening(url: str | None, api_key: str | None, engine: dict[str, Any]) -> Coroutine[Any, Any, ChatBackend]:
    """What is left to do on the loop. A model is found, and perhaps fetched, here, where Ctrl-C ends it at once."""
    if url is not None:
        model = engine.pop("model")
        if engine:
            name = flag_name(next(iter(engine)))
            raise ConfigurationError(f"{name} is for a model loaded here; the server at --url has its own", field="url")
        return UrlBackend.open(url, model=model, api_key=api_key)
    from holdfast.observability.logs import set_up_logging

    set_up_logging("warning")
    gathered = gather([EngineConfig], engine)
    return find_local(build(EngineConfig, gathered.values, refused=REFUSED, origin=gathered.origin))


class ChatHistory:
    """History and commands. Answers come through the loop, which goes on between them."""

    def __init__(
        self,
        backend: ChatBackend,
        options: Mapping[str, Any],
        system: str,
        screen: ChatScreen,
        loop: BackgroundLoop,
    ) -> None:
        self._backend = backend
        self._options = options
        self._system = system
        self._screen = screen
        self._loop = loop
        self._history: list[dict[str, str]] = []

    def answer_once(self, message: str) -> int:
        """A failure is raised."""
        self._answer(message)
        return 0

    def hold(self) -> int:
        """Until the person leaves; returns the exit code. Without a person, a failure is raised."""
        if not self._screen.interactive:
            while (line := self._screen.read()) is not None:
                if not self._take(line):
                    break
            return 0
        self._screen.say(f"{self._backend.name}. /help lists the commands, Ctrl-C stops an answer, Ctrl-D exits.")
        warned = False
        while True:
            try:
                line = None if self._backend.failure is not None else self._screen.read()
            except KeyboardInterrupt:
                self._screen.show("\n")
                if warned:
                    return 130
                warned = True
                self._screen.say("Press Ctrl-C again to exit; Ctrl-D and /exit do so too.")
                continue
            warned = False
            if self._backend.failure is not None:
                # Its log has said so when it happened, which may have been while somebody was typing.
                self._screen.say(f"{self._backend.failure}\nThe engine is gone; start the chat again.")
                return 1
            if line is None:
                self._screen.show("\n")
                return 0
            try:
                if not self._take(line):
                    return 0
            except KeyboardInterrupt:
                self._screen.say("stopped")
            except HoldfastError as error:
                self._screen.say(f"{error}\n/reset clears the conversation; the last message was not kept.")

    def _take(self, line: str) -> bool:
        """False when the person wants to leave."""
        text = line.strip()
        if not text:
            return True
        if not text.startswith("/") or self._screen.quoted:
            self._answer(text)
            return True
        command, _, rest = text.partition(" ")
        match command:
            case "/exit" | "/quit" | "/bye":  # The last as in Ollama, and two below.
                return False
            case "/reset" | "/clear":
                self._history.clear()
                self._screen.say("conversation cleared")
            case "/system":
                self._system = rest.strip()
                self._screen.say("system prompt set" if self._system else "system prompt removed")
            case "/set" if rest.strip() in ("quiet", "verbose"):
                self._screen.stats = rest.strip() == "verbose"
            case "/help" | "/?":
                self._screen.say(COMMANDS)
            case _:
                self._screen.say(f"there is no command {command}; /help lists them")
        return True

    def _answer(self, text: str) -> None:
        system = [{"role": "system", "content": self._system}] if self._system else []
        question = {"role": "user", "content": text}
        pieces: list[str] = []
        kept = False
        speed = AnswerSpeed()
        try:
            with unseen_keys():
                self._loop.run(self._stream([*system, *self._history, question], pieces, speed))
            kept = True
        except KeyboardInterrupt:
            kept = bool(pieces)
            raise
        finally:
            answer = "".join(pieces)
            if not answer.endswith("\n"):
                self._screen.show("\n")
            if kept:
                self._history += [question, {"role": "assistant", "content": answer}]
        self._screen.say_stats(speed.line(self._backend.tokens))

    async def _stream(self, messages: list[dict[str, str]], pieces: list[str], speed: AnswerSpeed) -> None:
        async with contextlib.aclosing(self._backend.stream(messages, self._options)) as stream:
            async for piece in stream:
                speed.hear()
                pieces.append(piece)
                self._screen.show(piece)


class AnswerSpeed:
    """How fast one answer came, as the person at the terminal sees it."""

    def __init__(self) -> None:
        self._asked_s = time.monotonic()
        self._first_s: float | None = None
        self._last_s = self._asked_s

    def hear(self) -> None:
        self._last_s = time.monotonic()
        if self._first_s is None:
            self._first_s = self._last_s

    def line(self, tokens: int | None) -> str | None:
        """`tokens`: of the answer. None: there is nothing to say."""
        if tokens is None or self._first_s is None:
            return None
        said = f"{tokens:,} token{'' if tokens == 1 else 's'}, the first after {self._first_s - self._asked_s:.2f} s"
        writing_s = self._last_s - self._first_s
        # The first one's time is the prompt's.
        return f"{said}, {(tokens - 1) / writing_s:.1f} tokens/s" if tokens > 1 and writing_s > 0 else said
