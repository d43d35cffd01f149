"""Errors that reach a script speak of keywords."""

from __future__ import annotations

import traceback

import pytest

from holdfast import LLM
from holdfast.config.python_words import in_python, tells_scripts
from holdfast.errors import ConfigurationError, EngineError


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("--max-model-len 5808, or --ram 720MiB", 'max_model_len=5808, or ram="720MiB"'),
        ("leave --kv-cache-dtype out, or --dtype float16.", 'leave kv_cache_dtype out, or dtype="float16".'),
        ("a smaller --gpu-memory-utilization", "a smaller gpu_memory_utilization"),
        ("--gpu-memory-utilization 0.95 or less", "gpu_memory_utilization=0.95 or less"),
        ("--ram SIZE", "ram=SIZE"),
        ("--enable-lora beside it", "enable_lora=True beside it"),
        ("--no-enable-prefix-caching", "enable_prefix_caching=False"),
        ("--tokenizer ./a, or name one with --tokenizer, or", 'tokenizer="./a", or name one with tokenizer, or'),
        ("did you mean dtype float16?", 'did you mean dtype="float16"?'),
        ("another model smollm2; a seed or none", "another model smollm2; a seed or none"),
        ("pip install --force-reinstall torch", "pip install --force-reinstall torch"),
        ("serve with --lora-modules a=b", "serve with --lora-modules a=b"),
    ],
)
def test_flags_become_keywords(written: str, shown: str) -> None:
    with pytest.raises(ConfigurationError) as caught, in_python():
        raise ConfigurationError("--max-model-len 7 is not valid", needed="--dtype float32 and more", fix=written)
    error = caught.value
    assert (error.message, error.needed, error.fix) == (
        "max_model_len=7 is not valid",
        'dtype="float32" and more',
        shown,
    )
    assert str(error).startswith("max_model_len=7 is not valid [HF100]")
    assert error.args == (error.message,)


def test_an_llm_advises_its_own_keywords() -> None:
    with pytest.raises(ConfigurationError) as caught:
        LLM(max_num_seqs=0)
    assert caught.value.fix == "leave it out, or max_num_seqs=1"
    with pytest.raises(ConfigurationError) as caught:
        LLM(vram="4GiB", device="cpu")
    assert caught.value.fix == "ram=SIZE"


def test_a_script_ends_with_the_error_and_not_with_our_frames() -> None:
    """But for those of ours that nobody asked for wrongly, which have to be found."""

    @tells_scripts
    def ask(error: Exception) -> None:
        def deep() -> None:
            try:
                raise OSError("no such file")
            except OSError as cause:
                raise error from cause

        deep()

    with pytest.raises(ConfigurationError) as caught:
        ask(ConfigurationError("--max-model-len 5 is too little"))
    assert str(caught.value.message) == "max_model_len=5 is too little"
    assert [entry.name for entry in caught.traceback][1:] == ["told"]
    assert "OSError" not in "".join(traceback.format_exception(caught.value))
    with pytest.raises(EngineError) as broken:
        ask(EngineError("it broke"))
    assert [entry.name for entry in broken.traceback][-1] == "deep"
