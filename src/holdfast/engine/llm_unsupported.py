"""vLLM's methods of `LLM` that are not there, refused with the reason. Owns no state."""

from __future__ import annotations

from typing import Any, NoReturn

from holdfast.errors import UnsupportedOptionError
from holdfast.records.sampling import NO_BEAMS

_NO_HEAD = "scores and classes need a model with a head for them, and decoders are run here"


class AbsentMethods:
    def beam_search(self, *_: Any, **__: Any) -> NoReturn:
        fix = "generate with n answers and logprobs=0, and keep the one with the largest cumulative_logprob"
        raise UnsupportedOptionError(f"beam search is not there: {NO_BEAMS}", fix=fix, field="beam_search")

    def encode(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("encode", "prompts are pooled in one way", "embed(prompts), which gives the last token's state")

    def score(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("score", _NO_HEAD, "embed(prompts), and compare the vectors by their product")

    def classify(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("classify", _NO_HEAD, "generate with StructuredOutputsParams(choice=[...])")

    def reward(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("reward", _NO_HEAD, "generate with prompt_logprobs=0 scores a text by the model itself")

    def collective_rpc(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("collective_rpc", "there is one engine, in this process, and no workers to call", "leave it out")

    def apply_model(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("apply_model", "the model is the engine's own", "leave it out")

    def start_profile(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("start_profile", "there is no profiler", "llm.get_metrics(), llm.info")

    def stop_profile(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("stop_profile", "there is no profiler", "llm.get_metrics(), llm.info")


def _refuse(name: str, reason: str, fix: str) -> NoReturn:
    raise UnsupportedOptionError(f"{name} is not there: {reason}", fix=fix, field=name)
