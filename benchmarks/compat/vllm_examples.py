"""vLLM's own offline examples, out of a checkout that the user names, run with `holdfast` in place of `vllm`.

    python -m benchmarks.compat.vllm_examples --checkout ~/vllm [--model smollm2] [--only basic] [--timeout 300]

Nothing of vLLM is installed or copied. Each example runs as it is written, in a process of its own, where `import vllm`
finds Holdfast's modules of the same names; one small model answers for every model they name. An example counts as
run when it ends with exit code 0. Left aside are those that need several GPUs, images or audio, or another program.

There is no hub here. Where an example is about what the small model cannot be, a substitute of random weights is
written first (`SUBSTITUTES`): a classifier, a checkpoint with a config.json, an adapter. Its answers mean nothing; that
the example's calls work is what is counted.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = (
    "basic/offline_inference/basic.py",
    "basic/offline_inference/chat.py",
    "basic/offline_inference/classify.py",
    "basic/offline_inference/embed.py",
    "basic/offline_inference/generate.py",
    "basic/offline_inference/score.py",
    "deployment/async_llm_streaming.py",
    "deployment/llm_engine_example.py",
    "features/automatic_prefix_caching/automatic_prefix_caching_offline.py",
    "features/automatic_prefix_caching/prefix_caching_offline.py",
    "features/batch_invariance/reproducibility_offline.py",
    "features/context_extension/context_extension_offline.py",
    "features/logits_processor/custom.py",
    "features/lora/lora_with_quantization_offline.py",
    "features/lora/multilora_offline.py",
    "features/pause_resume/pause_resume_offline.py",
    "features/profiling/run_one_batch_offline.py",
    "features/profiling/simple_profiling_offline.py",
    "features/prompt_embed/prompt_embed_offline.py",
    "features/reset_kv/reset_kv_offline.py",
    "features/speculative_decoding/mlpspeculator_offline.py",
    "features/speculative_decoding/spec_decode_offline.py",
    "features/structured_outputs/structured_outputs_offline.py",
    "generate/qwen_1m_offline.py",
    "observability/metrics/offline.py",
    "pooling/embed/embed_matryoshka_fy_offline.py",
    "pooling/reward/sequence_reward_offline.py",
    "tool_calling/chat_with_tools_offline.py",
)
OURS = ("model", "tokenizer", "revision", "tokenizer_revision", "quantization", "load_format", "tensor_parallel_size",
        "max_model_len", "gpu_memory_utilization", "max_num_batched_tokens", "hf_config_path")  # fmt: skip
"""Settings of the model that an example names, or of its size: the model here has its own."""

SUBSTITUTES = {
    "basic/offline_inference/classify.py": "classifier",
    "pooling/reward/sequence_reward_offline.py": "rewarder",
    "features/context_extension/context_extension_offline.py": "decoder",
    "features/lora/lora_with_quantization_offline.py": "decoder",
    "features/lora/multilora_offline.py": "decoder",
}
"""Examples that one small model cannot serve, and what of `write_substitutes` is served in its place. What they
download by `snapshot_download` is its adapter."""
SHAPE: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 32768, "tie_word_embeddings": True,
}  # fmt: skip


def write_substitutes(folder: Path) -> None:
    """Qwen3 in the smallest shape, with the tokenizer and the chat template of the built-in model."""
    import torch
    import transformers
    from safetensors.torch import save_file

    from holdfast.checkpoints.sources.resolve import locate
    from holdfast.text.tokenizer.tokenizer import Tokenizer

    torch.manual_seed(0)
    tokenizer = Tokenizer.from_files(locate("smollm2"))
    said: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.special_tokens_map}
    said["chat_template"] = tokenizer.chat_template
    shape = SHAPE | {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "pad_token_id": 0}
    kinds = {"decoder": ("ForCausalLM", {}), "classifier": ("ForSequenceClassification", {"num_labels": 2}),
             "rewarder": ("ForSequenceClassification", {"num_labels": 1})}  # fmt: skip
    for name, (kind, more) in kinds.items():
        config = transformers.Qwen3Config(**shape, **more)
        getattr(transformers, f"Qwen3{kind}")(config).save_pretrained(folder / name)
        tokenizer.backend.save(str(folder / name / "tokenizer.json"))
        (folder / name / "tokenizer_config.json").write_text(json.dumps(said))
    (folder / "adapter").mkdir()
    factors = {}
    for layer in range(SHAPE["num_hidden_layers"]):
        for module in ("q_proj", "v_proj"):
            rows = SHAPE["head_dim"] * SHAPE["num_attention_heads" if module == "q_proj" else "num_key_value_heads"]
            stem = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            factors[f"{stem}.lora_A.weight"] = torch.randn(8, SHAPE["hidden_size"])
            factors[f"{stem}.lora_B.weight"] = torch.randn(rows, 8)
    save_file(factors, folder / "adapter" / "adapter_model.safetensors")
    adapter = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(adapter))


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """`vllm.x` is `holdfast.x`; of what examples use beside the engine, the little that is not there."""

    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != "vllm":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        beside = _BESIDE.get(spec.name)
        if beside is not None:
            module = types.ModuleType(spec.name)
            vars(module).update(beside)
            return module
        try:
            return importlib.import_module("holdfast" + spec.name[len("vllm") :])
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(f"{error} (for {spec.name})", name=spec.name) from None

    def exec_module(self, module: types.ModuleType) -> None: ...


def _print_embeddings(embeds: list[float], prefix: str = "") -> None:
    print(f"{prefix} {embeds[:4]} and {max(0, len(embeds) - 4)} more")


_BESIDE: dict[str, dict[str, Any]] = {"vllm.utils.print_utils": {"print_embeddings": _print_embeddings}}


def run_one(path: Path, model: str, adapter: Path) -> None:
    import huggingface_hub

    from holdfast.config import EngineConfig

    sys.meta_path.insert(0, Finder())
    if adapter.is_dir():
        huggingface_hub.snapshot_download = lambda *_, **__: str(adapter)  # type: ignore[assignment]
    given = EngineConfig.from_arguments

    def with_model(**named: Any) -> EngineConfig:
        return given(**{name: value for name, value in named.items() if name not in OURS} | {"model": model})

    EngineConfig.from_arguments = staticmethod(with_model)  # type: ignore[method-assign]
    sys.argv = [str(path)]
    runpy.run_path(str(path), run_name="__main__")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", required=True, type=Path, help="a checkout of vLLM")
    parser.add_argument("--model", default="smollm2", help="what answers for every model that the examples name")
    parser.add_argument("--only", action="append", help="only these examples, by a part of their names")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for each")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--substitutes", type=Path, help=argparse.SUPPRESS)
    known = parser.parse_args()
    examples = known.checkout.resolve() / "examples"
    if known.run:
        substitute = SUBSTITUTES.get(known.run)
        model = known.model if substitute is None else str(known.substitutes / substitute)
        run_one(examples / known.run, model, known.substitutes / "adapter")
        return 0
    chosen = [name for name in EXAMPLES if not known.only or any(part in name for part in known.only)]
    ran = 0
    with tempfile.TemporaryDirectory() as made:
        write_substitutes(Path(made))
        for name in chosen:
            began_s = time.monotonic()
            ended = _run(known.checkout, known.model, name, known.timeout, Path(made))
            ran += ended == ""
            beside = f" (random {SUBSTITUTES[name]})" if name in SUBSTITUTES else ""
            told = f"{'FAIL' if ended else 'ran '} {time.monotonic() - began_s:5.0f} s  {name}{beside}  {ended}"
            print(told, flush=True)
    print(f"{ran} of {len(chosen)} examples run")
    return 0


def _run(checkout: Path, model: str, name: str, timeout_s: float, substitutes: Path) -> str:
    """The last line that it said of its failure; empty: it ran."""
    words = [sys.executable, "-m", "benchmarks.compat.vllm_examples", "--checkout", str(checkout), "--model", model]
    words += ["--substitutes", str(substitutes)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    try:
        ended = subprocess.run(
            [*words, "--run", name], cwd=substitutes, env=environment, capture_output=True, text=True, timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        return f"no end within {timeout_s:g} s"
    lines = [line for line in ended.stderr.splitlines() if line.strip()]
    said = [line for line in lines if "Error" in line] or lines
    return "" if ended.returncode == 0 else (said[-1] if said else f"exit code {ended.returncode}")[:300]


if __name__ == "__main__":
    raise SystemExit(main())
