"""A real headless Chromium, driven through its own DevTools protocol over a pipe: no driver program, no package.

    with Chromium(folder) as browser:
        page = browser.open("http://127.0.0.1:8000/")
        page.wait("document.title === 'Holdfast'")

Knows nothing of our page. One thread: a call waits for its answer, and events that came meanwhile are kept.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
PATIENCE_S = 60.0
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--mute-audio",
    "--disable-background-networking", "--disable-component-update", "--disable-default-apps", "--disable-extensions",
    "--disable-sync", "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip


def program() -> str | None:
    return next((found for name in PROGRAMS if (found := shutil.which(name))), None)


class Chromium:
    def __init__(self, folder: Path) -> None:
        """`folder`: of its profile."""
        found = program()
        assert found is not None
        to_child, self._to = os.pipe()
        self._from, from_child = os.pipe()

        def connect() -> None:
            # It reads from 3 and writes to 4. One of ours may have either number: both are moved away first.
            os.dup2(to_child, 60)
            os.dup2(from_child, 61)
            os.dup2(60, 3)
            os.dup2(61, 4)

        self._log = (folder / "chromium.log").open("wb")
        self._process = subprocess.Popen(
            [found, *FLAGS, f"--user-data-dir={folder}"],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            close_fds=False,
            preexec_fn=connect,
        )
        os.close(to_child)
        os.close(from_child)
        self._number = 0
        self._rest = b""
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._to)
        os.close(self._from)
        self._log.close()

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        asked = {"id": self._number, "method": method, "params": parameters}
        os.write(self._to, json.dumps(asked | ({"sessionId": session} if session else {})).encode() + b"\0")
        deadline = time.monotonic() + PATIENCE_S
        while True:
            said = self._next(deadline)
            if said.get("id") == self._number:
                assert "error" not in said, (method, said["error"])
                return dict(said["result"])
            self.events.append(said)

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            assert select.select([self._from], [], [], max(0.0, deadline - time.monotonic()))[0], "Chromium is silent"
            piece = os.read(self._from, 1 << 16)
            assert piece, f"Chromium has ended: {Path(self._log.name).read_text()[-2000:]}"
            self._rest += piece
        said, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(said))

    def open(self, url: str, *, width: int = 1400, height: int = 900, dark: bool = False, phone: bool = False) -> Page:
        """In a context of its own: nothing is shared with other pages."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        page.call("Page.enable")
        page.call("Runtime.enable")
        page.call("Log.enable")
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.call("Emulation.setEmulatedMedia", features=[scheme])
        page.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        page.call("Page.navigate", url=url)
        return page


class Page:
    def __init__(self, browser: Chromium, session: str) -> None:
        self._browser = browser
        self._session = session

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **parameters)

    def run(self, code: str) -> Any:
        """The value of an expression in the page; a promise's is waited for."""
        found = self.call("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, condition: str, patience_s: float = PATIENCE_S) -> Any:
        """Until the expression is true; its value."""
        deadline = time.monotonic() + patience_s
        while not (found := self.run(f"(() => {{ try {{ return {condition} }} catch {{ return null }} }})()")):
            assert time.monotonic() < deadline, f"not within {patience_s:g} s: {condition}\n{self.text()[-3000:]}"
            time.sleep(0.05)
        return found

    def text(self, selector: str = "body") -> str:
        return str(self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def type(self, selector: str, text: str) -> None:
        """As from a keyboard, behind what is there."""
        self.run(f"document.querySelector({json.dumps(selector)}).focus()")
        self.call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        code = {"Enter": 13, "Tab": 9, "ArrowLeft": 37, "ArrowRight": 39}[key]
        shared = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", text="\r" if key == "Enter" else "", **shared)
        self.call("Input.dispatchKeyEvent", type="keyUp", **shared)

    def point(self, selector: str) -> None:
        """The pointer over the middle of an element."""
        box = self.run(
            f"(() => {{ const box = document.querySelector({json.dumps(selector)}).getClientRects()[0];"
            "return [box.left + box.width / 2, box.top + box.height / 2] })()"
        )
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])

    def click(self, selector: str) -> None:
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def problems(self) -> list[str]:
        """What the console has of errors since the last call: broken policies, exceptions."""
        self.run("0")
        found = [event for event in self._browser.events if event.get("sessionId") == self._session]
        self._browser.events = [event for event in self._browser.events if event not in found]
        said = []
        for event in found:
            details = event.get("params", {})
            if event["method"] == "Runtime.exceptionThrown":
                said.append(json.dumps(details["exceptionDetails"])[:500])
            elif event["method"] == "Log.entryAdded" and details["entry"]["level"] == "error":
                said.append(f"{details['entry']['text']} {details['entry'].get('url', '')}")
        return said

    def screenshot(self, path: Path, *, whole: bool = False) -> Path:
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))
        return path
