"""A tiny random model of transformers on the GPU runner or the CPU runner, under the real scheduler."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from tiny_gguf import write_tiny_gguf

from holdfast.checkpoints import locate, open_checkpoint, spec_of
from holdfast.checkpoints.checkpoint import Checkpoint
from holdfast.checkpoints.formats import safetensors
from holdfast.engine.core.loop import EngineCore
from holdfast.execution.gpu.runner import GpuRunner
from holdfast.execution.kv_pool import LARGEST
from holdfast.execution.runner import Runner, RunnerLimits
from holdfast.execution.weights.decoder_weights import Weights
from holdfast.execution.weights.load import load_weights
from holdfast.kvcache import KVCache
from holdfast.kvcache.groups import KVLayout, form_groups
from holdfast.models import ModelSpec, from_config
from holdfast.records import EngineOutput, Request, SamplingParams, TokenLogprobs
from holdfast.scheduler import Scheduler, SchedulerLimits

BLOCK_TOKENS = 4
LAYERS = 2 if torch.cuda.is_available() else 1
"""The interpreter takes a second for a step of a layer or two."""
LLAMA = {"architecture": "Llama"}
MISTRAL = {"architecture": "Mistral", "sliding_window": 9}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 6,
    "long_factor": [1.5, 2, 2.5, 3, 4, 5],
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"architecture": "Qwen2"},
    "qwen3": {"architecture": "Qwen3", "head_dim": 16},
    "gemma2": {
        "architecture": "Gemma2", "head_dim": 16, "sliding_window": 9, "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0, "layer_types": ["sliding_attention", "full_attention"][-LAYERS:],
        "query_pre_attn_scalar": 24,
    },
    "gemma3": {
        "architecture": "Gemma3", "head_dim": 16, "sliding_window": 9,
        "layer_types": ["full_attention", "sliding_attention"][-LAYERS:],
    },
    "phi3": {
        "architecture": "Phi3", "partial_rotary_factor": 0.75, "rope_parameters": LONG_ROPE,
        "original_max_position_embeddings": 5,
    },
    "olmo2": {"architecture": "Olmo2"},
    "granite": {
        "architecture": "Granite", "embedding_multiplier": 3.0, "attention_multiplier": 0.11,
        "residual_multiplier": 0.4, "logits_scaling": 1.7,
    },
    "smollm3": {"architecture": "SmolLM3", "no_rope_layers": [1, 0][-LAYERS:]},
    "starcoder2": {"architecture": "Starcoder2"},
    "stablelm": {"architecture": "StableLm", "use_qkv_bias": True},
}  # fmt: skip
"""Every family that the engine runs; where a layer decides, the interpreter's only one is the odd one."""


class Tiny:
    """A random model of transformers, saved and opened by the project's own readers."""

    def __init__(self, folder: Path, architecture: str, **settings: Any) -> None:
        config = getattr(transformers, architecture + ("TextConfig" if architecture == "Gemma3" else "Config"))(
            **{
                "vocab_size": 211,
                "hidden_size": 64,
                "intermediate_size": 96,
                "num_hidden_layers": LAYERS,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": 128,
                "initializer_range": 0.2,
                "attn_implementation": "eager",
                "bos_token_id": 1,
                "eos_token_id": 2,
                "pad_token_id": 0,
                **settings,
            }
        )
        torch.manual_seed(0)
        self.model = getattr(transformers, f"{architecture}ForCausalLM")(config).float().eval()
        for name, parameter in self.model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                torch.nn.init.normal_(parameter, mean=parameter.mean().item(), std=0.2)
        self.model.save_pretrained(folder)
        self.folder = folder
        self.spec: ModelSpec = from_config(json.loads((folder / "config.json").read_text()))

    def layout(self, element_bytes: int = 4) -> KVLayout:
        groups, places = form_groups([layer.window for layer in self.spec.layers])
        return KVLayout(
            groups=groups,
            block_tokens=BLOCK_TOKENS,
            layers_per_page=places,
            kv_heads=self.spec.kv_heads,
            head_dim=self.spec.head_dim,
            element_bytes=element_bytes,
        )

    def core(
        self,
        device: torch.device,
        *,
        gpu: bool,
        blocks: int = 64,
        slots: int = 4,
        step: int = 16,
        kv_dtype: torch.dtype = torch.float32,
        **more: bool,
    ) -> EngineCore:
        layout = self.layout(kv_dtype.itemsize)
        limits = RunnerLimits(max_num_seqs=slots, max_num_batched_tokens=step, max_model_len=96)
        weights = self.weights(device)
        runner: Any = (GpuRunner if gpu else Runner)(
            self.spec, weights, layout, limits, device, kv_dtype=kv_dtype, **more
        )
        if kv_dtype in LARGEST:
            runner.calibrate_kv()
        runner.back_kv(blocks)
        ahead = 1 if gpu else 0
        scheduler = Scheduler(
            SchedulerLimits(
                max_num_seqs=slots,
                max_num_batched_tokens=step,
                max_model_len=96,
                policy="fcfs",
                max_steps_in_flight=1 + ahead,
            ),
            KVCache(layout, blocks, True),
        )
        return EngineCore(scheduler, runner, steps_ahead=ahead)

    def weights(self, device: torch.device) -> Weights:
        checkpoint = Checkpoint(safetensors.read_headers(sorted(self.folder.glob("*.safetensors"))), "safetensors")
        return load_weights(self.spec, checkpoint, dtype=torch.float32, device=device, expand=True)

    def assert_greedy(self, prompt: list[int], tokens: list[int]) -> None:
        with torch.inference_mode():
            logits = self.model(torch.tensor([prompt + tokens])).logits[0]
        assert tokens == logits[len(prompt) - 1 : -1].argmax(-1).tolist()


class TinyGguf(Tiny):
    """Its matrices stay quantized where `expand` does not say otherwise."""

    def __init__(self, path: Path, *, expand: bool = False) -> None:
        write_tiny_gguf(path)
        self._files, self._expand = locate(str(path), revision=None), expand
        self.spec = spec_of(self._files)

    def weights(self, device: torch.device) -> Weights:
        checkpoint = open_checkpoint(self._files)
        return load_weights(self.spec, checkpoint, dtype=torch.float32, device=device, expand=self._expand)


def run(
    core: EngineCore,
    prompts: list[list[int]],
    params: list[SamplingParams],
    bad_words: list[list[list[int]]] | None = None,
    between: Callable[[], None] = lambda: None,
) -> list[list[EngineOutput]]:
    """`between`: called before every step."""
    found: dict[str, list[EngineOutput]] = {}
    for number, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
        found[str(number)] = []
        words = [] if bad_words is None else bad_words[number]
        core.add(Request(request_id=str(number), prompt_token_ids=prompt, params=one, bad_word_ids=words))
    while core.has_work:
        between()
        for output in core.step():
            found[output.request_id].append(output)
        core.scheduler.check_invariants()
    return list(found.values())


def prompt(number: int, length: int) -> list[int]:
    return [(7919 * number + 31 * place * place + place) % 200 + 3 for place in range(length)]


def tokens_of(outputs: list[EngineOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def told_of(outputs: list[EngineOutput]) -> list[TokenLogprobs]:
    """Of the prompt."""
    return [entry for output in outputs for entry in output.prompt_logprobs or []]
