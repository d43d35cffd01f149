"""What the figures of a log say of memory, and what is worked out from them: shaped after logs of public threads, with
names and numbers of our own.
"""

# ruff: noqa: E501

from __future__ import annotations

from typing import NamedTuple

import pytest

from holdfast.doctor.logs import diagnose_lines


class Told(NamedTuple):
    text: str
    cause: str
    phase: str
    confidence: str
    changes: dict[str, str | None]
    """Of the fix."""


ROUTER = '2025-02-11T09:14:44.6Z ERROR warmup{{max_input_length={} max_prefill_tokens={}}}:warmup: text_generation_client: router/client/src/lib.rs:33: Server error: {}\nError: Warmup(Generation("{}"))\n'
OUT = "CUDA out of memory. Tried to allocate {} GiB. GPU 0 has a total capacity of 22.06 GiB of which {} GiB is free. Process 4242 has 20.85 GiB memory in use. Of the allocated memory 20.10 GiB is allocated by PyTorch, and 310.00 MiB is reserved by PyTorch but unallocated."
LAUNCHED = '2025-02-11T09:14:02.0Z  INFO text_generation_launcher: Args {{ model_id: "q/w", num_shard: {}, max_input_length: {}, max_total_tokens: {}, max_batch_prefill_tokens: {}, port: 80 }}\n'
SHARDED = "2025-02-11T09:14:03.0Z  INFO text_generation_launcher: Sharding model on 2 processes\n"

TGI = {
    "the traceback of the server": Told(
        LAUNCHED.format("Some(2)", 8000, 8192, 32768)
        + "2025-02-11T09:14:08.1Z  INFO shard-manager: text_generation_launcher: Waiting for shard to be ready... rank=0\n2025-02-11T09:14:44.5Z ERROR text_generation_launcher: Method Warmup encountered an error.\nTraceback (most recent call last):\n  File \"/opt/conda/lib/python3.10/site-packages/text_generation_server/models/flash_causal_lm.py\", line 753, in warmup\n    _, batch = self.generate_token(batch)\n  File \"/opt/conda/lib/python3.10/site-packages/text_generation_server/utils/layers.py\", line 90, in forward\n    return F.linear(input, self.weight)\ntorch.cuda.OutOfMemoryError: " + OUT.format("3.50", "1.20"),
        "activation_oom_runtime", "warmup", "high", {"--max-batch-prefill-tokens": "8192"},
    ),
    "the router's line alone, while shards are waited for": Told(
        SHARDED + "2025-02-11T09:14:08.1Z  INFO shard-manager: text_generation_launcher: Waiting for shard to be ready... rank=0\n" + ROUTER.format(4000, 4096, OUT.format("1.20", "0.90"), OUT.format("1.20", "0.90")),
        "activation_oom_runtime", "warmup", "high", {"--max-batch-prefill-tokens": "2048", "--max-input-tokens": "2048"},
    ),
    "so few tokens that it is not the step": Told(
        SHARDED + ROUTER.format(64, 256, OUT.format("0.20", "0.10"), OUT.format("0.20", "0.10")),
        "activation_oom_runtime", "warmup", "high", {"--num-shard": "4"},
    ),
    "the limit of a fraction, in the oldest words": Told(
        LAUNCHED.format("None", 1024, 2048, 4096) + "thread 'main' panicked at 'Unable to warmup model: Generation(\"Allocation on device 0 would exceed allowed memory. (out of memory)\\nCurrently allocated     : 16.10 GiB\\nRequested               : 4.80 GiB\\nDevice limit            : 22.20 GiB\\nFree (according to CUDA): 2.50 GiB\")', router/src/main.rs:216:18",
        "activation_oom_runtime", "warmup", "medium", {"--max-batch-prefill-tokens": "2048"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TGI)
def test_a_warm_up_of_tgi_that_runs_out_is_its_step(case: str) -> None:
    told = TGI[case]
    found = diagnose_lines(told.text.split("\n"), "log")
    first = found.findings[0]
    assert (first.cause, found.phase, first.confidence) == (told.cause, told.phase, told.confidence)
    assert first.fix is not None
    assert first.fix.changes == told.changes
