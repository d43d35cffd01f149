"""What goes to RAM where a GPU is full (llama.cpp's experts), and what is shortened where RAM is (Ollama's context)."""

from __future__ import annotations

import pytest

from holdfast.doctor import diagnose_lines
from holdfast.doctor.findings import Finding

MODEL = (
    "llama_model_loader: loaded meta data with 40 key-value pairs and 579 tensors from /m/{}.gguf (version GGUF V3)",
    "print_info: n_embd           = 2048",
    "print_info: n_layer          = 48",
    "print_info: n_embd_k_gqa     = 512",
    "print_info: n_embd_v_gqa     = 512",
)
EXPERTS = (
    "print_info: n_expert         = 128",
    "print_info: n_expert_used    = 8",
    "print_info: n_ff_exp         = 768",
    "print_info: file size   = 17.28 GiB (4.86 BPW)",
)
FREE = "llama_model_load_from_file_impl: using device CUDA0 (NVIDIA GeForce RTX 3060) - 11700 MiB free"
REFUSED = (
    "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 17524.42 MiB on device 0: cudaMalloc failed: out of memory",
    "llama_model_load: error loading model: unable to allocate CUDA0 buffer",
)
OLD, NEW = "build: 5400 (a1b2c3d) with cc", "build: 6500 (a1b2c3d) with cc"
NAMED = tuple(line.format("Qwen3-30B-A3B-Q4_K_M") for line in MODEL)
PLAIN = tuple(line.format("weights") for line in MODEL)


def _first(*lines: str) -> Finding:
    return diagnose_lines(list(lines), "log").findings[0]


SPILLED: dict[str, tuple[tuple[str, ...], dict[str, str | None], str]] = {
    "as many as are missing": ((NEW, FREE, *PLAIN, *EXPERTS, *REFUSED), {"--n-cpu-moe": "19"}, "first_try"),
    "more than are in RAM already": (
        ("llama-server -m /m/weights.gguf --n-cpu-moe 4", NEW, FREE, *PLAIN, *EXPERTS, *REFUSED),
        {"--n-cpu-moe": "23"},
        "computed",
    ),
    "all, where what is free is not told": (
        (NEW, *PLAIN, *EXPERTS, *REFUSED),
        {"--n-cpu-moe": "48"},
        "first_try",
    ),
    "all, by the name of the model": ((NEW, *NAMED, *REFUSED), {"--n-cpu-moe": "48"}, "first_try"),
    "all, where not even the layers are told": (
        ("llama-server -m /m/Mixtral-8x7B.gguf -ngl 99", *REFUSED),
        {"--cpu-moe": ""},
        "first_try",
    ),
    "by a pattern, in a build before that flag": (
        (OLD, FREE, *PLAIN, *EXPERTS, *REFUSED),
        {"--override-tensor": "exps=CPU"},
        "first_try",
    ),
    "layers, of a model without experts": ((NEW, FREE, *PLAIN, *REFUSED), {"--n-gpu-layers": "30"}, "first_try"),
    "layers, where experts are placed by hand": (
        ("llama-server -m /m/weights.gguf -ot exps=CPU", NEW, FREE, *PLAIN, *EXPERTS, *REFUSED),
        {"--n-gpu-layers": "30"},
        "computed",
    ),
}


@pytest.mark.parametrize("case", SPILLED)
def test_experts_go_to_ram_before_whole_layers(case: str) -> None:
    lines, changes, basis = SPILLED[case]
    first = _first(*lines)
    assert first.cause == "weights_do_not_fit"
    assert first.fix is not None
    assert (first.fix.changes, first.fix.basis) == (changes, basis)


