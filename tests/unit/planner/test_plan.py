"""The plan: named terms that add up, limits that hold, refusals with numbers before anything is loaded."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
from planned_llama import LLAMA_3_8B, idle_gpu

from holdfast.checkpoints import StoredTensor
from holdfast.config import EngineConfig
from holdfast.errors import ConfigurationError, DoesNotFitError
from holdfast.footprint import cpu, structured_output
from holdfast.footprint import gpu as gpu_footprint
from holdfast.footprint import lora as lora_sizes
from holdfast.footprint.gpu import padded_sizes
from holdfast.hardware import Memory, Processor
from holdfast.hardware.probe import KERNEL_VARIANTS
from holdfast.models import ModelSpec, from_config
from holdfast.planner import Plan, make_cpu_plan, settle_pool
from holdfast.planner.serve.gpu_plan import make_gpu_plan
from holdfast.planner.serve.host_memory import with_host_memory
from holdfast.planner.serve.refusals import FROM_DISK
from holdfast.planner.sizing import default_limits
from holdfast.units import GIB, MIB, format_bytes

PLAIN = Processor(model="plain", cores=2, features=frozenset({"asimd"}))
FAST = Processor(model="fast", cores=2, features=frozenset({"amx_bf16"}))


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return from_config(LLAMA_3_8B)


def plan(spec: ModelSpec, free_gib: float, processor: Processor = FAST, **settings: object) -> Plan:
    free = int(free_gib * GIB)
    machine = Memory(total_bytes=free, available_bytes=free, limited_by="machine")
    return make_cpu_plan(spec, None, EngineConfig.from_arguments(**settings), machine, processor)


def test_llama_3_8b_costs_what_is_known(spec: ModelSpec) -> None:
    assert spec.parameters == 8_030_261_248
    # Norms stay in float32, so a little over two bytes a parameter.
    assert cpu.weights_bytes(spec, None, dtype="bfloat16", expand=True) == pytest.approx(2 * 8.0303e9, rel=1e-3)
    layout = cpu.kv_layout(spec, block_tokens=16, kv_dtype="bfloat16")
    assert layout.page_bytes // 16 == 128 * 1024  # KV heads, not attention heads: 128 KiB a token


def test_terms_stay_within_the_budget(spec: ModelSpec) -> None:
    found = plan(spec, 40)
    assert sum(found.terms.values()) <= found.budget_bytes == int(0.9 * 40 * GIB)
    assert found.engine.blocks * found.engine.layout.page_bytes == found.terms["kv_pool"]
    assert found.limits.max_model_len == 8192


def test_dtype_follows_the_processor_and_says_why(spec: ModelSpec) -> None:
    assert plan(spec, 40, FAST).dtype == "bfloat16"
    slow = plan(spec, 60, PLAIN)
    assert slow.dtype == "float32"
    assert any("bfloat16" in decision.reason for decision in slow.decisions if decision.field == "dtype")
    assert plan(spec, 40, PLAIN, dtype="half").dtype == "float16"


def test_quantized_weights_are_expanded_only_with_room_to_spare(spec: ModelSpec, tmp_path) -> None:
    stored = {
        tensor.name: StoredTensor(tensor.name, tensor.shape, "Q4_1", tmp_path, 0, 20 * (size // 32))
        for tensor in spec.tensors
        if len(tensor.shape) == 2
        for size in [tensor.shape[0] * tensor.shape[1]]
    }

    def expanded(free_gib: int, setting: str = "auto") -> bool:
        machine = Memory(total_bytes=0, available_bytes=free_gib * GIB, limited_by="machine")
        config = EngineConfig(expand_weights=setting)
        return make_cpu_plan(spec, stored, config, machine, FAST).engine.expand_weights

    assert expanded(100)
    assert not expanded(24)
    assert not expanded(100, "never")
    assert expanded(24, "always")


def test_a_length_beyond_the_model_is_refused_with_both_numbers(spec: ModelSpec) -> None:
    with pytest.raises(ConfigurationError, match=r"8,193.*8,192"):
        plan(spec, 40, max_model_len=8193)


def test_a_length_that_memory_does_not_hold(spec: ModelSpec) -> None:
    pool = 512 * 128 * 1024 * 2  # 1,024 tokens
    with pytest.raises(DoesNotFitError) as caught:
        plan(spec, 40, max_model_len=8192, kv_cache_memory_bytes=pool)
    assert isinstance(caught.value, ValueError)
    largest = int(str(caught.value.fix).split()[1].rstrip(","))
    assert largest == 1008  # one page is the null page
    assert plan(spec, 40, max_model_len=largest, kv_cache_memory_bytes=pool).limits.max_model_len == largest
    with pytest.raises(DoesNotFitError):
        plan(spec, 40, max_model_len=largest + 1, kv_cache_memory_bytes=pool)
    unset = plan(spec, 40, kv_cache_memory_bytes=pool)
    assert unset.limits.max_model_len == largest
    assert any(decision.field == "max_model_len" for decision in unset.decisions)


def test_a_model_that_does_not_fit_says_what_is_short(spec: ModelSpec) -> None:
    with pytest.raises(DoesNotFitError, match="short") as caught:
        plan(spec, 12)
    assert "weights" in str(caught.value.needed)
    with pytest.raises(DoesNotFitError, match="does not fit"):
        plan(spec, 40, kv_cache_memory_bytes="100GiB")


@pytest.mark.parametrize(
    ("free_gib", "settings"),
    [
        (40, {"ram": "15GiB", "kv_cache_memory_bytes": "2GiB"}),
        (15, {"ram": "15GiB", "kv_cache_memory_bytes": "2GiB"}),
        (40, {"ram": "17GiB", "kv_cache_memory_bytes": "40GiB"}),
        (12, {"ram": "20GiB"}),
        (40, {"ram": "50GiB", "max_model_len": 4096}),
        (40, {"ram": "16700MiB", "max_model_len": 8192}),
        (40, {"kv_cache_memory_bytes": "3MiB", "max_model_len": 4096}),
    ],
)
def test_every_change_that_a_refusal_names_was_planned(
    spec: ModelSpec, free_gib: float, settings: dict[str, object]
) -> None:
    """A budget without room for any pool once offered a pool of 0 bytes."""
    with pytest.raises(DoesNotFitError) as caught:
        plan(spec, free_gib, **settings)
    fix = str(caught.value.fix)
    for text in fix.split(", or "):
        named = re.fullmatch(r"leave --([a-z-]+) out|--([a-z-]+) ([\w.]+)", text)
        if named is not None:
            name = (named[1] or named[2]).replace("-", "_")
            assert plan(spec, free_gib, **{**settings, name: named[3]}), text
    assert not re.search(r" 0\b", fix)
    if free_gib in (12, 15):
        assert fix.removesuffix(f", or {FROM_DISK}").endswith("--quantization fp8"), "less than the plain weights take"


def test_binary_search_over_the_length_finds_the_edge(spec: ModelSpec) -> None:
    """The founding documents' loop: catch ValueError, halve."""
    low, high = 1, 8192
    while low < high:
        middle = (low + high + 1) // 2
        try:
            plan(spec, 40, max_model_len=middle, kv_cache_memory_bytes="256MiB")
            low = middle
        except ValueError:
            high = middle - 1
    assert low == 2048 - 16


