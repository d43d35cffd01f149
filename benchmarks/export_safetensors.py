"""A GGUF file as a safetensors folder, for engines that read no GGUF: export_safetensors.py FILE.gguf FOLDER [DTYPE]

Owns nothing of Holdfast: it goes through transformers, so that the peers' weights do not depend on our own reader.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def export(source: Path, target: Path, dtype_name: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    dtype = getattr(torch, dtype_name)
    loaded: Any = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    # transformers will not save a model that remembers being quantized: its weights go into one that never was.
    settings = loaded.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "dtype"):
        settings.pop(name, None)
    plain = type(loaded)(type(loaded.config)(**settings)).to(dtype)
    plain.load_state_dict(loaded.state_dict())
    plain.save_pretrained(target)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit("export_safetensors.py FILE.gguf FOLDER [float32|bfloat16|float16]")
    export(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] if len(sys.argv) == 4 else "float32")
