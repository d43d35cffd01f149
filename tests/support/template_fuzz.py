"""Templates made of everything that the sandbox offers, with large and odd operands, and a program that renders them.

    python template_fuzz.py SEED COUNT         renders that many and prints a JSON line with what it found
    python template_fuzz.py sweep PART OF      every operation with every operand: one part of that many

What there is to make them of is asked of the environment itself: a filter that Jinja gains is used here too.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

from holdfast.errors import RequestError
from holdfast.text.templates import budget as template_budget
from holdfast.text.templates import template
from holdfast.text.templates.methods import METHODS, PARTS

MEMORY_BYTES = 1 << 30
CPU_S = 0.4
"""Of one rendering, instead of the usual five: most of these never end."""
AGAIN_S, ATTEMPTS = 0.05, 12
"""A busy machine may slow some operations down: what took longer than this is tried again, and its best time counts."""

VARIABLES = {
    "long": "a" * 15_900_000,
    "mixed": "a" * 7_000_000 + "😀",
    "wide": "漢" * 1_000_000,
    "emoji": "😀" * 240_000,
    "sharp": "ß" * 249_000,
    "lines": "\n" * 499_000,
    "medium": "a" * 499_000,
    "tabs": "\t" * 15_000,
    "title": "aB " * 16_000,
    "blanks": " " * 3_000_000,
    "periodic": "ab" * 400_000,
    "needle": "a" * 5_000 + "b" + "a" * 5_000,
    "short": "a" * 20 + "b" + "a" * 20,
    "digits": "7" * 4_000,
    "hexdigits": "0x" + "f" * 2_000,
    "braces": "{0}" * 3_000,
    "percents": "%s" * 3_000,
    "tags": "<a href='x'>&" * 20_000,
    "huge": 2**4000 - 1,
    "odd": -(10**1200),
    "infinite": float("inf"),
    "nan": float("nan"),
    "small": 5e-324,
    "numbers": list(range(3_000)),
    "words": ["w" * (n % 50) + str(n) for n in range(2_000)],
    "objects": [{"name": f"n{n}", "value": n % 7, "inner": {"x": [n]}} for n in range(500)],
    "table": {f"k{n}": n for n in range(2_000)},
}
_MADE = (
    *("'a' * 1000000", "[0] * 900000", "range(9999) | list", "long.split('a', 9000)", "[[1] * 900] * 900", "ns.x"),
    *("dict(objects | map('items') | map('first'))", "cycler(1, 2, 3)", "joiner('x')", "joiner", "namespace(a=1)"),
    *("objects | groupby('value') | first", "table.items()", "table.keys()", "objects | map(attribute='name')"),
    *("words | batch(3)", "range(5)", "self", "long ~ wide", "long | safe", "tags | e", "numbers[::-1]", "missing"),
    *("none", "true", "''", "[]", "{}", "()", "0", "-1", "1", "3", "1.5", "255", "65536", "10000000", "1e308", "f"),
    *("'{:>1000000}'", "'%*d'", "'{0.real}'", "'a'", "'ab'", "' '", "'\\n'", "'name'", "'value'", "'x' * 199"),
    *(
        "'%r' % long",
        "'{!r}'.format(long)",
        "'%(x)a' % {'x': wide}",
        "'%1000000d'",
        "(1, (2, (3,)))",
        "ns.t",
        "messages",
    ),
)
_TEXTS = (*(name for name, value in VARIABLES.items() if isinstance(value, str)), "'a'", "' '", "'\\n'", "''")
OPERATORS = ("+", "-", "*", "/", "//", "%", "**", "~")
COMPARISONS = ("==", "!=", "<", "<=", ">", ">=", "in", "not in")


OPENING = "{% set ns = namespace(x='a', t=()) %}{% macro f(a) %}{{ a }}{{ varargs }}{{ f(a) }}{% endmacro %}"


class Maker:
    """Of templates. The same seed makes the same ones."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        environment = template._ENVIRONMENT
        self._filters = sorted(environment.filters)
        self._tests = sorted(environment.tests)
        self._globals = [*sorted(environment.globals), "range"]
        names = {name for methods in METHODS.values() for name in methods}
        self._attributes = sorted(names | {name for parts in PARTS.values() for name in parts} | {"encode", "append"})
        self._values = [*VARIABLES, *(f"({made})" for made in _MADE)]

    def value(self, depth: int) -> str:
        if depth <= 0 or self._random.random() < 0.35:
            return self._random.choice(self._values)
        kinds: list[Callable[[int], str]] = [
            self._operation, self._comparison, self._filtered, self._filtered, self._called, self._called, self._tested,
            self._sliced, self._display, self._mapped, self._global,
        ]  # fmt: skip
        return self._random.choice(kinds)(depth - 1)

    def text(self, depth: int) -> str:
        """One that is a text, if its operations go well: what fails early shows little."""
        if depth <= 0:
            return self._random.choice(_TEXTS)
        inner, other = self.text(depth - 1), self.text(0)
        number = self._random.choice(("1", "-1", "80000", "900000"))
        return self._random.choice(
            (
                f"{inner}.replace({other}, {self.text(depth - 1)})",
                f"{inner}.{self._random.choice(('strip', 'lstrip', 'rstrip', 'removeprefix'))}({other})",
                f"{inner}.{self._random.choice(('upper', 'lower', 'title', 'swapcase', 'casefold', 'expandtabs'))}()",
                f"{inner}.{self._random.choice(('ljust', 'rjust', 'center', 'zfill'))}({number})",
                f"({inner} | {self._random.choice(('e', 'safe', 'title', 'trim', 'indent', 'truncate', 'urlencode'))})",
                f"({inner} + {other})",
                f"({inner} ~ {other})",
                f"({inner} * {number})",
                f"{inner}[{number}:]",
                f"{inner}[::-1]",
                f"({self.texts(depth - 1)} | join({other}))",
                f"{other}.join({self.texts(depth - 1)})",
                f"({self.texts(depth - 1)} | tojson)",
                f"('%s-%{number}s' % ({inner}, {other}))",
                f"'{{}}{{:>{number}}}'.format({inner}, {other})",
            )
        )

    def texts(self, depth: int) -> str:
        """A list of such."""
        inner, other = self.text(depth), self.text(0)
        return self._random.choice(
            (
                f"{inner}.{self._random.choice(('split', 'rsplit', 'partition', 'rpartition'))}({other})",
                f"{inner}.splitlines()",
                f"([{inner}, {other}] * 300)",
                f"([{inner}] + words)",
                f"(words | {self._random.choice(('sort', 'unique', 'reverse', 'batch(3)', 'groupby(0)'))} | list)",
                f"([{inner}] * 9 | map('{self._random.choice(self._filters)}') | list)",
                f"{{{inner}: {other}}}",
            )
        )

    def _arguments(self, depth: int) -> str:
        values = [self.value(min(depth, 1)) for _ in range(self._random.choice((0, 1, 1, 1, 2, 2, 3)))]
        if self._random.random() < 0.05:
            values.append("*" + self.value(0))
        if self._random.random() < 0.1:
            values.append("attribute=" + self._random.choice(("'name'", "'inner.x'", "'a.' * 9000", "0")))
        return ", ".join(values)

    def _operation(self, depth: int) -> str:
        return f"({self.value(depth)} {self._random.choice(OPERATORS)} {self.value(depth)})"

    def _comparison(self, depth: int) -> str:
        chained = f" < {self.value(0)}" if self._random.random() < 0.1 else ""
        return f"({self.value(depth)} {self._random.choice(COMPARISONS)} {self.value(depth)}{chained})"

    def _filtered(self, depth: int) -> str:
        return f"({self.value(depth)} | {self._random.choice(self._filters)}({self._arguments(depth)}))"

    def _called(self, depth: int) -> str:
        return f"{self.value(depth)}.{self._random.choice(self._attributes)}({self._arguments(depth)})"

    def _tested(self, depth: int) -> str:
        test = self._random.choice([name for name in self._tests if name.isidentifier()])
        return f"({self.value(depth)} is {test}({self.value(0)}))"

    def _sliced(self, depth: int) -> str:
        parts = [self._random.choice(("", "1", "-1", "5", "huge")) for _ in range(3)]
        return f"{self.value(depth)}[{':'.join(parts[: self._random.choice((2, 3))])}]"

    def _display(self, depth: int) -> str:
        one, two = self.value(depth), self.value(depth)
        return self._random.choice((f"[{one}, {two}]", f"({one}, {two})", f"{{{one}: {two}}}", f"(-{one})"))

    def _mapped(self, depth: int) -> str:
        way = self._random.choice(("map", "select", "reject", "selectattr", "rejectattr"))
        names = self._filters if way == "map" else self._tests
        name = self._random.choice(names)
        arguments = f"'name', '{name}'" if way.endswith("attr") else f"'{name}'"
        return f"({self.value(depth)} | {way}({arguments}, {self.value(0)}) | list)"

    def _global(self, depth: int) -> str:
        return f"{self._random.choice(self._globals)}({self._arguments(depth)})"

    def statement(self, depth: int) -> str:
        value = self.text(3) if self._random.random() < 0.5 else self.value(3)
        kind = self._random.randrange(9)
        if kind < 4 or depth <= 0:
            return f"{{{{ {value} }}}}"
        inner = self.statement(depth - 1)
        test = self._random.choice(("defined", "odd", "mapping"))
        changed = "{% if loop.changed(v) %}{{ loop.length }}{% endif %}"
        return (
            f"{{% set ns.x = {value} %}}{inner}",
            f"{{% for v in {value} %}}{inner}{changed}{{% endfor %}}",
            f"{{% for v in {value} if v is {test} %}}{inner}{{% endfor %}}",
            f"{{% set y %}}{inner}{{{{ {value} }}}}{{% endset %}}{{{{ y | length }}}}",
            f"{{% for i in range(40) %}}{{% set ns.x = {self._grown()} %}}{{% set ns.t = (ns.t, ns.t) %}}"
            f"{{% endfor %}}{inner}",
        )[kind - 4]

    def _grown(self) -> str:
        return self._random.choice(
            (
                "ns.x ~ ns.x",
                "[ns.x, ns.x]",
                "ns.x + ns.x",
                "ns.x * 3",
                "'%s%s' % (ns.x, ns.x)",
                "{'a': ns.x, 'b': ns.x}",
            )
        )

    def template(self) -> str:
        return OPENING + "".join(self.statement(2) for _ in range(self._random.randrange(1, 4)))


