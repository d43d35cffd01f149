"""The door: what passes can be computed; what does not is refused with numbers, and unfolding keeps seeds apart."""

import random

import numpy
import pytest

from holdfast import SamplingParams
from holdfast.engine.requests.admission import Admission
from holdfast.errors import ContextLengthError, RequestError
from holdfast.models import from_config

SPEC = from_config(
    {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 100, "hidden_size": 64,
        "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
        "torch_dtype": "float32", "eos_token_id": 2, "hidden_act": "silu",
    }
)  # fmt: skip


def door(**changes: object) -> Admission:
    return Admission(SPEC, 32, random.Random(0), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("prompt", [[], [100], [-1], [0, 5, 1000], [5.0], [True], ["5"], [None], [[5]]])
def test_prompts_that_cannot_be_read(prompt: list[int]) -> None:
    with pytest.raises(RequestError) as caught:
        door().admit(prompt, SamplingParams(), request_id="r")
    assert caught.value.field == "prompt"


@pytest.mark.parametrize(
    "change", [{"logit_bias": {100: 1.0}}, {"stop_token_ids": [100]}, {"allowed_token_ids": [5, 100]}]
)
def test_ids_in_parameters_are_checked(change: dict[str, object]) -> None:
    with pytest.raises(RequestError, match=next(iter(change))):
        door().admit([1], SamplingParams(**change), request_id="r")  # type: ignore[arg-type]


def test_whole_numbers_of_other_libraries_are_ids() -> None:
    (request,) = door().admit(numpy.array([1, 2], dtype=numpy.int64), SamplingParams(), request_id="r")
    assert [type(token) for token in request.prompt_token_ids] == [int, int]


def test_the_context_is_a_limit_with_both_numbers() -> None:
    with pytest.raises(ContextLengthError, match=r"32 tokens.*48 tokens \(32 in the messages, 16 in"):
        door().admit([1] * 32, SamplingParams(), request_id="r")
    with pytest.raises(ContextLengthError, match=r"a larger max_model_len \(the model supports up to 64 tokens\)"):
        door().admit([1] * 32, SamplingParams(), request_id="r")
    with pytest.raises(ContextLengthError, match="longer context: this one supports at most 64 tokens") as raised:
        Admission(SPEC, 64, random.Random(0)).admit([1] * 64, SamplingParams(), request_id="r")
    assert "max_model_len" not in str(raised.value)  # It is the model's own already.
    with pytest.raises(
        ContextLengthError, match=r"is 32 tokens.*33 tokens \(10 in the messages, 23 in the completion\)"
    ):
        door().admit([1] * 10, SamplingParams(max_tokens=23), request_id="r")
    assert door().admit([1] * 10, SamplingParams(max_tokens=None), request_id="r")[0].max_tokens == 22
    clamped = door(clamp_output=True).admit([1] * 10, SamplingParams(max_tokens=100), request_id="r")
    assert clamped[0].max_tokens == 22
    with pytest.raises(ContextLengthError, match="min_tokens"):
        door(clamp_output=True).admit([1] * 10, SamplingParams(max_tokens=100, min_tokens=50), request_id="r")


def test_answers_have_seeds_of_their_own_that_repeat() -> None:
    first = door().admit([1], SamplingParams(n=3, seed=7), request_id="r")
    again = door().admit([1], SamplingParams(n=3, seed=7), request_id="r")
    seeds = [request.params.seed for request in first]
    assert seeds == [request.params.seed for request in again]
    assert len(set(seeds)) == 3
    assert seeds[0] == 7
    assert [request.request_id for request in first] == ["r#0", "r#1", "r#2"]
    unseeded = [door().admit([1], SamplingParams(), request_id="r")[0].params.seed for _ in range(2)]
    assert unseeded[0] is not None
    assert unseeded[0] == unseeded[1]  # from the same configured seed


def test_ends_are_left_out_when_they_are_ignored() -> None:
    assert door().admit([1], SamplingParams(), request_id="r")[0].eos_token_ids == (2,)
    assert door().admit([1], SamplingParams(ignore_eos=True), request_id="r")[0].eos_token_ids == ()


def test_bad_words_are_spelled_at_the_start_and_after_a_space_or_a_newline() -> None:
    """Whatever the lengths of the spellings; one that ends in another is never written either, and is left out."""
    tokenizer = Spelling({"\n": [4, 3], "cat": [10], " cat": [11], "\ncat": [4, 3, 16], "tea pot": [12, 13],
                          " tea pot": [9, 12, 13], "\ntea pot": [17, 8], "an": [14, 15], " an": [14, 15],
                          "\nan": [4, 3, 14, 15], "abc" * 9: [1] * 16, " " + "abc" * 9: [2] * 16,
                          "\n" + "abc" * 9: [4, 3] + [1] * 16})  # fmt: skip
    words = ["cat", "  tea pot", "an"]
    (request,) = door(tokenizer=tokenizer).admit([5], SamplingParams(bad_words=words), request_id="r")
    assert request.bad_word_ids == [[10], [11], [16], [12, 13], [17, 8], [14, 15]]
    with pytest.raises(RequestError, match="have 384 tokenizations") as caught:
        door(tokenizer=tokenizer).admit([5], SamplingParams(bad_words=["cat"] * 128), request_id="r")
    assert caught.value.needed == "at most 256"
    with pytest.raises(RequestError, match="has 16 tokens"):
        door(tokenizer=tokenizer).admit([5], SamplingParams(bad_words=["abc" * 9]), request_id="r")
    with pytest.raises(RequestError, match="needs a tokenizer"):
        door().admit([5], SamplingParams(bad_words=["cat"]), request_id="r")


def test_a_token_must_be_left_to_sample() -> None:
    tokenizer = Spelling({"\n": [4], "cat": [10], " cat": [11], "\ncat": [4, 10]})
    for change in (
        {"allowed_token_ids": [10, 11], "bad_words": ["cat"]},
        {"allowed_token_ids": [2], "min_tokens": 1},
        {"allowed_token_ids": [2, 7], "min_tokens": 1, "stop_token_ids": [7]},
    ):
        with pytest.raises(RequestError, match="leave no token"):
            door(tokenizer=tokenizer).admit([5], SamplingParams(**change), request_id="r")
    door(tokenizer=tokenizer).admit(
        [5], SamplingParams(allowed_token_ids=[10, 11, 12], bad_words=["cat"]), request_id="r"
    )
    door().admit([5], SamplingParams(allowed_token_ids=[2]), request_id="r")


def test_one_of_several_answers_tells_of_the_prompt() -> None:
    requests = door().admit([5, 6], SamplingParams(n=3, prompt_logprobs=2), request_id="r")
    assert [request.params.prompt_logprobs for request in requests] == [2, None, None]


class Spelling:
    """A tokenizer that knows a few texts."""

    def __init__(self, known: dict[str, list[int]]) -> None:
        self._known = known

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return self._known[text]
