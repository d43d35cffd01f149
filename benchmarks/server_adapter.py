"""`holdfast serve` as a client sees it: a real server on a free port, token-id prompts over HTTP, all at once."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

TokenLists = list[list[int]]

START_LIMIT_S = 120.0


class ServerAdapter:
    def __init__(self, settings: dict[str, Any]) -> None:
        import httpx

        self.http = httpx
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        command = [str(Path(sys.executable).parent / "holdfast"), "serve", settings["model"]]
        command += ["--port", self.url.rpartition(":")[2], "--served-model-name", "bench"]
        for name, value in settings["limits"].items():
            command += ["--" + name.replace("_", "-"), str(value)]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        self.root_pid = self.process.pid
        self.version = version("holdfast")
        try:
            self.wait_until_healthy()
        except BaseException:
            self.close()
            raise

    def wait_until_healthy(self) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"holdfast serve ended with {self.process.returncode}; its log is in standard error")
            try:
                if self.http.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            except self.http.TransportError:
                pass
            time.sleep(0.02)
        raise RuntimeError(f"not healthy after {START_LIMIT_S:.0f} s")

    def generate(self, prompts: TokenLists, output_tokens: int) -> TokenLists:
        return asyncio.run(self.generate_all(prompts, output_tokens))

    async def generate_all(self, prompts: TokenLists, output_tokens: int) -> TokenLists:
        limits = self.http.Limits(max_connections=len(prompts))
        async with self.http.AsyncClient(timeout=600, limits=limits) as client:

            async def ask(prompt: list[int]) -> list[int]:
                body = {"model": "bench", "prompt": prompt, "max_tokens": output_tokens, "temperature": 0}
                reply = await client.post(f"{self.url}/v1/completions", json={**body, "ignore_eos": True})
                if reply.status_code != 200:
                    raise RuntimeError(f"HTTP {reply.status_code}: {reply.text[:500]}")
                # The ids themselves do not travel over OpenAI's API: the count is what is checked here.
                return [-1] * int(reply.json()["usage"]["completion_tokens"])

            return list(await asyncio.gather(*(ask(prompt) for prompt in prompts)))

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            os.kill(self.process.pid, 9)
            self.process.wait(10)
