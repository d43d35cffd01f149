"""The first lines of an engine process, before anything large is imported. The rest is in `main`."""

from __future__ import annotations

import gc
import sys
from typing import NoReturn

from holdfast.engine.startup.preload_torch import preload_torch
from holdfast.leave import leave


def main() -> NoReturn:
    preload_torch()
    gc.disable()  # Until all is there that stays (`main.run` enables it again).
    from holdfast.engine.process.main import run

    leave(run(sys.argv[1]))


if __name__ == "__main__":
    main()
