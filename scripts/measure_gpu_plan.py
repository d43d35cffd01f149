"""Holds the plan of a GPU against the GPU: what was predicted before loading, and what the driver counts afterwards.

Dummy weights in real shapes, each case in a process of its own: start, then three floods whose batches shrink from the
largest size to one, with plain answers, with adjusted logits and with answers that must have a form, so that every
graph is captured. The built-in model's tokenizer is needed for the last. Writes
docs/measurements/predicted-and-measured-gpu.md; `--case NAME` measures one and prints it as JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.execution.gpu.sampling import Work
from holdfast.footprint.gpu import KINDS_OF_WORK, padded_sizes
from holdfast.records import SamplingParams, StructuredOutputsParams
from holdfast.units import GIB, MIB

PAGE = Path(__file__).resolve().parent.parent / "docs" / "measurements" / "predicted-and-measured-gpu.md"
TOLERANCE = 0.03
LONGER_THAN_PROMPTS = 64
"""Tokens of the shortest answer: more than the steps in which prompts are computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    shape: tuple[int, int, int, int, int, int, int]
    """vocabulary, hidden, inner, layers, heads, KV heads, head width."""
    settings: dict[str, Any] = field(default_factory=dict)


CASES = (
    Case(name="0.6B", shape=(151936, 1024, 3072, 28, 16, 8, 128), settings={"max_model_len": 4096}),
    Case(
        name="0.6B, few long sequences", shape=(151936, 1024, 3072, 28, 16, 8, 128),
        settings={"max_model_len": 40960, "max_num_seqs": 32},
    ),
    Case(name="1B", shape=(128256, 2048, 8192, 16, 32, 8, 64), settings={"max_model_len": 16384}),
    Case(name="3B, 16 GiB budget", shape=(128256, 3072, 8192, 28, 24, 8, 128), settings={"vram": "16GiB"}),
    Case(name="8B", shape=(128256, 4096, 14336, 32, 32, 8, 128), settings={"max_model_len": 8192}),
    Case(
        name="8B, 24 GiB budget", shape=(128256, 4096, 14336, 32, 32, 8, 128),
        settings={"vram": "24GiB", "max_num_seqs": 64, "max_num_batched_tokens": 2048},
    ),
    Case(name="14B", shape=(152064, 5120, 13824, 48, 40, 8, 128), settings={"gpu_memory_utilization": 0.6}),
    Case(name="32B", shape=(152064, 5120, 27648, 64, 40, 8, 128), settings={"max_num_batched_tokens": 16384}),
)  # fmt: skip


def config_of(case: Case) -> dict[str, Any]:
    vocabulary, hidden, inner, layers, heads, kv_heads, width = case.shape
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocabulary, "hidden_size": hidden,
        "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": width, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
        "rope_theta": 5e5, "tie_word_embeddings": hidden <= 2048, "torch_dtype": "bfloat16", "bos_token_id": 1,
        "eos_token_id": 2, "hidden_act": "silu",
    }  # fmt: skip


def measure(case: Case) -> dict[str, Any]:
    from holdfast import LLM

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config_of(case)))
        with LLM(
            model=folder, load_format="dummy", tokenizer="smollm2", device="cuda", enable_prefix_caching=False,
            **case.settings,
        ) as llm:  # fmt: skip
            memory = llm.info.memory
            assert memory is not None
            start = llm.get_stats().device_bytes
            for work in Work:
                prompts, params = flood(llm.info.max_num_seqs, work)
                llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
            return {
                "name": case.name,
                "settings": case.settings,
                "budget": memory.budget_bytes,
                "planned": {term.term: term.planned_bytes for term in memory.terms},
                "measured": {term.term: term.measured_bytes for term in memory.terms},
                "held_at_start": start,
                "held_at_end": settled(llm),
                "graphs": captured(llm),
                "limits": [llm.info.max_model_len, llm.info.max_num_seqs, llm.info.max_num_batched_tokens],
                "kv_tokens": llm.info.blocks * llm.info.block_size,
            }


def flood(rows: int, work: Work) -> tuple[list[list[int]], list[SamplingParams]]:
    """Each answer is one token longer than the one before, and all outlast the prompts: steps of `rows` tokens, then of
    one less each time. In every one of them a row needs this kind of work."""
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 8000) for _ in range(rng.randrange(20, 200))] for _ in range(rows)]
    params = [_params(number, work if (rows - 1 - number) % 7 == 0 else Work.DRAW) for number in range(rows)]
    return prompts, params


