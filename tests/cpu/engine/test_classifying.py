"""Models with a classification head, held against transformers; and what a model cannot, refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import transformers

from holdfast import LLM
from holdfast.errors import CheckpointError, HoldfastError, RequestError, UnsupportedOptionError

PROMPTS = [[5, 6, 7, 8], [9], list(range(3, 90)), [5, 6, 7, 9]]
SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.4,
}


def save(folder: Path, name: str, **more: Any) -> Any:
    torch.manual_seed(5)
    config = getattr(transformers, f"{name}Config")(**SMALL, **more)
    model = getattr(transformers, f"{name}ForSequenceClassification")(config).eval()
    model.save_pretrained(folder)
    return model


def products(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return torch.stack([model(torch.tensor([prompt])).logits[0] for prompt in PROMPTS])


def served(folder: Path, **more: Any) -> LLM:
    settings: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "kv_cache_memory_bytes": "4MiB"}
    return LLM(str(folder), **settings, max_num_batched_tokens=32, max_num_seqs=4, **more)


@pytest.mark.parametrize(("family", "labels"), [("Llama", 3), ("Qwen3", 1)])
def test_the_chances_are_transformers_own(tmp_path: Path, family: str, labels: int) -> None:
    logits = products(save(tmp_path, family, num_labels=labels, **({"head_dim": 8} if family == "Qwen3" else {})))
    wanted = logits.sigmoid() if labels == 1 else logits.softmax(-1)
    with served(tmp_path) as llm:
        found = llm.classify(PROMPTS, use_tqdm=False)
        assert numpy.allclose([output.outputs.probs for output in found], wanted.numpy(), atol=2e-5)
        assert [output.outputs.num_classes for output in found] == [labels] * len(PROMPTS)
        encoded = llm.encode(PROMPTS[:1], pooling_task="classify", use_tqdm=False)
        assert encoded[0].outputs.data.tolist() == pytest.approx(found[0].outputs.probs, abs=1e-5)
        with pytest.raises(UnsupportedOptionError, match="classifies texts and cannot generate"):
            llm.generate(PROMPTS, use_tqdm=False)
        with pytest.raises(UnsupportedOptionError, match="no embeddings"):
            llm.embed(PROMPTS, use_tqdm=False)


RERANKER = {"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["no", "yes"]}


@pytest.mark.parametrize("tied", [True, False])
def test_a_reranker_that_answers_yes_or_no_is_a_classifier(tmp_path: Path, tied: bool) -> None:
    torch.manual_seed(5)
    shape = SMALL | {"vocab_size": 49152, "head_dim": 8, "tie_word_embeddings": tied}
    model: Any = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shape)).eval()
    model.save_pretrained(tmp_path)
    overrides = RERANKER | {"is_original_qwen3_reranker": True}
    settings: dict[str, Any] = {"dtype": "float32", "tokenizer": "smollm2", "kv_cache_memory_bytes": "4MiB"}
    with LLM(str(tmp_path), **settings, max_num_batched_tokens=64, max_num_seqs=4, hf_overrides=overrides) as llm:
        tokenizer = llm.get_tokenizer()
        places = [tokenizer.encode(word)[0] for word in ("no", "yes")]
        template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
        found = llm.score("a cat", ["a kitten", "stocks"], chat_template=template, use_tqdm=False)
        for output in found:
            with torch.inference_mode():
                logits = model(torch.tensor([output.prompt_token_ids])).logits[0, -1, places]
            assert output.outputs.score == pytest.approx(logits.softmax(-1)[1].item(), abs=2e-5)
    assert found[0].outputs.score != found[1].outputs.score


@pytest.mark.parametrize(
    "ranks",
    [
        {"tensor_parallel_size": 2},
        pytest.param({"pipeline_parallel_size": 2}, marks=pytest.mark.long),
        pytest.param({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, marks=pytest.mark.long),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["tied", "untied", pytest.param("stored", marks=pytest.mark.long)])
def test_several_ranks_classify_as_one_does(tmp_path: Path, kind: str, ranks: dict[str, int]) -> None:
    """Also where the classifier is made of rows of the vocabulary, of which each rank has a part or none."""
    torch.manual_seed(5)
    shape, more = SMALL | {"head_dim": 8, "tie_word_embeddings": kind == "tied"}, dict[str, Any]()
    if kind == "stored":
        save(tmp_path, "Qwen3", num_labels=3, head_dim=8)
    else:
        transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shape)).save_pretrained(tmp_path)
        # The second is the last rank's, and their order is not that of the vocabulary.
        made = {"classifier_from_token": ["a", "b", "c"], "method": "no_post_processing"}
        more["hf_overrides"] = RERANKER | made | {"classifier_token_ids": [7, 90, 3]}
    with served(tmp_path, threads=2, **more) as llm:
        alone = [output.outputs.probs for output in llm.classify(PROMPTS, use_tqdm=False)]
    with served(tmp_path, threads=4, **more, **ranks) as llm:
        together = [output.outputs.probs for output in llm.classify(PROMPTS, use_tqdm=False)]
    assert numpy.allclose(together, alone, atol=1e-5)
    assert numpy.std(alone, axis=0).max() > 0.01, "prompts are told apart"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "method"),
        ({"method": "from_2_way_softmax", "classifier_from_token": ["yes"]}, "two tokens"),
        ({"method": "no_post_processing", "classifier_from_token": ["no such token"]}, "no token of"),
    ],
)
def test_rerankers_that_are_described_wrongly_are_refused(tmp_path: Path, changes: Any, message: str) -> None:
    transformers.Qwen3Config(**SMALL, head_dim=8).save_pretrained(tmp_path)
    with pytest.raises(HoldfastError, match=message):
        LLM(str(tmp_path), load_format="dummy", tokenizer="smollm2", hf_overrides=RERANKER | changes)


def test_more_labels_than_the_head_has_rows_are_refused(tmp_path: Path) -> None:
    save(tmp_path, "Llama", num_labels=3)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"2": "LABEL_2"', '"2": "LABEL_2", "3": "LABEL_3"'))
    with pytest.raises(CheckpointError, match="score"):
        served(tmp_path)


def test_a_model_for_chats_scores_only_when_it_is_asked_to() -> None:
    """As in vLLM. Its embeddings are there either way."""
    with LLM(max_model_len=128, max_num_seqs=4, kv_cache_memory_bytes="16MiB") as llm:
        with pytest.raises(UnsupportedOptionError, match="trained to generate text, not to score it") as refused:
            llm.score("a cat", ["a kitten"], use_tqdm=False)
        assert 'runner="pooling"' in str(refused.value.fix)
        assert len(llm.embed("a cat", use_tqdm=False)) == 1


def test_scores_are_cosines_of_embeddings() -> None:
    with LLM(max_model_len=128, max_num_seqs=4, kv_cache_memory_bytes="16MiB", runner="pooling") as llm:
        texts = ["a cat", "a kitten", "stock market"]
        vectors = numpy.array([one.outputs.embedding for one in llm.embed(texts, use_tqdm=False)])
        found = llm.score(texts[0], texts, use_tqdm=False)
        assert numpy.allclose([one.outputs.score for one in found], vectors @ vectors[0], atol=1e-5)
        lengths = [len(llm.get_tokenizer().encode(text)) for text in texts]
        assert [len(one.prompt_token_ids) for one in found] == [lengths[0] + length for length in lengths]
        assert llm.score(texts, texts, use_tqdm=False)[2].outputs.score == pytest.approx(1, abs=1e-5)
        assert llm.encode(texts[0], use_tqdm=False)[0].outputs.data.tolist() == pytest.approx(vectors[0], abs=1e-6)
        with pytest.raises(RequestError, match="1:1, 1:N or N:N"):
            llm.score(texts[:2], texts, use_tqdm=False)
        with pytest.raises(UnsupportedOptionError, match="no classification head"):
            llm.classify(texts, use_tqdm=False)
        with pytest.raises(UnsupportedOptionError, match="only the last token is pooled"):
            llm.encode(texts, pooling_task="token_embed", use_tqdm=False)
