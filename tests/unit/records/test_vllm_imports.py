"""Scripts written for vLLM find its names where they look for them, and none of them brings torch along."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

import holdfast
from holdfast.config import EngineConfig
from holdfast.engine.offline.unsupported import AbsentMethods
from holdfast.errors import RequestError, UnsupportedOptionError
from holdfast.logger import init_logger
from holdfast.utils import FlexibleArgumentParser

SCRIPT = """
import sys
from holdfast import EmbeddingRequestOutput, LoRARequest, SamplingParams, TextPrompt, TokensPrompt
from holdfast import ModelRegistry
from holdfast.inputs import PromptType, TokensPrompt
from holdfast.logger import init_logger
from holdfast.lora.request import LoRARequest as same
from holdfast.outputs import CompletionOutput, EmbeddingRequestOutput, RequestOutput
from holdfast import AsyncEngineArgs, EngineArgs, PoolingParams
from holdfast import ClassificationOutput, PoolingOutput, PoolingRequestOutput, ScoringRequestOutput
from holdfast.distributed import cleanup_dist_env_and_memory
from holdfast.entrypoints.llm import LLM
from holdfast.engine.arg_utils import EngineArgs as same_arguments
from holdfast.pooling_params import PoolingParams as same_pooling
from holdfast.sampling_params import BeamSearchParams, RequestOutputKind
from holdfast.utils import FlexibleArgumentParser, random_uuid
from holdfast.utils.argparse_utils import FlexibleArgumentParser
from holdfast.v1.engine.async_llm import AsyncLLM
from holdfast.v1.metrics.reader import Counter, Gauge, Histogram, Vector

assert same is LoRARequest
BeamSearchParams(beam_width=4, max_tokens=8)
SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, truncate_prompt_tokens=None)
assert TokensPrompt(prompt_token_ids=[1]) == {"prompt_token_ids": [1]}
answer = RequestOutput(request_id="0", prompt=None, prompt_token_ids=[], outputs=[])
assert answer.metrics is None and answer.lora_request is None
assert same_arguments is EngineArgs and same_pooling is PoolingParams and random_uuid() != random_uuid()
cleanup_dist_env_and_memory()
assert "torch" not in sys.modules
"""


def test_names_are_where_vllm_has_them() -> None:
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=120)
    assert all(hasattr(holdfast, name) for name in holdfast.__all__ if name != "LLM")


def test_a_logger_says_once_what_it_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    logger = init_logger("a.script")
    with caplog.at_level("INFO", "a.script"):
        for turn in range(2):
            logger.info("turn %d", turn)
            logger.info_once("only %s", "this")
            logger.warning_once("and 100% of this")
            logger.debug_once("never")
    assert caplog.messages == ["turn 0", "only this", "and 100% of this", "turn 1"]
    assert caplog.records[1].funcName == "test_a_logger_says_once_what_it_is_told_once"


def test_a_model_of_a_script_is_refused_with_what_runs() -> None:
    assert "LlamaForCausalLM" in holdfast.ModelRegistry.get_supported_archs()
    with pytest.raises(UnsupportedOptionError, match=r"not run for it \(MyModel\)"):
        holdfast.ModelRegistry.register_model("MyModel", object)


@pytest.mark.parametrize("name", [name for name in vars(AbsentMethods) if not name.startswith("_")])
def test_methods_that_are_not_there_say_why(name: str) -> None:
    with pytest.raises(UnsupportedOptionError, match="is not supported: ") as caught:
        getattr(AbsentMethods(), name)("anything", of="any kind")
    assert caught.value.fix


def test_settings_as_scripts_for_vllm_keep_them() -> None:
    """Flags beside a script's own, a dataclass in between, and only what was set goes on."""
    parser = FlexibleArgumentParser()
    parser.add_argument("--my_words", type=int, default=3)
    holdfast.EngineArgs.add_cli_args(parser)
    words = ["--my-words", "4", "--max_model_len=512", "--trust-remote-code", "--hf-overrides.rope_theta", "5"]
    parsed = parser.parse_args(words)
    assert (parsed.my_words, parsed.dtype, parsed.tensor_parallel_size) == (4, "auto", 1)
    kept = holdfast.EngineArgs.from_cli_args(parsed)
    assert kept.settings() == {"max_model_len": "512", "trust_remote_code": "true", "hf_overrides": '{"rope_theta": 5}'}
    config = EngineConfig.from_arguments(**dataclasses.asdict(kept))
    assert (config.max_model_len, config.hf_overrides) == (512, {"rope_theta": 5})
    assert holdfast.AsyncEngineArgs(model="m", seed=3, disable_log_stats=True).settings() == {"model": "m", "seed": 3}
    with pytest.raises(TypeError):
        holdfast.EngineArgs(modle="m")


@pytest.mark.parametrize("given", [{"normalize": False}, {"task": "classify"}, {"truncate_prompt_tokens": 3}])
def test_other_ways_to_a_vector_are_refused_by_name(given: dict[str, object]) -> None:
    with pytest.raises(UnsupportedOptionError, match=next(iter(given))):
        holdfast.PoolingParams(**given).check(64)  # type: ignore[arg-type]
    holdfast.PoolingParams(dimensions=64, normalize=True).clone().check(64)
    with pytest.raises(RequestError, match="dimensions is 65"):
        holdfast.PoolingParams(dimensions=65).check(64)


def test_parameters_that_are_not_there_say_why() -> None:
    for name in ("truncate_prompt_tokens", "logits_processors"):
        with pytest.raises(UnsupportedOptionError, match=f"{name} is not supported: "):
            holdfast.SamplingParams(**{name: [3]})
