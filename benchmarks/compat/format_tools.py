"""Checkpoints that the formats' own tools write, read by those tools and by Holdfast: log-probabilities side by side.

    python benchmarks/compat/format_tools.py write PLAIN FOLDER [FORMAT ...]    with llmcompressor and bitsandbytes
    python benchmarks/compat/format_tools.py read FOLDER [NAME ...]             what is there, through the tools' code
    python -m benchmarks.compat.format_tools compare FOLDER [RESULTS.json]      with Holdfast

PLAIN is an unquantized folder (`benchmarks/export_safetensors.py`); `read` takes checkpoints of others, such as of
`vllm_formats.py --write FOLDER`. Neither imports anything of Holdfast, and both run in an environment of their own: the
tools want other releases of transformers. Beside each checkpoint they leave `read.json`: what transformers, through the
format's own code, has for some prompts in float32.

Where inputs are rounded too, one rounding that falls to the other side moves every later one: take a model of few
layers to see the arithmetic, not the noise.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Write = Callable[[Path, Path], None]

GROUP = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64}
ROW = {"strategy": "channel", "symmetric": True}
TENSOR = {"strategy": "tensor", "symmetric": True}
TOKEN = {"strategy": "token", "symmetric": True, "dynamic": True}
INT8, FP8 = {"num_bits": 8, "type": "int"}, {"num_bits": 8, "type": "float"}
ALTERNATIVES = 20
"""Likely tokens of each place that are compared."""


def prompts(vocabulary: int) -> list[list[int]]:
    return [[(71 * at * at + 13 * at + 5 * start) % (vocabulary - 400) for at in range(24)] for start in range(3)]


def _model(folder: Path, **more: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, device_map="cpu", **more).eval()


def _compressed(weights: dict[str, Any], inputs: dict[str, Any] | None = None, *, by_gptq: bool = False) -> Write:
    """By llm-compressor, calibrated with the prompts where it wants to be."""

    def write(plain: Path, target: Path) -> None:
        from datasets import Dataset  # type: ignore[import-not-found]
        from llmcompressor import oneshot  # type: ignore[import-not-found]
        from llmcompressor.modifiers import gptq, quantization  # type: ignore[import-not-found]

        model = _model(plain)
        recipe = (gptq.GPTQModifier if by_gptq else quantization.QuantizationModifier)(
            config_groups={"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}},
            ignore=["lm_head"],
        )
        ids = prompts(model.config.vocab_size)
        samples = Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * len(one) for one in ids]})
        oneshot(model=model, recipe=recipe, dataset=samples, max_seq_length=64, num_calibration_samples=len(ids))
        model.save_pretrained(target, save_compressed=True)

    return write


def _nf4(double: bool) -> Write:
    def write(plain: Path, target: Path) -> None:
        import torch
        from transformers import BitsAndBytesConfig

        settings = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=double,
            bnb_4bit_compute_dtype=torch.float32,
        )
        _model(plain, quantization_config=settings).save_pretrained(target)

    return write


FORMATS: dict[str, Write] = {
    "w4a16": _compressed({**GROUP, "symmetric": True}),
    "w4a16-zero-points": _compressed({**GROUP, "symmetric": False}),
    "w4a16-act-order": _compressed({**GROUP, "symmetric": True, "actorder": "weight"}, by_gptq=True),
    "w8a16": _compressed({**INT8, **ROW}),
    "w8a8-dynamic": _compressed({**INT8, **ROW}, {**INT8, **TOKEN}),
    "w8a8-static": _compressed({**INT8, **ROW}, {**INT8, **TENSOR}),
    "fp8-dynamic": _compressed({**FP8, **ROW}, {**FP8, **TOKEN}),
    "fp8-static": _compressed({**FP8, **TENSOR}, {**FP8, **TENSOR}),
    "nf4": _nf4(False),
    "nf4-double": _nf4(True),
}


def _unpack_nf4(model: Any) -> None:
    """With bitsandbytes' code, to float32: its products round weights and inputs to what a file was made from."""
    import torch

    quantized = [
        (name, module)
        for name, module in model.named_modules()
        if getattr(getattr(module, "weight", None), "quant_state", None) is not None
    ]
    if not quantized:
        return
    for name, module in quantized:
        from bitsandbytes import functional  # type: ignore[import-not-found]

        module.weight.quant_state.dtype = torch.float32
        plain = torch.nn.Linear(module.in_features, module.out_features, bias=module.bias is not None)
        plain.weight.data = functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
        if module.bias is not None:
            plain.bias.data = module.bias.data.float()
        model.set_submodule(name, plain)
    torch.nn.Module.float(model)  # transformers forbids it of a quantized one, which it is not any more.


