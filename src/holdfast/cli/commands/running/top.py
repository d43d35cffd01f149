"""`holdfast top`: servers watched in the terminal, as their page shows them. Asks /ui/state; changes nothing.

In a terminal it goes on until Ctrl-C; into a pipe it says everything once. What is drawn is `servers.state_screen`.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Sequence

import msgspec

from holdfast.cli.commands.running.ps import ask
from holdfast.cli.output import say, say_json
from holdfast.cli.servers.reach import DEFAULT_URL, KEY_VARIABLE, ServerAddress, addresses_of
from holdfast.cli.servers.state_screen import ServerLook, screen_lines
from holdfast.errors import ConfigurationError
from holdfast.observability.ledger import Ledger
from holdfast.observability.metrics.history import SAMPLES, Sample
from holdfast.server.ui.state import UiState

HELP = (
    """Watch servers in the terminal: memory, requests, tokens per second, latencies and warnings with their fixes."""
)

USAGE = "holdfast top [URL ...] [--interval SECONDS] [--once] [--json]"

EXAMPLES = """examples:
  holdfast top                                      every server on this machine, until Ctrl-C
  holdfast top 8000 https://gpu.example:8443        two servers, the first by its local port
  holdfast top --once                               one look; so it is in a pipe
  holdfast top --json | jq '.[0].requests.open'     for programs: /ui/state of each

A key is taken from HOLDFAST_API_KEY. Where no server is known on this machine, http://127.0.0.1:8000 is asked.

exit codes: 0 all are ready, 1 one is not or there is none, 2 an address is not valid
"""

READY, NOT_READY = 0, 1
OK = 200
NEEDS_A_KEY = (401, 403)
LEAST_S, MOST_S = 0.2, 3600.0
PIPE_WIDTH, LEAST_ROWS = 120, 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("urls", nargs="*", metavar="URL", help="addresses of servers; default: all on this machine")
    parser.add_argument("--interval", type=float, default=2.0, metavar="SECONDS", help="between two looks (default: 2)")
    parser.add_argument("--once", action="store_true", help="look once and end; default where output is not a terminal")
    parser.add_argument("--json", action="store_true", help="print JSON: one list with the /ui/state of each server")


def run(arguments: argparse.Namespace) -> int:
    if not LEAST_S <= arguments.interval <= MOST_S:
        raise ConfigurationError(
            f"--interval {arguments.interval:g} cannot be honoured",
            needed=f"{LEAST_S:g} to {MOST_S:g} seconds",
            fix="--interval 2",
            field="interval",
        )
    with WatchedServers(arguments.urls) as watched:
        if arguments.json:
            looks = watched.look()
            say_json([look.told for look in looks])
        elif arguments.once or not sys.stdout.isatty():
            looks = watched.look()
            say(line.plain for look in looks for line in screen_lines(look, width=PIPE_WIDTH))
        else:
            looks = _watch(watched, arguments.interval)
    return READY if all(look.status == "ready" for look in looks) else NOT_READY


def _watch(watched: WatchedServers, interval_s: float) -> list[ServerLook]:
    from rich.console import Console, Group
    from rich.live import Live

    console = Console()
    blocks = console.encoding.lower().startswith("utf")
    looks = watched.look()
    with Live(console=console, screen=True, auto_refresh=False) as live:
        try:
            while True:
                rows = max(LEAST_ROWS, console.height // len(looks))
                shown = [
                    line for look in looks for line in screen_lines(look, width=console.width, rows=rows, blocks=blocks)
                ]
                live.update(Group(*shown), refresh=True)
                time.sleep(interval_s)
                looks = watched.look()
        except KeyboardInterrupt:
            return looks


class WatchedServers:
    """Those that are named, or at each look those that run on this machine."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = urls
        self._known: dict[str, WatchedServer] = {}

    def __enter__(self) -> WatchedServers:
        return self

    def __exit__(self, *error: object) -> None:
        for one in self._known.values():
            one.close()

    def look(self) -> list[ServerLook]:
        # A node without an API has nothing to show: `holdfast ps` lists it, and its ranks are on its head's screen.
        found = [one for one in addresses_of(self._urls) if one.server is None or one.server.node is None]
        addresses = found or [ServerAddress(DEFAULT_URL)]
        for gone in self._known.keys() - {address.url for address in addresses}:
            self._known.pop(gone).close()
        for address in addresses:
            if address.url not in self._known:
                self._known[address.url] = WatchedServer(address)
        return [self._known[address.url].look() for address in addresses]


class WatchedServer:
    """One server, its samples of the hour gathered over looks, and its rates since the last."""

    def __init__(self, address: ServerAddress) -> None:
        self._address = address
        self._client = address.client()
        self._last: UiState | None = None
        self._looked_s = 0.0
        self._samples: list[Sample] = []

    def close(self) -> None:
        self._client.close()

    def look(self) -> ServerLook:
        import httpx

        from holdfast.cli.chat_backends import certificate_problem

        url, base = self._address.url, self._address.base
        since = 0 if self._last is None else self._last.history.newest
        try:
            answer = self._client.get(f"{base}/ui/state", params={"since": since})
        except httpx.HTTPError as error:
            told = certificate_problem(base, error)
            why = f"{told.message}; {told.fix}" if told else str(error) or type(error).__name__
            return ServerLook(url, "unreachable", why)
        if answer.status_code in NEEDS_A_KEY:
            return ServerLook(url, "locked", f"it needs a key: set {KEY_VARIABLE}")
        if answer.status_code != OK:
            return self._without_state()
        try:
            state = msgspec.json.decode(answer.content, type=UiState)
        except (msgspec.MsgspecError, ValueError) as error:
            return ServerLook(url, "unknown", f"its state cannot be read: {error}")
        if self._last is not None and self._last.server.id != state.server.id:
            self._last, self._samples = None, []  # Another run: its samples are numbered anew.
            if since > 0:  # Once: several servers may share an address, each with its own.
                return self.look()
        return self._gathered(state)

    def _without_state(self) -> ServerLook:
        """Of one without a page: what /health and /memory say."""
        told = ask(self._client, self._address.base)
        why = (
            told["reason"] or "it does not serve /ui/state (--no-ui, or not Holdfast): its memory is all that is known"
        )
        memory = None
        with contextlib.suppress(msgspec.MsgspecError, ValueError):
            memory = None if told["memory"] is None else msgspec.convert(told["memory"], Ledger)
        return ServerLook(self._address.url, told["status"], why, memory=memory)

    def _gathered(self, state: UiState) -> ServerLook:
        last, self._last = self._last, state
        before_s, self._looked_s = self._looked_s, time.monotonic()
        self._samples = [*self._samples, *state.history.samples][-SAMPLES:]
        whole = msgspec.structs.replace(state.history, samples=self._samples)
        rates = None
        if last is not None:
            elapsed_s = max(self._looked_s - before_s, 1e-9)
            rates = (
                (state.load.prompt_tokens_total - last.load.prompt_tokens_total) / elapsed_s,
                (state.load.generation_tokens_total - last.load.generation_tokens_total) / elapsed_s,
            )
        shown = msgspec.structs.replace(state, history=whole)
        return ServerLook(self._address.url, state.server.status, "", state=shown, memory=state.memory, rates=rates)
