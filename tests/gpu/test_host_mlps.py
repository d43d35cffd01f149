"""A real model of whose streamed layers the host's cores compute the MLPs, against one that stays on the GPU: each
token of a text is given, and its log-probability compared, so that no choice of a token hides or enlarges what differs.
"""

from __future__ import annotations

from typing import Any

import pytest
from forced_tokens import forced
from named_model import named_models, why_not

from holdfast import LLM, SamplingParams
from holdfast.execution.streaming import host_mlps
from holdfast.units import GIB

PROMPTS = "The history of the bicycle begins", "def merge_sort(values):", "Three ways to cook an egg:"
TOKENS = 200
"""Of each text, which the model that stays has written itself."""
FEW = 8
"""Tokens of a step: prompts come in pieces of so many, so that the host has a part in all of them."""
MEAN, MOST = 0.002, 0.03
"""Of |difference| of log-probabilities, in nats, in float32: sums are in another order, weights the same.
Compiled products beside expanded weights, on a CPU with SmolLM2, were 0.00012 and 0.0012 apart."""


@pytest.mark.parametrize("name", named_models())
def test_log_probabilities_are_those_of_a_model_that_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if (problem := why_not(name)) is not None:
        pytest.skip(problem)
    # Of so small a model nothing would be gained: the link brings it in a hundredth of a second.
    monkeypatch.setattr(host_mlps, "WORTH", 0.0)
    settings: dict[str, Any] = {
        "model": name, "device": "cuda", "dtype": "float32", "max_model_len": 1024, "max_num_seqs": FEW,
        "max_num_batched_tokens": FEW, "enable_prefix_caching": False, "vram": 8 * GIB,
    }  # fmt: skip
    greedy = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    with LLM(**settings) as llm:
        written = llm.generate(list(PROMPTS), greedy, use_tqdm=False)
        texts = [[*one.prompt_token_ids, *one.outputs[0].token_ids] for one in written]
        plain = forced(llm, texts)
        assert llm.get_stats().links == []
    with LLM(**settings, gpu_layers=2) as llm:
        assert llm._core is not None
        runner: Any = llm._core.runner
        hosts = runner.decoder.host_mlps
        assert hosts is not None
        print(hosts.decision.line())
        assert hosts.decision.source == "measured", "cores and link at once, before the first step"
        hosts.wait(120.0)
        assert hosts.joined is not None, "the host's cores read this format"
        print(hosts.joined.reason)
        assert hosts.joined.few_tokens >= FEW
        before = hosts.joined.host.pairs
        found = forced(llm, texts)
        computed, layers = hosts.joined.host.pairs - before, len(hosts.joined.exchanges)
    places = sum(len(ids) for ids in texts)
    assert computed >= 0.9 * places * layers, "all tokens, of all of its layers"
    apart = [abs(one - other) for a, b in zip(found, plain, strict=True) for one, other in zip(a, b, strict=True)]
    mean = sum(apart) / len(apart)
    print(f"{len(apart)} tokens, MLPs of {layers} layers: differ by {mean:.6f} in the mean, {max(apart):.5f} at most")
    assert 0 < max(apart) <= MOST
    assert mean <= MEAN
