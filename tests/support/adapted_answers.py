"""What an engine of a tiny model on stand-ins for GPUs says with a LoRA adapter, held against merged weights."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from lora_adapters import merge, write_adapter
from tiny_gpu import Tiny, prompt

from holdfast.config import EngineConfig
from holdfast.engine.core.loop import EngineCore
from holdfast.engine.requests.adapters import Adapters
from holdfast.records import Request, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


def require_adapted(tiny: Tiny, core: EngineCore, folder: Path, **sizes: int) -> None:
    """By an adapter that each process has read its part of: a prompt with it and without it. `sizes`: of the engine,
    where it is on several nodes."""
    known = Adapters(tiny.spec, "tiny", EngineConfig(device="cuda", enable_lora=True, max_lora_rank=8, **sizes))
    write_adapter(folder / "one", tiny.folder, seed=1, rank=7)
    adapter = known.load("one", str(folder / "one"), anywhere=True)
    merged = transformers.LlamaForCausalLM.from_pretrained(merge(folder / "merged", tiny.folder, folder / "one"))
    said: dict[str, list[int]] = {"plain": [], "adapted": []}
    for name, asked in (("plain", None), ("adapted", adapter)):
        core.add(Request(request_id=name, prompt_token_ids=prompt(1, 9), params=GREEDY, adapter=asked))
    while core.has_work:
        for output in core.step():
            assert output.failure is None, output.failure
            said[output.request_id] += output.token_ids
    assert said["plain"] != said["adapted"]
    tiny.assert_greedy(prompt(1, 9), said["plain"])
    with torch.inference_mode():
        logits = merged.float().eval()(torch.tensor([prompt(1, 9) + said["adapted"]])).logits[0]
    assert said["adapted"] == logits[8:-1].argmax(-1).tolist()
