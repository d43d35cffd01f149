"""`holdfast chat`: a conversation in the terminal, streamed. Owns lines, keys and history; answers come from a backend.

Answers go to stdout and nothing else does; everything said to the person goes to stderr. When stdin is not a
terminal, each line is a message and the output is plain.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from holdfast.cli.background_loop import BackgroundLoop
from holdfast.cli.chat_backends import ChatBackend, UrlBackend, find_local
from holdfast.cli.terminal_keys import unseen_keys
from holdfast.config import EngineConfig
from holdfast.config.engine import REFUSED
from holdfast.config.setting import build, flag_name
from holdfast.config.sources import add_flags, gather
from holdfast.errors import ConfigurationError, HoldfastError

HELP = """Chat with a model in the terminal.

Without --url the model is loaded here, in a separate process; with --url a running server is used.
Ctrl-C stops an answer, not the program; Ctrl-D exits. When stdin is not a terminal, each line is a message."""

USAGE = "holdfast chat [MODEL] [--url URL] [--system TEXT] [settings]"

EXAMPLES = """examples:
  holdfast chat                                      the built-in SmolLM2-135M-Instruct
  holdfast chat ./my-model --system "Be brief."      a folder, a .gguf file or a hub id
  holdfast chat --url http://127.0.0.1:8000          a server that is already running
  echo "What is 2 + 2?" | holdfast chat              one question, the answer on stdout

environment: HOLDFAST_API_KEY for --api-key; NO_COLOR for no colours
exit codes: 0 normal exit, 1 failed, 2 a setting cannot be honoured, 130 exited with Ctrl-C
"""

COMMANDS = """/system TEXT   set the system prompt, from the next message on (without TEXT: remove it)
/reset         clear the conversation, keep the system prompt
/help          this list
/exit          exit (also Ctrl-D)
Ctrl-C         stop the answer; what was generated so far stays in the conversation"""

_HIDDEN_CONTROLS = {code: "\ufffd" for code in [*range(0x20), *range(0x7F, 0xA0)] if chr(code) not in "\n\t"}
"""On a terminal a model's text must not move the cursor, change colours or write the clipboard."""

PROMPT = "> "

_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a folder, a .gguf file, a hub id; with --url, a name the server knows",
    )
    chat = parser.add_argument_group("chat")
    chat.add_argument("--url", metavar="URL", help="use this server instead of loading a model: http://127.0.0.1:8000")
    chat.add_argument("--api-key", metavar="KEY", default=os.environ.get("HOLDFAST_API_KEY"), help="API key for --url")
    chat.add_argument("--system", metavar="TEXT", default="", help="system prompt")
    chat.add_argument(
        "--max-tokens", type=int, metavar="N", help="maximum answer length; default: to the end of the context"
    )
    chat.add_argument("--temperature", type=float, metavar="T", help="0 always takes the most likely token")
    chat.add_argument(
        "--top-p", type=float, metavar="P", help="only the most likely tokens that add up to this probability"
    )
    chat.add_argument("--top-k", type=int, metavar="K", help="only the K most likely tokens")
    chat.add_argument("--seed", type=int, metavar="N", help="random seed, for reproducible answers")
    chat.add_argument("--stop", action="append", metavar="TEXT", help="end an answer before this text; may be repeated")
    add_flags(parser, EngineConfig, title="model and engine (without --url)", skip=("model", "seed"))


def run(arguments: argparse.Namespace) -> int:
    from holdfast.observability.logs import log_lines_to

    given = vars(arguments).copy()
    options = {name: value for name in _SAMPLING if (value := given.pop(name)) is not None}
    url, api_key, system = given.pop("url"), given.pop("api_key"), given.pop("system")
    screen = ChatScreen()
    with BackgroundLoop() as loop:
        backend = loop.run(_opening(url, api_key, given), discard=lambda opened: opened.close())
        try:
            with log_lines_to(screen.write_log):
                return ChatHistory(backend, options, system, screen, loop).hold()
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


class ChatScreen:
    """The terminal, or what stands in for it."""

    def __init__(self) -> None:
        self.interactive = sys.stdin.isatty()
        self._edits = self.interactive and sys.stdout.isatty()
        self._hides_controls = sys.stdout.isatty()
        colours = sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self._dim, self._normal = ("\033[2m", "\033[0m") if colours else ("", "")
        self._newline = "\n" if os.environ.get("TERM") == "dumb" else ""
        """Where lines cannot be cleared."""
        self._prompting, self._within_line = False, False
        self._typed: Callable[[], str] = str
        if self._edits:
            with contextlib.suppress(ImportError):
                import readline  # importing it gives input() line editing and history

                self._typed = readline.get_line_buffer

    def read(self) -> str | None:
        """One line without its end; None at the end of input. KeyboardInterrupt passes through."""
        self._prompting = self.interactive
        try:
            line = self._read_line()
        finally:
            self._prompting = False
        if line is None:
            return None
        # Bytes that are not UTF-8 reach us as lone surrogates, which nothing further on can carry.
        return line.rstrip("\r\n").encode("utf-8", "surrogateescape").decode("utf-8", "replace")

    def _read_line(self) -> str | None:
        if self._edits:
            try:
                return input(PROMPT)
            except EOFError:
                return None
        if self.interactive:
            sys.stderr.write(PROMPT)
            sys.stderr.flush()
        return sys.stdin.readline() or None

    def write_log(self, line: str) -> None:
        """A line of the log, by any thread: above the prompt and what is typed there, or below a line of an answer that
        has not ended. The cursor is behind what is typed then."""
        if not sys.stderr.isatty():
            text = f"{line}\n"
        elif self._prompting:
            from rich.cells import cell_len

            typed = PROMPT + self._typed()
            rows_up = (cell_len(typed) - 1) // max(1, shutil.get_terminal_size().columns)
            clear = (f"\033[{rows_up}A" if rows_up else "") + "\r\033[J"
            text = f"{self._newline or clear}{line}\n{typed}"
        else:
            text = f"\n{line}\n" if self._within_line else f"{line}\n"
            self._within_line = False
        sys.stderr.write(text)
        sys.stderr.flush()

    def show(self, text: str) -> None:
        if text:
            self._within_line = not text.endswith("\n")
        sys.stdout.write(text.translate(_HIDDEN_CONTROLS) if self._hides_controls else text)
        sys.stdout.flush()

    def say(self, text: str) -> None:
        sys.stderr.write(f"{self._dim}{text}{self._normal}\n")
        sys.stderr.flush()


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
        if not text.startswith("/"):
            self._answer(text)
            return True
        command, _, rest = text.partition(" ")
        match command:
            case "/exit" | "/quit":
                return False
            case "/reset":
                self._history.clear()
                self._screen.say("conversation cleared")
            case "/system":
                self._system = rest.strip()
                self._screen.say("system prompt set" if self._system else "system prompt removed")
            case "/help":
                self._screen.say(COMMANDS)
            case _:
                self._screen.say(f"there is no command {command}; /help lists them")
        return True

    def _answer(self, text: str) -> None:
        system = [{"role": "system", "content": self._system}] if self._system else []
        question = {"role": "user", "content": text}
        pieces: list[str] = []
        kept = False
        try:
            with unseen_keys():
                self._loop.run(self._stream([*system, *self._history, question], pieces))
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

    async def _stream(self, messages: list[dict[str, str]], pieces: list[str]) -> None:
        async with contextlib.aclosing(self._backend.stream(messages, self._options)) as stream:
            async for piece in stream:
                pieces.append(piece)
                self._screen.show(piece)
