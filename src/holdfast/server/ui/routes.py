"""The paths of the page: its static files, open to all, and its state, which needs a key where others do.

The files lie in static/ and are sent as they are. The policy lets the page load and ask this server alone, run no
script that stands in a document, and put no text into one as HTML.
"""

from __future__ import annotations

import ipaddress
from importlib.resources import files
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from holdfast.errors import RequestError
from holdfast.server.http.errors import json_response
from holdfast.server.http.paths import UI_PAGES, UI_STATE
from holdfast.server.ui.state import StateKeeper
from holdfast.units import shorten

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
MOST_DIGITS = 15


def ui_routes(keeper: StateKeeper, *, with_key: bool) -> list[Route]:
    """`with_key`: nobody asks for the state without one."""
    folder = files("holdfast.server.ui") / "static"

    def sent(name: str) -> Route:
        content, kind = (folder / name).read_bytes(), KINDS[name.rpartition(".")[2]]

        async def answer(request: Request) -> Response:
            return Response(content, headers=HEADERS, media_type=kind)

        return Route(UI_PAGES[name], answer, methods=["GET"])

    async def state(request: Request) -> Response:
        since = _number(request.query_params.get("since", "0"))
        found = await keeper.state(since, names_holders=with_key or _is_near(request))
        return json_response(found, headers={"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"})

    async def without_slash(request: Request) -> Response:
        return RedirectResponse("../ui", headers=HEADERS)

    index = sent("index.html")
    return [
        index,
        Route("/", index.endpoint, methods=["GET"]),
        Route("/ui/", without_slash, methods=["GET"]),
        *(sent(name) for name in UI_PAGES if name != "index.html"),
        Route(UI_STATE, state, methods=["GET"]),
    ]


def _is_near(request: Request) -> bool:
    """Asked from this machine, and not for somebody else: names of its processes are nobody else's business. A page of
    another site, whose name was made to mean this machine (DNS rebinding) or that CORS lets read, is somebody else."""
    host = request.client.host if request.client is not None else "127.0.0.1"  # None: a Unix domain socket.
    if any(name in request.headers for name in ("forwarded", "x-forwarded-for", "x-real-ip", "origin")):
        return False
    try:
        asked = urlsplit(f"//{request.headers.get('host', '')}").hostname or ""
    except ValueError:
        return False
    return _is_loopback(host) and (asked == "localhost" or _is_loopback(asked))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS):
        raise RequestError(
            f"since: {shorten(text)!r} is not the number of a sample", needed="a whole number", field="since"
        )
    return int(text)
