"""Holdfast and vLLM on the same quantized files, format by format: log-probabilities and greedy tokens.

    python -m benchmarks.compat.vllm_formats [--vllm SITE] [--only NAME ...] [--out FILE] [--beside 14]
    python -m benchmarks.compat.vllm_formats --write FOLDER [--only NAME ...]     the files alone, for other readers

Small models in real layout (a Llama, and a Qwen3 with experts) of random weights are put into each format by
tests/support/quantized_files.py, which shares no code with either engine; a format that vLLM reads is one that is
written right. `--vllm`: a folder with vLLM and what it needs, for PYTHONPATH; left out: the one that is installed.
`--beside`: engines that run at the same time, each takes about 4 GiB of the GPU.

Told of each format: how far apart the log-probabilities are (of every token of the prompts, and of the likeliest ones
after each token both chose), how many greedy tokens are the same until the first that is not, and by how much the two
tokens differed there in vLLM's eyes. `changed` is how far vLLM's own figures moved from the unquantized model: what a
format read wrong would show. A format is within its tolerance if the mean of all differences is, none is ten times as
large (with experts 99 of 100: a token that is sent to another expert is far off), and a differing greedy token was a
tie within twice that.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.machine import commit, today

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("greedy_answers.py")
LAYERS, HIDDEN, HEADS, KV_HEADS, WIDTH, INNER, VOCABULARY = 2, 1024, 8, 2, 128, 2816, 4096
EXPERTS, USED, EXPERT_INNER = 8, 2, 256
LARGEST = 4.5
"""Weights, in deviations: all matrices that an engine fuses have the same largest weight, so that their scales for a
whole tensor are the same and vLLM, which keeps one, does not round a second time."""
LOGITS = 3.0
"""Deviation of the logits, about."""
STATIC = 0.02
KV_SCALES = {"k_scale": 0.02, "v_scale": 0.015}
LARGEST_OF_MEAN = 10.0
WITH_EXPERTS = 2.0
"""Times the tolerance: unquantized models with experts differ by so much more, for tokens go to other experts."""
PLAIN, INT8_INPUTS, FP8_INPUTS, FP8_KV = {"float16": 0.008, "bfloat16": 0.04}, 0.12, 0.22, 0.26
"""Tolerances of the mean, in nats: weights alone are quantized, with activations of that type; inputs are rounded to 8
bits; keys and values too. About 1.25 times what two exact readers are apart that round some inputs the other way
(rounding_noise.py: 0.092, 0.180 and 0.207 with bfloat16; 0.027 where no input is rounded)."""

INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
TOKEN, TENSOR = {"dynamic": True, "strategy": "token"}, {"dynamic": False, "strategy": "tensor"}
BYTES, FLOATS = {"num_bits": 8, "type": "int", "symmetric": True}, {"num_bits": 8, "type": "float", "symmetric": True}
BLOCKS = {"dynamic": True, "strategy": "group", "group_size": 128, **FLOATS}
ROUTERS = [f"model.layers.{layer}.mlp.gate" for layer in range(LAYERS)]


@dataclass(frozen=True)
class Case:
    encode: tuple[str, dict[str, Any]] | None
    """Of tests/support/quantized_files.py: the encoder's name and its arguments."""
    config: dict[str, Any]
    dtype: str = "bfloat16"
    tolerance: float = PLAIN["bfloat16"]
    experts: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    scales: bool = False
    """Of keys and values, beside the weights."""


