"""What it costs to hold answers to a form: masks a row and token, and a batch of held answers beside one of free ones.

    python -m benchmarks.structured --models smollm2 gemma-3-270m --batch 8

A mask is timed at each token of a text that has the form; free and held batches alternate in one engine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from holdfast import LLM, SamplingParams, StructuredOutputsParams
from holdfast.checkpoints import locate
from holdfast.text.structured.client import vocabulary_of
from holdfast.text.structured.llguidance_backend import Grammars
from holdfast.text.tokenizer.tokenizer import Tokenizer

ADDRESS = {
    "type": "object",
    "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
    "required": ["street", "zip"],
}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0},
        "tags": {"type": "array", "items": {"type": "string"}},
        "address": ADDRESS,
    },
    "required": ["name", "age", "tags", "address"],
    "additionalProperties": False,
}
TEXT = (
    '{"name": "Alice Liddell", "age": 30, "tags": ["reader", "dreams of a white rabbit", "tea"], '
    '"address": {"street": "12 Christ Church, behind the great hall", "zip": "12345"}}'
)
JSON_GBNF = r"""root ::= value
value ::= object | array | string | number | "true" | "false" | "null"
object ::= "{" ws (string ":" ws value ("," ws string ":" ws value)*)? "}" ws
array ::= "[" ws (value ("," ws value)*)? "]" ws
string ::= "\"" ([^"\\\x00-\x1f] | "\\" ["\\/bfnrt])* "\"" ws
number ::= "-"? [0-9]+ ("." [0-9]+)? ws
ws ::= [ \t\n]*
"""
FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "schema of 6 fields": ({"json": PERSON}, TEXT),
    "any JSON object": ({"json_object": True}, TEXT),
    "regex, words": ({"regex": "[A-Za-z ,.']{20,2000}"}, "Alice was beginning to get very tired of sitting by her"),
    "choice of 50": ({"choice": [f"option {number}" for number in range(50)]}, "option 49"),
    "JSON as GBNF": ({"grammar": JSON_GBNF}, TEXT),
}  # fmt: skip
PROMPT = "Describe a person as JSON."


def masks(name: str, repeats: int) -> None:
    tokenizer = Tokenizer.from_files(locate(name, revision=None))
    eos = tokenizer.eos_token_id
    assert eos is not None
    began_s = time.perf_counter()
    grammars = Grammars(vocabulary_of(tokenizer), [eos], tokenizer.ids_end)
    print(f"{name}: {tokenizer.ids_end:,} tokens, ready in {time.perf_counter() - began_s:.2f} s")
    for title, (form, text) in FORMS.items():
        params, tokens = StructuredOutputsParams(**form), tokenizer.encode(text, add_special_tokens=False)
        began_s = time.perf_counter()
        grammars.matcher(params)
        compiled_s, times_s, first_s = time.perf_counter() - began_s, list[float](), list[float]()
        for turn in range(repeats):
            matcher = grammars.matcher(params)
            for token in tokens:
                began_s = time.perf_counter()
                matcher.mask()
                (times_s if turn else first_s).append(time.perf_counter() - began_s)
                assert matcher.consume(token), f"{title}: {matcher.error}"
        print(
            f"  {title:20} compiled in {compiled_s * 1e3:6.1f} ms; "
            f"a mask: median {statistics.median(times_s) * 1e6:6.0f} us, mean {statistics.fmean(times_s) * 1e6:6.0f}, "
            f"worst {max(times_s) * 1e3:6.2f} ms; first answer: mean {statistics.fmean(first_s) * 1e6:6.0f} us, "
            f"worst {max(first_s) * 1e3:6.2f} ms"
        )


def throughput(name: str, batch: int, tokens: int, repeats: int) -> None:
    words, schema = StructuredOutputsParams(regex="[a-zA-Z ,.]{4000}"), StructuredOutputsParams(json=PERSON)
    with LLM(name, max_model_len=1024, max_num_seqs=batch, kv_cache_memory_bytes="256MiB") as llm:
        free = [SamplingParams(max_tokens=tokens, seed=seed, ignore_eos=True) for seed in range(batch)]
        held = [SamplingParams(max_tokens=tokens, seed=seed, structured_outputs=words) for seed in range(batch)]
        told = [SamplingParams(max_tokens=tokens, seed=seed, structured_outputs=schema) for seed in range(batch)]
        sides = {"free": free, "words": held, "words and free": [*held[::2], *free[1::2]], "schema": told}
        rates: dict[str, list[float]] = {side: [] for side in sides}
        for turn in range(repeats + 1):
            for side, params in sides.items():
                began_s = time.perf_counter()
                outputs = llm.generate([PROMPT] * batch, params, use_tqdm=False)
                made = sum(len(output.outputs[0].token_ids) for output in outputs)
                if turn:
                    rates[side].append(made / (time.perf_counter() - began_s))
        shown = ", ".join(f"{side} {statistics.median(found):.1f} tokens/s" for side, found in rates.items())
        print(f"{name}, {batch} at once, {tokens} tokens each, median of {repeats}: {shown}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", nargs="+", default=["smollm2"])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    for name in arguments.models:
        masks(name, arguments.repeats)
    throughput(arguments.models[0], arguments.batch, arguments.tokens, arguments.repeats)


if __name__ == "__main__":
    main()