def _params(number: int, work: Work) -> SamplingParams:
    tokens, formed = LONGER_THAN_PROMPTS + number, work is Work.FORWARD
    return SamplingParams(
        temperature=0.8 if number % 3 else 0.0, top_p=0.9, logprobs=5 if number % 50 == 0 else None, seed=number,
        repetition_penalty=1.1 if work is Work.ADJUST else 1, min_tokens=tokens if formed else 0, max_tokens=tokens,
        structured_outputs=StructuredOutputsParams(regex="[a-z]*") if formed else None, ignore_eos=True,
        detokenize=False,
    )  # fmt: skip


def captured(llm: Any) -> str:
    """Graphs there are, of all that there can be."""
    return f"{len(llm._engine().runner._graphs.captured)} of {KINDS_OF_WORK * len(padded_sizes(llm.info.max_num_seqs))}"


def settled(llm: Any) -> int:
    """The driver is asked once a second."""
    import time

    time.sleep(1.1)
    held: int = llm.get_stats().device_bytes
    return held


def rows_of(one: dict[str, Any]) -> str:
    """Without the pool, which takes what is left: with it every prediction would look good."""
    planned = sum(size for name, size in one["planned"].items() if name != "kv_pool")
    held = one["held_at_end"] - one["measured"]["kv_pool"]
    unaccounted = one["held_at_end"] - sum(size or 0 for size in one["measured"].values())
    total = sum(one["planned"].values()) / one["held_at_end"] - 1
    length, sequences, step = one["limits"]
    return (
        f"| {one['name']} | {sequences} x {length:,}, {step:,} a step | {one['budget'] / GIB:.2f} "
        f"| {one['held_at_start'] / GIB:.2f} | {one['held_at_end'] / GIB:.2f} | {one['graphs']} | {total:+.1%} "
        f"| {planned / MIB:,.0f} | {held / MIB:,.0f} | {planned / held - 1:+.1%} "
        f"| {unaccounted / MIB:,.0f} ({unaccounted / one['held_at_end']:.2%}) |"
    )


def page(results: list[dict[str, Any]], machine: str) -> str:
    terms = list(results[0]["planned"])
    detail = [f"| MiB | {' | '.join(terms)} |", f"|---|{'---:|' * len(terms)}"]
    for one in results:
        cells = [
            f"{one['planned'].get(name, 0) / MIB:,.0f} / {(one['measured'].get(name) or 0) / MIB:,.0f}"
            for name in terms
        ]
        detail.append(f"| {one['name']} | {' | '.join(cells)} |")
    return TEXT.format(
        machine=machine, table="\n".join(map(rows_of, results)), terms="\n".join(detail), tolerance=f"{TOLERANCE:.0%}"
    )


TEXT = """# Predicted and measured on a GPU

Written by `scripts/measure_gpu_plan.py`: dummy weights in real shapes, each in its own process. The prediction is the
plan made before loading; the measurement is what the driver (NVML) counts for the process, right after the start and
after load whose batches shrink from the most sequences to one, with plain output, with adjusted logits and with
structured output: every possible graph is captured by then.

Measured on {machine}.

| model | limits | budget, GiB | at start | at end | graphs | plan off \
| planned without pool, MiB | held | off | unaccounted |
|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|
{table}

Targets: held memory stays within the budget, the plan is within {tolerance} of what is held, and
what no term accounts for is under 2%.

## Term by term

Planned / measured. `activations` is measured as what the profile run added to the other terms.

{terms}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", help="measure this one in this process and print JSON")
    parser.add_argument("--results", type=Path, help="write the page from these JSON lines, and measure nothing")
    asked = parser.parse_args()
    if asked.case is not None:
        print(json.dumps(measure(next(case for case in CASES if case.name == asked.case))))
        return 0
    if asked.results is not None:
        results = [json.loads(line) for line in asked.results.read_text().splitlines() if line.startswith("{")]
        PAGE.write_text(page(results[:-1], results[-1]["machine"]), encoding="utf-8")
        return 0
    results = []
    for case in CASES:
        done = subprocess.run(
            [sys.executable, __file__, "--case", case.name], check=True, capture_output=True, text=True, timeout=600
        )
        results.append(json.loads(done.stdout.splitlines()[-1]))
        print(json.dumps(results[-1]), flush=True)
    machine = machine_text()
    print(json.dumps({"machine": machine}))
    PAGE.write_text(page(results, machine), encoding="utf-8")
    return 0


def machine_text() -> str:
    import torch

    from holdfast.hardware.nvidia import probe

    found = probe()
    return f"{found.gpus[0].name}, driver {found.driver}, torch {torch.__version__}, Python {sys.version.split()[0]}"


if __name__ == "__main__":
    raise SystemExit(main())