def gptq(bits: int = 4, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": 128, "desc_act": False, "sym": True, **more}


def half(encode: tuple[str, dict[str, Any]], config: dict[str, Any], **more: Any) -> Case:
    return Case(encode, config, "float16", PLAIN["float16"], **more)


def eight(encode: tuple[str, dict[str, Any]], config: dict[str, Any], **more: Any) -> Case:
    tolerance = INT8_INPUTS if encode[0] == "int8" else FP8_INPUTS
    return Case(encode, config, tolerance=more.pop("tolerance", tolerance), **more)


@cache
def cases() -> dict[str, Case]:
    compressed = _writers().compressed
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    block8 = ("fp8", {"granularity": "block", "block": (128, 128)})
    row8, tensor8 = ("fp8", {"granularity": "channel"}), ("fp8", dict[str, Any]())
    inverse = ("fp8", {"granularity": "block", "block": (128, 128), "name": "weight_scale_inv"})
    nf4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
           "bnb_4bit_compute_dtype": "bfloat16"}  # fmt: skip
    channel = compressed(FLOAT8, TOKEN | FLOATS, "float-quantized")
    with_kv = channel | {"kv_cache_scheme": TENSOR | FLOATS}
    packed = ("pack_quantized", {"group": 128})
    return {
        "plain": Case(None, {}),
        "plain-experts": Case(None, {}, experts=True),
        "awq": half(("awq", {"group": 128}), awq),
        "gptq-4": half(("gptq", {"group": 128}), gptq()),
        "gptq-4-act-order": half(("gptq", {"group": 128, "ordered": True}), gptq(desc_act=True)),
        "gptq-4-channel": half(("gptq", {"group": -1}), gptq(group_size=-1)),
        "gptq-4-asymmetric": half(("gptq", {"group": 128, "symmetric": False}), gptq(sym=False)),
        "gptq-8": half(("gptq", {"group": 128, "bits": 8}), gptq(8)),
        "gptq-8-act-order": half(("gptq", {"group": 128, "bits": 8, "ordered": True}), gptq(8, desc_act=True)),
        "w4a16": Case(packed, compressed(INT4)),
        "w4a16-asymmetric": Case(
            ("pack_quantized", {"group": 128, "symmetric": False}), compressed({**INT4, "symmetric": False})
        ),
        "w4a16-act-order": Case(
            ("pack_quantized", {"group": 128, "ordered": True}), compressed({**INT4, "actorder": "group"})
        ),
        "w4a16-channel": Case(
            ("pack_quantized", {"group": -1}), compressed({**INT4, "strategy": "channel", "group_size": None})
        ),
        "w8a16": Case(("pack_quantized", {"group": 128, "bits": 8}), compressed({**INT4, "num_bits": 8})),
        "w8a8-dynamic": eight(("int8", {}), compressed(INT8, TOKEN | BYTES, "int-quantized")),
        "w8a8-static": eight(("int8", {"static": STATIC}), compressed(INT8, TENSOR | BYTES, "int-quantized")),
        "fp8-channel": eight(row8, channel),
        "fp8-tensor-static": eight(
            ("fp8", {"static": STATIC}),
            compressed({**FLOAT8, "strategy": "tensor"}, TENSOR | FLOATS, "float-quantized"),
        ),
        "fp8-compressed-blocks": eight(
            block8,
            compressed({**FLOAT8, "strategy": "block", "block_structure": [128, 128]}, BLOCKS, "float-quantized"),
        ),
        "fp8": eight(tensor8, fp8),
        "fp8-static": eight(("fp8", {"static": STATIC}), {**fp8, "activation_scheme": "static"}),
        "fp8-blocks": eight(inverse, {**fp8, "weight_block_size": [128, 128]}),
        "nf4": Case(("nf4", {}), {**nf4, "bnb_4bit_use_double_quant": True}),
        "nf4-single": Case(("nf4", {"nested": False}), {**nf4, "bnb_4bit_use_double_quant": False}),
        "kv-fp8": eight(row8, with_kv, tolerance=FP8_KV, settings={"kv_cache_dtype": "fp8"}, scales=True),
        "experts-awq": half(("awq", {"group": 128}), {**awq, "modules_to_not_convert": ["mlp.gate"]}, experts=True),
        "experts-gptq-4": half(("gptq", {"group": 128}), gptq(), experts=True),
        "experts-w4a16": Case(packed, compressed(INT4), experts=True),
        "experts-fp8": eight(tensor8, {**fp8, "modules_to_not_convert": ROUTERS}, experts=True),
        "experts-fp8-channel": eight(row8, channel, experts=True),
        "experts-fp8-blocks": eight(
            inverse, {**fp8, "weight_block_size": [128, 128], "modules_to_not_convert": ROUTERS}, experts=True
        ),
    }


def _writers() -> Any:
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    return importlib.import_module("quantized_files")


