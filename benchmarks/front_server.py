"""The real HTTP front with the public fake engine behind it, which has every token at once: what is left is the front.

python benchmarks/front_server.py PORT [PROFILE.pstats]
"""

from __future__ import annotations

import cProfile
import signal
import sys

from holdfast.engine.fake import FakeEngine, say
from holdfast.observability.logs import json_lines
from holdfast.server.app import create_app
from holdfast.server.run import bind, run
from holdfast.server.settings import ServerSettings

ANSWER = "It was the best of times, it was the worst of times, it was the age of wisdom. "


def main(port: int, profile: str | None) -> int:
    engine = FakeEngine(say(ANSWER), max_num_seqs=1024)
    # The access log is written as `holdfast serve` writes it.
    settings = ServerSettings(served_model_names=("fake",), access_log=json_lines(sys.stderr))
    app = create_app(engine, settings)
    listener = bind("127.0.0.1", port)

    def serve() -> int:
        return run(app, engine, listener=listener, drain_timeout_s=1)

    if profile is None:
        return serve()
    profiler = cProfile.Profile()
    try:
        return profiler.runcall(serve)
    finally:
        profiler.dump_stats(profile)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who started us.
    sys.exit(main(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None))
