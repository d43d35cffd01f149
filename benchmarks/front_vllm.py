"""vLLM's own HTTP front with an engine that has every token at once, to be driven as Holdfast's front is.

    PEER/bin/python benchmarks/front_vllm.py PORT FOLDER

Runs in vLLM's environment. FOLDER holds a config.json and a tokenizer. The engine client is ours and gives text as well
as ids, so that turning ids into text, which vLLM does in this process too, is not counted against it.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import AsyncIterator
from typing import Any

import uvloop
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.launchers.api_server.entry import build_and_serve
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.launchers.launcher import setup_server
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.renderers import renderer_from_config
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.input_processor import InputProcessor

ANSWER = "It was the best of times, it was the worst of times, it was the age of wisdom. "


class InstantEngine(EngineClient):  # type: ignore[misc]
    """One token an output, given up to the others after each, as the fake of Holdfast's."""

    is_running, is_stopped, errored = True, False, False

    def __init__(self, config: Any) -> None:
        self.vllm_config, self.model_config = config, config.model_config
        self.renderer = renderer_from_config(config)
        self.input_processor = InputProcessor(config, self.renderer)

    async def generate(self, prompt: Any, params: Any, request_id: str, **_: Any) -> AsyncIterator[Any]:
        for count, character in enumerate(itertools.islice(itertools.cycle(ANSWER), params.max_tokens), 1):
            await asyncio.sleep(0)
            last = count == params.max_tokens
            output = CompletionOutput(0, character, [ord(character)], None, None)
            output.finish_reason = "length" if last else None
            yield RequestOutput(request_id, None, [1] * 16, None, [output], last, num_cached_tokens=0)

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    async def is_tracing_enabled(self) -> bool:
        return False

    async def check_health(self) -> None:
        return


# Nobody asks it the rest.
InstantEngine.__abstractmethods__ = frozenset()


async def main(port: str, folder: str) -> None:
    parser = make_arg_parser(FlexibleArgumentParser())
    words = [folder, "--port", port, "--host", "127.0.0.1", "--served-model-name", "fake"]
    arguments = parser.parse_args([*words, "--load-format", "dummy", "--dtype", "float32", "--max-model-len", "2048"])
    arguments.model = folder
    config = AsyncEngineArgs.from_cli_args(arguments).create_engine_config()
    address, listener = setup_server(arguments, reuse_port=False)
    await (await build_and_serve(InstantEngine(config), address, listener, arguments))


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:3]))
