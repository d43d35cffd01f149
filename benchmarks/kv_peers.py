"""Conversations over a KV pool that does not hold them, with RAM below it: Holdfast beside vLLM, the same work.

    python -m benchmarks.kv_peers [--vllm SITE] [--rounds 2] [--out FILE]
    python -m benchmarks.kv_peers --engines holdfast --device cpu --model tiny --tokens 256 --conversations 8 \\
        --ram 1 --rounds 1      tries it without a GPU, where there is no such RAM

`--vllm`: a folder with vLLM and what it needs, for PYTHONPATH; left out: the one that is installed. Each turn is a
process of its own, told the same settings under vLLM's names. Every conversation is asked once; then each again in
turn for one token (`again_s`: seconds to the first token), all at once for one (`at_once_s`: the last first token), and
all at once for an answer (`tok_per_s`). `rss_gib`: the most that the process and its children held, what they share
counted once; `ram_taken_gib`: by how much the machine's MemAvailable fell meanwhile, which is of use where nothing else
runs. `ready_s` ends when all of Holdfast's RAM is pinned, as vLLM's is by then. vLLM may round pinned tensors up to a
power of two: 64 GiB are one. `moved`: the engine's own counters of what came from RAM: if they are 0, nothing was
offloaded, and the turn says so.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gpu_worker import LLAMA, SHAPES

MODELS: dict[str, dict[str, Any]] = {
    "8b": SHAPES["llama-8b"],
    "tiny": LLAMA | {
        "vocab_size": 2048, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "head_dim": 32,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 8192,
        "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
    },
}  # fmt: skip
HELD = 8.3
"""Conversations that the pool holds."""
COMPARED = (
    ("again_p50_s", False), ("again_p99_s", False), ("at_once_s", False), ("tok_per_s", True), ("rss_gib", False),
)  # fmt: skip
"""Of a turn, and whether more of it is better."""
COUNTERS = ("kv_offload", "external_prefix_cache")
"""In names of metrics of what comes from RAM."""


def kv_bytes(model: dict[str, int], tokens: int) -> int:
    return 2 * 2 * model["num_hidden_layers"] * model["num_key_value_heads"] * model["head_dim"] * tokens


class HeldRam:
    """The most that this process and its children hold, looked at five times a second."""

    def __init__(self) -> None:
        self.most_bytes = self.most_taken_bytes = 0
        self._available_bytes = available_bytes()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            self.most_bytes = max(self.most_bytes, family_bytes(os.getpid()))
            self.most_taken_bytes = max(self.most_taken_bytes, self._available_bytes - available_bytes())
            time.sleep(0.2)


def available_bytes() -> int:
    """Of the machine's RAM."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))


def family_bytes(pid: int) -> int:
    """RAM of a process and all below it; what is shared memory is taken to be the same for all."""
    parents, found = dict[int, int](), [pid]
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit():
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    own, shared = 0, 0
    for one in found:
        try:
            lines = dict(line.split(":", 1) for line in Path(f"/proc/{one}/status").read_text().splitlines())
        except OSError:
            continue
        kib = {name: int(lines[name].split()[0]) for name in ("RssAnon", "RssFile", "RssShmem") if name in lines}
        own += kib.get("RssAnon", 0)
        shared = max(shared, kib.get("RssShmem", 0))
    return (own + shared) * 1024


def moved(engine: str, llm: Any) -> float:
    if engine == "holdfast":
        return float(sum(one.hit_tokens_total for one in llm.get_stats().kv_tiers if one.tier == "ram"))
    found = (one for one in llm.get_metrics() if any(name in one.name for name in COUNTERS) and "quer" not in one.name)
    return float(sum(getattr(one, "value", 0) or getattr(one, "sum", 0) for one in found))


def open_llm(engine: str, asked: argparse.Namespace, folder: str) -> tuple[Any, Any]:
    model = MODELS[asked.model] | {"max_position_embeddings": 32_768}
    (Path(folder) / "config.json").write_text(json.dumps(model))
    os.environ |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    more: dict[str, Any] = {"device": asked.device} if engine == "holdfast" else {"disable_log_stats": False}
    module = importlib.import_module(engine)
    llm = module.LLM(
        model=folder, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16",
        max_model_len=asked.tokens + 2 * asked.answer, max_num_batched_tokens=8192, max_num_seqs=64,
        enable_prefix_caching=True,
        kv_cache_memory_bytes=int(HELD * kv_bytes(model, asked.tokens)), kv_offloading_size=asked.ram,
        kv_offloading_backend="native", **more,
    )  # fmt: skip
    return module, llm