LISTENS = 'time=2025-02-01T10:00:00.000Z level=INFO source=routes.go:1 msg="Listening on 127.0.0.1:11434 (version {})"'
SPLIT = (
    'time=2025-02-01T10:00:01.000Z level=INFO source=memory.go:356 msg="offload to cpu" layers.requested=-1'
    ' layers.model=33 layers.offload={} layers.split="" memory.available="[14.2 GiB]" memory.required.full="37.9 GiB"'
    ' memory.required.partial="0 B" memory.required.kv="{} GiB" memory.required.allocations="[37.9 GiB]"'
)
LOAD = (
    'time=2025-02-01T10:00:02.000Z level=INFO source=runner.go:1172 msg=load request="{{Operation:fit LoraPath:[]'
    ' Parallel:{} BatchSize:512 FlashAttention:false KvSize:{} KvCacheType: NumThreads:8 GPULayers:[]}}"'
)
RUNNER = (
    'time=2025-02-01T10:00:02.000Z level=INFO source=server.go:380 msg="starting llama server" cmd="/usr/bin/ollama'
    ' runner --model /m --ctx-size {} --batch-size 512 --threads 8 --parallel {} --port 40001"'
)
IN_RAM = 'time=2025-02-01T10:00:02.500Z level=INFO source=device.go:251 msg="kv cache" device=CPU size="32.0 GiB"'
TOO_LARGE = (
    'time=2025-02-01T10:00:03.000Z level=INFO source=sched.go:428 msg="NewLlamaServer failed" model=/m error="model'
    ' requires more system memory (37.9 GiB) than is available (14.2 GiB)"'
)
CONTEXTS: dict[str, tuple[tuple[str, ...], dict[str, str | None], str]] = {
    "KV by the sums of older releases": (
        (LISTENS.format("0.5.7"), SPLIT.format(0, "32.0"), RUNNER.format(131072, 1), TOO_LARGE),
        {"OLLAMA_CONTEXT_LENGTH": "30720"},
        "high",
    ),
    "KV by those of newer ones": (
        (LISTENS.format("0.13.0"), LOAD.format(1, 131072), IN_RAM, TOO_LARGE),
        {"OLLAMA_CONTEXT_LENGTH": "30720"},
        "high",
    ),
    "a context for each of four": (
        (LISTENS.format("0.13.0"), LOAD.format(4, 131072), IN_RAM, TOO_LARGE),
        {"OLLAMA_CONTEXT_LENGTH": "7680"},
        "high",
    ),
    "a context whose KV is not told": (
        (LISTENS.format("0.13.0"), LOAD.format(1, 131072), TOO_LARGE),
        {"OLLAMA_CONTEXT_LENGTH": "4096"},
        "medium",
    ),
    "a short context, so that weights are what is too large": (
        (LISTENS.format("0.13.0"), LOAD.format(1, 4096), TOO_LARGE),
        {},
        "high",
    ),
    "a long context whose KV is little of it": (
        (LISTENS.format("0.5.7"), SPLIT.format(0, "4.0"), RUNNER.format(32768, 1), TOO_LARGE),
        {},
        "high",
    ),
}


@pytest.mark.parametrize("case", CONTEXTS)
def test_ollama_s_context_is_shortened_where_its_kv_is_what_ram_lacks(case: str) -> None:
    lines, changes, confidence = CONTEXTS[case]
    first = _first(*lines)
    assert first.cause == "host_ram_oom"
    assert first.fix is not None
    assert (first.fix.changes, first.confidence) == (changes, confidence)


def test_a_gpu_that_a_long_context_of_ollama_fills_gets_a_shorter_one() -> None:
    out = (
        "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 9524.42 MiB on device 0: cudaMalloc failed: out of"
        " memory"
    )
    long = _first(LISTENS.format("0.13.0"), LOAD.format(1, 65536), out)
    short = _first(LISTENS.format("0.13.0"), LOAD.format(1, 4096), out)
    assert long.fix is not None
    assert short.fix is not None
    assert (long.fix.changes, long.confidence) == ({"OLLAMA_CONTEXT_LENGTH": "32768"}, "medium")
    assert list(short.fix.changes) == ["OLLAMA_GPU_OVERHEAD"]


def test_a_smaller_model_is_not_what_ollama_is_told_first() -> None:
    first = _first(LISTENS.format("0.13.0"), TOO_LARGE)
    assert first.fix is not None
    told = [first.fix.why.index(one) for one in ("have to be free", "a quantization", "or a smaller model")]
    assert told == sorted(told)
