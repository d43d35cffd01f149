"""`Question`: the input of the planner (model, machine, settings, traffic). Records only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from holdfast.checkpoints import StoredTensor
from holdfast.config.engine import DEFAULT_UTILIZATION, EngineConfig
from holdfast.config.parts.offload import NO_REQUEST, OffloadRequest, offload_request
from holdfast.footprint.cpu import FRONT_BYTES
from holdfast.hardware import Processor
from holdfast.hardware.gpus import Gpu
from holdfast.models import ModelSpec
from holdfast.observability.decisions import Decision
from holdfast.planner.compat.vllm_release import Vllm

if TYPE_CHECKING:
    from holdfast.config.plan import PlanConfig

DeviceKind = Literal["gpu", "cpu"]
USEFUL_TOKENS = 4096
"""A model that cannot hold one sequence of this length (or of its own shorter context) is not said to fit."""
STREAMED_SEQUENCE_TOKENS = 240
"""Of KV for each sequence of a step, at least, that layers make room for which come to a GPU for every step."""
CPU_USEFUL_TOKENS = 512
"""The same of this engine on a CPU, and the shortest context that is advised anywhere."""
MOST_UTILIZATION = 0.95
"""Never advised past it: the rest is for what cannot be counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedModel:
    name: str
    spec: ModelSpec
    origin: Literal["builtin", "file", "folder", "hub", "catalogue"]
    stored: Mapping[str, StoredTensor] | None = field(default=None, repr=False)
    """The checkpoint's own tensors, by its names; None: weights are counted from shapes and the quantization."""
    canonical: Mapping[str, StoredTensor] | None = field(default=None, repr=False)
    """The same by the spec's names, for a model that this engine can run."""
    format: Literal["safetensors", "gguf", "none"] = "none"
    published_parameters: int | None = None
    derived: bool = False
    """`stored` was worked out from shapes, as a quantizer would write it; no file was read."""
    unchecked: bool = False
    """Shapes of the catalogue that nobody compared with a public copy yet."""
    tokenizer: bool = True
    """False: a folder or a hub's was looked into, and there is none that Holdfast reads."""
    made_as: str | None = None
    """Planned as if it were quantized so (awq, nf4, Q4_K_M), and not known to be stored so anywhere."""
    unquantized: PlannedModel | None = field(default=None, repr=False)
    """What it is made of, where an engine makes it while loading. None: the model itself is stored so."""
    draft: PlannedModel | None = field(default=None, repr=False)
    """A smaller model that guesses tokens for it, loaded beside it."""

    @property
    def exact(self) -> bool:
        """Headers were read: weights are counted, not derived."""
        return self.stored is not None and not self.derived


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One GPU, or the CPU with its RAM."""

    index: int
    name: str
    kind: DeviceKind
    total_bytes: int
    free_bytes: int
    """Measured on this machine; of a catalogue GPU, all of it."""
    budget_bytes: int | None = None
    """Set absolutely (--vram, --ram); None: a share of the total."""
    gpu: Gpu | None = None
    """Rates and links, where the GPU is known."""
    measured: bool = False
    held_by: tuple[str, ...] = ()
    """Who holds the rest, for people to read."""
    unified: bool = False
    limited_by: str = ""
    """What bounds the memory that was measured, for people to read: the machine, a container, a GPU."""
    selector: str | None = field(default=None, compare=False)
    """What CUDA_VISIBLE_DEVICES calls it on this machine, in the order of its buses; None: `index`, as it was named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    devices: tuple[Device, ...]
    """Those that may hold one model together, once a plan is made."""
    stage_devices: tuple[Device, ...] = ()
    """Of a server's pipeline on GPUs that differ: of each stage the one with the least room. Empty: one stands for
    all."""
    aside: tuple[Device, ...] = ()
    """GPUs of other kinds, which share no model with these."""
    ram_bytes: int | None = None
    """Free RAM beside the devices; None: not known."""
    pinned_bytes: int | None = None
    """Of it, what layers of a model may take that do not stay on a GPU; None: not known."""
    nvme_bytes: int | None = None
    nvme_limit_bytes: int | None = None
    """Of it, what was set (--nvme), of which less may be free; None: it is what is free, or nothing."""
    nvme_path: str | None = None
    """Where that is; None: no folder was named."""
    cpu_features: frozenset[str] = frozenset()
    cores: int = 1
    """That compute, on a CPU."""
    host: Processor | None = None
    """Beside a GPU; None: not known."""
    compiled_kernels: bool = False
    """This installation has them, and the CPU can run them."""
    host_computes: bool = True
    """Beside a GPU, the cores can: they are known to have compiled kernels, or nothing is known of them."""

    @property
    def kind(self) -> DeviceKind:
        return self.devices[0].kind

    @property
    def processor(self) -> Processor:
        return Processor(model="", cores=self.cores, features=self.cpu_features)

    @property
    def all_devices(self) -> tuple[Device, ...]:
        return (*self.devices, *self.aside)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """As the user gave them; None is left to the plan."""

    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    utilization: float | None = None
    tensor_parallel: int | None = None
    pipeline_parallel: int = 1
    stages_open: bool = False
    """More stages may be chosen where no split of each layer holds the model."""
    stage_cut: tuple[int, ...] | None = None
    """Layers of each of those stages, as an engine was told them; empty, or of another number of stages or layers: it
    was told nothing, and cuts evenly. None: the plan may cut by what their GPUs hold, and says so."""
    block_tokens: int = 16
    max_loras: int = 0
    max_lora_rank: int = 16
    graphs: bool = True
    """Steps are captured, by engines that do that."""
    data_parallel: int = 1
    """Replicas, of which one is planned."""
    expert_parallel: bool = False
    """Ranks have whole experts each, not a part of every one: on GPUs those of all replicas together."""
    expert_placement: Literal["linear", "round_robin"] = "linear"
    """Which, on a CPU."""
    rope_scaling: str | None = None
    """As it was written: the model has it already."""
    spec_method: str | None = None
    """Draft layers are among the model's."""
    speculative_config: str | None = None
    """As it was written: what it loads is with the model already."""
    text_only: bool = False
    """No images come: the model has no encoder that room is kept for."""
    expand_weights: str = "auto"
    """Of this engine on a CPU, as is what follows: auto, always or never."""
    attention_backend: str = "auto"
    kv_cache_memory_bytes: int | None = None
    """Of the KV pool, on a GPU too; None: what is left of the budget, or the default."""
    lora_copies: int = 0
    """Adapters that are kept in addition to those in slots."""
    streamed_layers: int = 0
    """Layers that do not stay where they are computed, and come for every step."""
    layers_on_disk: int | None = None
    """Of these, those that come from a disk, not from RAM; None: all, as on a CPU."""
    embedding_on_disk: bool = False
    """Beside a GPU, where RAM is too small: rows of it are read for every step."""
    resident_experts: int | None = None
    """Of all layers together, those that stay on a GPU; None: all, or as was asked for by hand."""
    experts_wait: bool = False
    """Experts of layers that stay wait in RAM."""
    host_experts: bool = False
    """RAM has all experts of these layers once more, and the host's cores compute with them."""
    offload: OffloadRequest = NO_REQUEST
    """What was asked for of layers that do not stay on a GPU."""
    ranks: int = 1
    """Processes that compute the model together on this CPU, or on GPUs that are alike, each with its share of every
    layer."""
    stages: int = 1
    """Of a pipeline there, each of so many ranks, with some of the layers."""
    nodes: int = 1
    """Machines that those ranks are on, as many on each."""
    structured_output: bool = True
    kv_store_size: int = 0
    """Of a store of KV pages on disk; 0: there is none."""
    front_bytes: int = FRONT_BYTES
    """Of the process in front of the engine's, out of the same budget."""

    @property
    def offloads(self) -> bool:
        """Layers or experts do not all stay where they are computed."""
        return self.streamed_layers > 0 or self.experts_wait


