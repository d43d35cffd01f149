"""Checkpoints of random quantized weights in real shapes, the same file for every engine.

    write_awq(config, folder)      AWQ (gemm layout, 4 bits, groups of 128), one safetensors file a layer
    write_fp8(config, folder)      FP8, a scale for each matrix, inputs rounded as they come; alike
    write_bf16(config, folder)     unquantized, in bfloat16; alike
    write_q4_k(config, path)       GGUF: Q4_K, the head in Q6_K; no vocabulary: run with token ids
    write_smollm2(path)            GGUF: SmolLM2-135M's shape, Q4_1 and Q8_0 as the built-in model has them; alike

Numbers are scaled so that logits have spread. Needs torch, or numpy and gguf.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

GROUP = 128
WRITERS = 12
"""Files that are written at the same time."""
BETWEEN = 4099
"""Words from where one layer's begin to where the next one's do."""
SPREAD = 0.02
"""Standard deviation of the weights."""


def write_awq(config: dict[str, Any], folder: Path) -> None:
    """As AutoAWQ lays it out: each matrix apart, also of each expert; the router, embeddings and norms in float16."""
    import torch

    device, modules, layers = _device(), _modules(config), config["num_hidden_layers"]
    # One run of random words for all layers, each of which begins at another: making and copying them takes longest.
    length = sum((rows // 8) * (columns + columns // GROUP) for rows, columns in modules.values())
    made = torch.randint(
        -(2**31), 2**31, (length + layers * BETWEEN,), generator=torch.Generator(device=device).manual_seed(0),
        device=device, dtype=torch.int32,
    ).cpu()  # fmt: skip
    # Codes and zero points are uniform over 0 to 15: their difference has a deviation of 6.5.
    scales = {
        shape: torch.full((shape[1] // GROUP, shape[0]), SPREAD / 6.5, dtype=torch.float16)
        for shape in set(modules.values())
    }

    def packed(layer: int) -> dict[str, Any]:
        tensors, first = dict[str, Any](), layer * BETWEEN
        for module, (rows, columns) in modules.items():
            stem = f"model.layers.{layer}.{module}"
            for part, lines in (("qweight", columns), ("qzeros", columns // GROUP)):
                last = first + lines * (rows // 8)
                tensors[f"{stem}.{part}"] = made[first:last].view(lines, rows // 8)
                first = last
            tensors[f"{stem}.scales"] = scales[rows, columns]
        return tensors

    _write_layers(awq_config(config), folder, packed, torch.float16)


def write_fp8(config: dict[str, Any], folder: Path) -> None:
    """As `quant_method: fp8` lays it out: each matrix apart, also of each expert; the rest in bfloat16."""
    import torch

    device, modules, layers = _device(), _modules(config), config["num_hidden_layers"]
    length = sum(rows * columns for rows, columns in modules.values())
    made = torch.empty(length + layers * BETWEEN, dtype=torch.float8_e4m3fn, device=device)
    generator = torch.Generator(device=device).manual_seed(0)
    for part in made.split(1 << 28):
        part.copy_(torch.randn(part.shape, generator=generator, device=device, dtype=torch.bfloat16).mul_(64))
    run, scale = made.cpu(), torch.tensor(SPREAD / 64)

    def rounded(layer: int) -> dict[str, Any]:
        tensors, first = dict[str, Any](), layer * BETWEEN
        for module, (rows, columns) in modules.items():
            stem, last = f"model.layers.{layer}.{module}", first + rows * columns
            tensors[f"{stem}.weight"] = run[first:last].view(rows, columns)
            tensors[f"{stem}.weight_scale"] = scale
            first = last
        return tensors

    # By whole names: vLLM takes a router for a quantized matrix otherwise, and sends all tokens to the same experts.
    routers = [f"model.layers.{layer}.mlp.gate" for layer in range(layers)] if "num_experts" in config else []
    left = ["lm_head", *routers]
    quantization = {"quant_method": "fp8", "activation_scheme": "dynamic", "modules_to_not_convert": left}
    _write_layers(config | {"quantization_config": quantization}, folder, rounded, torch.bfloat16)


def write_bf16(config: dict[str, Any], folder: Path) -> None:
    import torch

    device, modules, layers = _device(), _modules(config), config["num_hidden_layers"]
    length = sum(rows * columns for rows, columns in modules.values())
    made = torch.empty(length + layers * BETWEEN, dtype=torch.bfloat16, device=device)
    made.normal_(0, SPREAD, generator=torch.Generator(device=device).manual_seed(0))
    run = made.cpu()

    def rounded(layer: int) -> dict[str, Any]:
        tensors, first = dict[str, Any](), layer * BETWEEN
        for module, (rows, columns) in modules.items():
            last = first + rows * columns
            tensors[f"model.layers.{layer}.{module}.weight"] = run[first:last].view(rows, columns)
            first = last
        return tensors

    _write_layers(config, folder, rounded, torch.bfloat16)


def _write_layers(
    config: dict[str, Any], folder: Path, quantized: Callable[[int], dict[str, Any]], dtype: torch.dtype
) -> None:
    """A file a layer: its quantized matrices, and what is not quantized, in `dtype`."""
    import torch

    device, hidden, places = _device(), config["hidden_size"], dict[str, str]()
    generator = torch.Generator(device=device).manual_seed(1)

    def plain(*shape: int) -> Any:
        return (torch.randn(shape, generator=generator, device=device, dtype=dtype) * SPREAD).cpu()

    def ones(width: int) -> Any:
        return torch.ones(width, dtype=dtype)

    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(WRITERS) as writers:
        written = list[Future[None]]()

        def save(name: str, tensors: dict[str, Any]) -> None:
            written.append(writers.submit(_write_safetensors, folder / name, tensors))
            places.update(dict.fromkeys(tensors, name))

        for layer in range(config["num_hidden_layers"]):
            stem, tensors = f"model.layers.{layer}.", quantized(layer)
            for norm in ("input_layernorm", "post_attention_layernorm"):
                tensors[f"{stem}{norm}.weight"] = ones(hidden)
            if config["model_type"].startswith("qwen3"):
                for norm in ("q_norm", "k_norm"):
                    tensors[f"{stem}self_attn.{norm}.weight"] = ones(config["head_dim"])
            if "num_experts" in config:
                tensors[f"{stem}mlp.gate.weight"] = plain(config["num_experts"], hidden)
            save(f"model-{layer:05}.safetensors", tensors)
        ends = {"model.embed_tokens.weight": plain(config["vocab_size"], hidden), "model.norm.weight": ones(hidden)}
        if not config["tie_word_embeddings"]:
            ends["lm_head.weight"] = plain(config["vocab_size"], hidden)
        save("model-ends.safetensors", ends)
        for one in written:
            one.result()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (folder / "config.json").write_text(json.dumps(config))


def awq_config(config: dict[str, Any]) -> dict[str, Any]:
    """What such a checkpoint says of itself."""
    quantization = {
        "quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm",
        "modules_to_not_convert": ["mlp.gate"] if "num_experts" in config else None,
    }  # fmt: skip
    return config | {"torch_dtype": "float16", "quantization_config": quantization}


def _write_safetensors(path: Path, tensors: dict[str, Any]) -> None:
    """Straight from each tensor's memory: the library's own writer copies everything first."""
    import torch

    kinds = {torch.int32: "I32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32"}
    header, end = dict[str, Any](__metadata__={"format": "pt"}), 0
    for name, tensor in tensors.items():
        kind = kinds.get(tensor.dtype, "F8_E4M3")
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb", buffering=0) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            left = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
            while left:
                left = left[file.write(left) :]


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _modules(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Quantized matrices of a layer: (outputs, inputs)."""
    hidden, width = config["hidden_size"], config["head_dim"]
    query, kv = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    found = {
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, query),
    }
    experts = config.get("num_experts", 0)
    inner = config["moe_intermediate_size" if experts else "intermediate_size"]
    for stem in [f"mlp.experts.{expert}" for expert in range(experts)] or ["mlp"]:
        found |= {f"{stem}.gate_proj": (inner, hidden), f"{stem}.up_proj": (inner, hidden)}
        found[f"{stem}.down_proj"] = (hidden, inner)
    return found


