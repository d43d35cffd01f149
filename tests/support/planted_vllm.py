"""Stands in for `vllm serve` with an optimum that is known: no engine is in it.

    --max-num-seqs N     so many are served at once; time between tokens grows with N, and is lost from 128 on
    --max-num-seqs 8     runs out of memory at start, in vLLM's words

By default 128 are served at once, each slowly; 16 to 32 answer the most within 30 ms a token.
"""

from __future__ import annotations

import asyncio
import sys

from fake_completions import FakeServer, FakeSettings

DIES = 8


def value(flag: str, default: str) -> str:
    return sys.argv[sys.argv.index(flag) + 1] if flag in sys.argv else default


async def serve(port: int, sequences: int) -> None:
    itl_s = 0.005 if sequences <= 32 else 0.06
    fake = FakeServer(FakeSettings(slots=sequences, ttft_s=(0.02, 0.02), itl_s=(itl_s, itl_s)))
    server = await asyncio.start_server(fake.serve, "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


def main() -> None:
    sequences = int(value("--max-num-seqs", "128"))
    if sequences <= DIES:
        print(
            "ERROR 11-15 10:00:01 [core.py:718] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
            " GPU 0 has a total capacity of 79.11 GiB of which 1.25 GiB is free.",
            file=sys.stderr,
        )
        sys.exit(1)
    asyncio.run(serve(int(value("--port", "8000")), sequences))


if __name__ == "__main__":
    main()
