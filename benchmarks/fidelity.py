"""How far the logits of quantized products stray from float32, Holdfast's and llama.cpp's on the same file and text.

The reference expands every weight and multiplies in float32 with torch. Said of each engine: the Kullback-Leibler
divergence of its next-token distribution from the reference's after every token of a fixed text, in nats, and how
often both find the same token likeliest. Docs: docs/measurements/performance.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy
import numpy.typing

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.every_logit import divergences, every_logit
from benchmarks.fidelity_text import TEXT
from holdfast.checkpoints import locate
from holdfast.config import EngineConfig
from holdfast.engine.startup.build import find_model, open_tokenizer
from holdfast.execution import native

Logits = numpy.typing.NDArray[numpy.float32]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, help="a GGUF file; default: the built-in model")
    parser.add_argument("--peers", type=Path, help="folder made by setup_peers.sh; without it llama.cpp is left out")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path, help="JSON file for the figures")
    return parser.parse_args()


def token_ids(gguf: Path) -> list[int]:
    config = EngineConfig(model=str(gguf))
    tokenizer = open_tokenizer(config, find_model(config, progress=False))
    assert tokenizer is not None
    return list(tokenizer.encode(TEXT))


def llama_logits(peers: Path, gguf: Path, tokens: list[int], threads: int) -> Logits:
    with tempfile.TemporaryDirectory() as folder:
        ids, out = Path(folder) / "ids.json", Path(folder) / "logits.npy"
        ids.write_text(json.dumps(tokens))
        script = Path(__file__).with_name("llama_logits.py")
        python = peers.absolute() / "llama" / "bin" / "python"
        command = [str(python), str(script), str(gguf), str(ids), str(out), str(threads)]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
        logits: Logits = numpy.load(out)
        return logits


def figures(reference: Logits, found: Logits) -> dict[str, float]:
    away = divergences(reference, found)
    return {
        "mean": float(away.mean()),
        "median": float(numpy.median(away)),
        "99 of 100": float(numpy.quantile(away, 0.99)),
        "largest": float(away.max()),
        "same token likeliest": float((reference.argmax(1) == found.argmax(1)).mean()),
    }


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    gguf = (arguments.gguf or locate(None).weights[0]).absolute()
    tokens = token_ids(gguf)
    reference = every_logit(gguf, tokens, compiled=False)
    rows: dict[str, dict[str, float]] = {}
    if native.available():
        rows["holdfast, compiled"] = figures(reference, every_logit(gguf, tokens, compiled=True))
        half = every_logit(gguf, tokens, compiled=True, kv_dtype=torch.float16)
        rows["holdfast, compiled, KV in float16"] = figures(reference, half)
    else:
        print(f"no compiled kernels here: {native.why_not()}", file=sys.stderr)
    if arguments.peers is not None:
        rows["llama.cpp"] = figures(reference, llama_logits(arguments.peers, gguf, tokens, arguments.threads))
    print(f"{gguf.name}, {len(tokens)} tokens; KL divergence from float32 with expanded weights, in nats\n")
    names = ["mean", "median", "99 of 100", "largest", "same token likeliest"]
    print("| | " + " | ".join(names) + " |\n" + "|---" * (len(names) + 1) + "|")
    for name, values in rows.items():
        cells = [f"{values[key]:.1%}" if key == names[-1] else f"{values[key]:.1e}" for key in names]
        print(f"| {name} | " + " | ".join(cells) + " |")
    if arguments.output is not None:
        document = {"model": gguf.name, "tokens": len(tokens), "engines": rows}
        arguments.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
