"""LoRA on the GPU runner: kernels against torch, answers against merged weights, places and bytes as planned."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy
import pytest
import quantized_files as written
import torch
import transformers
from lora_adapters import merge, write_adapter
from quantized_files import Format, write_quantized
from quantized_models import round_inputs
from safetensors.torch import load_file
from tiny_gpu import LAYERS, LLAMA, Tiny, prompt, tokens_of

from holdfast.checkpoints.checkpoint import Checkpoint
from holdfast.checkpoints.formats import safetensors
from holdfast.config import EngineConfig
from holdfast.engine.core.loop import EngineCore
from holdfast.engine.requests.adapters import Adapters
from holdfast.execution.batch import RunnerLimits, as_planned
from holdfast.execution.gpu.layers.lora import GpuAdapters
from holdfast.execution.gpu.runner import GpuRunner
from holdfast.execution.lora import upload
from holdfast.execution.lora.slots import LoraLimits
from holdfast.execution.triton_kernels import lora as kernels
from holdfast.execution.triton_kernels.lora import add_adapters
from holdfast.execution.weights.decoder_weights import Weights
from holdfast.execution.weights.load import load_weights
from holdfast.footprint.lora import gpu_bytes
from holdfast.kvcache import KVCache
from holdfast.models import from_config
from holdfast.records import AdapterRef, EngineOutput, FinishReason, Request, Row, SamplingParams
from holdfast.scheduler import Scheduler, SchedulerLimits

LIMITS = RunnerLimits(max_num_seqs=4, max_num_batched_tokens=40, max_model_len=96, max_loras=2)
LORA = LoraLimits(max_loras=2, max_rank=20, cached=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny(tmp_path_factory.mktemp("lora-gpu") / "model", **LLAMA)


@pytest.fixture(scope="module")
def refs(model: Tiny) -> dict[str, AdapterRef]:
    base = model.folder.parent
    write_adapter(base / "all", model.folder, seed=1, rank=20)
    write_adapter(base / "some", model.folder, seed=2, rank=3, modules=("self_attn.k_proj", "mlp.up_proj"))
    known = Adapters(model.spec, "tiny", EngineConfig(enable_lora=True, max_lora_rank=20))
    return {name: known.load(name, str(base / name), anywhere=True) for name in ("all", "some")}


@pytest.mark.parametrize(
    ("parts", "rank", "split"), [((64, 32, 32), 32, True), ((80,), 16, True), ((48, 48), 48, False)]
)
def test_rows_of_all_adapters_at_once(
    parts: tuple[int, ...], rank: int, split: bool, device: torch.device, model: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sent as a step of single tokens, padded with tiles that are none. Rows without an adapter keep their bits."""
    if not split:
        monkeypatch.setattr(kernels, "SPLIT_ROWS", 8)
    torch.manual_seed(rank)
    limits = replace(LIMITS, max_num_seqs=24)
    adapters = GpuAdapters(model.spec, replace(LORA, max_rank=64), limits, torch.float32, device)
    x, out = torch.randn(24, 72, device=device), torch.randn(24, sum(parts), device=device)
    a, b = torch.randn(2, len(parts) * rank, 72, device=device), torch.randn(2, sum(parts), rank, device=device)
    places = numpy.array([1, -1, 0, 1, 1, -1] + [0] * 17 + [-1], dtype=numpy.int32)
    rows = [Row(slot, 0, 1, True) for slot in (5, *range(5), *range(6, 23))]
    assert adapters.send_decode(rows, places, 24)
    adapters.use_decode(24, adapted=True)
    assert adapters.tiles is not None
    assert len(adapters.tiles.places) == 3
    wanted = out.clone()
    left_alone = 0 if rank == 48 else -1  # A place whose adapter changes other products only.
    changes = torch.tensor([[int(place != left_alone), 9] for place in range(2)], dtype=torch.int32, device=device)[
        :, 0
    ]
    for line, row in enumerate(rows):
        place = int(places[row.slot])
        if place not in (-1, left_alone):
            inner = (a[place] @ x[line]).split(rank)
            added = [part @ numbers for part, numbers in zip(b[place].split(parts), inner, strict=True)]
            wanted[line] += torch.cat(added)
    before = out.clone()
    add_adapters(x, a, b, parts, changes, adapters.tiles, adapters.inner, out)
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-3)
    for line in (0, 2, 23):  # Slots 5 and 1, and one that is padding.
        assert torch.equal(out[line], before[line])
    assert not adapters.send_decode(rows[:1], places, 1)
    adapters.use_decode(1, adapted=False)
    assert adapters.tiles is None


