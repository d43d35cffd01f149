"""What ranks cost on one machine's CPU: one rank against several of the same random weights, in turns.

    python -m benchmarks.rank_speed [--shape 8b|smollm2] [--ranks 2] [--streams 1,8] [--rounds 3] [--folder FOLDER]

Both engines are loaded, each in a process of its own, and generate in turns; the best round of each is compared. CPU
time is that of all processes of an engine. The file (8b: 4.6 GB) is written once and kept in the folder.
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

from benchmarks.random_checkpoints import write_q4_k, write_smollm2

LLAMA_8B = {
    "hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "max_position_embeddings": 8192,
    "rope_theta": 5e5, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
PROMPT, ANSWER = 64, 48
"""Tokens of each stream."""


def write_model(shape: str, folder: Path) -> Path:
    path = folder / f"{shape}.gguf"
    if not path.exists():
        made = path.with_suffix(".part")
        write_smollm2(made) if shape == "smollm2" else write_q4_k(LLAMA_8B, made)
        made.rename(path)
    return path


def work(model: str, ranks: int, streams: int) -> None:
    """Generates once for every line read (a number of streams), and writes what it took."""
    import psutil

    from holdfast import LLM, SamplingParams

    told, sys.stdout = sys.stdout, sys.stderr
    llm = LLM(
        model,
        device="cpu",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        tensor_parallel_size=ranks,
        max_model_len=512,
        max_num_seqs=streams,
        kv_cache_memory_bytes="512MiB",
    )
    processes = [psutil.Process(), *psutil.Process().children()]

    def cpu_s() -> float:
        return sum(times.user + times.system for times in (one.cpu_times() for one in processes))

    print("loaded", file=told, flush=True)
    for line in sys.stdin:
        prompts: list[Any] = [
            {"prompt_token_ids": [7 + stream + token for token in range(PROMPT)]} for stream in range(int(line))
        ]
        took = list[float]()
        for length in (1, ANSWER):  # The first token is the prompt's.
            began_s, began_cpu_s = time.perf_counter(), cpu_s()
            params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False)
            answers = llm.generate(prompts, params, use_tqdm=False)
            took += [time.perf_counter() - began_s, cpu_s() - began_cpu_s]
        tokens = [list(answer.outputs[0].token_ids) for answer in answers]
        decoded = (ANSWER - 1) * len(prompts)
        found = {
            "prompt": PROMPT * len(prompts) / took[0],
            "decode": decoded / (took[2] - took[0]),
            "cpu_ms": 1e3 * (took[3] - took[1]) / decoded,
            "tokens": tokens,
        }
        print(json.dumps(found), file=told, flush=True)
    llm.close()


class Worker:
    def __init__(self, model: Path, ranks: int, streams: int) -> None:
        command = [sys.executable, "-m", "benchmarks.rank_speed", "--worker", str(model), "--ranks", str(ranks)]
        self._process = subprocess.Popen(
            [*command, "--streams", str(streams)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def heard(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            raise SystemExit(f"an engine has ended: exit code {self._process.wait()}")
        return line

    def generate(self, streams: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        print(streams, file=self._process.stdin, flush=True)
        found: dict[str, Any] = json.loads(self.heard())
        return found

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()


def compare(workers: dict[int, Worker], streams: int, rounds: int) -> None:
    rows: dict[int, list[dict[str, Any]]] = {ranks: [] for ranks in workers}
    for _ in range(rounds):
        for ranks, worker in workers.items():
            rows[ranks].append(worker.generate(streams))
    best = {ranks: max(found, key=lambda row: row["decode"]) for ranks, found in rows.items()}
    one = best[1]
    for ranks, row in best.items():
        same = sum(a == b for a, b in zip(row["tokens"], one["tokens"], strict=True))
        prompt = max(found["prompt"] for found in rows[ranks])
        print(
            f"{streams} streams, {ranks} rank{'s' if ranks > 1 else ''}: decode {row['decode']:.1f} tok/s"
            f" ({row['decode'] / one['decode']:.2f} of one rank), {row['cpu_ms']:.1f} ms of CPU a token,"
            f" prompt {prompt:.0f} tok/s, {same} of {streams} answers equal"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=["8b", "smollm2"], default="8b")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--streams", default="1,8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    streams = [int(number) for number in asked.streams.split(",")]
    if asked.worker:
        work(asked.worker, asked.ranks, max(streams))
        return
    began_s = time.monotonic()
    model = write_model(asked.shape, asked.folder)
    print(f"{model}: {model.stat().st_size / 1e9:.1f} GB, {time.monotonic() - began_s:.0f} s to write", flush=True)
    workers = {ranks: Worker(model, ranks, max(streams)) for ranks in (1, asked.ranks)}
    try:
        for worker in workers.values():
            worker.heard()
        print(f"loaded after {time.monotonic() - began_s:.0f} s", flush=True)
        for count in streams:
            compare(workers, count, asked.rounds)
    finally:
        for worker in workers.values():
            worker.close()
    print(f"{time.monotonic() - began_s:.0f} s in all")


if __name__ == "__main__":
    main()
