"""What a bug report must not hold: secrets and words of users, planted in every form that logs have, and looked for."""

from __future__ import annotations

import gzip
import random
import string
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.doctor.diagnosis.diagnose import diagnose_lines
from holdfast.doctor.findings import Diagnosis
from holdfast.doctor.report.bundle import FIRST_LINES, LAST_LINES, write_bundle
from holdfast.doctor.report.redact import GONE, redacted, without_secrets
from holdfast.doctor.rules.load import rulebook

STAMP = "INFO 05-05 10:00:00 [logger.py:39]"
KEYS = (
    "DEBUG header Authorization: Bearer {0}",
    "authorization: ApiKey {0}",
    "Authorization: Token {0} and {1}",
    '{{"headers": {{"authorization": "Bearer {0}", "x-api-key": "{1}"}}}}',
    "headers=[(b'authorization', b'{0}'), (b'x-api-key', b'{1}'), (b'cookie', b'sid={1}')]",
    "Cookie: session={0}; id={1}",
    "SECRET_KEY={0} OPENAI_KEY={1}",
    "export API_KEY_PROD='{0}'",
    "docker run -e HF_TOKEN={0} -e MY_PASS={1} vllm/vllm-openai",
    "$ vllm serve m --api-key {0} {1} --port 8000",
    "$ vllm serve m --ssl-keyfile-password={0} --hf-token '{1}'",
    "args: Namespace(api_key=['{0}', '{1}'], model='m')",
    "non-default args: {{'api_key': ('{0}', \"{1}\"), 'max_model_len': 4096}}",
    '{{"log": "{{\\"api_key\\": \\"{0}\\", \\"password\\": \\"{1}\\"}}"}}',
    '[{{"name": "HF_TOKEN", "value": "{0}"}}, {{"name":"DB_PASSWORD","value":"{1}"}}]',
    "        - name: HF_TOKEN\n          value: {0}",
    "https://jane:{0}@proxy:3128/x and https://{1}@github.com/x/y",
    "GET https://b.s3.amazonaws.com/x?X-Amz-Credential={0}&X-Amz-Signature={1}",
    'IP - "GET /v1/models?api_key={0}&q={1} HTTP/1.1" 200',
    "AccountName=a;AccountKey={0};EndpointSuffix=core",
    "Password is {0}, the password {1}",
    "client_secret: {0}",
    "-----BEGIN PRIVATE KEY-----\n{0}\n{1}\n-----END PRIVATE KEY-----",
    'curl -H "Authorization: Bearer {0}" -u me:{1} http://x',
)
WORDS = (
    STAMP + " Received request chatcmpl-1: prompt: '{0}', params: SamplingParams(n=1), prompt_token_ids: None",
    STAMP + " Received request chatcmpl-1: prompt: 'line one\n{0}\nlast {1}', params: SamplingParams(n=1)",
    STAMP + " Generated response chatcmpl-1: output: '{0}', output_token_ids: [1, 2]",
    "[2025-05-05 10:00:00 TP0] Receive: obj=GenerateReqInput(rid='abc', text='{0}', input_ids=None)",
    "[2025-05-05 10:00:00] Finish: obj=GenerateReqInput(rid='a'), out={{'text': '{0}', 'meta_info': {{}}}}",
    '2025-05-05T10:00:00Z INFO generate{{inputs="{0}"}}: text_generation_router: Success',
    'srv  log_server_r: request:  {{"messages":[{{"role":"user","content":"{0}"}}],"prompt":"{1}"}}',
    "slot process_toke: id 0 | n_decoded = 1, next token: 123 '{0}'",
    '{{"input": "{0}", "model": "x"}}',
    '{{"type": "text", "text": "{0}"}}',
    '"reasoning_content": "{0}"',
    "Input prompt: {0}\nand further {1}",
    "User prompt = {0}",
    '{{"tool_calls": [{{"function": {{"name": "f", "arguments": "{{\\"q\\": \\"{0}\\"}}"}}}}]}}',
    "templated: <|im_start|>user\n{0}<|im_end|>",
    "ValidationError: 1 error for Request [type=missing, input_value={{'messages': '{0}'}}, input_type=dict]",
    "{{'url': 'data:image/png;base64,{0}'}}",
)
PEOPLE = (
    ("jane", "/home/" + "jane/models/x"),
    ("jane", "/mnt/users/jane/models"),
    ("jane", "C:/Users/jane/models"),
    ("Smith", r"C:\Users\Jane Smith\models"),
    ("Smith", r"'C:\\Users\\Jane Smith\\models'"),
    ("jane", "jane@example.org"),
    ("10.1.2.3", 'INFO:     10.1.2.3:51822 - "POST /v1/completions HTTP/1.1" 200 OK'),
)
ERROR = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 256.00 MiB."


def _planted(form: str, random_one: random.Random) -> tuple[str, list[str]]:
    words = ["".join(random_one.choices(string.ascii_letters + string.digits, k=12)) for _ in range(2)]
    return form.format(*words), [word for at, word in enumerate(words) if f"{{{at}}}" in form]


