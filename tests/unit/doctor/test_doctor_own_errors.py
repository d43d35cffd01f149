"""What Holdfast says of itself: the same codes in its errors, in the doctor's findings and in `holdfast explain`."""

from __future__ import annotations

import shlex

import pytest

from holdfast.cli.fatal import command_line, say_fatal
from holdfast.doctor import diagnose_lines
from holdfast.doctor.command.parse import parse_command
from holdfast.doctor.rules.load import rulebook
from holdfast.errors import DoesNotFitError, EngineDiedError
from holdfast.observability.codes import codes

CAUSED = [code for code in codes().values() if code.cause]
SERVE = "2026-11-15 20:18:41 INFO holdfast: command: holdfast serve tiny --ram 500MiB --max-num-seqs 4"


@pytest.mark.parametrize("code", CAUSED, ids=lambda code: code.code)
def test_a_finding_has_the_code_of_the_error(code):
    assert code.cause in rulebook().causes
    (found,) = diagnose_lines(["holdfast 0.1.0", f"holdfast: it is so [{code.code}]"], "log").findings
    assert (found.code, found.cause, found.what) == (code.code, code.cause, "Holdfast: it is so")


def test_an_error_that_ends_a_server_has_a_cause():
    """Those of one request end nobody; settings of other commands are not a server's."""
    without = {code.code for code in codes().values() if code.kind in ("class", "case") and not code.cause}
    assert not [code for code in without if code.startswith(("HF11", "HF12", "HF13", "HF15", "HF2", "HF44"))]


@pytest.mark.parametrize(("where", "cause"), [("memory", "host_ram_oom"), ("GPU memory", "other_process_on_gpu")])
def test_a_rank_that_could_not_start_lacked_what_it_says(where, cause):
    (found,) = diagnose_lines([SERVE, f"holdfast: rank 1: out of {where} while it started [HF448]"], "log").findings
    assert (found.code, found.cause) == ("HF448", cause)


@pytest.mark.parametrize(
    ("needed", "cause"),
    [
        ("front 188.00 MiB, weights 600.00 MiB, and 10.00 MiB for the KV of 64 tokens", "weights_do_not_fit"),
        ("front 188.00 MiB, weights 400.00 MiB, and 10.00 MiB for the KV of 64 tokens", "no_memory_for_kv_blocks"),
        (
            "front 8.00 MiB, weights 400.00 MiB, and 110.00 MiB for the KV of 64 tokens",
            "kv_cache_too_small_for_max_len",
        ),
    ],
)
@pytest.mark.parametrize("prefix", ["", "web-1  | ", "Nov 15 20:18:42 host holdfast[77]: "])
def test_what_does_not_fit_is_read_below_the_message(needed, cause, prefix):
    said = [
        SERVE,
        "holdfast: the model does not fit in memory [HF110]",
        f"  needed: {needed}",
        "  found:  500.00 MiB of budget: 100.00 MiB short",
        "  fix:    --ram 1024MiB, or --max-num-seqs 2 --max-model-len 512, or leave it out",
    ]
    (found,) = diagnose_lines([prefix + line for line in said], "log").findings
    assert (found.cause, found.code, found.confidence) == (cause, "HF110", "high")
    assert found.root_cause == ("kv_blowout" if cause.startswith("kv") else "configuration_overshoot")
    assert found.fix is not None
    assert found.fix.command == "holdfast serve tiny --ram 1024MiB --max-num-seqs 4"
    first, words = found.alternatives
    assert first.command == "holdfast serve tiny --ram 500MiB --max-num-seqs 2 --max-model-len 512"
    assert (words.command, words.why) == (None, "leave it out")


def test_lines_of_another_error_are_not_taken_for_its_own():
    said = ["holdfast 0.1.0", "holdfast: the port is taken [HF150]", *["x"] * 9, "  fix:    --ram 9GiB"]
    (found,) = diagnose_lines(said, "log").findings
    assert found.fix is None


def test_a_process_that_was_killed_ran_out_of_memory_most_likely():
    (found,) = diagnose_lines(
        ["holdfast 0.1.0", "holdfast: the engine process ended while starting (signal 9) [HF410]"], "log"
    ).findings
    assert (found.cause, found.confidence) == ("host_ram_oom", "medium")


READY = [SERVE, "2026-11-15 20:18:43 INFO holdfast: Ready: http://127.0.0.1:8000"]
DEATH = "20:19:4{} ERROR engine: the engine process exited ({}) with 3 unfinished requests; restarting it [HF410]"
AGAIN = "2026-11-15 20:19:5{} INFO engine: the engine process is ready again; resuming 3 unfinished requests"


def test_deaths_that_the_server_recovered_from_are_advice():
    said = [*READY, DEATH.format(1, "signal 11"), AGAIN.format(1), DEATH.format(5, "signal 11"), AGAIN.format(5)]
    found = diagnose_lines(said, "log")
    assert (found.healthy, found.phase) == (True, "serve")
    (finding,) = found.findings
    assert (finding.code, finding.cause) == ("HF410", "other")
    assert "deaths in this log: 2" in finding.what
    assert "could not be resumed" not in finding.why
    assert [one.number for one in finding.evidence] == [3, 4, 6]


