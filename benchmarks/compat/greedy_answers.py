"""What one engine answers to fixed prompts of token ids, greedily, with log-probabilities, as a JSON file.

    python benchmarks/compat/greedy_answers.py ENGINE MODEL OUT [SETTINGS as JSON]

Needs nothing but the engine that it is asked for, so that it runs where only that one is installed; compares nothing.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

LENGTHS = (9, 16, 33, 64, 97, 128, 191, 300)
OUTPUT = 24
TOP = 20
"""Log-probabilities of the likeliest tokens, after each token of an output."""


def prompts(vocabulary: int) -> list[list[int]]:
    drawn = random.Random(5)
    return [[drawn.randrange(10, vocabulary) for _ in range(length)] for length in LENGTHS]


def told(answer: Any) -> dict[str, Any]:
    """Of each token of the prompt but the first its own chance; of the output the tokens and the likeliest ones."""
    ids = list(answer.prompt_token_ids)
    found = answer.prompt_logprobs
    return {
        "prompt": [found[place][ids[place]].logprob for place in range(1, len(ids))],
        "tokens": list(answer.outputs[0].token_ids),
        "likeliest": [
            {str(token): chance.logprob for token, chance in place.items()} for place in answer.outputs[0].logprobs
        ],
    }


def main(engine: str, model: str, out: str, settings: str = "{}") -> None:
    os.environ |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    module = importlib.import_module(engine)
    begin = time.perf_counter()
    llm = module.LLM(
        model=model,
        skip_tokenizer_init=True,
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=512,
        max_num_seqs=16,
        max_num_batched_tokens=1024,
        **json.loads(settings),
    )
    ready_s = time.perf_counter() - begin
    config = json.loads((Path(model) / "config.json").read_text())
    asked = [{"prompt_token_ids": ids} for ids in prompts(config["vocab_size"])]
    params = module.SamplingParams(
        temperature=0.0, max_tokens=OUTPUT, ignore_eos=True, logprobs=TOP, prompt_logprobs=0, detokenize=False
    )
    # The last prompt once more, alone: steps of one row.
    answers = [*llm.generate(asked, params, use_tqdm=False), *llm.generate(asked[-1:], params, use_tqdm=False)]
    document = {"version": module.__version__, "ready_s": ready_s, "answers": [told(answer) for answer in answers]}
    Path(out).write_text(json.dumps(document))


if __name__ == "__main__":
    main(*sys.argv[1:5])
