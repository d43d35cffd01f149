"""`python -m holdfast.entrypoints.openai.api_server --model MODEL`, as vLLM is started by module: `holdfast serve`."""

from __future__ import annotations

import sys

from holdfast.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
