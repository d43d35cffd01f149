"""The shape of a 405B at a sixteenth of its width, on eight ranks of one machine: all of its 126 layers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast import LLM, SamplingParams
from holdfast.execution import native

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not native.available(), reason="ranks wait for one another by compiled code"),
]

SIXTEENTH = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256 // 16,
    "hidden_size": 16384 // 16, "intermediate_size": 53248 // 16, "num_hidden_layers": 126,
    "num_attention_heads": 128 // 16, "head_dim": 128,
    "num_key_value_heads": 4, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "tie_word_embeddings": False, "torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def test_it_starts_on_eight_ranks_and_answers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SIXTEENTH))
    with LLM(
        model=str(tmp_path),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        kv_cache_memory_bytes="512MiB",
        tensor_parallel_size=2,
        pipeline_parallel_size=4,
    ) as llm:
        rows = llm.info.memory.ranks
        assert [row.rank for row in rows] == list(range(8))
        assert [(row.first_layer, row.layers) for row in rows[::2]] == [(0, 31), (31, 32), (63, 32), (95, 31)]
        assert [row.weights_bytes for row in rows] == [row.planned_weights_bytes for row in rows]
        prompts = [{"prompt_token_ids": list(range(10 + number, 90 + 3 * number))} for number in range(6)]
        params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [len(output.outputs[0].token_ids) for output in outputs] == [4] * 6