def quantized(spec: ModelSpec, folder) -> dict[str, StoredTensor]:
    matrices = [tensor for tensor in spec.tensors if len(tensor.shape) == 2]
    sizes = [tensor.shape[0] * tensor.shape[1] for tensor in matrices]
    return {
        tensor.name: StoredTensor(tensor.name, tensor.shape, "Q4_1", folder, 0, 20 * (size // 32))
        for tensor, size in zip(matrices, sizes, strict=True)
    }


def test_blocks_are_kept_where_compiled_products_are_faster(spec: ModelSpec, tmp_path) -> None:
    """Measured: with Arm's dot products they are; their portable form on x86 is slower than expanded weights."""
    machine = Memory(total_bytes=0, available_bytes=200 * GIB, limited_by="machine")
    arm = Processor(model="arm", cores=2, features=frozenset({"asimddp"}))
    x86 = Processor(model="x86", cores=2, features=frozenset({"avx2"}))

    def made(processor: Processor, *, compiled: bool, **settings: object) -> Plan:
        config = EngineConfig.from_arguments(**settings)
        return make_cpu_plan(spec, quantized(spec, tmp_path), config, machine, processor, compiled_kernels=compiled)

    assert not made(arm, compiled=True).engine.expand_weights
    assert made(arm, compiled=False).engine.expand_weights
    assert made(x86, compiled=True).engine.expand_weights
    assert made(arm, compiled=True).terms["weights"] < 5 * GIB < made(x86, compiled=True).terms["weights"]
    assert made(arm, compiled=True).engine.compiled_attention
    assert not made(arm, compiled=True, attention_backend="torch").engine.compiled_attention
    assert not made(FAST, compiled=True).engine.compiled  # bfloat16 there: torch's own products
    with pytest.raises(ConfigurationError, match="no compiled kernels"):
        made(arm, compiled=False, attention_backend="compiled")


def test_the_pool_is_settled_by_what_is_measured_after_loading(spec: ModelSpec) -> None:
    planned = plan(spec, 40)
    assert settle_pool(planned, 30 * GIB) is planned
    less = settle_pool(planned, 4 * GIB + 2 * GIB)  # 4 GiB were to stay free
    assert less.engine.blocks * less.engine.layout.page_bytes == less.terms["kv_pool"] <= 2 * GIB
    assert less.decisions[-1].source == "measured"
    shorter = settle_pool(planned, 4 * GIB + GIB // 2)
    assert shorter.limits.max_model_len == 4096 - 16  # one page of the half GiB is the null page
    assert [decision.field for decision in shorter.decisions[-2:]] == ["kv_pool", "max_model_len"]
    with pytest.raises(DoesNotFitError, match="short while loading"):
        settle_pool(planned, 4 * GIB + 1)
    with pytest.raises(DoesNotFitError, match="short while loading") as caught:
        settle_pool(plan(spec, 40, max_model_len=8192), 4 * GIB + GIB // 2)
    assert str(caught.value.found).endswith("free: 514.00 MiB short")  # 1 GiB, the null page of 2 MiB, half of it there


@pytest.mark.parametrize("settings", [{}, {"ram": "36GiB"}], ids=["a share", "a budget"])
def test_the_shortage_is_what_would_have_to_be_free_besides(settings: dict[str, str], spec: ModelSpec) -> None:
    planned = plan(spec, 40, max_model_len=8192, **settings)
    for free, measured in ((GIB // 2, {}), (-GIB, {}), (30 * GIB, {"weights": planned.terms["weights"] + 25 * GIB})):
        cause = "more memory than planned" if measured else "short while loading"
        with pytest.raises(DoesNotFitError, match=cause) as caught:
            settle_pool(planned, free, measured)
        number, unit = str(caught.value.found).split(": ")[-1].split()[:2]
        short = int(float(number) * {"GiB": GIB, "MiB": 1 << 20}[unit])
        roughly = 16 * (1 << 20)  # It is said in hundredths of a GiB.

        def with_more(nbytes: int, free: int = free, measured: dict[str, int] = measured) -> Plan:
            return settle_pool(planned, free + nbytes, {name: size - nbytes for name, size in measured.items()})

        assert with_more(short + roughly).limits.max_model_len == 8192
        with pytest.raises(DoesNotFitError):
            with_more(short - roughly)
        assert ("left free" in str(caught.value.needed)) == (not settings)


def test_terms_that_took_more_than_planned_take_it_from_the_pool(spec: ModelSpec) -> None:
    tight = plan(spec, 24, ram="22GiB")  # An absolute budget: all that is left of it is the pool.
    assert settle_pool(tight, 30 * GIB, {"weights": tight.terms["weights"]}) is tight
    fewer = settle_pool(tight, 30 * GIB, {"weights": tight.terms["weights"] + 100 * 1024**2})
    assert 100 * 1024**2 <= tight.terms["kv_pool"] - fewer.terms["kv_pool"] < 103 * 1024**2
    assert "more than planned" in fewer.decisions[-1].reason
    # What one term left over pays for another.
    both = {"weights": tight.terms["weights"] + 1024**2, "activations": tight.terms["activations"] - 1024**2}
    assert settle_pool(tight, 30 * GIB, both) is tight
    with_room = plan(spec, 60)
    assert settle_pool(with_room, 60 * GIB, {"weights": with_room.terms["weights"] + 1024**2}) is with_room


def test_terms_that_took_less_than_planned_give_it_to_the_pool(spec: ModelSpec) -> None:
    tight = plan(spec, 24, ram="22GiB")
    under = {"weights": tight.terms["weights"] - 100 * 1024**2}
    more = settle_pool(tight, 30 * GIB, under)
    gained = sum(more.terms.values()) - sum(tight.terms.values())
    assert 98 * 1024**2 < gained <= 100 * 1024**2 + tight.budget_bytes - sum(tight.terms.values())
    assert more.engine.blocks * more.engine.layout.page_bytes == more.terms["kv_pool"]
    assert more.terms["buffers"] > tight.terms["buffers"]  # with the books of the blocks
    assert "less than planned" in more.decisions[-1].reason
    assert more.limits == tight.limits
    # Never more than is free, and nothing where the pool is not what is left of the budget.
    assert settle_pool(tight, tight.reserve_bytes + tight.terms["kv_pool"], under) is tight
    for settings in ({"kv_cache_memory_bytes": "1GiB", "ram": "22GiB"}, {"ram": "23GiB", "max_num_seqs": 2}, {}):
        found = plan(spec, 40, **settings)
        assert settle_pool(found, 40 * GIB, {"weights": found.terms["weights"] - GIB}) is found
    # Nor more than all sequences of full length can use.
    few = plan(spec, 24, ram="20GiB", max_num_seqs=8)
    grown = settle_pool(few, 40 * GIB, {"weights": few.terms["weights"] - 8 * GIB})
    assert few.engine.blocks < grown.engine.blocks == few.engine.most_blocks == 1 + 8 * 8192 // 16


def test_the_pool_of_a_gpu_grows_within_its_budget(spec: ModelSpec) -> None:
    total = 40 * GIB
    gpu = idle_gpu(total)

    def made(**settings: object) -> Plan:
        return make_gpu_plan(spec, None, EngineConfig.from_arguments(device="cuda", **settings), [gpu])

    found = made()
    page = found.engine.layout.page_bytes
    under = {"weights": found.terms["weights"], "activations": found.terms["activations"] - 64 * 1024**2}
    grown = settle_pool(found, total, under)
    assert found.engine.blocks < grown.engine.blocks <= found.engine.most_blocks <= found.budget_bytes // page
    assert found.terms["buffers"] == grown.terms["buffers"]  # the books are in RAM
    assert sum(grown.terms.values()) - 64 * 1024**2 <= found.budget_bytes
    few, as_set = made(max_num_seqs=2), made(kv_cache_memory_bytes="2GiB")
    assert few.engine.most_blocks == few.engine.blocks == 1 + 2 * 8192 // 16
    assert as_set.engine.most_blocks == as_set.engine.blocks == 2 * GIB // page


def test_a_gpu_that_is_too_small_is_offered_only_what_fits_there(spec: ModelSpec) -> None:
    """A fix that a refusal names itself is planned before it is offered, as on a CPU."""

    def refused(free_gib: float, **settings: object) -> str:
        free = int(free_gib * GIB)
        gpu = replace(idle_gpu(80 * GIB, capability=(8, 0)), free_bytes=free)
        with pytest.raises(DoesNotFitError) as caught:
            make_gpu_plan(spec, None, EngineConfig.from_arguments(device="cuda", **settings), [gpu])
        return str(caught.value.fix)

    assert refused(40, vram="60GiB") == "--vram 40960MiB, or leave --vram out"
    assert "--vram 1" not in refused(12, vram="60GiB")  # 16 GB of weights
    # The pool is what is wrong, not the context.
    pool = refused(40, kv_cache_memory_bytes="1MiB").split(", or ")
    assert pool == ["--kv-cache-memory-bytes 1026MiB", "leave --kv-cache-memory-bytes out"]
    both = refused(40, max_model_len=8192, kv_cache_memory_bytes="512MiB").split(", or ")
    assert both[0].startswith("--max-model-len ")
    assert both[1:3] == ["--kv-cache-memory-bytes 1026MiB", "leave --kv-cache-memory-bytes out"]
    # Two settings at once: neither alone is enough.
    assert "free memory" not in refused(40, gpu_memory_utilization=0.1, kv_cache_memory_bytes="60GiB")


def test_a_budget_that_is_not_there_does_not_hide_what_else_is_wrong(spec: ModelSpec) -> None:
    def refused(free_gib: float, **settings: object) -> ConfigurationError:
        with pytest.raises(ConfigurationError) as caught:
            plan(spec, free_gib, **settings)
        return caught.value

    assert refused(20, ram="64GiB").fix == f"--ram {20480 * 95 // 100}MiB, or leave --ram out"
    fix = str(refused(20, ram="64GiB", kv_cache_memory_bytes="32GiB").fix)
    assert fix.startswith("leave --ram out, and --kv-cache-memory-bytes ")
    assert refused(20, ram="64GiB", max_model_len=1 << 20).code == "HF111"


def test_copies_of_adapters_are_held_against_ram(spec: ModelSpec) -> None:
    """Behind a GPU; on a CPU they are a term of the plan."""
    gpu = idle_gpu(40 * GIB)

    def made(available_bytes: int, **settings: object) -> Plan:
        config = EngineConfig.from_arguments(device="cuda", kv_ram="0", **settings)
        found = make_gpu_plan(spec, None, config, [gpu])
        machine = Memory(total_bytes=64 * GIB, available_bytes=available_bytes, limited_by="machine")
        return with_host_memory(found, config, machine, front_bytes=GIB)

    assert (
        made(0, skip_tokenizer_init=True).decisions
        == make_gpu_plan(
            spec, None, EngineConfig.from_arguments(device="cuda", skip_tokenizer_init=True), [gpu]
        ).decisions
    )
    bare = made(0)
    forms = structured_output.forms_bytes(spec.vocab_size, bare.limits.max_num_seqs)
    assert (bare.decisions[-1].field, bare.decisions[-1].value) == ("structured_outputs", format_bytes(forms))
    lora: dict[str, object] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 64, "max_cpu_loras": 32}
    held = lora_sizes.held_bytes(spec, dtype=made(64 * GIB, **lora).dtype, places=1, max_rank=64)
    assert any(one.field == "max_cpu_loras" for one in made(GIB + forms + 32 * held, **lora).decisions)
    error = _refused(lambda: made(GIB + forms + 32 * held - 1, **lora))
    assert (error.code, error.field, error.fix) == ("HF110", "max_cpu_loras", "--max-cpu-loras 31")
    assert "--max-loras" in str(_refused(lambda: made(GIB, **lora)).fix)


MEASURED_MIB = (
    # On an H200: layers, sequences, planned terms but graphs and pool, held but pool, graphs that were captured.
    (28, 256, 2543, 2770, 24), (28, 32, 2185, 2408, 8), (16, 256, 3969, 4138, 24), (28, 256, 8694, 8800, 24),
    (32, 256, 17358, 17530, 24), (32, 64, 16394, 16552, 12), (48, 256, 30444, 30702, 24), (64, 256, 67064, 67288, 24),
)  # fmt: skip


def test_graphs_are_planned_by_their_number() -> None:
    """With those that were not captured in the measurement, the plan is within 3% of what is held."""
    for layers, sequences, others, held, there in MEASURED_MIB:
        to_come = gpu_footprint.KINDS_OF_WORK * len(padded_sizes(sequences)) - there
        planned = others + gpu_footprint.graphs_bytes(layers, sequences) / MIB
        assert planned == pytest.approx(held + to_come * layers * gpu_footprint.GRAPH_LAYER_BYTES / MIB, rel=0.03)
    more = gpu_footprint.graphs_bytes(32, 1024) - gpu_footprint.graphs_bytes(32, 256)
    assert more == gpu_footprint.KINDS_OF_WORK * (47 - 23) * 32 * gpu_footprint.GRAPH_LAYER_BYTES


def test_graphs_that_are_not_captured_are_not_planned(spec: ModelSpec) -> None:
    gpu = idle_gpu(40 * GIB)
    with_graphs, without = (
        make_gpu_plan(spec, None, EngineConfig(model="m", device="cuda", enforce_eager=eager), [gpu])
        for eager in (False, True)
    )
    assert without.terms["graphs"] == gpu_footprint.GRAPHS_BYTES < with_graphs.terms["graphs"]


def test_what_the_gpu_kernels_have_not_got_is_refused_before_anything_is_loaded(spec: ModelSpec) -> None:
    gpu = idle_gpu(40 * GIB)

    def made(of: ModelSpec = spec, **settings: object) -> Plan:
        return make_gpu_plan(of, None, EngineConfig.from_arguments(device="cuda", **settings), [gpu])

    for name, value in (("expand_weights", "always"), ("attention_backend", "torch")):
        refusal = _refused(partial(made, **{name: value}))
        assert (refusal.code, refusal.field) == ("HF127", name)
    assert made(expand_weights="never").terms == made().terms
    assert _refused(partial(made, replace(spec, head_dim=512))).code == "HF128"


def test_a_gpu_keeps_kv_in_what_it_computes_in(spec: ModelSpec) -> None:
    gpu = idle_gpu(40 * GIB)

    def made(**settings: object) -> Plan:
        return make_gpu_plan(spec, None, EngineConfig.from_arguments(device="cuda", **settings), [gpu])

    assert made(kv_cache_dtype="bfloat16").kv_dtype == made().kv_dtype == "bfloat16"
    for settings in ({"kv_cache_dtype": "float16"}, {"kv_cache_dtype": "bfloat16", "dtype": "float16"}):
        refusal = _refused(partial(made, **settings))
        assert (refusal.code, refusal.field) == ("HF126", "kv_cache_dtype")
        # What is advised is taken.
        assert f"--dtype {settings['kv_cache_dtype']}" in str(refusal.fix)
    assert made(kv_cache_dtype="float16", dtype="float16").kv_dtype == "float16"


def test_fp8_holds_twice_the_tokens_in_the_same_pool(spec: ModelSpec) -> None:
    gpu = idle_gpu(40 * GIB, capability=(8, 6))

    def made(of: ModelSpec = spec, **settings: object) -> Plan:
        config = EngineConfig.from_arguments(device="cuda", kv_cache_memory_bytes="300MiB", **settings)
        return make_gpu_plan(of, None, config, [gpu])

    plain = made()
    for name, kept in (("fp8", "fp8"), ("fp8_e4m3", "fp8"), ("fp8_e5m2", "fp8_e5m2")):
        plan = made(kv_cache_dtype=name)
        assert plan.kv_dtype == kept
        assert 2 * plan.engine.layout.page_bytes == plain.engine.layout.page_bytes
        assert plan.engine.blocks in (2 * plain.engine.blocks, 2 * plain.engine.blocks + 1)
        assert plan.terms["kv_pool"] <= 300 << 20
        assert {name: size for name, size in plan.terms.items() if name != "kv_pool"} == {
            name: size for name, size in plain.terms.items() if name != "kv_pool"
        }
    of_checkpoint = made(replace(spec, kv_cache_fp8=True))
    assert of_checkpoint.kv_dtype == "fp8"
    assert "kv_cache_dtype = fp8 (model): the checkpoint's kv_cache_scheme" in [
        decision.line() for decision in of_checkpoint.decisions
    ]
    assert made(replace(spec, kv_cache_fp8=True), kv_cache_dtype="bfloat16").kv_dtype == "bfloat16"
    with pytest.raises(ConfigurationError, match="kv_cache_dtype"):
        made(kv_cache_dtype="fp4")
    with pytest.raises(ConfigurationError, match="all layers keep"):
        made(kv_cache_dtype_skip_layers=["0"])
    assert made(kv_cache_dtype="fp8", calculate_kv_scales=True).terms == made(kv_cache_dtype="fp8").terms


def _refused(make: Callable[[], object]) -> ConfigurationError:
    with pytest.raises(ConfigurationError) as caught:
        make()
    return caught.value


def test_a_gpu_that_is_not_there_is_refused_by_name(spec: ModelSpec) -> None:
    config = EngineConfig.from_arguments(device="cuda")
    assert _refused(lambda: make_gpu_plan(spec, None, config, [])).code == "HF121"


def test_a_checkpoint_that_a_gpu_cannot_hold_is_refused_with_what_is_short(spec: ModelSpec, tmp_path) -> None:
    """Its tensors come under the spec's own names: remedies divide them by layer."""
    gpu = idle_gpu(8 * GIB)
    config = EngineConfig.from_arguments(device="cuda", max_model_len=8192)
    for mib in range(5000, 6750, 250):  # From one that does not hold the weights to one that lacks only KV.
        few = replace(gpu, free_bytes=mib * MIB)
        refusal = _refused(partial(make_gpu_plan, spec, quantized(spec, tmp_path), config, [few]))
        assert "short" in str(refusal.found)


def test_a_pool_that_was_set_on_a_gpu_holds_a_sequence_or_is_refused(spec: ModelSpec) -> None:
    total = 40 * GIB
    gpu = idle_gpu(total)

    def made(**settings: object) -> Plan:
        return make_gpu_plan(spec, None, EngineConfig.from_arguments(device="cuda", **settings), [gpu])

    shorter = made(kv_cache_memory_bytes="100MiB")
    assert 512 <= shorter.limits.max_model_len < 8192
    assert made(kv_cache_memory_bytes="100MiB", max_model_len=512).limits.max_model_len == 512
    with pytest.raises(DoesNotFitError, match="short") as caught:
        made(kv_cache_memory_bytes="100MiB", max_model_len=8192)
    length, pool = re.findall(r"(?:--max-model-len|--kv-cache-memory-bytes) (\d\w*)", str(caught.value.fix))
    assert made(kv_cache_memory_bytes="100MiB", max_model_len=int(length)).limits.max_model_len == int(length)
    assert made(kv_cache_memory_bytes=pool, max_model_len=8192).limits.max_model_len == 8192
    with pytest.raises(DoesNotFitError, match="short"):
        made(kv_cache_memory_bytes="10MiB")


def test_an_absolute_budget(spec: ModelSpec) -> None:
    found = plan(spec, 40, ram="24GiB")
    assert found.budget_bytes == 24 * GIB
    # It is ours while it is free: others may use what lies beyond it. Only beside a share the rest stays free.
    assert found.reserve_bytes == 0
    assert plan(spec, 40).reserve_bytes == 4 * GIB
    assert settle_pool(found, found.terms["kv_pool"]) is found
    assert 0 <= 24 * GIB - sum(found.terms.values()) < 3 * 1024**2  # less than a page and its book
    with pytest.raises(DoesNotFitError, match="less is free") as caught:
        plan(spec, 40, ram="41GiB")
    assert "1.00 GiB short" in str(caught.value.found)
    with pytest.raises(ConfigurationError, match="runs on the CPU"):
        plan(spec, 40, vram="24GiB", device="cpu")


def test_what_a_refusal_advises_fits_when_it_is_planned(spec: ModelSpec) -> None:
    for free_gib, settings in (
        (18, {"ram": "16GiB", "max_model_len": 8192}),
        (16.6, {}),
        (40, {"max_model_len": 8192, "kv_cache_memory_bytes": "100MiB"}),
        (19, {"max_num_seqs": 4096, "max_num_batched_tokens": 1 << 16}),
    ):
        with pytest.raises(DoesNotFitError, match="short") as caught:
            plan(spec, free_gib, **settings)
        fix = str(caught.value.fix).removesuffix(f", or {FROM_DISK}")
        advice = [text.split() for text in fix.split(", or ")]
        assert advice
        for words in advice:
            if words[0] == "leave":
                changed = {name: value for name, value in settings.items() if name != field_of(words[1])}
            else:
                changed = {**settings, **dict(zip(map(field_of, words[::2]), words[1::2], strict=True))}
            plan(spec, free_gib, **changed)


def test_ram_that_refuses_a_model_names_a_disk_where_that_would_do(spec: ModelSpec) -> None:
    for free_gib, helps in ((6, True), (1, False)):
        with pytest.raises(DoesNotFitError) as caught:
            plan(spec, free_gib)
        assert str(caught.value.fix).endswith(FROM_DISK) is helps


def field_of(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def test_a_shorter_context_leaves_more_for_the_pool(spec: ModelSpec) -> None:
    """What is auto is settled with the terms of the length it gets, not of the length that did not fit."""
    long = from_config({**LLAMA_3_8B, "max_position_embeddings": 1 << 20})
    limits = {"max_num_seqs": 64, "max_num_batched_tokens": 512}
    found = plan(long, 24, **limits)
    assert found.engine.short
    assert found.limits.max_model_len > 8192
    assert sum(found.terms.values()) <= found.budget_bytes
    with pytest.raises(DoesNotFitError):
        plan(long, 24, max_model_len=found.limits.max_model_len + 16, **limits)
    assert plan(long, 24, max_model_len=found.limits.max_model_len, **limits).engine.blocks == found.engine.blocks


def test_dense_products_are_planned_with_their_copy_where_torch_makes_one(spec: ModelSpec) -> None:
    arm = Processor(model="arm", cores=2, features=frozenset({"asimd"}))
    half = {"dtype": "bfloat16"}
    assert plan(spec, 60, arm, **half).terms["scratch"] == 128256 * 4096 * 2
    assert plan(spec, 60, arm, max_num_seqs=8, **half).terms["scratch"] == 2 * 14336 * 4096 * 2  # gate and up, as one
    assert "scratch" not in plan(spec, 60, arm).terms
    assert "scratch" not in plan(spec, 60, FAST, **half).terms


def test_a_pool_counts_by_its_whole_pages(spec: ModelSpec) -> None:
    """A size between two numbers of pages is allocated as the lower one, and fits where that does."""
    page, low, high = 2 * MIB, 1, 4096

    def made(nbytes: int) -> Plan:
        return plan(spec, 40, ram="17000MiB", max_model_len=64, kv_cache_memory_bytes=nbytes)

    while low < high:
        middle = (low + high + 1) // 2
        try:
            low = made(middle * page).engine.blocks
        except DoesNotFitError:
            high = middle - 1
    assert 1 < low < 4096
    assert made(low * page + page - 1).engine.blocks == low
    with pytest.raises(DoesNotFitError, match="does not fit"):
        made((low + 1) * page)


def test_a_pool_too_small_for_a_block_says_so(spec: ModelSpec) -> None:
    with pytest.raises(DoesNotFitError, match="holds no block"):
        plan(spec, 40, kv_cache_memory_bytes=2 << 20)


UNITS = {"MiB": 1, "GiB": 1024}


def test_limits_that_are_too_large_together_are_refused_with_some_that_fit(spec: ModelSpec) -> None:
    """The numbers add up also where what comes before KV is more than the budget."""
    asked = {"max_model_len": 8192, "max_num_seqs": 1024}
    with pytest.raises(DoesNotFitError) as caught:
        plan(spec, 40, ram="16508MiB", **asked)
    amounts = [float(size) * UNITS[unit] for size, unit in re.findall(r"([\d.]+) ([MG]iB)", str(caught.value.found))]
    budget, *terms, beyond, short = amounts
    needed = re.search(r"([\d.]+) ([MG]iB)", str(caught.value.needed))
    assert needed is not None
    assert sum(terms) - budget == pytest.approx(beyond, abs=8)  # What is said in GiB is rounded to 5 MiB.
    assert float(needed[1]) * UNITS[needed[2]] + beyond == pytest.approx(short, abs=8)
    lower = re.search(r", or --max-model-len (\d+) --max-num-seqs (\d+)(?:, or |$)", str(caught.value.fix))
    assert lower is not None
    length, sequences = map(int, lower.groups())
    limits = plan(spec, 40, ram="16508MiB", max_model_len=length, max_num_seqs=sequences).limits
    assert (limits.max_model_len, limits.max_num_seqs) == (length, sequences)


@pytest.mark.parametrize(("cores", "tokens"), [(1, 64), (2, 144), (64, 512)])
def test_prompts_beside_answers_take_about_half_a_second(cores: int, tokens: int) -> None:
    """By the model's size and what the cores do, within what a step has."""
    flops = cores * default_limits.core_flops(KERNEL_VARIANTS["neon_dotprod"])
    assert default_limits.prompt_tokens_beside(106_202_880, flops, 512) == tokens
    assert default_limits.prompt_tokens_beside(70_000_000_000, flops, 512) == 16
    assert default_limits.prompt_tokens_beside(106_202_880, flops, 8) == 8


def test_prompts_beside_answers_go_by_what_multiplies() -> None:
    assert set(default_limits.CORE_FLOPS) == set(KERNEL_VARIANTS)
    rates = [default_limits.core_flops(KERNEL_VARIANTS[name] | {"sse2"}) for name in ("avx512_vnni", "avx512", "avx2")]
    assert rates == sorted(rates, reverse=True)
    assert len(set(rates)) == 3
    assert default_limits.core_flops(frozenset()) == default_limits.core_flops(None) < rates[-1]
