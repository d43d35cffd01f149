"""Commands and sentences as they are printed: no key in them, still a command, and none of our own words taken."""

from __future__ import annotations

import shlex
import subprocess
import tarfile
from pathlib import Path

import pytest

from holdfast.doctor.check_command.check import judge_command
from holdfast.doctor.diagnosis.diagnose import diagnose_lines
from holdfast.doctor.report.bundle import write_bundle
from holdfast.doctor.report.redact import redacted, without_values
from holdfast.doctor.report.secret_names import values_of_flags
from holdfast.doctor.report.text import lines, without_keys
from holdfast.rescue.choose_fix import read
from holdfast.rescue.masking import secret_values, shown, shown_change


@pytest.mark.parametrize(
    ("command", "printed", "secrets"),
    [
        ("vllm serve m --api-key k-1 k-2 --port 80", 'vllm serve m --api-key "${API_KEY:?}" "${API_KEY_2:?}" --port 80',
         {"k-1", "k-2"}),
        ("holdfast serve m --node-secret abcdefgh", 'holdfast serve m --node-secret "${HOLDFAST_NODE_SECRET:?}"',
         {"abcdefgh"}),
        ("vllm serve m --api-keyy=abcd", 'vllm serve m --api-keyy="${API_KEYY:?}"', {"abcd"}),
        ("HF_TOKEN=abcd nice -n 5 vllm serve m", 'HF_TOKEN="${HF_TOKEN:?}" nice -n 5 vllm serve m', {"abcd"}),
        ("env VLLM_API_KEY=abcd vllm serve m", 'env VLLM_API_KEY="${VLLM_API_KEY:?}" vllm serve m', {"abcd"}),
        ("llama-server -m 'a b.gguf' --api-key-file /run/key --max-num-batched-tokens 8",
         "llama-server -m 'a b.gguf' --api-key-file /run/key --max-num-batched-tokens 8", set()),
    ],
)  # fmt: skip
def test_a_printed_command_stays_one(command: str, printed: str, secrets: set[str]) -> None:
    started = read(shlex.split(command))
    assert shown(started) == printed
    assert secret_values(started) == secrets


def test_a_shell_puts_the_key_in_and_stops_without() -> None:
    text = shown(read(["vllm", "serve", "m", "--api-key", "a key"])).replace("vllm", "printf '%s|'", 1)
    given = {"PATH": "/usr/bin:/bin", "API_KEY": "a key"}
    assert subprocess.run(["sh", "-c", text], env=given, capture_output=True).stdout == b"serve|m|--api-key|a key|"
    assert subprocess.run(["sh", "-c", text], env={"PATH": given["PATH"]}, capture_output=True).returncode != 0


def test_sentences_lose_keys_and_no_words() -> None:
    assert without_values("--api-key is near, was abcd", {"abcd"}) == "--api-key is near, was [REDACTED]"
    assert shown_change("--api-key", "abcd") == '--api-key "${API_KEY:?}"'
    assert shown_change("--max-model-len", "8192") == "--max-model-len 8192"
    assert values_of_flags("--api-key abcd --port 80; --hf-token is what it has") == {"abcd"}
    assert values_of_flags('--api-key "${API_KEY:?}" model-2') == frozenset()
    assert values_of_flags("--api-keyy k-1 model-2") == {"k-1"}


def test_what_a_shell_fills_in_is_no_secret_and_what_only_looks_so_is() -> None:
    for harmless in ('--api-key "${API_KEY:?}" "${API_KEY_2:?}"', 'HF_TOKEN="${HF_TOKEN:?}"', "TOKEN=$TOKEN"):
        assert redacted(harmless) == harmless
    for secret in ("PASSWORD=$ecret-word", "--api-key ${KEY:-hunter22}", "api_key: $3cret"):
        assert "[REDACTED]" in redacted(secret), secret


def test_a_key_of_the_evidence_stands_nowhere_in_the_answer(tmp_path: Path) -> None:
    found = without_keys(
        diagnose_lines(["vllm: error: unrecognized arguments: --api-keyy abcdefgh --swap-space 4"], "log")
    )
    assert found.findings
    assert "abcdefgh" not in "\n".join(lines(found))
    assert "abcdefgh" not in str(found)
    judged = judge_command("vllm serve meta-llama/Llama-3.1-8B-Instruct --api-keyy abcdefgh")
    assert {"--api-keyy": None, "--api-key": "abcdefgh"} in [one.fix and one.fix.changes for one in judged.findings]
    write_bundle(str(tmp_path / "bundle"), [], judged)
    with tarfile.open(tmp_path / "bundle") as bundle:
        assert all(b"abcdefgh" not in file.read() for one in bundle if (file := bundle.extractfile(one)) is not None)
