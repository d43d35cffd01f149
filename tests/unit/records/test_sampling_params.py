"""SamplingParams: vLLM's names and defaults, checked when made."""

import msgspec
import numpy
import pytest

from holdfast import SamplingParams
from holdfast.engine.requests.whole_vocabulary import with_whole_vocabulary
from holdfast.errors import RequestError, UnknownParameterError, UnsupportedOptionError
from holdfast.records import Request


def test_as_the_founding_code_writes_it() -> None:
    params = SamplingParams(
        temperature=0.7,
        top_p=0.95,
        top_k=50,
        max_tokens=256,
        frequency_penalty=0.0,
        presence_penalty=0.0,
        stop=["\n"],
        seed=42,
        logprobs=5,
    )
    assert params.stop_strings == ("\n",)
    assert SamplingParams(top_k=-1).top_k == 0
    assert SamplingParams(stop="x").stop_strings == ("x",)
    assert SamplingParams(temperature=0).greedy
    assert not params.greedy


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0), ("presence_penalty", 2.5), ("frequency_penalty", -3), ("repetition_penalty", 1e-40),
        ("temperature", -1.0), ("temperature", float("nan")), ("temperature", float("inf")), ("top_p", 0.0),
        ("top_p", 1.1), ("top_k", -2), ("min_p", -0.1), ("max_tokens", 0), ("min_tokens", -1), ("min_tokens", 17),
        ("logprobs", 21), ("stop", [""]), ("stop", ["x"] * 65), ("seed", 2**63), ("logit_bias", {1: 101.0}),
        ("logit_bias", dict.fromkeys(range(1025), 1.0)), ("stop_token_ids", list(range(1001))),
        ("allowed_token_ids", []), ("allowed_token_ids", list(range(4097))), ("bad_words", ["a"] * 129),
        ("bad_words", [" "]), ("bad_words", ["a" * 1025]), ("prompt_logprobs", -2),
    ],
)  # fmt: skip
def test_out_of_range_names_the_field(field: str, value: object) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field
    assert isinstance(caught.value, ValueError)


def test_vllms_number_for_the_whole_vocabulary_is_of_prompts() -> None:
    with pytest.raises(
        RequestError, match=r"logprobs is -1; .* the whole vocabulary, is more than memory is planned for"
    ):
        SamplingParams(logprobs=-1)
    asked = SamplingParams(prompt_logprobs=-1)
    assert with_whole_vocabulary(asked, [5, 6], 300, -1).prompt_logprobs == 300
    for params, vocabulary, most in (
        (asked, 300, 20),
        (SamplingParams(prompt_logprobs=21), 300, -1),
        (asked, 2**22, -1),
    ):
        with pytest.raises(RequestError) as caught:
            with_whole_vocabulary(params, [5, 6], vocabulary, most)
        assert caught.value.field == "prompt_logprobs"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bad_words", "foo"), ("bad_words", b"foo"), ("bad_words", [5]), ("bad_words", 5), ("stop", 5), ("stop", [5]),
        ("stop_token_ids", "123"), ("stop_token_ids", 5), ("allowed_token_ids", "123"), ("allowed_token_ids", {5: 1}),
        ("logit_bias", [5]), ("logit_bias", "5"),
    ],
)  # fmt: skip
def test_the_wrong_kind_names_the_field(field: str, value: object) -> None:
    """A text where a list belongs would be taken letter by letter."""
    with pytest.raises(RequestError, match=f"{field} must be a (list|dict)") as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field
    with pytest.raises(RequestError):
        SamplingParams().replace(**{field: value})


def test_a_text_in_place_of_bad_words_is_told_how_to_write_it() -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(bad_words="foo")  # type: ignore[arg-type]
    assert caught.value.fix == "bad_words=['foo']"


@pytest.mark.parametrize(
    ("field", "value"),
    [("logits_processors", [1]), ("use_beam_search", True), ("best_of", 3)],
)
def test_what_is_not_there_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(UnsupportedOptionError, match=field):
        SamplingParams(**{field: value})


def test_scripts_may_change_theirs_and_what_is_taken_is_checked_again() -> None:
    params = SamplingParams(stop=["a"], temperature=0.5, extra_args={"x": 1})
    copied = params.clone()
    copied.stop.append("b")
    copied.top_k, copied.n = -1, 3
    assert (params.stop, params.n, copied.extra_args) == (["a"], 1, {"x": 1})
    checked = copied.checked()
    assert (checked.stop, checked.top_k, checked.n) == (["a", "b"], 0, 3)
    copied.n = 0
    assert checked.n == 3
    with pytest.raises(RequestError, match="n is 0"):
        copied.checked()


def test_over_the_wire() -> None:
    params = SamplingParams(stop=["a", "b"], stop_token_ids=[3], seed=-5, logit_bias={7: 1.5})
    request = Request(request_id="r", prompt_token_ids=[1, 2], params=params, eos_token_ids=(2,), output_token_ids=[9])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=Request) == request


@pytest.mark.parametrize(
    "wrong", [{"stop": ["s" * 1000] * 5000}, {"stop": "s" * 10**6}, {"logit_bias": dict.fromkeys(range(10**5), 500.0)}]
)
def test_a_refusal_is_short_whatever_was_given(wrong):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**wrong)
    assert len(str(caught.value)) < 500


def test_a_misspelt_name_is_a_type_error_that_names_the_nearest() -> None:
    with pytest.raises(TypeError, match="did you mean temperature") as caught:
        SamplingParams(temprature=1)
    assert isinstance(caught.value, UnknownParameterError)
    assert caught.value.field == "temprature"
    with pytest.raises(TypeError, match="did you mean max_tokens"):
        SamplingParams().replace(max_token=3)
    with pytest.raises(TypeError, match="known: n, "):
        SamplingParams(zzz=3)


WRONG_KINDS = [
    *((name, value) for name in ("n", "top_k", "seed", "max_tokens", "min_tokens") for value in (1.5, True, "5")),
    *((name, value) for name in ("logprobs", "prompt_logprobs") for value in (1.5, True, "5")),
    *((name, value) for name in ("temperature", "top_p", "min_p", "repetition_penalty") for value in ("hot", True)),
    ("top_p", None), ("n", None), ("ignore_eos", "no"), ("detokenize", 0), ("skip_special_tokens", None),
    ("logit_bias", {5: "x"}), ("logit_bias", {"a": 1.0}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), WRONG_KINDS)
def test_values_of_another_kind_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(RequestError) as refused:
        SamplingParams(**{name: value})
    assert refused.value.field == name


def test_numbers_become_pythons_own() -> None:
    """Encoded for another process, or used as an index, others would fail there."""
    made = SamplingParams(
        n=numpy.int64(2), temperature=numpy.float32(0.5), top_p=1, seed=numpy.int32(7), logit_bias={"12": 3}
    )
    assert [type(value) for value in (made.n, made.temperature, made.top_p, made.seed)] == [int, float, float, int]
    assert made.logit_bias == {12: 3.0}
