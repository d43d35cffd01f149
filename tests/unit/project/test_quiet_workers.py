"""What test workers leave unsaid: nothing that failed, was skipped or took long."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from quiet_workers import quieten


class WorkerInteractor:
    """As xdist's."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Any]] = []

    def sendevent(self, name: str, **event: Any) -> None:
        self.sent.append((name, event.get("data")))


def report(when: str = "call", outcome: str = "passed", duration: float = 0.001) -> dict[str, Any]:
    return {"when": when, "outcome": outcome, "duration": duration}


def quietened(verbose: int = 0, xmlpath: str | None = None) -> WorkerInteractor:
    plugin, option = WorkerInteractor(), SimpleNamespace(verbose=verbose, xmlpath=xmlpath)
    manager = SimpleNamespace(get_plugins=lambda: {object(), plugin})
    quieten(SimpleNamespace(workerinput={}, option=option, pluginmanager=manager))  # type: ignore[arg-type]
    return plugin


@pytest.mark.parametrize(
    "said",
    [
        report(),
        report("call", "failed"),
        report("setup", "failed"),
        report("setup", "skipped"),
        report("teardown", "failed"),
        report("setup", duration=0.1),
    ],
)
def test_what_is_used_is_said(said: dict[str, Any]) -> None:
    plugin = quietened()
    plugin.sendevent("testreport", data=said)
    plugin.sendevent("runtest_protocol_complete")
    assert plugin.sent == [("testreport", said), ("runtest_protocol_complete", None)]


def test_what_is_not_used_is_not_said() -> None:
    plugin = quietened()
    plugin.sendevent("logstart")
    plugin.sendevent("testreport", data=report("setup"))
    plugin.sendevent("testreport", data=report("teardown"))
    plugin.sendevent("logfinish")
    assert plugin.sent == []


@pytest.mark.parametrize("option", [{"verbose": 1}, {"xmlpath": "results.xml"}])
def test_where_every_test_is_listed_all_is_said(option: dict[str, Any]) -> None:
    plugin = quietened(**option)
    plugin.sendevent("logstart")
    assert plugin.sent == [("logstart", None)]


def test_it_knows_the_class_of_xdist() -> None:
    from xdist import remote

    assert remote.WorkerInteractor.__name__ == WorkerInteractor.__name__
    assert hasattr(remote.WorkerInteractor, "sendevent")