def sweep() -> Iterator[str]:
    """Every operator, filter, test, method and slice, with every operand and a few arguments."""
    environment = template._ENVIRONMENT
    values = [*VARIABLES, *(f"({made})" for made in _MADE)]
    texts = [name for name, value in VARIABLES.items() if isinstance(value, str)]
    words = (
        "",
        "'a'",
        "'a', 'bb'",
        "needle",
        "short",
        "needle, ''",
        "'ab', 1",
        "short, 'x', 5",
        "lines",
        "words",
        "999999",
    )
    for name in METHODS[str]:
        yield from (f"{{{{ {text}.{name}({word}) }}}}" for text in texts for word in words)
    for kind, owner in (
        (list, "numbers"),
        (list, "objects"),
        (dict, "table"),
        (tuple, "(1, (2, (3,)))"),
        (int, "huge"),
    ):
        for name in METHODS[kind]:
            yield from (f"{{{{ {owner}.{name}({word}) }}}}" for word in ("", *values))
    for name in environment.filters:
        for word in (
            "",
            "'a'",
            "'a', 'b'",
            "1",
            "9999, 'x'",
            "9999, true",
            "attribute='name'",
            "long",
            "words",
            "huge",
        ):
            yield from (f"{{{{ {value} | {name}({word}) | string | length }}}}" for value in values)
    for name in environment.tests:
        if name.isidentifier():
            yield from (f"{{{{ {one} is {name}({two}) }}}}" for one in values for two in ("", "huge", "long", "words"))
    for sign in (*OPERATORS, *COMPARISONS):
        yield from (f"{{{{ ({one} {sign} {two}) | string | length }}}}" for one in values for two in VARIABLES)
    for cut in ("[::-1]", "[::2]", "[1:]", "[huge:]", "[:odd]", "['a']", "[0]", "[huge]", "[ns.t]"):
        yield from (f"{{{{ {value}{cut} | string | length }}}}" for value in values)