def settings_of(
    config: EngineConfig | PlanConfig,
    *,
    tensor_parallel: int | None = 1,
    pipeline_parallel: int | None = 1,
    **others: Any,
) -> Settings:
    """`pipeline_parallel` None: it is left to the plan, unless the other half of a split is set."""
    return Settings(
        dtype=config.dtype,
        kv_cache_dtype=config.kv_cache_dtype,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        utilization=config.gpu_memory_utilization,
        block_tokens=config.block_size,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel or 1,
        stages_open=pipeline_parallel is None and tensor_parallel is None,
        expand_weights=config.expand_weights,
        offload=offload_request(config),
        **others,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    concurrency: int
    """At the peak."""
    prompt_tokens: int
    """P99, as is what follows."""
    output_tokens: int
    source: str = "stated"
    requests: int = 0
    """Those it was read from; 0: it was stated."""
    length_tokens: int | None = None
    """P99 of prompt and output together, where it is known; it is less than the sum of the two P99s."""
    peak_known: bool = True
    """False: the source tells no peak, and `concurrency` is the least that it may be."""
    at_least: bool = False
    """The source tells only that P99 is no less."""
    without_output: int = 0
    """Requests of which the source does not tell how long the answers were: counted as none."""

    @property
    def length(self) -> int:
        return self.length_tokens or self.prompt_tokens + self.output_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    model: PlannedModel
    machine: Machine
    settings: Settings = field(default_factory=Settings)
    traffic: Traffic | None = None
    decisions: tuple[Decision, ...] = ()
    """Made on the way to this question: which files, which GPUs, which traffic."""
    engine: str | None = None
    """Whose commands are wanted, where that was said: on GPUs memory is counted as llama.cpp takes it for llama.cpp."""
    vllm: Vllm = field(default_factory=Vllm)
    """The release whose terms a GPU has where they are vLLM's."""

    @property
    def utilization(self) -> float:
        share = self.settings.utilization
        return DEFAULT_UTILIZATION if share is None else share

    @property
    def stated(self) -> bool:
        """It is known what must fit: a context or traffic was set."""
        return self.settings.max_model_len is not None or self.traffic is not None

    @property
    def runs_on_cpu(self) -> bool:
        """This engine would serve it on this CPU; what it cannot read or keep is counted in general terms."""
        model, spec = self.model, self.model.spec
        known = model.canonical is not None or model.stored is None or model.derived
        return self.machine.kind == "cpu" and spec.runnable and known

    @property
    def useful_tokens(self) -> int:
        """The shortest context that is worth serving where none is set; any length in a pool that was set."""
        if not self.runs_on_cpu:
            return min(self.model.spec.max_position, USEFUL_TOKENS)
        pool = self.settings.kv_cache_memory_bytes
        return min(self.model.spec.max_position, CPU_USEFUL_TOKENS) if pool is None else 1

    @property
    def required(self) -> tuple[int, int]:
        """Sequences that must fit side by side, and the tokens of each."""
        if self.traffic is not None:
            return self.traffic.concurrency, self.traffic.length
        return 1, self.settings.max_model_len or self.useful_tokens
