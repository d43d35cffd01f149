"""LoRA adapters of an engine on two nodes, each of which has files of its own: the tokens of one rank; and where a node
has not got an adapter, or another one, that one is refused with the node's number, and all others are served on.

Nodes are process groups of this machine (support/node_processes.py). The adapters' path goes by the folder that a
process is in: it is the same on both nodes, and leads to other files on each.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from lora_adapters import write_adapter
from node_processes import nodes
from rank_engines import PROMPTS, make, tokens

from holdfast import LLM, LoRARequest
from holdfast.errors import AdapterError

pytestmark = pytest.mark.usefixtures("forked_starts")

LORA = {"enable_lora": True, "max_loras": 2}
NAMES = ("sql", "law", "differs", "lacks")
MIXED = (None, "sql", "law")
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


@pytest.fixture
def head(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The head's adapters, in the folder that this process is in."""
    for seed, name in enumerate(NAMES):
        write_adapter(tmp_path / "head" / name, tiny_model, seed=seed, rank=2 + seed)
    monkeypatch.chdir(tmp_path / "head")
    return tmp_path / "head"


def request(name: str | None) -> LoRARequest | None:
    return None if name is None else LoRARequest(name, 1 + NAMES.index(name), f"/proc/self/cwd/{name}")


def said(llm: LLM, names: Sequence[str | None]) -> list[list[int]]:
    return tokens(llm, PROMPTS[: len(names)], lora=[*map(request, names)])


def refused(llm: LLM, name: str) -> AdapterError:
    with pytest.raises(AdapterError) as caught:
        said(llm, [name])
    assert "/proc" not in str(caught.value), "clients are told no folder"
    return caught.value


@pytest.fixture
def of_one(tiny_model: Path, head: Path) -> tuple[list[list[int]], list[list[int]]]:
    """Of the mixed batch, and of the adapter that another node has yet to get."""
    with make(tiny_model, 1, **LORA) as llm:
        assert llm._adapters.resolve(LoRARequest("sql", 9, "sql")).digest == "", "one machine reads none of it twice"
        plain, mixed = said(llm, [None] * len(MIXED)), said(llm, MIXED)
        assert [ours != theirs for ours, theirs in zip(plain, mixed, strict=True)] == [False, True, True]
        return mixed, said(llm, ["lacks"])


@pytest.mark.parametrize(
    "sizes",
    [(1, 2), pytest.param((2, 1), marks=pytest.mark.long), pytest.param((2, 2), marks=pytest.mark.long)],
    ids=["pp2", "tp2", "tp2-pp2"],
)
def test_adapters_of_two_nodes(
    tiny_model: Path,
    tmp_path: Path,
    head: Path,
    of_one: tuple[list[list[int]], list[list[int]]],
    sizes: tuple[int, int],
) -> None:
    first = sizes[0] * sizes[1] // 2
    with nodes(tmp_path, tiny_model, sizes) as (settings, [other]):
        for name in ("sql", "law"):
            shutil.copytree(head / name, other.home / name)
        write_adapter(other.home / "differs", tiny_model, seed=9, rank=2 + NAMES.index("differs"))
        shutil.copy(head / "differs" / CONFIG, other.home / "differs" / CONFIG)
        with make(tiny_model, sizes[0], **LORA, **settings) as llm:
            assert said(llm, MIXED) == of_one[0]
            error = refused(llm, "differs")
            assert error.code == "HF379"
            assert error.message == f"rank {first} (node 1): {WEIGHTS} of differs is another one than on the head"
            assert "and not the same" in str(error.found)
            error = refused(llm, "lacks")
            assert error.code == "HF379"
            assert error.message.startswith(f"rank {first} (node 1): the folder of lacks that the head named")
            assert error.found == "No such file or directory"
            assert "LoRA adapter at /proc/self/cwd/lacks: the folder of lacks" in other.log
            assert said(llm, MIXED) == of_one[0], "others are there as before"
            shutil.copytree(head / "lacks", other.home / "lacks")
            assert said(llm, ["lacks"]) == of_one[1], "it is looked for anew"
            assert llm.info.memory.ranks[-1].node == 1
        assert other.wait() == 0