def make_core(model: Tiny, device: torch.device) -> EngineCore:
    runner = GpuRunner(model.spec, model.weights(device), model.layout(), LIMITS, device, lora=LORA)
    runner.back_kv(64)
    limits = SchedulerLimits(
        max_num_seqs=4, max_num_batched_tokens=40, max_model_len=96, max_steps_in_flight=2, max_loras=2
    )
    return EngineCore(Scheduler(limits, KVCache(model.layout(), 64, True)), runner, steps_ahead=1)


@pytest.mark.usefixtures("few_programs")
def test_answers_are_those_of_merged_weights(
    model: Tiny, refs: dict[str, AdapterRef], device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mixed in a batch, the same prompt with each: nothing cached of one is another's. One whose files are gone ends
    alone, and so does one that is too large to compute with."""
    monkeypatch.setattr(upload, "PIECE_BYTES", 100_000)  # Where they are sent, each in some pieces.
    gone = AdapterRef("gone", 9, str(tmp_path), "")
    write_adapter(tmp_path / "huge", model.folder, seed=3, size=1e30)
    known = Adapters(model.spec, "tiny", EngineConfig(enable_lora=True, max_lora_rank=20))
    huge = msgspec.structs.replace(known.load("huge", str(tmp_path / "huge"), anywhere=True), number=8)
    asked = [None, refs["all"], refs["some"], gone, huge]
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    core = make_core(model, device)
    found: dict[str, list[object]] = {}
    for number, adapter in enumerate(asked):
        found[str(number)] = []
        own = params.replace(temperature=1.0, top_k=9, logprobs=2) if adapter is huge else params
        core.add(Request(request_id=str(number), prompt_token_ids=prompt(1, 9), params=own, adapter=adapter))
    while core.has_work:
        for output in core.step():
            found[output.request_id].append(output)
        core.scheduler.check_invariants()
    *answers, failed, broken = found.values()
    assert failed[-1].finish_reason is FinishReason.ERROR  # type: ignore[attr-defined]
    assert failed[-1].failure.kind == "AdapterError"  # type: ignore[attr-defined]
    assert [output.failure.code for output in broken] == ["HF442"]  # type: ignore[attr-defined]
    folders = [model.folder, *(merge(tmp_path / name, model.folder, model.folder.parent / name) for name in refs)]
    for folder, outputs in zip(folders, answers, strict=True):
        tokens = tokens_of(outputs)  # type: ignore[arg-type]
        merged = transformers.LlamaForCausalLM.from_pretrained(folder).float().eval()
        with torch.inference_mode():
            logits = merged(torch.tensor([prompt(1, 9) + tokens])).logits[0]
        assert tokens == logits[8:-1].argmax(-1).tolist()
    assert len({str(tokens_of(outputs)) for outputs in answers}) == 3  # type: ignore[arg-type]


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": True}
QUANTIZED = {
    "awq": Format({"quant_method": "awq", "bits": 4, "group_size": 32}, written.awq()),
    "fp8": Format({"quant_method": "fp8", "activation_scheme": "dynamic"}, written.fp8(), "fp8"),
    "in act-order, each matrix in its own": Format(GPTQ, written.gptq(ordered=True)),
}


class TinyQuantized(Tiny):
    """With what its stored bits mean in `model`, whose linear layers round their inputs where the format does."""

    def __init__(self, folder: Path, made: Format) -> None:
        (folder / "plain").mkdir(parents=True)
        shape = {} if made.inputs == "plain" else {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32}
        super().__init__(folder / "plain", "Llama", initializer_range=0.08, **shape)
        means = write_quantized(self.folder, folder / "quantized", made)
        self.model.load_state_dict({name: torch.from_numpy(mean) for name, mean in means.items()}, strict=False)
        self._quantized = folder / "quantized"
        self.spec = from_config(json.loads((self._quantized / "config.json").read_text()))

    def weights(self, device: torch.device) -> Weights:
        checkpoint = Checkpoint(safetensors.read_headers((self._quantized / "model.safetensors",)), "safetensors")
        return load_weights(self.spec, checkpoint, dtype=torch.float32, device=device, expand=False)

    def adapt(self, adapter: Path) -> None:
        """Adds scale · B·(A·x) to linear layers, of x as it is: adapters round nothing."""
        factors = load_file(adapter / "adapter_model.safetensors")
        for name, module in self.model.named_modules():
            a = factors.get(f"base_model.model.{name}.lora_A.weight")
            if a is None:
                continue
            change = 2 * factors[f"base_model.model.{name}.lora_B.weight"] @ a
            module.register_forward_pre_hook(lambda module, inputs: setattr(module, "unrounded", inputs[0]))
            module.register_forward_hook(
                lambda module, _, out, change=change: out + torch.nn.functional.linear(module.unrounded, change)
            )


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name == "awq" else ()) for name in QUANTIZED]
)
def test_adapters_are_added_to_quantized_matrices(name: str, device: torch.device, tmp_path: Path) -> None:
    model = TinyQuantized(tmp_path, QUANTIZED[name])
    write_adapter(tmp_path / "adapter", model.folder, seed=4, rank=3, size=0.2)
    known = Adapters(model.spec, "tiny", EngineConfig(enable_lora=True, max_lora_rank=20))
    adapter = known.load("one", str(tmp_path / "adapter"), anywhere=True)
    core = make_core(model, device)
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    found: dict[str, list[EngineOutput]] = {"plain": [], "adapted": []}
    for request, asked in (("plain", None), ("adapted", adapter)):
        core.add(Request(request_id=request, prompt_token_ids=prompt(1, 9), params=params, adapter=asked))
    while core.has_work:
        for output in core.step():
            found[output.request_id].append(output)
    answers = {request: tokens_of(outputs) for request, outputs in found.items()}
    assert answers["plain"] != answers["adapted"]
    for request, tokens in answers.items():
        if request == "adapted":
            model.adapt(tmp_path / "adapter")
        hooks = round_inputs(model.model, QUANTIZED[name]) if QUANTIZED[name].inputs != "plain" else []
        with torch.inference_mode():
            logits = model.model(torch.tensor([prompt(1, 9) + tokens])).logits[0, 8:-1]
        for hook in hooks:
            hook.remove()
        chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        # Where inputs are rounded, one that lies between two codes may fall to either side.
        assert bool((logits.amax(1) - chosen <= (0.2 if hooks else 1e-3)).all())


def test_the_plan_counts_what_is_allocated(model: Tiny, device: torch.device) -> None:
    adapters = GpuAdapters(model.spec, LORA, LIMITS, torch.float32, device)
    planned = gpu_bytes(model.spec, as_planned(LIMITS), dtype="float32", places=2, max_rank=20)
    assert adapters.nbytes == planned
    each = 32 * LAYERS * ((64 + 64) + 2 * (32 + 64) + (64 + 64) + 2 * (96 + 64) + (64 + 96))
    assert adapters.places.places.nbytes == 2 * 4 * each
