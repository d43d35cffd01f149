"""Built-in models put into every format, and the files read by this engine: its logits against transformers with the
numbers that the files mean by their definitions. The models' own weights are quantized already, so that nothing is said
here of what a format costs.

Long: a model is written to disk once for every format.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import quantized_files as written
import torch
from gguf_reference import reference_from_gguf
from quantized_files import Format, compressed, write_quantized
from quantized_models import log_chances, round_inputs
from safetensors.torch import save_file

from holdfast.checkpoints import locate, match, open_checkpoint, spec_of
from holdfast.execution.weights.load import load_weights
from holdfast.footprint.cpu import weights_bytes

pytestmark = [pytest.mark.long, pytest.mark.timeout(1500)]

PROMPTS = [
    [504, 2953, 282, 4649, 314],
    [1604, 15, 28, 216, 34, 28, 216, 35, 28, 216, 36, 28, 216, 37, 28],
    [(71 * place * place + 13 * place) % 40_000 for place in range(40)],
]
GROUP = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64}
FLOAT = {"num_bits": 8, "type": "float", "strategy": "channel"}
DYNAMIC = {"num_bits": 8, "dynamic": True, "strategy": "token"}
FORMATS: dict[str, Format] = {
    "awq": Format({"quant_method": "awq", "bits": 4, "group_size": 64}, written.awq(64)),
    "gptq": Format(
        {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": False, "desc_act": True},
        written.gptq(64, symmetric=False, ordered=True),
    ),
    "gptq-8": Format({"quant_method": "gptq", "bits": 8, "group_size": 32, "sym": True}, written.gptq(32, 8)),
    "w4a16": Format(compressed({**GROUP, "symmetric": False}), written.pack_quantized(64, symmetric=False)),
    "w8a8": Format(
        compressed({"num_bits": 8, "type": "int", "strategy": "channel"}, {**DYNAMIC, "type": "int"}, "int-quantized"),
        written.int8(),
        "int8",
    ),
    "fp8": Format(compressed(FLOAT, {**DYNAMIC, "type": "float"}, "float-quantized"), written.fp8("channel"), "fp8"),
    "fp8-static": Format({"quant_method": "fp8", "activation_scheme": "static"}, written.fp8(static=0.1), "fp8", 0.1),
    "fp8-blocks": Format(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [64, 64]},
        written.fp8("block", block=(64, 64), name="weight_scale_inv"),
        "fp8",
        input_group=64,
    ),
    "nf4": Format(
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True}, written.nf4()
    ),
}


@pytest.fixture(scope="module", params=["smollm2", "qwen2.5-coder-0.5b"])
def plain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """transformers' model, and its folder of plain weights."""
    model, folder = reference_from_gguf(locate(request.param).path), tmp_path_factory.mktemp("plain")
    config = model.config.to_dict()
    config.pop("quantization_config", None)
    config |= {"architectures": [type(model).__name__], "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    tied = model.config.tie_word_embeddings
    state = {name: value.contiguous() for name, value in model.state_dict().items() if not (tied and "lm_head" in name)}
    save_file(state, folder / "model.safetensors")
    return model, folder


def record_products(model: Any, products: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> list[Any]:
    """Of the last prompt: what every linear layer was given, before it is rounded, and what it made of it."""

    def before(name: str) -> Any:
        return lambda _, given: products.update({name: (given[0][0].clone(), given[0][0])})

    def after(name: str) -> Any:
        return lambda _, __, made: products.update({name: (products[name][0], made[0].clone())})

    hooks = []
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            hooks += [module.register_forward_pre_hook(before(name)), module.register_forward_hook(after(name))]
    return hooks


@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_those_of_the_numbers_in_the_file(name: str, plain: tuple[Any, Path], tmp_path: Path) -> None:
    (model, folder), made = plain, FORMATS[name]
    means = write_quantized(folder, tmp_path / "model", made)
    before = {key: value.clone() for key, value in model.state_dict().items() if key in means}
    hooks: list[Any] = []
    try:
        with torch.inference_mode():
            for key, value in model.state_dict().items():
                if key in means:
                    value.copy_(torch.from_numpy(means[key]))
        del means
        products: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        hooks = record_products(model, products)
        hooks += round_inputs(model, made) if made.inputs != "plain" else []
        with torch.inference_mode():
            expected = [model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1) for prompt in PROMPTS]
    finally:
        for hook in hooks:
            hook.remove()
        with torch.inference_mode():
            for key, value in model.state_dict().items():
                if key in before:
                    value.copy_(before[key])
    files = locate(str(tmp_path / "model"))
    spec = spec_of(files)
    with open_checkpoint(files) as checkpoint:
        weights = load_weights(spec, checkpoint, dtype=torch.float32, device=torch.device("cpu"), expand=False)
        assert weights.nbytes == weights_bytes(spec, match(spec, checkpoint), dtype="float32", expand=False)
    for layer, held in enumerate(weights.layers):
        gate_up, down = held.mlp.linears
        linears = {"self_attn": (("q", "k", "v"), held.qkv), "self_attn.": (("o",), held.o)}
        linears |= {"mlp": (("gate", "up"), gate_up), "mlp.": (("down",), down)}
        for module, (parts, linear) in linears.items():
            told = [products[f"model.layers.{layer}.{module.strip('.')}.{part}_proj"] for part in parts]
            outputs = torch.cat([made for _, made in told], -1)
            found = torch.full_like(outputs, float("nan"))
            linear.write(told[0][0], found)
            torch.testing.assert_close(found, outputs, rtol=1e-4, atol=1e-4 * float(outputs.abs().max()))
    for prompt, logits in zip(PROMPTS, expected, strict=True):
        found = log_chances(spec, weights, prompt)
        likely = logits.topk(20).indices
        worst = float((found[likely] - logits[likely]).abs().max())
        print(f"{name}: {worst:.1e} at most of the 20 likeliest after {len(prompt)} tokens")
        if made.inputs == "plain":
            assert worst < 2e-3
            assert int(found.argmax()) == int(logits.argmax())
        else:
            # Inputs between two codes fall to either side, and all that follows rounds what differs a little: noise of
            # 1e-7 on the inputs moved transformers' own answers as much, by 0.3 to 0.9. Products are held above, each
            # from the same inputs.
            assert worst < 1.5