def read(folder: Path) -> None:
    """Log-probabilities of each prompt's next token after every token of it."""
    import torch

    model = _model(folder)
    _unpack_nf4(model)
    ids = prompts(model.config.vocab_size)
    with torch.no_grad():
        chances = [torch.log_softmax(model(torch.tensor([one])).logits[0].float(), -1) for one in ids]
    said = {"prompts": ids, "chances": [one.tolist() for one in chances], "tools": versions()}
    (folder / "read.json").write_text(json.dumps(said))


def versions() -> dict[str, str]:
    from importlib import metadata

    tools = ("torch", "transformers", "compressed-tensors", "llmcompressor", "bitsandbytes", "autoawq", "gptqmodel")
    installed = {found.metadata["Name"].lower(): found.version for found in metadata.distributions()}
    return {tool: installed[tool] for tool in tools if tool in installed}


def read_all(target: str, *names: str) -> None:
    for folder in sorted(path.parent for path in Path(target).glob("*/config.json")):
        if folder.name in (names or (folder.name,)) and not folder.name.startswith("source-of-"):
            read(folder)
            print(f"{folder.name}: read", file=sys.stderr, flush=True)


def write(plain: str, target: str, *names: str) -> None:
    for name in names or FORMATS:
        folder = Path(target) / name
        if not (folder / "config.json").exists():
            FORMATS[name](Path(plain), folder)
        read(folder)
        print(f"{name}: written and read", file=sys.stderr, flush=True)


def compare(target: str, results: str | None = None) -> None:
    from holdfast import LLM, SamplingParams

    rows: dict[str, dict[str, Any]] = {}
    print(f"{'format':<20}{'mean':>12}{'largest':>12}  differences of log-probabilities")
    for folder in sorted(path.parent for path in Path(target).glob("*/read.json")):
        wanted = json.loads((folder / "read.json").read_text())
        llm = LLM(model=str(folder), dtype="float32", skip_tokenizer_init=True, max_model_len=256, max_num_seqs=4)
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=ALTERNATIVES, detokenize=False)
        answers = llm.generate([{"prompt_token_ids": ids} for ids in wanted["prompts"]], params, use_tqdm=False)
        differences = [
            abs(found.logprob - chances[at][token])
            for answer, chances in zip(answers, wanted["chances"], strict=True)
            for at, place in enumerate((answer.prompt_logprobs or [])[1:])
            for token, found in (place or {}).items()
        ]
        mean = sum(differences) / len(differences)
        print(f"{folder.name:<20}{mean:>12.6f}{max(differences):>12.5f}", flush=True)
        rows[folder.name] = {"mean": mean, "largest": max(differences), "of": len(differences), **wanted["tools"]}
        del llm
    if results is not None:
        from benchmarks.machine import commit, today

        said = {"date": today(), "commit": commit(), "differences_in_nats": rows}
        Path(results).write_text(json.dumps(said, indent=1) + "\n")


if __name__ == "__main__":
    if len(sys.argv) < 3 or sys.argv[1] not in ("write", "read", "compare"):
        sys.exit("format_tools.py write PLAIN FOLDER [FORMAT ...] | read FOLDER [NAME ...] | compare FOLDER [RESULTS]")
    commands: dict[str, Callable[..., None]] = {"write": write, "read": read_all, "compare": compare}
    commands[sys.argv[1]](*sys.argv[2:])
