"""`holdfast explain`, and that no code is without an explanation."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from holdfast import errors
from holdfast.cli.main import main
from holdfast.models import describe_config
from holdfast.observability.codes import codes, explain, fill_tables

ROOT = Path(__file__).resolve().parents[3]


def test_every_code_in_the_source_is_explained() -> None:
    used = {
        f"{code} ({path.relative_to(ROOT)})"
        for path in (ROOT / "src").rglob("*.py")
        for code in re.findall(r'"(HFW?\d{2,3})"', path.read_text(encoding="utf-8"))
        if code not in codes()
    }
    assert not used, f"describe them in codes.toml: {sorted(used)}"


def test_every_class_of_the_tree_is_explained_under_its_own_name() -> None:
    for name, kind in vars(errors).items():
        if isinstance(kind, type) and issubclass(kind, errors.HoldfastError):
            assert (codes()[kind.code].kind, codes()[kind.code].name) == ("class", name)


def test_every_explanation_is_of_a_code_that_is_used() -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    assert [code for code in codes() if f'"{code}"' not in source] == []


def test_the_page_says_the_same() -> None:
    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    assert fill_tables(page) == page, "run .venv/bin/python scripts/write_errors_page.py"
    assert all(f"| {code} |" in page for code in codes())


@pytest.mark.parametrize("written", ["HF110", "hf110", "[HF110]", " HF110 "])
def test_one_code(written: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", written]) == 0
    said = capsys.readouterr().out
    assert "DoesNotFitError, also a ValueError" in said
    assert "max-model-len" in said


def test_all_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain"]) == 0
    said = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert [code for code in said if not code.startswith("HFD")] == list(codes())
    assert len(set(said)) == len(said) > len(codes())  # The doctor's own are told too.
    assert main(["explain", "HFW20", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["kind"] == "plan"


def test_a_cause_is_told_as_the_doctor_finds_it_and_as_holdfast_says_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "preemption-thrash", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(one["code"], one["kind"]) for one in found] == [("HFW25", "doctor"), ("HFW25", "plan")]
    assert main(["explain", "bad_flag"]) == 0
    assert "HFD31" in capsys.readouterr().out


def test_an_unknown_code_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "HF11O"]) == 2
    assert "HF110" in capsys.readouterr().err
    with pytest.raises(errors.ConfigurationError):
        explain("x" * 10_000)


def test_several_codes_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "HF110", "HF111"]) == 0
    said = capsys.readouterr().out
    assert "HF110: " in said
    assert "HF111: " in said


def test_codes_that_begin_so_are_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "HF11"]) == 2
    assert "the closest: HF110, HF111, HF112" in capsys.readouterr().err


def test_a_terminal_is_shown_no_marks_of_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    for code in codes():
        assert main(["explain", code]) == 0
        assert "](" not in capsys.readouterr().out


def test_warnings_are_filed_under_who_says_them() -> None:
    """Those of plans are raised in the planner, the others at load."""
    planner = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src/holdfast/planner").rglob("*.py"))
    for code in codes().values():
        if code.kind in ("plan", "warning"):
            assert (code.kind == "plan") == (f'"{code.code}"' in planner), code.code


def test_an_unknown_architecture_is_said_shortly() -> None:
    with pytest.raises(errors.UnknownArchitectureError) as refused:
        describe_config({"architectures": ["LlamaForCausalLM2"]})
    assert "LlamaForCausalLM" in (refused.value.needed or "")
    assert max(map(len, str(refused.value).splitlines())) < 200
    assert "holdfast models" in (refused.value.fix or "")
