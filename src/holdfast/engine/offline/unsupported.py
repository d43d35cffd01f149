"""vLLM's methods of `LLM` that are not there, refused with the reason. Owns no state."""

from __future__ import annotations

from typing import Any, NoReturn

from holdfast.errors import UnsupportedOptionError

_NO_REWARD = "it needs a reward for every token, and only the last token is pooled"


class AbsentMethods:
    def reward(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("reward", _NO_REWARD, "classify(prompts) with a model that rewards whole texts")

    def collective_rpc(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("collective_rpc", "the engine has no worker processes to call", "leave it out")

    def apply_model(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("apply_model", "there is no access to the model object", "leave it out")


def _refuse(name: str, reason: str, fix: str) -> NoReturn:
    raise UnsupportedOptionError(f"{name} is not supported: {reason}", fix=fix, field=name)
