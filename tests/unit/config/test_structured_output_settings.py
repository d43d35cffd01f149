"""The server-wide setting of forms: each way to write it, what of it is honoured, and what a request may still say."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from holdfast.cli.dotted_flags import joined
from holdfast.config.structured_output import form_settings
from holdfast.errors import ConfigurationError
from holdfast.server.request.structured_output import form_of
from holdfast.server.schema.requests import ChatBody

FLAG = "--structured-outputs-config"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([f"{FLAG}.disable_any_whitespace", "true", "-p"], [f'{FLAG}={{"disable_any_whitespace": true}}', "-p"]),
        (["m", f"{FLAG}.disable-any-whitespace=False"], ["m", f'{FLAG}={{"disable_any_whitespace": false}}']),
        (["--structured_outputs_config.disable_any_whitespace", "--x", f"{FLAG}.backend", "auto"],
         [f'{FLAG}={{"disable_any_whitespace": true, "backend": "auto"}}', "--x"]),
        (["--other.part", "1", FLAG, "{}"], ["--other.part", "1", FLAG, "{}"]),
    ],
)  # fmt: skip
def test_parts_of_a_table_as_flags(words: list[str], expected: list[str]) -> None:
    assert joined(words) == expected


def test_what_is_honoured_and_what_is_refused_by_name() -> None:
    assert form_settings("x", '{"disable_any_whitespace": true, "backend": "xgrammar"}') == {
        "disable_any_whitespace": True
    }
    assert form_settings("x", {"disable_additional_properties": False, "reasoning_parser": ""}) == {
        "disable_additional_properties": False
    }
    for wrong in (
        {"backend": "other"},
        {"enable_in_reasoning": True},
        {"whitespace": True},
        '{"a"',
        {"backend": 3},
    ):
        with pytest.raises(ConfigurationError):
            form_settings("x", wrong)


@pytest.mark.parametrize(
    ("body", "blanks"),
    [
        ({"response_format": {"type": "json_object"}}, True),
        ({"guided_json": {}}, True),
        ({"guided_json": {}, "guided_whitespace_pattern": " ?"}, False),
        ({"structured_outputs": {"json": {}, "disable_any_whitespace": False}}, False),
        ({"guided_regex": "a"}, False),
    ],
)
def test_a_request_that_says_otherwise_is_heard(body: dict[str, Any], blanks: bool) -> None:
    asked = msgspec.convert({"messages": [], **body}, ChatBody)
    form = form_of(asked, {"disable_any_whitespace": True})
    assert form is not None
    assert form.disable_any_whitespace is blanks