def config_of(experts: bool) -> dict[str, Any]:
    shape = {
        "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": WIDTH, "vocab_size": VOCABULARY, "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5, "rope_theta": 1e4, "hidden_act": "silu", "attention_bias": False,
        "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    if not experts:
        return shape | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    return shape | {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": EXPERTS,
        "num_experts_per_tok": USED, "moe_intermediate_size": EXPERT_INNER, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [],
    }  # fmt: skip


def write_plain(folder: Path, *, experts: bool, dtype: str) -> None:
    import torch
    from safetensors.torch import save_file

    generator, kept = torch.Generator().manual_seed(3), dict[str, Any]()

    def matrix(name: str, rows: int, columns: int, gain: float = 1.0) -> None:
        drawn = torch.randn((rows, columns), generator=generator).clamp(-LARGEST, LARGEST)
        drawn[0, 0] = LARGEST
        kept[f"{name}.weight"] = drawn * (gain * columns**-0.5)

    matrix("model.embed_tokens", VOCABULARY, HIDDEN, HIDDEN**0.5)
    matrix("lm_head", VOCABULARY, HIDDEN, LOGITS)
    norms = {"model.norm": HIDDEN}
    for layer in range(LAYERS):
        stem = f"model.layers.{layer}"
        norms |= {f"{stem}.input_layernorm": HIDDEN, f"{stem}.post_attention_layernorm": HIDDEN}
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            matrix(f"{stem}.self_attn.{name}_proj", heads * WIDTH, HIDDEN)
        matrix(f"{stem}.self_attn.o_proj", HIDDEN, HEADS * WIDTH, 2.0)
        if experts:
            norms |= {f"{stem}.self_attn.q_norm": WIDTH, f"{stem}.self_attn.k_norm": WIDTH}
            # Far apart, so that rounding seldom sends a token to another expert.
            matrix(f"{stem}.mlp.gate", EXPERTS, HIDDEN, 4.0)
        inner = EXPERT_INNER if experts else INNER
        for part in [f"mlp.experts.{number}" for number in range(EXPERTS)] if experts else ["mlp"]:
            matrix(f"{stem}.{part}.gate_proj", inner, HIDDEN)
            matrix(f"{stem}.{part}.up_proj", inner, HIDDEN)
            matrix(f"{stem}.{part}.down_proj", HIDDEN, inner, 2.0)
    for name, width in norms.items():
        kept[f"{name}.weight"] = 1 + 0.1 * torch.randn(width, generator=generator)
    folder.mkdir(parents=True, exist_ok=True)
    numbers = {name: tensor.to(getattr(torch, dtype)) for name, tensor in kept.items()}
    save_file(numbers, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config_of(experts) | {"torch_dtype": dtype}))


def write_case(name: str, folder: Path) -> None:
    import numpy
    from safetensors.torch import load_file, save_file

    case, writers = cases()[name], _writers()
    if case.encode is None:
        write_plain(folder / name, experts=case.experts, dtype=case.dtype)
        return
    encoder, arguments = case.encode
    source, target = folder / f"source-of-{name}", folder / name
    write_plain(source, experts=case.experts, dtype=case.dtype)
    encode = getattr(writers, encoder)(**arguments)
    # Matrices with the same inputs have the same act-order, as quantizers choose it: vLLM keeps one for those it fuses.
    made = writers.Format(case.config, lambda weight, _: encode(weight, numpy.random.default_rng(weight.shape[1])))
    writers.write_quantized(source, target, made)
    tensors = load_file(target / "model.safetensors")
    if case.scales:
        import torch

        for layer in range(LAYERS):
            stem = f"model.layers.{layer}.self_attn"
            tensors |= {f"{stem}.{part}": torch.tensor([value]) for part, value in KV_SCALES.items()}
    # transformers asks for the mark of who wrote a file.
    save_file(tensors, target / "model.safetensors", {"format": "pt"})


def ask(engine: str, name: str, folder: Path, site: Path | None, until: float) -> dict[str, Any]:
    """What the engine answers until that time, or why it does not."""
    case, out = cases()[name], folder / f"{name}-{engine}.json"
    environment = os.environ | {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_USE_DEEP_GEMM": "0"}
    if engine == "vllm" and site is not None:
        environment["PYTHONPATH"] = str(site)
    settings = {"dtype": case.dtype, "gpu_memory_utilization": 0.04, "kv_cache_memory_bytes": 2**28, **case.settings}
    log = folder / f"{name}-{engine}.log"
    command = [sys.executable, str(WORKER), engine, str(folder / name), str(out), json.dumps(settings)]
    with log.open("w") as written:
        try:
            code = subprocess.run(
                command, env=environment, stdout=written, stderr=written, timeout=max(until - time.monotonic(), 0.1)
            ).returncode
        except subprocess.TimeoutExpired:
            return {"failed": "not done in time", "tail": _lines(log)[-25:]}
    if code or not out.exists():
        lines = _lines(log)
        wrong = [line for line in lines if "Error" in line or "error" in line]
        said = (wrong or lines or ["nothing was said"])[-1][:400]
        return {"failed": f"exit code {code}: {said}", "tail": lines[-25:]}
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def _lines(log: Path) -> list[str]:
    return [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]


def apart(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> list[float]:
    """Differences of log-probabilities: of the prompts' tokens, and after each output that is the same so far."""
    found: list[float] = []
    for left, right in zip(one, other, strict=True):
        found += [abs(a - b) for a, b in zip(left["prompt"], right["prompt"], strict=True)]
        for place in range(min(equal(left, right) + 1, len(left["tokens"]))):
            first, second = left["likeliest"][place], right["likeliest"][place]
            found += [abs(first[token] - second[token]) for token in first.keys() & second.keys()]
    return found


def equal(left: dict[str, Any], right: dict[str, Any]) -> int:
    """Tokens until the first that is not the same."""
    pairs = zip(left["tokens"], right["tokens"], strict=True)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), len(left["tokens"]))


