"""The GPU runner under the real scheduler, one step ahead, against transformers and against the CPU runner.

On a GPU as it is used, graphs included; elsewhere its kernels run in the interpreter, without graphs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from holdfast.checkpoints import safetensors
from holdfast.checkpoints.checkpoint import Checkpoint
from holdfast.engine.core import EngineCore
from holdfast.execution.gpu.decoder import GpuDecoder
from holdfast.execution.gpu.runner import GpuRunner
from holdfast.execution.runner import Runner, RunnerLimits
from holdfast.execution.weights import load_weights
from holdfast.kvcache import KVCache
from holdfast.kvcache.groups import KVLayout, form_groups
from holdfast.models import ModelSpec, from_config
from holdfast.records import EngineOutput, Request, SamplingParams
from holdfast.scheduler import Scheduler, SchedulerLimits

CPU = torch.device("cpu")
BLOCK_TOKENS = 4
LAYERS = 2 if torch.cuda.is_available() else 1
"""The interpreter takes a second for a step of a layer or two."""
LLAMA = {"architecture": "Llama"}
MISTRAL = {"architecture": "Mistral", "sliding_window": 9}


class Tiny:
    """A random model of transformers, saved and opened by the project's own readers."""

    def __init__(self, folder: Path, architecture: str, **settings: Any) -> None:
        config = getattr(transformers, f"{architecture}Config")(
            **{
                "vocab_size": 211, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS,
                "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
                "initializer_range": 0.2, "attn_implementation": "eager", **settings,
            }
        )  # fmt: skip
        torch.manual_seed(0)
        self.model = getattr(transformers, f"{architecture}ForCausalLM")(config).float().eval()
        self.model.save_pretrained(folder)
        self.folder = folder
        self.spec: ModelSpec = from_config(json.loads((folder / "config.json").read_text()))

    def layout(self) -> KVLayout:
        groups, places = form_groups([layer.window for layer in self.spec.layers])
        return KVLayout(
            groups=groups, block_tokens=BLOCK_TOKENS, layers_per_page=places, kv_heads=self.spec.kv_heads,
            head_dim=self.spec.head_dim, element_bytes=4,
        )  # fmt: skip

    def core(
        self, device: torch.device, *, gpu: bool, blocks: int = 64, slots: int = 4, step: int = 16, **more: bool
    ) -> EngineCore:
        limits = RunnerLimits(max_num_seqs=slots, max_num_batched_tokens=step, max_model_len=96)
        checkpoint = Checkpoint(safetensors.read_headers(sorted(self.folder.glob("*.safetensors"))), "safetensors")
        weights = load_weights(self.spec, checkpoint, dtype=torch.float32, device=device, expand=True)
        runner: Any = (GpuRunner if gpu else Runner)(self.spec, weights, self.layout(), limits, device, **more)
        runner.back_kv(blocks)
        ahead = 1 if gpu else 0
        scheduler = Scheduler(
            SchedulerLimits(
                max_num_seqs=slots, max_num_batched_tokens=step, max_model_len=96, policy="fcfs",
                max_steps_in_flight=1 + ahead,
            ),
            KVCache(self.layout(), blocks, True),
        )  # fmt: skip
        return EngineCore(scheduler, runner, steps_ahead=ahead)

    def assert_greedy(self, prompt: list[int], tokens: list[int]) -> None:
        with torch.inference_mode():
            logits = self.model(torch.tensor([prompt + tokens])).logits[0]
        assert tokens == logits[len(prompt) - 1 : -1].argmax(-1).tolist()


