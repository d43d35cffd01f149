"""`holdfast run`: a chat with a model, served in the background: started if it is not yet, and left running.

Puts together the background server and the chat; does the work of neither.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any

from holdfast.cli.chat_backends import UrlBackend
from holdfast.cli.commands.chat import add_chat_arguments, hold_chat, take_chat_arguments
from holdfast.config import EngineConfig
from holdfast.config.sources import add_flags

if TYPE_CHECKING:
    from holdfast.cli.servers.registry import RunningServer

HELP = """Chat with a model, served in the background.

A server is started if none of this machine serves the model yet, and keeps running for the next time and for other
programs: `holdfast ps` shows it, `holdfast stop` ends it. With a PROMPT, or text on stdin, one answer is printed; with
neither (stdin is empty) the model is only loaded."""

USAGE = "holdfast run [MODEL] [PROMPT ...] [--system TEXT] [settings]"

EXAMPLES = """examples:
  holdfast run smollm2                               chat; Ctrl-D leaves, the server stays
  holdfast run smollm2 "Why is the sky blue?"        one answer on stdout
  holdfast run llama3.1:8b --max-model-len 8K        a name that `holdfast plan` knows; settings of the server
  holdfast run ./model.gguf "Summarize:" < text.txt  text on stdin stands in front of the prompt
  holdfast stop smollm2                              when it is not needed any more

environment: HOLDFAST_API_KEY for a server with a key; NO_COLOR for no colours
exit codes: 0 normal exit, 1 failed, 2 a setting cannot be honoured, 130 exited with Ctrl-C
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a name, a folder, a .gguf file or a hub id")
    parser.add_argument("prompt", nargs="*", metavar="PROMPT", help="one question; its answer is printed")
    add_chat_arguments(parser)
    add_flags(parser, EngineConfig, title="model and engine, of a server that is started", skip=("model", "seed"))


def run(arguments: argparse.Namespace) -> int:
    from holdfast.checkpoints import DEFAULT_MODEL
    from holdfast.cli.servers.background import BackgroundStartError, ensure_server

    given = vars(arguments).copy()
    options, system, screen = take_chat_arguments(given)
    model, prompt = given.pop("model") or DEFAULT_MODEL, given.pop("prompt")
    message = _message(prompt, interactive=screen.interactive)
    try:
        server = ensure_server(model, given, screen.say)
    except BackgroundStartError as failed:
        return failed.code
    if message == "":  # Nothing was asked: it is there for whoever asks next.
        screen.say(f"{server.name} is served at {server.url}; to end it: holdfast stop {_stopped_by(server)}")
        return 0
    opening = UrlBackend.open(
        server.url,
        model=server.name,
        api_key=os.environ.get("HOLDFAST_API_KEY"),
        certificate=server.certificate,
    )
    code = hold_chat(opening, options, system, screen, message)
    if screen.interactive and sys.stderr.isatty():
        screen.say(f"{server.name} is still served at {server.url}; to end it: holdfast stop {_stopped_by(server)}")
    return code


def _stopped_by(server: RunningServer) -> str:
    """By its name where it was started in the background."""
    from holdfast.cli.servers.background import is_background

    return server.name if is_background(server) else str(server.pid)


def _message(prompt: list[str], *, interactive: bool) -> str | None:
    """All of what is asked at once, text on stdin first; None: a person types."""
    words = " ".join(prompt)
    if interactive:
        return words or None
    piped: Any = sys.stdin.read().strip() if sys.stdin is not None else ""
    return "\n\n".join(part for part in (piped, words) if part)
