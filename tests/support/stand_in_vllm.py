"""Stands in for vLLM where a GPU would be needed: prints what it prints, dies of what it dies of, answers /health.

    vllm serve MODEL --max-model-len N --port P     starts when N is at most STAND_IN_HOLDS tokens
    STAND_IN_HANG=1                                 answers /health once, and never again
    STAND_IN_DEAF=S                                 loses a request to end, and begins to serve S seconds after it
    STAND_IN_KNOWS_NOT=--flag                       refuses that flag as an argument parser does
    STAND_IN_CRASH=1                                runs out of memory once it serves, unless utilization is below 0.9

Installed by a test as a program called `vllm`; no engine is in it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PREFIX = "(EngineCore_0 pid=4242) ERROR 11-15 10:00:0{} [core.py:718] "


class Health(BaseHTTPRequestHandler):
    asked = threading.Event()

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
        self.asked.set()

    def log_message(self, *words: object) -> None:
        pass


def value(flag: str, default: str) -> str:
    return sys.argv[sys.argv.index(flag) + 1] if flag in sys.argv else default


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def refuse(length: int, holds: int) -> None:
    say(f"{PREFIX.format(1)}EngineCore failed to start.")
    say(f"{PREFIX.format(1)}Traceback (most recent call last):")
    say(
        f"{PREFIX.format(1)}ValueError: To serve at least one request with the models's max seq len ({length}),"
        " (16.00 GiB KV cache is needed, which is larger than the available KV cache memory (5.93 GiB). Based on the"
        f" available memory, the estimated maximum model length is {holds}. Try increasing `gpu_memory_utilization` or"
        " decreasing `max_model_len` when initializing the engine."
    )
    say("RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}")
    sys.exit(1)


def crash() -> None:
    say(f"{PREFIX.format(9)}EngineCore encountered a fatal error.")
    say(f"{PREFIX.format(9)}Traceback (most recent call last):")
    say(f'{PREFIX.format(9)}  File "/x/vllm/v1/worker/gpu_model_runner.py", line 1500, in execute_model')
    say(
        f"{PREFIX.format(9)}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 594.00 MiB. GPU 0 has a total"
        " capacity of 23.64 GiB of which 310.00 MiB is free. Process 1 has 23.30 GiB memory in use. Of the allocated"
        " memory 22.50 GiB is allocated by PyTorch, and 120.00 MiB is reserved by PyTorch but unallocated."
    )
    say("vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above).")
    os._exit(1)


def lose_a_request_to_end(seconds: float) -> None:
    heard = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: heard.set())
    say("INFO 11-15 10:00:01 [gpu_model_runner.py:2338] Starting to load model")
    heard.wait()
    time.sleep(seconds)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def main() -> None:
    print("stand-in: " + " ".join(sys.argv[1:]), flush=True)
    say("(APIServer pid=4200) INFO 11-15 10:00:00 [api_server.py:1839] vLLM API server version 0.11.0")
    unknown = os.environ.get("STAND_IN_KNOWS_NOT")
    if unknown in sys.argv:
        say("usage: vllm serve [model_tag] [options]")
        say(f"vllm: error: unrecognized arguments: {unknown} {value(str(unknown), '')}")
        sys.exit(2)
    length, holds = int(value("--max-model-len", "131072")), int(os.environ.get("STAND_IN_HOLDS", "48544"))
    if length > holds:
        refuse(length, holds if os.environ.get("STAND_IN_LEARNS", "1") == "1" else length - 1024)
    if os.environ.get("STAND_IN_DEAF"):
        lose_a_request_to_end(float(os.environ["STAND_IN_DEAF"]))
    server = ThreadingHTTPServer(("127.0.0.1", int(value("--port", "8000"))), Health)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    say("(APIServer pid=4200) INFO:     Application startup complete.")
    if os.environ.get("STAND_IN_CRASH") and float(value("--gpu-memory-utilization", "0.9")) >= 0.9:
        Health.asked.wait()
        crash()
    if os.environ.get("STAND_IN_HANG"):
        Health.asked.wait()
        server.shutdown()  # Connections are taken, and nobody answers.
    while True:
        time.sleep(1)


main()
