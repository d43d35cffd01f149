"""lm-eval against /v1/completions (token ids, echo and logprobs) and /v1/chat/completions. Argument: a folder with the
model's tokenizer, as Hugging Face stores one. Runs in the folder of its tasks."""

import os
import sys

from cases import main
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

URL, MODEL = os.environ["BASE_URL"], os.environ["MODEL"]
DATA = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "data")
os.chdir(DATA)


def _score(kind, path, task, metric, chat=False, **more):
    found = simple_evaluate(
        model=kind,
        model_args={"model": MODEL, "base_url": f"{URL}/{path}", "num_concurrent": 4, "max_retries": 1, **more},
        tasks=[task],
        task_manager=TaskManager(include_path=DATA, include_defaults=False),
        apply_chat_template=chat,
        bootstrap_iters=0,
    )
    results = found["results"][task]
    return [results[metric], found["n-samples"][task]["effective"]]


def choices_by_token_ids():
    tokens = {"tokenizer_backend": "huggingface", "tokenizer": sys.argv[1], "tokenized_requests": True}
    return _score("local-completions", "completions", "capitals_choice", "acc,none", **tokens)


def written():
    tokens = {"tokenizer_backend": "huggingface", "tokenizer": sys.argv[1], "tokenized_requests": True}
    return _score("local-completions", "completions", "capitals_written", "exact_match,named", **tokens)


def chat_written():
    return _score("local-chat-completions", "chat/completions", "capitals_chat", "exact_match,named", chat=True)


main(choices_by_token_ids, written, chat_written)