class Gaps:
    """The longest time of the processor between two looks of the budget at what was done."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._last_s = 0.0

    def begin(self) -> None:
        self.longest_s = 0.0

    def resume(self) -> None:
        """A rendering begins: what was before it is not its own."""
        self._last_s = time.thread_time()

    def tick(self) -> None:
        now_s = time.thread_time()
        self.longest_s = max(self.longest_s, now_s - self._last_s)
        self._last_s = now_s


@contextmanager
def measured_gaps() -> Iterator[Gaps]:
    """Of renderings meanwhile."""
    gaps = Gaps()
    budget = template_budget.Budget
    plain_init, plain_step, plain_made = budget.__init__, budget.step, budget.made

    def init(self: template_budget.Budget, *arguments: Any) -> None:
        plain_init(self, *arguments)
        gaps.resume()

    def step(self: template_budget.Budget, count: int = 1) -> None:
        gaps.tick()
        plain_step(self, count)

    def made(self: template_budget.Budget, value: Any) -> Any:
        gaps.tick()
        return plain_made(self, value)

    budget.__init__, budget.step, budget.made = init, step, made  # type: ignore[method-assign, assignment]
    try:
        yield gaps
    finally:
        budget.__init__, budget.step, budget.made = plain_init, plain_step, plain_made  # type: ignore[method-assign]


def render(source: str) -> str:
    """How it ended."""
    try:
        variables = {name: value for name, value in VARIABLES.items() if name in source}
        template.ChatTemplate(source).render([{"role": "user", "content": "hi"}], variables=variables)
    except RequestError as error:
        return error.code
    return "text"


def main(sources: Iterator[str]) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    template_budget.MAX_CPU_S = CPU_S
    template.PROBE_CPU_S = 0.05
    endings: dict[str, int] = {}
    slowest: list[tuple[float, str]] = []
    with measured_gaps() as gaps:
        for source in sources:
            print(source, file=sys.stderr, flush=True)  # The last line is the one that ended us.
            best_s = float("inf")
            for _ in range(ATTEMPTS):
                gaps.begin()
                ending = render(source)
                best_s = min(best_s, gaps.longest_s)
                if best_s < AGAIN_S:
                    break
            endings[ending] = endings.get(ending, 0) + 1
            slowest = sorted([*slowest, (best_s, source)], reverse=True)[:3]
    print(json.dumps({"endings": endings, "slowest": slowest}))


if __name__ == "__main__":
    if sys.argv[1] == "sweep":
        main(islice(map(OPENING.__add__, sweep()), int(sys.argv[2]), None, int(sys.argv[3])))
    else:
        made = Maker(int(sys.argv[1]))
        main(made.template() for _ in range(int(sys.argv[2])))
