"""Memory for images: how large they are by the config, what a step of them takes, and where it is not known."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from holdfast.config.plan import PlanConfig
from holdfast.footprint.cpu import Limits
from holdfast.models import EncoderSpec, catalogue, describe_config
from holdfast.planner.api import question_of
from holdfast.planner.compat.vllm_release import parse_vllm
from holdfast.planner.engines.vllm_command import vllm_terms
from holdfast.planner.fit.search import Plan, Question, fit
from holdfast.planner.report.answer import answer
from holdfast.planner.sizing.terms import ENCODER_UNCERTAINTY, activations_bytes, encoder_bytes, encoder_images
from holdfast.units import GIB

Ask = Callable[..., Question]


def terms(found: Plan, rank: int = 0) -> dict[str, int]:
    return {term.name: term.nbytes for term in found.ranks[rank].terms}


@pytest.mark.parametrize(
    ("name", "encoder"),
    [
        # 896 / 14 squared, pooled to 256.
        ("gemma-3-27b", EncoderSpec(hidden_size=1152, intermediate_size=4304, gated=False, patches=4096, tokens=256)),
        # 1024 / 16 squared, none merged.
        ("pixtral-12b", EncoderSpec(hidden_size=1024, intermediate_size=4096, gated=True, patches=4096, tokens=4096)),
        # 16 tiles and the whole, each 336 / 14 squared and a class token; four become one.
        (
            "llama-4-scout",
            EncoderSpec(hidden_size=1408, intermediate_size=5632, gated=False, patches=9809, tokens=2448),
        ),
        # 280 tokens, each of 3 x 3 patches.
        ("gemma-4-31b", EncoderSpec(hidden_size=1152, intermediate_size=4304, gated=True, patches=2520, tokens=280)),
        # 16,777,216 pixels of a preprocessor_config.json in squares of 16, four to a token; three layers hand over too.
        (
            "qwen3-vl-30b-a3b",
            EncoderSpec(
                hidden_size=1152,
                intermediate_size=4304,
                gated=False,
                patches=65_536,
                tokens=16_384,
                outputs=4,
                kept_columns=1152 + 3 * 1536,
            ),
        ),
        # 12,845,056 pixels in squares of 14, four to a token.
        (
            "qwen2.5-vl-7b",
            EncoderSpec(
                hidden_size=1280,
                intermediate_size=3420,
                gated=True,
                patches=65_536,
                tokens=16_384,
                kept_columns=1280 + 3 * 1176,
            ),
        ),
        ("llama-3.1-8b", None),
    ],
)
def test_what_configs_tell(name: str, encoder: EncoderSpec | None) -> None:
    assert describe_config(catalogue.find(name).config).encoder == encoder


def test_mistral_3_merges_neighbours() -> None:
    config = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "text_config": {"hidden_size": 5120, "num_hidden_layers": 2},
        "vision_config": {"hidden_size": 1024, "image_size": 1540, "patch_size": 14},
        "spatial_merge_size": 2,
    }
    encoder = describe_config(config).encoder
    assert encoder is not None
    assert (encoder.patches, encoder.tokens) == (12_100, 3025)


def test_as_many_images_as_a_step_has_tokens_for() -> None:
    spec = describe_config(catalogue.find("gemma-3-27b").config)
    for step, images in ((8192, 32), (2048, 8), (256, 1), (64, 1)):
        assert encoder_images(spec, Limits(max_model_len=4096, max_num_seqs=4, max_num_batched_tokens=step)) == images


def test_it_takes_what_activations_do_not_have_and_what_it_hands_on() -> None:
    """32 images of 4,096 patches, each 4 x 1152 + 2 x 4304 numbers of 2 bytes."""
    spec = describe_config(catalogue.find("gemma-3-27b").config)
    limits = Limits(max_model_len=4096, max_num_seqs=4, max_num_batched_tokens=8192)
    live, handed = 32 * 4096 * (4 * 1152 + 2 * 4304) * 2, 32 * 256 * 5376 * 2
    activations = activations_bytes(spec, limits, "bfloat16", 1, range(len(spec.layers)))
    assert encoder_bytes(spec, limits, "bfloat16", activations) == live - activations + handed
    assert encoder_bytes(spec, limits, "bfloat16", 2 * live) == handed


def test_the_largest_image_of_qwen(ask: Ask) -> None:
    """vLLM's trial image took 2.6 GiB of Qwen3-VL-30B beyond its activations; the plan says so within its interval."""
    found = fit(ask("qwen3-vl-30b-a3b", "h100-80"))
    taken = terms(found)["encoder"] / GIB
    assert taken == pytest.approx(2.08, abs=0.01)
    assert taken < 2.6 < taken * (1 + ENCODER_UNCERTAINTY)
    text = question_of(PlanConfig.from_arguments(model="qwen3-vl-30b-a3b", gpu="h100-80", language_model_only=True))
    assert "encoder" not in terms(fit(text))


def test_it_is_a_term_with_an_interval_and_a_reason(ask: Ask) -> None:
    found = answer(ask("gemma-3-27b", "h100-80"))
    (device,) = found.to_json()["devices"]
    size = device["terms"]["encoder"]
    assert device["interval"]["encoder"] == [size // 2, size * 3 // 2]
    (decision,) = [decision for decision in found.decisions if decision.field == "encoder"]
    assert "32 images of 4,096 patches" in decision.reason
    assert "HFW38" not in {warning.code for warning in found.warnings}
    assert "encoder" not in terms(fit(ask("llama-3.1-8b", "h100-80")))


def test_smaller_steps_take_fewer_images(ask: Ask) -> None:
    small = terms(fit(ask("gemma-3-27b", "h100-80", max_num_batched_tokens=1024)))
    assert small["encoder"] < terms(fit(ask("gemma-3-27b", "h100-80")))["encoder"] / 4


def test_of_stages_the_first_has_it(ask: Ask) -> None:
    found = fit(ask("gemma-3-27b", "h100-80", count=2, pipeline_parallel=2, tensor_parallel=1))
    assert ["encoder" in terms(found, rank) for rank in (0, 1)] == [True, False]


def test_vllm_tries_it_when_it_starts(ask: Ask) -> None:
    found = fit(ask("gemma-3-27b", "h100-80"))
    ours = terms(found)
    peak = vllm_terms(found, parse_vllm("==0.29")).peak_activation
    assert peak == ours["activations"] + ours["encoder"] + ours.get("logits", 0)
