"""The terminal of a chat, or what takes its place: lines in, messages of several lines, text and notes out.

Knows nothing of models, history or commands.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable

_HIDDEN_CONTROLS = {code: "\ufffd" for code in [*range(0x20), *range(0x7F, 0xA0)] if chr(code) not in "\n\t"}
"""On a terminal a model's text must not move the cursor, change colours or write the clipboard."""

PROMPT, CONTINUED = "> ", "... "
QUOTES = '"""'
BEFORE_QUOTES = ("", "/system")
"""What a line may begin with before a block: nothing, or the command whose text it is."""


class ChatScreen:
    def __init__(self, *, stats: bool = True) -> None:
        """`stats`: whether speed is told after an answer; a pipe never shows it."""
        self.interactive = sys.stdin.isatty()
        self.stats = stats
        self.quoted = False
        """Whether the last message was a block, in which a / at the beginning is text."""
        self._edits = self.interactive and sys.stdout.isatty()
        self._hides_controls = sys.stdout.isatty()
        colours = sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self._dim, self._normal = ("\033[2m", "\033[0m") if colours else ("", "")
        self._newline = "\n" if os.environ.get("TERM") == "dumb" else ""
        """Where lines cannot be cleared."""
        self._prompt = ""
        """While there is one."""
        self._within_line = False
        self._typed: Callable[[], str] = str
        if self._edits:
            with contextlib.suppress(ImportError):
                import readline  # importing it gives input() line editing and history

                if not self._newline:
                    # So the line ends that are pasted are part of the message; older libraries have it off.
                    readline.parse_and_bind("set enable-bracketed-paste on")
                self._typed = readline.get_line_buffer

    def read(self) -> str | None:
        """One message; None at the end of input. KeyboardInterrupt passes through, also out of a block.

        At a terminal it may have several lines: pasted, continued by a backslash, or between triple quotes.
        """
        self.quoted = False
        line = self._read_line(PROMPT)
        if line is None or not self.interactive:
            return line
        before, quotes, rest = line.partition(QUOTES)
        if quotes and before.strip() in BEFORE_QUOTES:
            self.quoted = not before.strip()
            return before + self._block(rest)
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            following = self._read_line(CONTINUED)
            if following is None:
                break
            lines.append(following)
        return "\n".join(lines)

    def _block(self, first: str) -> str:
        """Up to the line that ends with the quotes, or the end of input."""
        lines = [first]
        while QUOTES not in lines[-1]:
            following = self._read_line(CONTINUED)
            if following is None:
                break
            lines.append(following)
        return "\n".join(lines).partition(QUOTES)[0].strip("\n")

    def _read_line(self, prompt: str) -> str | None:
        """Without its end."""
        self._prompt = prompt if self.interactive else ""
        try:
            line = self._ask(prompt)
        finally:
            self._prompt = ""
        if line is None:
            return None
        # Bytes that are not UTF-8 reach us as lone surrogates, which nothing further on can carry.
        return line.rstrip("\r\n").encode("utf-8", "surrogateescape").decode("utf-8", "replace")

    def _ask(self, prompt: str) -> str | None:
        if self._edits:
            try:
                return input(prompt)
            except EOFError:
                return None
        if self.interactive:
            sys.stderr.write(prompt)
            sys.stderr.flush()
        return sys.stdin.readline() or None

    def write_log(self, line: str) -> None:
        """A line of the log, by any thread: above the prompt and what is typed there, or below a line of an answer that
        has not ended. The cursor is behind what is typed then."""
        if not sys.stderr.isatty():
            text = f"{line}\n"
        elif self._prompt:
            from rich.cells import cell_len

            typed = self._prompt + self._typed()
            columns = max(1, shutil.get_terminal_size().columns)
            rows = [max(cell_len(row) - 1, 0) // columns + 1 for row in typed.split("\n")]
            rows_up = sum(rows) - 1
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

    def say_stats(self, line: str | None) -> None:
        """For people alone."""
        if line is not None and self.stats and self.interactive and sys.stderr.isatty():
            self.say(f"[{line}]")