@pytest.mark.parametrize(("ending", "cause"), [("signal 11", "other"), ("signal 9", "host_ram_oom")])
def test_a_death_after_a_recovery_is_a_failure(ending, cause):
    said = [*READY, DEATH.format(1, "signal 11"), AGAIN.format(1), DEATH.format(5, ending)]
    found = diagnose_lines(said, "log")
    assert not found.healthy
    assert found.findings[0].cause == cause
    assert ending in found.findings[0].what


def test_a_server_that_ends_says_why(capsys):
    error = DoesNotFitError("no", needed="weights 2.00 GiB, and x", found="1.00 GiB of budget", fix="--ram 3GiB")
    say_fatal(error, ("serve", "tiny", "--ram", "1GiB", "--api-key", "geheim", "--api-key=geheim"))
    said = capsys.readouterr().err
    assert said.splitlines() == [
        "holdfast: no [HF110]",
        "  needed: weights 2.00 GiB, and x",
        "  found:  1.00 GiB of budget",
        "  cause:  the weights alone are more than the memory has (weights_do_not_fit)",
        "  fix:    --ram 3GiB",
        '  run:    holdfast serve tiny --ram 3GiB --api-key "${API_KEY:?}" --api-key="${API_KEY:?}"',
    ]


def test_a_command_that_is_offered_is_not_the_one_that_was_given():
    error = DoesNotFitError("no", needed="weights 2.00 GiB", found="1.00 GiB of budget", fix="--ram 3GiB, or --a never")
    given, offered = "holdfast serve tiny --ram 1GiB --a always", "holdfast serve tiny --ram 3GiB --a always"
    log = [f"INFO holdfast: command: {given}", *f"holdfast: {error}".splitlines(), f"  run:    {offered}"]
    found = diagnose_lines(log, "log")
    assert found.command == given
    (finding,) = found.findings
    assert finding.fix is not None
    assert finding.fix.command == offered
    assert finding.alternatives[0].command == "holdfast serve tiny --ram 1GiB --a never"


def test_a_fault_of_its_own_is_not_memory(capsys):
    try:
        raise KeyError("a bug")
    except KeyError as error:
        say_fatal(error, ("serve",))
    assert "other [HFD" in capsys.readouterr().err
    say_fatal(EngineDiedError("it ended"), ("serve",))
    assert capsys.readouterr().err == "holdfast: it ended [HF410]\n"


def test_several_keys_after_one_flag_are_all_hidden():
    assert command_line(["serve", "--api-key", "one", "two", "--port", "1"]) == (
        'holdfast serve --api-key "${API_KEY:?}" "${API_KEY:?}" --port 1'
    )


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("--api-key K -tp 2", '--api-key "${API_KEY:?}" -tp 2'),
        ("--api-key K J -c8192 m", '--api-key "${API_KEY:?}" "${API_KEY:?}" -c8192 m'),
        ("--api-key K -cc.mode=3", '--api-key "${API_KEY:?}" -cc.mode=3'),
        (
            "--node-secret S -tp 2 -pp 2 --node-rank 1",
            '--node-secret "${HOLDFAST_NODE_SECRET:?}" -tp 2 -pp 2 --node-rank 1',
        ),
        ("--node-secret S some/model -q awq", '--node-secret "${HOLDFAST_NODE_SECRET:?}" some/model -q awq'),
        ("--node-secret --port 1", "--node-secret --port 1"),
    ],
)
def test_a_secret_ends_at_the_next_flag(given: str, shown: str) -> None:
    assert command_line(["serve", *given.split()]) == f"holdfast serve {shown}"


@pytest.mark.parametrize("secret", ["-5", "-", "-a b", "--a b", "-Zx0_9aQw-hunter222", "-12.5"])
@pytest.mark.parametrize("flag", ["--api-key", "--node-secret"])
def test_a_secret_that_begins_with_a_dash_is_hidden(flag: str, secret: str) -> None:
    assert command_line(["serve", flag, secret, "-tp", "2"]).endswith(':?}" -tp 2')


def test_a_key_is_hidden_however_its_flag_is_spelled():
    for flag in ("--api-key", "--api_key"):
        assert "sk-1" not in command_line(["serve", flag, "sk-1"])
        assert command_line(["serve", f"{flag}=sk-1"]) == f'holdfast serve {flag}="${{API_KEY:?}}"'


def test_each_secret_has_a_variable_of_its_own():
    words = ["serve", "m", "--node-secret", "hunter222", "--api-key", "sk-1", "--node_secret=hunter222"]
    shown = (
        'holdfast serve m --node-secret "${HOLDFAST_NODE_SECRET:?}" --api-key "${API_KEY:?}"'
        ' --node_secret="${HOLDFAST_NODE_SECRET:?}"'
    )
    assert command_line(words) == shown
    assert command_line(shlex.split(shown)[1:]).count("HOLDFAST_NODE_SECRET") == 2
    read = parse_command("holdfast serve m --node-secret hunter222 --api-key sk-1 --hf-token hf_1 --port 1")
    assert read is not None
    assert read.with_changes({"--port": "2"}) == (
        'holdfast serve m --node-secret "${HOLDFAST_NODE_SECRET:?}" --api-key "${API_KEY:?}"'
        ' --hf-token "${HF_TOKEN:?}" --port 2'
    )
