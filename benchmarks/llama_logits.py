"""Logits after every token of a text, from llama.cpp: llama_logits.py MODEL IDS.json OUT.npy THREADS

Runs in llama.cpp's own environment, so it imports nothing of the project but its adapter.
"""

from __future__ import annotations

import json
import os
import sys


def main(model: str, ids: str, out: str, threads: str) -> None:
    # The folder of this file would shadow modules of the library; the one above it holds only packages.
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    import numpy

    from benchmarks.llama_adapter import LlamaAdapter

    with open(ids) as file:
        tokens = json.load(file)
    adapter = LlamaAdapter({"model": model, "threads": int(threads)})
    library, context = adapter.lib, adapter.context_for(1, len(tokens), False)
    batch = library.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for index, token in enumerate(tokens):
        batch.token[index], batch.pos[index], batch.n_seq_id[index] = token, index, 1
        batch.seq_id[index][0], batch.logits[index] = 0, True
    status = library.llama_decode(context, batch)
    if status != 0:
        raise RuntimeError(f"llama_decode answered {status}")
    rows = [
        numpy.ctypeslib.as_array(library.llama_get_logits_ith(context, index), shape=(adapter.vocabulary,)).copy()
        for index in range(len(tokens))
    ]
    numpy.save(out, numpy.stack(rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