def compare(name: str, vllm: list[dict[str, Any]], ours: list[dict[str, Any]], plain: Any) -> dict[str, Any]:
    case, differences = cases()[name], apart(vllm, ours)
    tolerance = case.tolerance * (WITH_EXPERTS if case.experts else 1)
    ties: list[float] = []
    for left, right in zip(vllm, ours, strict=True):
        place = equal(left, right)
        if place < len(left["tokens"]):
            chances = left["likeliest"][place]
            lowest = min(chances.values())
            ties.append(chances[str(left["tokens"][place])] - chances.get(str(right["tokens"][place]), lowest))
    mean, largest = statistics.fmean(differences), max(differences)
    changed = [
        abs(a - b)
        for x, y in zip(vllm, plain or [], strict=False)
        for a, b in zip(x["prompt"], y["prompt"], strict=True)
    ]
    limit = LARGEST_OF_MEAN * tolerance
    most = statistics.quantiles(differences, n=100)[-1] if case.experts else largest
    return {
        "mean": mean,
        "largest": largest,
        "99_of_100": statistics.quantiles(differences, n=100)[-1],
        "tolerance": tolerance,
        "changed": statistics.fmean(changed) if changed else None,
        "equal_tokens": sum(map(equal, vllm, ours)),
        "tokens": sum(len(one["tokens"]) for one in vllm),
        "equal_first_tokens": sum(a["tokens"][0] == b["tokens"][0] for a, b in zip(vllm, ours, strict=True)),
        "answers": len(vllm),
        "largest_tie": max(ties, default=0.0),
        "within": mean <= tolerance and most <= limit and max(ties, default=0.0) <= 2 * limit,
    }


def table(rows: dict[str, dict[str, Any]]) -> str:
    lines = [
        "| format | mean difference, nats | largest | tolerance | changed by the format | equal greedy tokens | |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    for name, row in rows.items():
        if "mean" not in row:
            lines.append(
                f"| {name} | | | | | | {'; '.join(f'{key}: {value}' for key, value in row.items() if key != 'tails')} |"
            )
            continue
        changed = "" if row["changed"] is None else f"{row['changed']:.3f}"
        lines.append(
            f"| {name} | {row['mean']:.4f} | {row['largest']:.3f} | {row['tolerance']} | {changed} | "
            f"{row['equal_tokens']} of {row['tokens']} | {'within' if row['within'] else 'NOT WITHIN'} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, help="folder with vLLM, for PYTHONPATH")
    parser.add_argument("--only", nargs="+", choices=list(cases()), default=list(cases()), metavar="NAME")
    parser.add_argument("--beside", type=int, default=14, help="engines that run at the same time")
    parser.add_argument("--within", type=float, default=900.0, metavar="SECONDS", help="what takes longer is left out")
    parser.add_argument("--out", type=Path, help="JSON file: this run is added to those in it")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="only write the files there; needs no GPU")
    asked = parser.parse_args()
    if asked.write is not None:
        for name in asked.only:
            write_case(name, asked.write)
        return
    until = time.monotonic() + asked.within
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        with ProcessPoolExecutor(asked.beside, mp_context=get_context("spawn")) as pool:
            list(pool.map(write_case, asked.only, [folder] * len(asked.only)))
        turns = [(engine, name) for name in asked.only for engine in ("vllm", "holdfast")]
        with ThreadPoolExecutor(asked.beside) as pool:
            said = dict(
                zip(turns, pool.map(lambda turn: ask(turn[0], turn[1], folder, asked.vllm, until), turns), strict=True)
            )
    rows: dict[str, dict[str, Any]] = {}
    for name in asked.only:
        theirs, ours = said["vllm", name], said["holdfast", name]
        failed = {engine: one["failed"] for engine, one in (("vLLM", theirs), ("Holdfast", ours)) if "failed" in one}
        if failed:
            rows[name] = failed | {"tails": {engine: said[engine, name].get("tail") for engine in ("vllm", "holdfast")}}
            continue
        case = cases()[name]
        plain = said.get(("vllm", "plain-experts" if case.experts else "plain"), {}).get("answers")
        rows[name] = compare(name, theirs["answers"], ours["answers"], plain if case.encode else None)
        rows[name] |= {"ready_s": {"vllm": theirs["ready_s"], "holdfast": ours["ready_s"]}}
    versions = {engine: one["version"] for (engine, _), one in said.items() if "version" in one}
    print(table(rows), flush=True)
    if asked.out is not None:
        from benchmarks.gpu_peers import machine

        keep(asked.out, {"commit": commit(), "machine": machine(), "versions": versions, "formats": rows})


def keep(path: Path, run: dict[str, Any]) -> None:
    """Added to the runs that the file has already, which stay as they were measured."""
    document: dict[str, Any] = {"date": today(), "runs": []}
    if path.exists():
        document = json.loads(path.read_text())
    document["runs"].append(run)
    path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
