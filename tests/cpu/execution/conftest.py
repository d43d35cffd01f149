"""Tiny random models saved by transformers, and a hand-driven runner: the test decides rows, pages and chunks."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from greedy_runs import layout_of

from holdfast.checkpoints.checkpoint import Checkpoint
from holdfast.checkpoints.formats import safetensors
from holdfast.execution import native
from holdfast.execution.runner import Runner, RunnerLimits
from holdfast.execution.weights.load import load_weights
from holdfast.models import from_config
from holdfast.records import Row, SamplingParams, SequenceStart, StepPlan, StepResult, TableWrite

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0)
CONFIGS = {"Gemma3": "Gemma3TextConfig"}
"""Of text models whose config has another name than the model."""


class Oracle:
    """A tiny transformers model with its checkpoint, opened by the project's own readers."""

    def __init__(self, folder: Path, architecture: str, seed: int = 0, **settings: Any) -> None:
        config_type = getattr(transformers, CONFIGS.get(architecture, f"{architecture}Config"))
        config = config_type(
            **{
                "vocab_size": 300,
                "hidden_size": 64,
                "intermediate_size": 96,
                "num_hidden_layers": 3,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": 512,
                "initializer_range": 0.2,
                "attn_implementation": "eager",
                # Some families' own lie outside so small a vocabulary.
                "bos_token_id": 1,
                "eos_token_id": 2,
                "pad_token_id": 0,
                **settings,
            }
        )
        torch.manual_seed(seed)
        self.model = getattr(transformers, f"{architecture}ForCausalLM")(config).float().eval()
        for name, parameter in self.model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.2)
            elif "norm" in name:  # made as ones or zeros, which say nothing of where they belong
                torch.nn.init.normal_(parameter, mean=parameter.mean().item(), std=0.2)
        self.model.save_pretrained(folder)
        self.folder = folder
        self.spec = from_config(json.loads((folder / "config.json").read_text()))

    def checkpoint(self) -> Checkpoint:
        return Checkpoint(safetensors.read_headers(sorted(self.folder.glob("*.safetensors"))), "safetensors")

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        return self.model(torch.tensor([list(token_ids)])).logits[0]

    def assert_greedy(self, tokens: Sequence[int], prompt_length: int) -> None:
        """Every token after the prompt is the likeliest after those before it."""
        expected = self.logits(tokens)[prompt_length - 1 : -1].argmax(-1).tolist()
        assert list(tokens[prompt_length:]) == expected


class Driver:
    """Sequences over a runner, with the simplest books there are: pages are never reused unless the test says so."""

    def __init__(self, runner: Runner, blocks: int) -> None:
        self.runner, self.layout = runner, runner.layout
        self.free = list(range(1, blocks))
        self.tokens: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.pages: dict[tuple[int, int], list[int]] = {}
        self._pending: list[SequenceStart] = []
        self._steps = itertools.count()

    def start(self, slot: int, tokens: Sequence[int], params: SamplingParams = GREEDY, **more: Any) -> None:
        self.tokens[slot], self.computed[slot] = list(tokens), 0
        for group in self.layout.groups:
            self.pages[slot, group.index] = []
        more.setdefault("prompt_length", len(tokens))
        self._pending.append(
            SequenceStart(slot=slot, request_id=f"request-{slot}", token_ids=list(tokens), params=params, **more)
        )

    def end(self, slot: int) -> None:
        for group in self.layout.groups:
            self.free += self.pages.pop((slot, group.index))
        del self.tokens[slot], self.computed[slot]

    def plan(self, counts: dict[int, int]) -> StepPlan:
        """Computes so many further tokens of each slot; a slot that reaches its end samples."""
        writes, rows = [], []
        for slot, count in counts.items():
            start, end = self.computed[slot], self.computed[slot] + count
            for group in self.layout.groups:
                held = self.pages[slot, group.index]
                first = len(held)
                while len(held) * self.layout.block_tokens < end:
                    held.append(self.free.pop(0))
                if held[first:]:
                    writes.append(TableWrite(slot, group.index, first, held[first:]))
            rows.append(Row(slot, start, count, end == len(self.tokens[slot])))
        starts, self._pending = self._pending, []
        return StepPlan(step_id=next(self._steps), starts=starts, table_writes=writes, rows=rows)

    def step(self, counts: dict[int, int]) -> StepResult:
        plan = self.plan(counts)
        result = self.runner.execute(plan)
        sampled = iter(result.token_ids)
        for row in plan.rows:
            self.computed[row.slot] = row.start + row.count
            if row.samples:
                self.tokens[row.slot].append(next(sampled))
        return result

    def generate(self, slot: int, count: int) -> list[int]:
        """Alone, in one chunk, then token by token."""
        before = len(self.tokens[slot])
        for _ in range(count):
            self.step({slot: len(self.tokens[slot]) - self.computed[slot]})
        return self.tokens[slot][before:]


def make_driver(
    oracle: Oracle,
    *,
    blocks: int = 400,
    block_tokens: int = 4,
    slots: int = 8,
    budget: int = 256,
    poison: bool = True,
    reference: bool = False,
    compiled: bool = False,
    beat: Callable[[], None] | None = None,
) -> Driver:
    compiled = compiled and not reference
    weights = load_weights(
        oracle.spec, oracle.checkpoint(), dtype=torch.float32, device=CPU, expand=not compiled, compiled=compiled
    )
    runner = Runner(
        oracle.spec,
        weights,
        layout_of(oracle.spec, block_tokens),
        RunnerLimits(max_num_seqs=slots, max_num_batched_tokens=budget, max_model_len=256),
        CPU,
        reference=reference,
        compiled=compiled,
        beat=beat,
    )
    runner.back_kv(blocks)
    if poison:
        # What a page held before it was handed out must never be seen.
        runner.kv.pages[1:].fill_(float("nan"))
    return Driver(runner, blocks)


@pytest.fixture(scope="session")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Oracle]]:
    """Tiny models by settings, each made once."""
    made: dict[str, Oracle] = {}

    def make(architecture: str = "Llama", **settings: Any) -> Oracle:
        key = architecture + repr(sorted(settings.items()))
        if key not in made:
            made[key] = Oracle(tmp_path_factory.mktemp("oracle"), architecture, **settings)
        return made[key]

    yield make
    made.clear()


@pytest.fixture(scope="session", params=["torch", "compiled"])
def driver_for(request: pytest.FixtureRequest) -> Callable[..., Driver]:
    """Everything is held against the oracle twice: with torch's operations, and with kernels of our own."""
    if request.param == "compiled" and not native.available():
        pytest.skip(f"no compiled kernels here: {native.why_not()}")
    return functools.partial(make_driver, compiled=request.param == "compiled")
