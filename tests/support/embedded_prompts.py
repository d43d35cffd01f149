"""Prompts as vectors, beside an answer: asked of one engine and compared with another's."""

from __future__ import annotations

import numpy

from holdfast.engine.core.loop import EngineCore
from holdfast.engine.requests.embedding import PARAMS
from holdfast.records import EngineOutput, Request, SamplingParams


def embedded(core: EngineCore, prompts: list[list[int]]) -> dict[str, EngineOutput]:
    """Each twice, so that the second finds a prefix; and an answer beside them."""
    for turn in ("first", "again"):
        for place, ids in enumerate(prompts):
            core.add(Request(request_id=f"{turn}-{place}", prompt_token_ids=ids, params=PARAMS, embed=True))
    spoken = SamplingParams(temperature=0.0, max_tokens=3, seed=0, ignore_eos=True)
    core.add(Request(request_id="spoken", prompt_token_ids=prompts[0], params=spoken))
    outputs: dict[str, EngineOutput] = {}
    said: list[int] = []
    while core.has_work:
        for output in core.step():
            said += output.token_ids if output.request_id == "spoken" else []
            if output.finish_reason is not None:
                outputs[output.request_id] = output
    assert len(said) == 3
    return outputs


def assert_same_vectors(here: dict[str, EngineOutput], there: dict[str, EngineOutput], width: int) -> None:
    for name in (name for name in here if name != "spoken"):
        mine, theirs = (numpy.frombuffer(found[name].embedding or b"", dtype="<f4") for found in (here, there))
        assert here[name].token_ids == []
        assert len(mine) == width
        assert abs(float(numpy.linalg.norm(mine)) - 1) < 1e-4
        assert float(mine @ theirs) > 0.999
    assert here["spoken"].embedding is None
