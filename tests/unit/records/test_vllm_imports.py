"""Scripts written for vLLM find its names where they look for them, and none of them brings torch along."""

from __future__ import annotations

import subprocess
import sys

import pytest

import holdfast
from holdfast.engine.llm_unsupported import AbsentMethods
from holdfast.errors import UnsupportedOptionError

SCRIPT = """
import sys
from holdfast import EmbeddingRequestOutput, LoRARequest, SamplingParams, TextPrompt, TokensPrompt
from holdfast.inputs import PromptType, TokensPrompt
from holdfast.lora.request import LoRARequest as same
from holdfast.outputs import CompletionOutput, EmbeddingRequestOutput, RequestOutput
from holdfast.sampling_params import BeamSearchParams, RequestOutputKind

assert same is LoRARequest
BeamSearchParams(beam_width=4, max_tokens=8)
SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, truncate_prompt_tokens=None)
assert TokensPrompt(prompt_token_ids=[1]) == {"prompt_token_ids": [1]}
answer = RequestOutput(request_id="0", prompt=None, prompt_token_ids=[], outputs=[])
assert answer.metrics is None and answer.lora_request is None
assert "torch" not in sys.modules
"""


def test_names_are_where_vllm_has_them() -> None:
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=120)
    assert all(hasattr(holdfast, name) for name in holdfast.__all__ if name != "LLM")


@pytest.mark.parametrize("name", [name for name in vars(AbsentMethods) if not name.startswith("_")])
def test_methods_that_are_not_there_say_why(name: str) -> None:
    with pytest.raises(UnsupportedOptionError, match="is not supported: ") as caught:
        getattr(AbsentMethods(), name)("anything", of="any kind")
    assert caught.value.fix


def test_parameters_that_are_not_there_say_why() -> None:
    for name in ("truncate_prompt_tokens", "extra_args", "logits_processors"):
        with pytest.raises(UnsupportedOptionError, match=f"{name} is not supported: "):
            holdfast.SamplingParams(**{name: [3]})
