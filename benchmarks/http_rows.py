"""A server with an 8B model (dummy weights) as clients see it: how soon it is ready, and what `holdfast bench` finds of

    python -m benchmarks.http_rows --out FILE.json [--rounds 2] [--requests 512]

    many        512 requests of 512 tokens in and 128 out, 256 at once: tokens a second, first tokens
    poisson     25 of these a second for 40 s: first tokens, and the time between tokens

Token ids go in and come out. Owns no load of its own: `benchmarks/peak_load.py` has the minutes at a peak.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.machine import commit, describe_machine, today
from benchmarks.peak_load import DUMMY_FLAGS, SHAPE, START_LIMIT_S
from holdfast.bench.own_server import free_port, launched

LENGTHS = ("--token-ids", "--prompt", "512", "--output", "128", "--ignore-eos", "--quiet")
AT_ONCE, RATE = "256", "25"


def bench(url: str, seed: int, *words: str) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".json") as kept:
        command = [sys.executable, "-m", "holdfast", "bench", url, *LENGTHS, "--seed", str(seed), *words]
        subprocess.run([*command, "--save", kept.name], stdout=subprocess.DEVNULL, check=False)
        whole = json.loads(Path(kept.name).read_text())["peak"]
    kinds = {name: {share: round(whole[name][share] * 1e3, 2) for share in ("p50", "p99")} for name in ("ttft", "itl")}
    return {key: whole[key] for key in ("requests", "failed", "output_tokens_per_s")} | {
        f"{name}_ms": value for name, value in kinds.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--requests", default="512")
    parser.add_argument("--steady", default="40s", metavar="TIME", help="of the open loop (default: 40s)")
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"], help="of the dummy (default: 32)")
    parser.add_argument("--device", default="cuda")
    asked = parser.parse_args()
    port, rounds = free_port(), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPE | {"num_hidden_layers": asked.layers}))
        words = [sys.executable, "-m", "holdfast", "serve", folder, *DUMMY_FLAGS, "--served-model-name", "8b"]
        words += ["--device", asked.device, "--port", str(port), "--disable-access-log"]
        began_s = time.monotonic()
        with launched(words, port, kept=True) as server:
            server.wait_until_ready(START_LIMIT_S)
            ready_s = time.monotonic() - began_s
            print(f"ready after {ready_s:.1f} s", flush=True)
            for number in range(asked.rounds):
                many = ("--concurrency", AT_ONCE, "--requests", asked.requests, "--workers", "2")
                steady = ("--rate", RATE, "--up", "0s", "--peak", asked.steady, "--down", "0s")
                found = {"many": bench(server.url, number, *many), "poisson": bench(server.url, number, *steady)}
                rounds.append(found)
                print(json.dumps(found), flush=True)
                about = {"date": today(), "commit": commit(), "machine": describe_machine()}
                asked.out.write_text(json.dumps(about | {"ready_s": ready_s, "rounds": rounds}, indent=1) + "\n")


if __name__ == "__main__":
    main()