def wait_for_ram(module: Any, llm: Any, nbytes: int) -> None:
    """Until all of it is pinned; steps tell. What is less than a whole piece is not taken."""
    params = module.SamplingParams(max_tokens=1, detokenize=False)
    deadline = time.monotonic() + 120
    while not any(one.tier == "ram" and one.total_bytes >= 0.99 * nbytes for one in llm.get_stats().kv_tiers):
        if time.monotonic() > deadline:
            raise SystemExit("Holdfast has not pinned its RAM after two minutes")
        llm.generate([{"prompt_token_ids": [7, 8, 9]}], params, use_tqdm=False)
        time.sleep(0.2)


def work(engine: str, asked: argparse.Namespace) -> dict[str, Any]:
    held = HeldRam()
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        module, llm = open_llm(engine, asked, folder)
        if engine == "holdfast" and asked.device == "cuda":
            wait_for_ram(module, llm, int(asked.ram * 2**30))
        ready_s, vocabulary = time.perf_counter() - begin, MODELS[asked.model]["vocab_size"] - 300

        def ask(prompts: list[list[int]], tokens: int) -> float:
            params = module.SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=tokens, detokenize=False)
            begun = time.perf_counter()
            llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
            return time.perf_counter() - begun

        draws = [random.Random(number) for number in range(asked.conversations)]
        prompts = [[draw.randrange(3, vocabulary) for _ in range(asked.tokens)] for draw in draws]
        ask([prompts[0][:64]], 4)
        first = [ask([ids], 1) for ids in prompts]
        time.sleep(asked.settle)  # What is on its way to RAM arrives.
        before, again = moved(engine, llm), [ask([ids], 1) for ids in prompts]
        at_once_s, answers_s = ask(prompts, 1), ask(prompts, asked.answer)
        again.sort()
        return {
            "engine": engine, "version": module.__version__, "ready_s": ready_s, "first_s": statistics.median(first),
            "again_p50_s": statistics.median(again), "again_p99_s": again[-1], "at_once_s": at_once_s,
            "tok_per_s": len(prompts) * asked.answer / answers_s, "rss_gib": held.most_bytes / 2**30,
            "ram_taken_gib": held.most_taken_bytes / 2**30,
            "moved": moved(engine, llm) - before,
        }  # fmt: skip


def turn(engine: str, given: list[str], site: Path | None) -> dict[str, Any]:
    environment = {**os.environ, "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    if engine == "vllm" and site is not None:
        environment["PYTHONPATH"] = str(site)
    command = [sys.executable, __file__, *given, "--worker", engine]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=580)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        print(done.stdout[-3000:], done.stderr[-3000:], file=sys.stderr)
        raise SystemExit(f"{engine} did not finish")
    figures: dict[str, Any] = json.loads(lines[-1])
    if not figures["moved"]:
        print(f"{engine}: nothing came from RAM by its own counters", file=sys.stderr)
    return figures


def judge(turns: list[dict[str, Any]]) -> None:
    """Holdfast beside vLLM, medians of the turns: no slower, and no more RAM."""
    medians = {
        engine: {
            name: statistics.median([one[name] for one in turns if one["engine"] == engine]) for name, _ in COMPARED
        }
        for engine in ("holdfast", "vllm")
    }
    for name, more_is_better in COMPARED:
        ours, theirs = medians["holdfast"][name], medians["vllm"][name]
        holds = ours >= theirs if more_is_better else ours <= theirs
        said = {"verdict": name, "holdfast": round(ours, 4), "vllm": round(theirs, 4), "holds": holds}
        print(json.dumps(said), flush=True)


def main(given: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, help="folder with vLLM, for PYTHONPATH")
    parser.add_argument("--engines", nargs="+", default=["holdfast", "vllm"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--model", choices=sorted(MODELS), default="8b")
    parser.add_argument("--device", default="cuda", help="of Holdfast")
    parser.add_argument("--tokens", type=int, default=16_384, help="of each conversation")
    parser.add_argument("--conversations", type=int, default=30)
    parser.add_argument("--answer", type=int, default=64, help="tokens, of the round that counts them")
    parser.add_argument("--ram", type=float, default=64.0, help="GiB")
    parser.add_argument("--settle", type=float, default=3.0, help="seconds between the first round and the second")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    asked = parser.parse_args(given)
    if asked.worker:
        print(json.dumps(work(asked.worker, asked)), flush=True)
        return
    turns = list[dict[str, Any]]()
    for _ in range(asked.rounds):
        for engine in asked.engines:
            turns.append(turn(engine, given, asked.vllm))
            rounded = {name: round(one, 4) if isinstance(one, float) else one for name, one in turns[-1].items()}
            print(json.dumps(rounded), flush=True)
            if asked.out is not None:
                asked.out.write_text(json.dumps(turns, indent=1) + "\n")
    if {one["engine"] for one in turns} == {"holdfast", "vllm"}:
        judge(turns)


if __name__ == "__main__":
    main(sys.argv[1:])
