"""Of what a test worker tells the process that collects results, only what that one uses: of a test that passes one
message in place of six. Knows nothing of the tests."""

from __future__ import annotations

from typing import Any

import pytest

NOTICED_S = 0.005
"""From here on the duration of a setup or teardown is told: --durations lists it."""


def quieten(config: pytest.Config) -> None:
    """In a worker of pytest-xdist; elsewhere, and where each test is printed or written to a file, nothing changes."""
    if not hasattr(config, "workerinput") or config.option.verbose > 0 or config.option.xmlpath:
        return
    for plugin in config.pluginmanager.get_plugins():
        if type(plugin).__name__ == "WorkerInteractor":
            plugin.sendevent = _filtered(plugin.sendevent)


def _filtered(send: Any) -> Any:
    def send_what_is_used(name: str, **event: Any) -> None:
        if name in ("logstart", "logfinish") or (name == "testreport" and _says_nothing(event["data"])):
            return
        send(name, **event)

    return send_what_is_used


def _says_nothing(report: dict[str, Any]) -> bool:
    return report["when"] != "call" and report["outcome"] == "passed" and report["duration"] < NOTICED_S