def _whole_log(seed: int) -> tuple[str, list[str]]:
    random_one = random.Random(seed)
    forms = [*KEYS, *WORDS]
    random_one.shuffle(forms)
    planted = [_planted(form, random_one) for form in forms]
    lines = [line for text, _ in planted for line in (f"{STAMP} a line of the engine's", text)]
    return "\n".join([*lines, f"{STAMP} end", ERROR]), [secret for _, secrets in planted for secret in secrets]


@pytest.mark.parametrize("form", [*KEYS, *WORDS])
def test_no_form_lets_a_secret_through(form: str) -> None:
    for seed in range(5):
        text, secrets = _planted(form, random.Random(seed))
        clean = redacted(text)
        assert not [secret for secret in secrets if secret in clean], clean
        assert GONE in clean


@pytest.mark.parametrize("form", KEYS)
def test_what_is_shown_to_its_owner_hides_keys_too(form: str) -> None:
    if "\n" not in form:
        text, secrets = _planted(form, random.Random(0))
        assert not [secret for secret in secrets if secret in without_secrets(text)]


@pytest.mark.parametrize(("name", "text"), PEOPLE)
def test_people_are_not_named(name: str, text: str) -> None:
    assert name not in redacted(f"before {text} behind")


@pytest.mark.parametrize(
    "packed",
    [
        lambda text: text.encode(),
        lambda text: gzip.compress(text.encode()),
        lambda text: text.encode("utf-16"),
        lambda text: text.encode("utf-16-le"),
        lambda text: text.replace("\n", "\r\n").encode("utf-8-sig"),
    ],
    ids=["plain", "gz", "utf-16", "utf-16 without its mark", "windows"],
)
def test_a_log_however_it_is_written(packed: Callable[[str], bytes], tmp_path: Path) -> None:
    text, secrets = _whole_log(7)
    log = tmp_path / "server.log"
    log.write_bytes(packed(text))
    found = _bundled(log, tmp_path)
    assert not [secret for secret in secrets if secret in found]
    assert found.count("a line of the engine's") == len(KEYS) + len(WORDS)
    assert found.rstrip().endswith(ERROR)


def test_the_end_of_a_long_log_may_begin_within_a_prompt(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    prompt = "\n".join(f"private {number}" for number in range(FIRST_LINES + LAST_LINES))
    log.write_text(f"{STAMP} Received request a-1: prompt: 'begun\n{prompt}\nended'\n{STAMP} next\n{ERROR}\n")
    found = _bundled(log, tmp_path)
    assert "private" not in found
    assert found.count("lines left out") == 1
    assert found.endswith(f"{STAMP} next\n{ERROR}")


def _bundled(log: Path, folder: Path) -> str:
    path = folder / "report.tar.gz"
    nothing = Diagnosis(engine=None, engine_version=None, command=None, phase=None, healthy=False, findings=[])
    assert write_bundle(str(path), [str(log)], nothing) == ["diagnosis.json", "versions.txt", "log-0.txt"]
    assert path.stat().st_mode & 0o777 == 0o600
    assert [one.name for one in folder.iterdir() if one.name.startswith(".")] == []
    with tarfile.open(path) as archive:
        return archive.extractfile("log-0.txt").read().decode()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "text",
    [
        "max_tokens=16, prompt_tokens: 200, num_key_value_heads=8",
        "api_key=None",
        "GPU KV cache size: 37,136 tokens",
        "--max-model-len 4096 --max-num-batched-tokens 2048 --limit-mm-per-prompt '{\"image\": 2}'",
        "limit_mm_per_prompt={'image': 2}, tokenizer='a/b', eos_token_id=2",
        "print_info: EOS token        = 2 '</s>'",
        "KeyError: 'model.layers.0.weight'",
        "prompt eval time =     100.0 ms /    10 tokens",
        "Avg prompt throughput: 0.0 tokens/s, Running: 1 reqs",
        "error: unrecognized arguments: --swap-space 4",
        '  File "/usr/lib/python3/site-packages/vllm/x.py", line 3, in forward',
        "Nov 01 03:09:11 host vllm[1422]: INFO 127.0.0.1:8000 is where it listens",
        "Traceback (most recent call last):",
        "sha256:" + "0123456789abcdef" * 4,
    ],
)
def test_what_a_report_needs_stays(text: str) -> None:
    assert redacted(text) == text


def test_the_diagnosis_is_the_same_without_secrets() -> None:
    for rule in rulebook().rules:
        for example in (text for text in rule.examples if redacted(text) != text):
            whole = diagnose_lines(example.split("\n"), "log")
            clean = diagnose_lines(redacted(example).split("\n"), "log")
            assert [(one.cause, one.confidence) for one in clean.findings] == [
                (one.cause, one.confidence) for one in whole.findings
            ], rule.id


def test_long_words_take_no_longer_than_others() -> None:
    """Where time grew with the square of their length this would not end."""
    for word in ("a-", "a.", "token-", "key='", "--api-key a ", "/home/", "x=", " ", "a@", "aA1"):
        redacted(word * 4_000)