@pytest.fixture(scope="module", params=[LLAMA, MISTRAL], ids=["llama", "window"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny(tmp_path_factory.mktemp("tiny"), **request.param)


def run(core: EngineCore, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[EngineOutput]]:
    found: dict[str, list[EngineOutput]] = {}
    for number, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
        found[str(number)] = []
        core.add(Request(request_id=str(number), prompt_token_ids=prompt, params=one))
    while core.has_work:
        for output in core.step():
            found[output.request_id].append(output)
        core.scheduler.check_invariants()
    core.close()
    return list(found.values())


def prompt(number: int, length: int) -> list[int]:
    return [(7919 * number + 31 * place * place + place) % 200 + 3 for place in range(length)]


def tokens_of(outputs: list[EngineOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def test_greedy_tokens_are_those_of_transformers(tiny: Tiny, device: torch.device) -> None:
    """Chunks, mixed steps and single tokens, sequences of all lengths coming and going."""
    prompts = [prompt(number, length) for number, length in enumerate((5, 21, 1, 9))]
    params = [SamplingParams(temperature=0.0, max_tokens=3 + number, ignore_eos=True) for number in range(4)]
    for asked, outputs in zip(prompts, run(tiny.core(device, gpu=True), prompts, params), strict=True):
        tiny.assert_greedy(asked, tokens_of(outputs))


@pytest.mark.long
def test_pages_run_out_and_answers_stay_the_same(tiny: Tiny, device: torch.device) -> None:
    prompts = [prompt(number, 20) for number in range(4)]
    params = [SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)] * 4
    core = tiny.core(device, gpu=True, blocks=20)
    found = run(core, prompts, params)
    if len(tiny.layout().groups) == 1 and tiny.spec.layers[0].window is None:
        assert core.stats().preemptions_total > 0
    for asked, outputs in zip(prompts, found, strict=True):
        tiny.assert_greedy(asked, tokens_of(outputs))


OPTIONS = {
    "drawn": {"temperature": 0.8, "seed": 3},
    "cut": {"temperature": 1.1, "top_k": 20, "top_p": 0.8, "seed": 4},
    "floor": {"temperature": 1.0, "min_p": 0.05, "seed": 5},
    "penalized": {"temperature": 0.0, "repetition_penalty": 1.4, "frequency_penalty": 0.5, "presence_penalty": 0.3},
    "biased": {"temperature": 0.0, "logit_bias": {17: 30.0, 23: -100.0}},
    "logprobs": {"temperature": 0.0, "logprobs": 3},
    "late end": {"temperature": 0.0, "min_tokens": 5, "stop_token_ids": list(range(3, 100))},
}


def test_every_option_chooses_what_it_chooses_on_a_cpu(tiny: Tiny, device: torch.device) -> None:
    """All of them beside each other; there are fewer slots than requests, so that some take the slots of others."""
    if tiny.spec.layers[0].window is not None and device.type == "cpu":
        return  # Sampling knows nothing of windows, and the interpreter takes half a minute for it.
    params = [SamplingParams(max_tokens=6, ignore_eos=True, **given) for given in OPTIONS.values()]
    prompts = [prompt(number, 3 + number) for number in range(len(params))]
    here = run(tiny.core(device, gpu=True), prompts, params)
    there = run(tiny.core(CPU, gpu=False), prompts, params)
    for name, found, expected in zip(OPTIONS, here, there, strict=True):
        assert tokens_of(found) == tokens_of(expected), name
        for one, other in zip(found, expected, strict=True):
            assert (one.logprobs is None) == (other.logprobs is None)
            for mine, theirs in zip(one.logprobs or [], other.logprobs or [], strict=True):
                assert mine.token_ids == theirs.token_ids
                assert mine.rank == theirs.rank
                assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)


def test_a_step_without_memory_is_done_in_parts(
    tiny: Tiny, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step of more than three tokens fails once it has written its keys; answers are the same all the same."""
    if tiny.spec.layers[0].window is not None and device.type == "cpu":
        return  # As above.
    forward, sizes = GpuDecoder.forward, list[int]()

    def fails(self: GpuDecoder, rows: Any, pages: torch.Tensor, layers: int | None = None) -> torch.Tensor:
        stream = forward(self, rows, pages, layers)
        sizes.append(len(rows.slots))
        if len(rows.slots) > 3:
            raise torch.OutOfMemoryError("as if there were none left")
        return stream

    monkeypatch.setattr(GpuDecoder, "forward", fails)
    prompts = [prompt(number, length) for number, length in enumerate((7, 1))]
    params = [SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=1)] * 2
    core = tiny.core(device, gpu=True, graphs=False)
    for asked, outputs in zip(prompts, run(core, prompts, params), strict=True):
        tiny.assert_greedy(asked, tokens_of(outputs))
    assert max(sizes) == 8
    assert 0 < sizes.count(1) + sizes.count(2) + sizes.count(3) < len(sizes)
