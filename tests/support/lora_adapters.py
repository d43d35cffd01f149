"""LoRA adapters as PEFT would save them, and the same merged into a model's weights by arithmetic of its own."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from holdfast.checkpoints import locate, spec_of

LAYER_MODULES = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
    "mlp.down_proj",
)  # fmt: skip


def write_adapter(
    folder: Path,
    model: Path,
    *,
    seed: int,
    rank: int = 4,
    modules: Sequence[str] = LAYER_MODULES,
    ranks: Mapping[str, int] | None = None,
    size: float = 0.4,
    **config: Any,
) -> Path:
    """Random factors for these modules of all layers of the model; `ranks` by the module's last name."""
    weights, tensors = _weights(model), dict[str, torch.Tensor]()
    random = torch.Generator().manual_seed(seed)
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        if not module.endswith(tuple(modules)) or weight.dim() != 2:
            continue
        own = (ranks or {}).get(module.rsplit(".", 1)[-1], rank)
        a = torch.randn((own, weight.shape[1]), generator=random) * size
        b = torch.randn((weight.shape[0], own), generator=random) * size
        tensors[f"base_model.model.{module}.lora_A.weight"] = a
        tensors[f"base_model.model.{module}.lora_B.weight"] = b
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    said = {
        "peft_type": "LORA", "base_model_name_or_path": "a/tiny-model", "r": rank, "lora_alpha": 2 * rank,
        "target_modules": sorted({name.rsplit(".", 1)[-1] for name in modules}), "bias": "none", "use_rslora": False,
        "use_dora": False, "modules_to_save": None, "rank_pattern": dict(ranks or {}), "alpha_pattern": {}, **config,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(said))
    return folder


def merge(target: Path, model: Path, adapter: Path) -> Path:
    """The model's folder once more with W + scale · B·A in place of W."""
    target.mkdir(parents=True)
    weights, factors = _weights(model), load_file(adapter / "adapter_model.safetensors")
    config = json.loads((adapter / "adapter_config.json").read_text())
    for name in [name for name in factors if name.endswith(".lora_A.weight")]:
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        a, b = factors[name].double(), factors[name.replace("lora_A", "lora_B")].double()
        alpha = next(
            (value for key, value in config["alpha_pattern"].items() if module.endswith("." + key)),
            config["lora_alpha"],
        )
        scale = alpha / (math.sqrt(len(a)) if config["use_rslora"] else len(a))
        weight = weights[f"{module}.weight"]
        weights[f"{module}.weight"] = (weight.double() + scale * (b @ a)).to(weight.dtype)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text((model / "config.json").read_text())
    return target


def _weights(model: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(model.glob("*.safetensors")):
        found |= load_file(path)
    if not found:  # A model of a config alone, whose weights are made up: what counts here is their shapes.
        spec = spec_of(locate(str(model)))
        found = {tensor.hf_name: torch.empty(tensor.shape, device="meta") for tensor in spec.tensors}
    return found
