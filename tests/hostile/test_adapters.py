"""Adapters that a client names: their files may hold anything and link anywhere, and the worst answer is a refusal.

A fuzzer over every file of an adapter's folder, and a real server that is asked to load the worst of them.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import hostile_files as files
import httpx
import pytest
from deadlines import PATIENCE_S
from hostile_json import HUGE, Raw, dump, spoiled_bytes
from limits import Ending, Limited

MODEL = {**files.CONFIG, "vocab_size": 49152}
FACTORS = {
    "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": (4, 32),
    "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight": (32, 4),
}
ADAPTER: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["q_proj"],
    "bias": "none",
    "use_rslora": False,
    "base_model_name_or_path": "maker/tiny",
    "alpha_pattern": {"q_proj": 16},
    "rank_pattern": {},
    "lora_dropout": 0.1,
}
ADDED = {"<x>": 100, "<y>": 101}
TOKENIZER_CONFIG = {"added_tokens_decoder": {"100": {"content": "<x>"}}, "model_max_length": 10**30}
JSON_FILES: dict[str, dict[str, Any]] = {
    "adapter_config.json": ADAPTER,
    "added_tokens.json": ADDED,
    "tokenizer_config.json": TOKENIZER_CONFIG,
}


def write_adapter(folder: Path) -> Path:
    folder.mkdir(parents=True)
    header = json.dumps(files.safetensors_header(FACTORS)).encode()
    (folder / "adapter_model.safetensors").write_bytes(files.safetensors_file(header, files.data_size(FACTORS)))
    for name, table in JSON_FILES.items():
        (folder / name).write_text(json.dumps(table))
    return folder


def spoil_adapter(folder: Path, random: Random) -> None:
    name = random.choice([*JSON_FILES, *JSON_FILES, "adapter_model.safetensors"])
    if name in JSON_FILES:
        special = ({HUGE: 1}, {"²": 1}, {"٣": 1}, {"9" * 5000: {"content": "<x>"}}, {"<x>": HUGE}, {"<x>": 1 << 70})
        (folder / name).write_bytes(spoiled_bytes(JSON_FILES[name], random, special))
    else:
        (folder / name).write_bytes(files.spoiled_safetensors(FACTORS, random))


@pytest.fixture(scope="module")
def load() -> Iterator[Limited]:
    with Limited("hostile_loads:load_adapter") as limited:
        yield limited


def fuzz_adapters(cases, load: Limited, tmp_path: Path, count: int = 400) -> None:
    refused = 0
    for name, random in cases(count):
        folder = write_adapter(tmp_path / "case")
        spoil_adapter(folder, random)
        ending = load(str(folder), str(tmp_path), MODEL)
        assert ending.good, f"{name}: {ending.kind}\n{ending.detail}"
        if ending.kind == "refused":
            # Of adapters clients are told, with a status of 4xx; and they are not told where files lie.
            assert ending.detail.startswith("HF37"), f"{name}: {ending.detail}"
            assert str(tmp_path) not in ending.detail, f"{name}: {ending.detail}"
            refused += 1
        shutil.rmtree(folder)
    assert refused > 20


def test_adapters(cases, load, tmp_path) -> None:
    fuzz_adapters(cases, load, tmp_path)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_adapters_for_long(cases, load, tmp_path) -> None:
    fuzz_adapters(cases, load, tmp_path)


def test_a_good_adapter_is_taken(load: Limited, tmp_path: Path) -> None:
    assert load(str(write_adapter(tmp_path / "good")), str(tmp_path), MODEL) == Ending("returned", '"one"')


LINKED = [*JSON_FILES, "adapter_model.safetensors"]


@pytest.mark.parametrize("name", LINKED)
def test_no_file_is_read_through_a_link_out_of_the_folder(load: Limited, tmp_path: Path, name: str) -> None:
    folder, secret = write_adapter(tmp_path / "allowed" / "one"), tmp_path / "secret"
    (folder / name).rename(secret)
    (folder / name).symlink_to(secret)
    ending = load(str(folder), str(tmp_path / "allowed"), MODEL)
    assert (ending.kind, ending.detail[:5], name in ending.detail) == ("refused", "HF371", True), ending
    # A link that stays within what was allowed, as in a hub's cache, is one more way to store a file.
    secret.rename(tmp_path / "allowed" / "blob")
    (folder / name).unlink()
    (folder / name).symlink_to(tmp_path / "allowed" / "blob")
    assert load(str(folder), str(tmp_path / "allowed"), MODEL).kind == "returned"


@pytest.mark.parametrize("name", LINKED)
def test_no_pipe_or_device_is_waited_for(load: Limited, tmp_path: Path, name: str) -> None:
    folder = write_adapter(tmp_path / "one")
    (folder / name).unlink()
    os.mkfifo(folder / name)
    ending = load(str(folder), str(tmp_path), MODEL)
    optional = name in ("added_tokens.json", "tokenizer_config.json")
    assert ending.kind == ("returned" if optional else "refused"), ending


def test_a_server_refuses_them_and_goes_on(start_server, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "adapters").mkdir()
    server = start_server(
        str(model),
        "--load-format",
        "dummy",
        "--tokenizer",
        "smollm2",
        "--threads",
        "1",
        "--dtype",
        "float32",
        "--kv-cache-memory-bytes",
        "16MiB",
        "--enable-lora",
        "--lora-folders",
        str(tmp_path / "adapters"),
    ).wait_ready()
    (tmp_path / "secret").write_text(json.dumps({"<x>": 1 << 40}))
    bad: dict[str, tuple[str, Any]] = {
        "digits": ("adapter_config.json", {**ADAPTER, "lora_alpha": HUGE}),
        "rank": ("adapter_config.json", {**ADAPTER, "r": HUGE}),
        "unknown": ("adapter_config.json", {**ADAPTER, "other": Raw("1e400")}),
        "nan": ("adapter_config.json", {**ADAPTER, "lora_alpha": Raw("NaN")}),
        "deep": ("adapter_config.json", {**ADAPTER, "loftq_config": Raw("[" * 9999 + "]" * 9999)}),
        "key": ("tokenizer_config.json", {"added_tokens_decoder": {"9" * 5000: {}}}),
        "huge id": ("added_tokens.json", {"<x>": 10**60}),
        "link": ("added_tokens.json", tmp_path / "secret"),
        "other link": ("tokenizer_config.json", tmp_path / "secret"),
    }
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
        for name, (file, content) in bad.items():
            folder = write_adapter(tmp_path / "adapters" / name)
            (folder / file).unlink()
            if isinstance(content, Path):
                (folder / file).symlink_to(content)
            else:
                (folder / file).write_text(dump(content))
            answer = client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(folder)})
            # A file that may not be read is as one that is not there.
            assert answer.status_code == (404 if "HF371" in answer.text else 400), (name, answer.text)
            assert answer.json()["error"]["holdfast"]["code"].startswith("HF37"), (name, answer.text)
        good = write_adapter(tmp_path / "adapters" / "good")
        answer = client.post("/v1/load_lora_adapter", json={"lora_name": "good", "lora_path": str(good)})
        assert answer.status_code == 200, answer.text
    assert "Traceback" not in server.log
