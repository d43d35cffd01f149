"""guidellm: synthetic prompts on both endpoints, streamed, with usage and ignore_eos. Argument: a folder with the
model's tokenizer, as Hugging Face stores one."""

import json
import os
import subprocess
import sys
import tempfile

from cases import main

URL = os.environ["BASE_URL"].removesuffix("/v1")
REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 6, 32, 12


def _run(path, profile):
    with tempfile.TemporaryDirectory() as folder:
        report = os.path.join(folder, "report.json")
        done = subprocess.run(
            [
                sys.executable, "-m", "guidellm", "run", "--disable-console",
                "--backend", f"kind=openai_http,target={URL},model={os.environ['MODEL']},request_format={path}",
                "--profile", profile, "--constraint", f"kind=max_requests,count={REQUESTS}",
                "--tokenizer", f"kind=hf_auto,model={sys.argv[1]}",
                "--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}",
                "--output", f"kind=json,path={report}",
            ],
            capture_output=True, text=True, timeout=240,
        )  # fmt: skip
        if done.returncode != 0:
            raise RuntimeError(done.stdout[-3000:] + done.stderr[-3000:])
        with open(report) as file:
            (benchmark,) = json.load(file)["benchmarks"]
    requests = benchmark["requests"]
    return {
        "failed": len(requests["errored"]),
        "output_tokens": [one["output_metrics"]["text_tokens"] for one in requests["successful"]],
        "prompt_tokens": [one["input_metrics"]["text_tokens"] for one in requests["successful"]],
    }


def completions():
    return _run("/v1/completions", "kind=synchronous")


def chat():
    return _run("/v1/chat/completions", "kind=concurrent,streams=3")


main(completions, chat)
