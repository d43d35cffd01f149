"""How much of JSON Schema answers can be held to: the JSON-Schema-Test-Suite, as jsonschema's sdist on PyPI has it.

    python -m benchmarks.schema_coverage jsonschema-4.26.0.tar.gz

Of every schema: compiled, or refused with a reason. Of every instance, byte by byte as compact JSON: accepted or not.
What counts is that nothing invalid is accepted; a valid instance may be rejected, because an answer has its properties
in the schema's order.
"""

from __future__ import annotations

import argparse
import json
import tarfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.errors import GrammarError, RequestError
from holdfast.records.structured import StructuredOutputsParams, Vocabulary
from holdfast.text.structured.llguidance_backend import Grammars

END = 256
VOCABULARY = Vocabulary([bytes([byte]) for byte in range(256)] + [b"</s>"], {"</s>": END})


@dataclass(slots=True)
class Tally:
    compiled: int = 0
    refused: int = 0
    valid_accepted: int = 0
    valid_rejected: int = 0
    invalid_rejected: int = 0
    invalid_accepted: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    unsound: list[str] = field(default_factory=list)


def groups(archive: Path, draft: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file, group) of the required tests of a draft."""
    with tarfile.open(archive) as files:
        for member in files.getmembers():
            folder, _, name = member.name.rpartition("/")
            if folder.endswith(f"json/tests/{draft}") and name.endswith(".json"):
                held = files.extractfile(member)
                if held is not None:
                    yield from ((name, group) for group in json.load(held))


def measure(archive: Path, draft: str) -> Tally:
    grammars, tally = Grammars(VOCABULARY, [END], END + 1), Tally()
    for name, group in groups(archive, draft):
        try:
            if group["schema"] is False:
                raise GrammarError("nothing is valid")
            form = StructuredOutputsParams(json=group["schema"])
            grammars.matcher(form)
        except RequestError as error:
            tally.refused += 1
            tally.reasons[error.message.removeprefix("json: ").split(":")[0][:60]] += 1
            continue
        tally.compiled += 1
        for test in group["tests"]:
            count(tally, accepted(grammars, form, test["data"]), test["valid"], f"{name}: {group['description']}")
    return tally


def accepted(grammars: Grammars, form: StructuredOutputsParams, instance: Any) -> bool:
    matcher = grammars.matcher(form)
    text = json.dumps(instance, ensure_ascii=False, separators=(",", ":"))
    return matcher.consume_all(list(text.encode(errors="surrogatepass"))) and matcher.library.is_accepting()


def count(tally: Tally, was_accepted: bool, valid: bool, where: str) -> None:
    if valid:
        tally.valid_accepted += was_accepted
        tally.valid_rejected += not was_accepted
    else:
        tally.invalid_accepted += was_accepted
        tally.invalid_rejected += not was_accepted
        if was_accepted:
            tally.unsound.append(where)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("archive", type=Path)
    parser.add_argument("--drafts", nargs="+", default=["draft2020-12", "draft7"])
    arguments = parser.parse_args()
    for draft in arguments.drafts:
        tally = measure(arguments.archive, draft)
        print(
            f"{draft}: {tally.compiled} of {tally.compiled + tally.refused} schemas compiled; "
            f"invalid instances rejected {tally.invalid_rejected}, accepted {tally.invalid_accepted}; "
            f"valid instances accepted {tally.valid_accepted}, rejected {tally.valid_rejected}"
        )
        for reason, times in tally.reasons.most_common(12):
            print(f"  refused {times:3}  {reason}")
        for where in tally.unsound:
            print(f"  accepted though invalid: {where}")


if __name__ == "__main__":
    main()
