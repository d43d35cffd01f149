"""Generators of structured output that nobody sends by accident: each draws the arguments of one
StructuredOutputsParams, legal in size and hostile in shape. Small pieces that explode are put together, nested,
repeated, cut off and left open."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

ATOMS = ["a", "b", ".", "[a-z]", "[^a]", r"\d", r"\w", r"\s", "(a|b)", "(a|ab|abc)", ".*", "a?", "é", r"\p{L}", r"\x41"]
SPECIALS = [
    "[",
    "(",
    "{",
    "\\",
    '"',
    "'",
    "/",
    "//",
    "#",
    "::=",
    ":",
    "|",
    "*",
    "+",
    "?",
    "&",
    "~",
    "<",
    ">",
    "\n",
    "%",
]


def regex(random: Random, depth: int = 0) -> str:
    kind = random.randrange(8 if depth < 4 else 3)
    if kind <= 1:
        return random.choice(ATOMS)
    if kind == 2:
        return "".join(random.choice(ATOMS) for _ in range(random.randint(1, 12)))
    inner = regex(random, depth + 1)
    if kind == 3:
        return f"({inner}){{{random.choice([0, 1, 9, 99, 300])},{random.choice([300, 999, 5000])}}}"
    if kind == 4:
        return f".*{inner}.{{{random.randint(1, 80)}}}"
    if kind == 5:
        return "|".join(f"{inner}{at}" for at in range(random.choice([2, 30, 300])))
    if kind == 6:
        return f"({inner}){random.choice('*+?')}" * random.choice([1, 8, 60])
    return f"({inner})({regex(random, depth + 1)})"


def broken(random: Random, text: str) -> str:
    """Cut, with marks put in, or a piece of it over and over, up to what is taken."""
    place = random.randrange(len(text) + 1)
    kind = random.randrange(4)
    if kind == 0:
        return text[:place]
    if kind == 1:
        return text[:place] + random.choice(SPECIALS) + text[place:]
    if kind == 2:
        return text[:place] + random.choice(SPECIALS) * random.choice([10, 1000, 15_000]) + text[place:]
    piece = text[place : place + random.randint(1, 20)] or "a"
    return text + piece * (15_000 // len(piece))


def schema(random: Random, depth: int = 0) -> Any:
    kind = random.randrange(12 if depth < 5 else 5)
    if kind == 0:
        return random.choice([{}, True, {"type": "object"}, {"type": ["string", "null"]}, {"const": [1, {"a": None}]}])
    if kind == 1:
        return {
            "type": "integer",
            random.choice(["multipleOf", "minimum", "maximum"]): random.choice([1, 7, 999, 10**9]),
        }
    if kind == 2:
        return {"type": "string", "pattern": regex(random, 2)}
    if kind == 3:
        return {"type": "string", "minLength": random.choice([0, 10, 10**6]), "maxLength": random.choice([10, 10**7])}
    if kind == 4:
        return {"enum": [f"{at}" * random.randint(1, 9) for at in range(random.choice([1, 40, 2000]))]}
    if kind == 5:
        named = {f"p{at}": schema(random, depth + 1) for at in range(random.choice([1, 3, 12]))}
        return {"type": "object", "properties": named, "required": list(named)[: random.randint(0, 12)]}
    if kind == 6:
        counts = {"minItems": random.choice([0, 5, 10**4]), "maxItems": random.choice([5, 10**5])}
        return {"type": "array", "items": schema(random, depth + 1), **counts}
    if kind == 7:
        return {
            random.choice(["allOf", "anyOf", "oneOf"]): [schema(random, depth + 1) for _ in range(random.randint(1, 5))]
        }
    if kind == 8:
        return {"allOf": [{"type": "string", "pattern": f".*a.{{{at}}}"} for at in range(1, random.randint(3, 30))]}
    if kind == 9:
        return {"$defs": {"d": schema(random, depth + 1)}, "$ref": random.choice(["#/$defs/d", "#", "#/$defs/e"])}
    if kind == 10:
        return {
            "type": "object",
            "additionalProperties": schema(random, depth + 1),
            "maxProperties": random.randint(0, 99),
        }
    return {"items": {"enum": list("abcdefgh")}, "type": "array", "uniqueItems": True, "minItems": random.randint(0, 9)}


def lark(random: Random) -> str:
    rules = random.choice([1, 3, 12, 200])
    names = [f"r{at}" for at in range(rules)]
    parts = [*names, '"a"', '"ab"', '""', "/[ab]+/", "A", "B", '%json {"type": "integer"}']
    lines = [f"start: {random.choice(names)}"]
    for name in names:
        ways = [
            " ".join(random.choice(parts) for _ in range(random.randint(0, 8))) for _ in range(random.randint(1, 4))
        ]
        lines.append(f"{name}: {' | '.join(ways)}")
    joined = f" {random.choice(['&', '|'])} ".join(f"/{regex(random, 2)}/" for _ in range(random.randint(1, 12)))
    return "\n".join([*lines, f"A: {joined}", f"B: /{regex(random, 1)}/"])


def gbnf(random: Random) -> str:
    rules = random.choice([1, 3, 30, 400])
    parts = [*(f"r{at}" for at in range(rules)), '"a"', "'b'", "[a-z]", "[^\\n]", "(", ")", "|", '"x"{3,9}', "."]
    lines = ["root ::= " + " ".join(f"r{random.randrange(rules)}" for _ in range(random.choice([1, 5, 2000])))]
    for at in range(rules):
        pieces = [
            random.choice(parts) + random.choice(["", "", "*", "+", "?", "{2,300}"])
            for _ in range(random.randint(1, 6))
        ]
        lines.append(f"r{at} ::= {' '.join(pieces)}")
    return "\n".join(lines)


def tags(random: Random, depth: int = 0) -> Any:
    kind = random.randrange(8 if depth < 4 else 4)
    if kind == 0:
        return {"type": "const_string", "value": random.choice(["", "a", "<t>" * 50])}
    if kind == 1:
        return {"type": "json_schema", "json_schema": schema(random, 3)}
    if kind == 2:
        return {"type": "regex", "pattern": regex(random, 2)}
    if kind == 3:
        return {"type": "grammar", "grammar": gbnf(random)[:2000]}
    if kind == 4:
        return {"type": "any_text"}
    if kind == 5:
        several = [tags(random, depth + 1) for _ in range(random.randint(0, 6))]
        return {"type": random.choice(["sequence", "or"]), "elements": several}
    content = {"type": "tag", "begin": random.choice(["<a>", "<"]), "end": "</a>", "content": tags(random, depth + 1)}
    if kind == 6:
        return content
    return {
        "type": "triggered_tags",
        "triggers": [random.choice(["<", "<a", "x"])],
        "tags": [content] * random.randint(0, 9),
    }


def arguments(random: Random) -> dict[str, Any]:
    """Of StructuredOutputsParams, which may refuse them."""
    makers: list[Callable[[], dict[str, Any]]] = [
        lambda: {"regex": regex(random)[:16_000]},
        lambda: {"regex": broken(random, regex(random))[:16_000]},
        lambda: {"json": schema(random)},
        lambda: {"json": schema(random), "whitespace_pattern": random.choice([" ?", r"\s*", "( | ){0,99}"])},
        lambda: {"grammar": lark(random)[:64_000]},
        lambda: {"grammar": broken(random, lark(random))[:64_000]},
        lambda: {"grammar": gbnf(random)[:64_000]},
        lambda: {"grammar": broken(random, gbnf(random))[:64_000]},
        lambda: {"structural_tag": {"format": tags(random)}},
        lambda: {"choice": [f"{at}" * random.randint(1, 12) for at in range(random.choice([1, 50, 3000]))]},
    ]
    return random.choice(makers)()
