"""llama.cpp through its C interface, with the batching its Python class does not offer. Runs in its environment only.

llama.cpp has no scheduler of its own in process, so this file plays one, in llama.cpp's favour: all sequences of a call
advance together, and a prefix that all prompts share is computed once and given to the others by `seq_cp`.
"""

from __future__ import annotations

import os
from importlib.metadata import version
from typing import Any

TokenLists = list[list[int]]

BATCH_TOKENS = 512
"""llama.cpp's own default for a physical batch."""
SHARED_AT_LEAST = 256
"""Only a prefix this long is treated as shared."""


def shared_length(prompts: TokenLists) -> int:
    shortest = min(len(prompt) for prompt in prompts) - 1
    length = 0
    while length < shortest and all(prompt[length] == prompts[0][length] for prompt in prompts):
        length += 1
    return length if len(prompts) > 1 and length >= SHARED_AT_LEAST else 0


class LlamaAdapter:
    def __init__(self, settings: dict[str, Any]) -> None:
        import llama_cpp
        import numpy

        self.lib: Any = llama_cpp
        self.numpy: Any = numpy
        self.threads = settings["threads"]
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(
            settings["model"].encode(), llama_cpp.llama_model_default_params()
        )
        if not self.model:
            raise RuntimeError(f"llama.cpp could not load {settings['model']}")
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.contexts: dict[tuple[int, int, bool], Any] = {}
        self.last_prefix: list[int] = []
        self.version = version("llama_cpp_python")
        self.root_pid = os.getpid()

    def context_for(self, sequences: int, tokens_each: int, unified: bool) -> Any:
        """Kept between calls: an engine in service does not make a context a request."""
        key = (sequences, -(-tokens_each // 256) * 256, unified)
        if key not in self.contexts:
            params = self.lib.llama_context_default_params()
            params.n_ctx = key[1] if unified else key[0] * key[1]
            params.n_batch = params.n_ubatch = BATCH_TOKENS
            params.n_seq_max = sequences
            params.kv_unified = unified
            params.n_threads = params.n_threads_batch = self.threads
            params.no_perf = True
            self.contexts[key] = self.lib.llama_init_from_model(self.model, params)
            if not self.contexts[key]:
                raise RuntimeError("llama.cpp could not make a context")
        return self.contexts[key]

    def decode(self, context: Any, tokens: list[tuple[int, int, int, bool]]) -> list[int]:
        """Each token is (id, position, sequence, wanted); returns the likeliest next id of each wanted one."""
        chosen: list[int] = []
        for first in range(0, len(tokens), BATCH_TOKENS):
            part = tokens[first : first + BATCH_TOKENS]
            batch = self.lib.llama_batch_init(len(part), 0, 1)
            batch.n_tokens = len(part)
            for index, (token, position, sequence, wanted) in enumerate(part):
                batch.token[index] = token
                batch.pos[index] = position
                batch.n_seq_id[index] = 1
                batch.seq_id[index][0] = sequence
                batch.logits[index] = wanted
            status = self.lib.llama_decode(context, batch)
            if status != 0:
                raise RuntimeError(f"llama_decode answered {status}")
            for index, (_, _, _, wanted) in enumerate(part):
                if wanted:
                    row = self.numpy.ctypeslib.as_array(
                        self.lib.llama_get_logits_ith(context, index), shape=(self.vocabulary,)
                    )
                    chosen.append(int(row.argmax()))
            self.lib.llama_batch_free(batch)
        return chosen

    def prefill_shared(self, context: Any, memory: Any, prefix: list[int], sequences: int) -> None:
        """The prefix in sequence 0, kept from the last call if it is the same, then lent to the others."""
        if prefix != self.last_prefix:
            self.lib.llama_memory_clear(memory, True)
            self.decode(context, [(token, position, 0, False) for position, token in enumerate(prefix)])
            self.last_prefix = list(prefix)
        else:
            self.lib.llama_memory_seq_rm(memory, 0, len(prefix), -1)
        for sequence in range(1, sequences):
            self.lib.llama_memory_seq_rm(memory, sequence, -1, -1)
            self.lib.llama_memory_seq_cp(memory, 0, sequence, 0, len(prefix))

    def generate(self, prompts: TokenLists, output_tokens: int) -> TokenLists:
        shared = shared_length(prompts)
        longest = max(len(prompt) for prompt in prompts) + output_tokens
        if shared:
            context = self.context_for(len(prompts), shared + len(prompts) * (longest - shared), True)
        else:
            context = self.context_for(len(prompts), longest, False)
        memory = self.lib.llama_get_memory(context)
        if shared:
            self.prefill_shared(context, memory, prompts[0][:shared], len(prompts))
        else:
            self.lib.llama_memory_clear(memory, True)
        rows = [
            (token, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
            if position >= shared
        ]
        answers: TokenLists = [[token] for token in self.decode(context, rows)]
        while len(answers[0]) < output_tokens:
            rows = [
                (answer[-1], len(prompts[sequence]) + len(answer) - 1, sequence, True)
                for sequence, answer in enumerate(answers)
            ]
            for answer, token in zip(answers, self.decode(context, rows), strict=True):
                answer.append(token)
        return answers

    def close(self) -> None:
        for context in self.contexts.values():
            self.lib.llama_free(context)
        self.lib.llama_model_free(self.model)
