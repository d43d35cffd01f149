"""pytest and its plugins without work that they do for nothing at each of many thousand tests. Importing this changes
them; what a test sees is not touched. It knows nothing of our tests."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest
from _pytest.assertion import rewrite
from _pytest.logging import catching_logs


def _attach(self: Any) -> Any:
    """As pytest's own since 9, which looks through the loggers of all libraries, six times a test, for those that keep
    their records to themselves. Of these only ours are of interest."""
    if self.level is not None:
        self.handler.setLevel(self.level)
    root = logging.getLogger()
    self.attached_loggers += [root, *(one for one in _OWN if not one.propagate)]
    for logger in self.attached_loggers:
        logger.addHandler(self.handler)
    if self.level is not None:
        self.orig_level = root.level
        root.setLevel(min(root.level, self.level))
    return self.handler


_OWN = (logging.getLogger("holdfast"),)

if hasattr(catching_logs, "attached_loggers"):
    catching_logs.__enter__ = _attach


def keep_reruns_here(config: pytest.Config) -> None:
    """A worker asks the first process before every test how often it has failed, for a schedule that could run a test
    again whose process crashed; that of whole files cannot."""
    if hasattr(config, "workerinput") and hasattr(config, "failures_db"):
        config.failures_db = sys.modules["pytest_rerunfailures"].StatusDB()


def rewrite_a_share(config: pytest.Config, folder: Path) -> None:
    """Every worker reads all files of tests, and where it is not yet kept what their asserts become, each finds it out
    for all of them. Of a run of all tests each does its share first, so that it finds the others' done."""
    worker: dict[str, Any] | None = getattr(config, "workerinput", None)
    whole = [(config.invocation_params.dir / one).resolve() for one in config.args] == [folder]
    if worker is None or not whole or sys.dont_write_bytecode:
        return
    number, workers = int(worker["workerid"].removeprefix("gw")), worker["workercount"]
    for path in sorted(folder.rglob("test_*.py"))[number::workers]:
        kept = rewrite.get_cache_dir(path) / (path.stem + rewrite.PYC_TAIL)
        if rewrite.try_makedirs(kept.parent) and rewrite._read_pyc(path, kept) is None:
            source, code = rewrite._rewrite_test(path, config)
            rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, source, kept)


def seed_torch(torch: Any, seed: int) -> None:
    """torch writes down the whole stack for every kind of GPU that is not there yet, in case that one comes."""
    if torch.cuda.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)