SMOLLM2 = {
    "hidden_size": 576, "num_hidden_layers": 30, "intermediate_size": 1536, "num_attention_heads": 9,
    "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152, "max_position_embeddings": 8192,
    "rope_theta": 1e5, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip


def write_smollm2(path: Path) -> None:
    write_q4_k(SMOLLM2, path, layers="Q4_1", embedding="Q8_0")


def write_q4_k(
    config: dict[str, Any], path: Path, skew: float = 0.0, *, layers: str = "Q4_K", embedding: str = "Q4_K"
) -> None:
    """`skew`: logits of the n-th expert of a layer spread by n to the power of less that: the first are chosen more.
    `layers`, `embedding`: other types for their matrices."""
    import gguf
    import numpy

    kinds = gguf.GGMLQuantizationType
    experts = config.get("num_experts", 0)
    writer = gguf.GGUFWriter(str(path), "qwen3moe" if experts else "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    random, chunks = numpy.random.default_rng(0), dict[Any, Any]()
    last: dict[Any, Any] = {}

    def blocks(kind: Any, count: int) -> Any:
        """Random codes and small scales; the same million blocks again and again. Matrices of one size are one array:
        all are held until the file is written."""
        if (kind, count) in last:
            return last[kind, count]
        if kind not in chunks:
            made = random.integers(0, 256, (1 << 18, gguf.GGML_QUANT_SIZES[kind][1]), dtype=numpy.uint8)
            if kind == kinds.Q4_K:
                made[:, :4] = numpy.array([1e-4, 7.5e-4], dtype=numpy.float16).view(numpy.uint8)
            elif kind == kinds.Q4_1:
                made[:, :4] = numpy.array([4e-3, -3e-2], dtype=numpy.float16).view(numpy.uint8)
            elif kind == kinds.Q8_0:
                made[:, :2] = numpy.array([2e-4], dtype=numpy.float16).view(numpy.uint8)
            else:
                made[:, -2:] = numpy.array([1e-5], dtype=numpy.float16).view(numpy.uint8)
            chunks[kind] = made
        last[kind, count] = numpy.resize(chunks[kind], (count, chunks[kind].shape[1]))
        return last[kind, count]

    def add(name: str, shape: tuple[int, ...], kind: Any) -> None:
        elements, nbytes = gguf.GGML_QUANT_SIZES[kind]
        columns = shape[-1] // elements
        made = blocks(kind, int(numpy.prod(shape[:-1])) * columns)
        writer.add_tensor(name, made.reshape(*shape[:-1], columns * nbytes), raw_dtype=kind)

    def ones(name: str, width: int) -> None:
        writer.add_tensor(name, numpy.ones(width, dtype=numpy.float32))

    hidden, width = config["hidden_size"], config["head_dim"]
    query, kv = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    add("token_embd.weight", (config["vocab_size"], hidden), kinds[embedding])
    if not config["tie_word_embeddings"]:
        add("output.weight", (config["vocab_size"], hidden), kinds.Q6_K)
    for layer in range(config["num_hidden_layers"]):
        stem = f"blk.{layer}."
        for name, shape in {
            "q": (query, hidden),
            "k": (kv, hidden),
            "v": (kv, hidden),
            "output": (hidden, query),
        }.items():
            add(f"{stem}attn_{name}.weight", shape, kinds[layers])
        if experts:
            inner = config["moe_intermediate_size"]
            ones(f"{stem}attn_q_norm.weight", width)
            ones(f"{stem}attn_k_norm.weight", width)
            router = random.standard_normal((experts, hidden), dtype=numpy.float32)
            router *= (1 + random.permutation(experts).astype(numpy.float32))[:, None] ** -skew
            writer.add_tensor(f"{stem}ffn_gate_inp.weight", router)
            sides: dict[str, tuple[int, ...]] = {
                "gate_exps": (experts, inner, hidden),
                "up_exps": (experts, inner, hidden),
            }
            sides["down_exps"] = (experts, hidden, inner)
        else:
            inner = config["intermediate_size"]
            sides = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
        for name, side in sides.items():
            add(f"{stem}ffn_{name}.weight", side, kinds[layers])
        ones(f"{stem}attn_norm.weight", hidden)
        ones(f"{stem}ffn_norm.weight", hidden)
    ones("output_norm.weight", hidden)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
