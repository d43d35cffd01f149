"""llama-server to be driven as Holdfast's front is: its command, and the smallest model it can be given.

It takes no engine of ours: so it computes, on the same core, a model of one layer that is 32 wide and has a token for
each letter. That is in its figures, and is little beside HTTP and JSON.
"""

from __future__ import annotations

import string
from pathlib import Path

import gguf
import numpy

WIDTH, INNER, HEADS = 32, 32, 2
CHARACTERS = ["Ġ", *string.ascii_letters, *string.digits]
"""None that JSON would escape; a space is written as GPT-2's tokenizer writes it."""
END = "</s>"
"""The one token without text: it is never drawn where the end is to be ignored."""
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
CONTEXT_TOKENS = 512
"""Of each connection."""


def command(binary: str, folder: Path, connections: int) -> list[str]:
    """With PORT where the port goes. A thread for each connection is how its HTTP library works."""
    model = folder / "smallest.gguf"
    write_model(model)
    return [
        binary,
        "-m",
        str(model),
        "--host",
        "127.0.0.1",
        "--port",
        "PORT",
        "-np",
        str(connections),
        "-t",
        "1",
        "-tb",
        "1",
        "-c",
        str(connections * CONTEXT_TOKENS),
        "--threads-http",
        str(connections + 8),
        "--jinja",
    ]


def write_model(path: Path) -> None:
    tokens = [END, *CHARACTERS, "In"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(CONTEXT_TOKENS)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] + [gguf.TokenType.NORMAL] * (len(tokens) - 1))
    writer.add_token_merges(["I n"])  # It asks for at least one.
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_chat_template(TEMPLATE)
    numbers = numpy.random.default_rng(0)
    shapes = {
        "token_embd": (len(tokens), WIDTH), "output": (len(tokens), WIDTH), "blk.0.attn_q": (WIDTH, WIDTH),
        "blk.0.attn_k": (WIDTH, WIDTH), "blk.0.attn_v": (WIDTH, WIDTH), "blk.0.attn_output": (WIDTH, WIDTH),
        "blk.0.ffn_gate": (INNER, WIDTH), "blk.0.ffn_up": (INNER, WIDTH), "blk.0.ffn_down": (WIDTH, INNER),
    }  # fmt: skip
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", numbers.standard_normal(shape).astype(numpy.float32))
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", numpy.ones(WIDTH, numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
