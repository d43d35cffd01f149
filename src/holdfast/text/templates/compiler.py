"""From a chat template's text to Python, in bounded time, with a word to the environment wherever work is done.

Owns what a template's text may contain. What its parts cost when they run is `sandbox`'s to count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.lexer import Lexer

from holdfast.text.templates.budget import check_number

MAX_TOKENS = 30_000
"""Of Jinja, blanks counted: the longest of some seventy well-known templates has 3,770."""
MAX_NAMES = 500
"""Different ones. Jinja keeps a table of them for every branch."""
MAX_PYTHON_CHARS = 400_000
"""Of the program it becomes, which Python compiles in one piece that nothing can interrupt, at half a microsecond each.
The same templates have up to 64,000."""
MAX_NAMED = 255
"""Arguments of one call: Python compares each with each."""
MAX_LITERAL_CHARS = 1300
"""Of a number in the text."""

NODES = frozenset(
    {
        *("Template", "Output", "TemplateData", "For", "If", "Macro", "CallBlock", "FilterBlock", "With", "Block"),
        *("Assign", "AssignBlock", "ExprStmt", "Scope", "Break", "Continue", "Name", "NSRef", "Const", "Tuple", "List"),
        *("Dict", "Pair", "Keyword", "CondExpr", "Filter", "Test", "Call", "Getitem", "Getattr", "Slice", "Concat"),
        *("Compare", "Operand", "Mul", "Div", "FloorDiv", "Add", "Sub", "Mod", "Pow", "Not", "Neg", "Pos", "And", "Or"),
    }
)
"""What a template may be made of, by Jinja's names."""
REFUSED_NODES = frozenset(
    {
        # Other templates: there is one.
        *("Extends", "Include", "Import", "FromImport"),
        # {% autoescape %}: for web pages.
        *("EvalContextModifier", "ScopedEvalContextModifier"),
        # Made by extensions that are not loaded here.
        *("MarkSafe", "MarkSafeIfAutoescape", "ContextReference", "DerivedContextReference", "OverlayScope"),
        *("EnvironmentAttribute", "ExtensionAttribute", "ImportedName", "InternalName"),
    }
)
"""All others."""


class BoundedLexer(Lexer):
    def tokeniter(
        self, source: str, name: str | None, filename: str | None = None, state: str | None = None
    ) -> Iterator[tuple[int, str, str]]:
        for count, token in enumerate(super().tokeniter(source, name, filename, state)):
            if count > MAX_TOKENS:
                raise SecurityError(f"a template of more than {MAX_TOKENS} tokens")
            # Before it becomes a number: reading one takes the square of its length.
            if token[1] in ("integer", "float") and len(token[2]) > MAX_LITERAL_CHARS:
                raise SecurityError(f"a number of more than {MAX_LITERAL_CHARS} digits")
            yield token


def check_tree(tree: nodes.Template) -> None:
    """Raises SecurityError for what no template may contain; puts a count around what is not counted by itself."""
    names: set[str] = set()
    waiting: list[nodes.Node] = [tree]
    while waiting:
        node = waiting.pop()
        waiting.extend(node.iter_child_nodes())
        kind = type(node).__name__
        if kind not in NODES:
            raise SecurityError(f"{_TAGS.get(kind, kind)} is not allowed in chat templates")
        if isinstance(node, nodes.Name):
            names.add(node.name)
        elif isinstance(node, nodes.Const) and isinstance(node.value, int):
            check_number(node.value)
        elif isinstance(node, nodes.For) and node.test is not None:
            node.iter = _through("_counted", node.iter)
        elif isinstance(node, nodes.Call | nodes.Filter | nodes.Test):
            if len(node.kwargs) > MAX_NAMED:
                raise SecurityError(f"a call with more than {MAX_NAMED} named arguments")
            node.dyn_args = node.dyn_args and _through("_spread", node.dyn_args)
            node.dyn_kwargs = node.dyn_kwargs and _through("_spread", node.dyn_kwargs)
    if len(names) > MAX_NAMES:
        raise SecurityError(f"a template of more than {MAX_NAMES} names")


_TAGS = {
    "Extends": "{% extends %}",
    "Include": "{% include %}",
    "Import": "{% import %}",
    "FromImport": "{% from %}",
    "ScopedEvalContextModifier": "{% autoescape %}",
}


def _through(name: str, node: nodes.Node) -> nodes.Filter:
    assert isinstance(node, nodes.Expr)
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _own_nodes(body: Iterable[nodes.Node]) -> int:
    """Of a block, without the blocks within it, which count themselves. One with nothing in it is entered too."""
    count = 1
    waiting = list(body)
    while waiting:
        node = waiting.pop()
        count += 1
        waiting.extend(child for child in node.iter_child_nodes() if not isinstance(child, nodes.Stmt))
        if isinstance(node, nodes.If):  # Tests of `elif` are done where the `if` is.
            waiting.extend(node.elif_)
    return count


class CountingGenerator(CodeGenerator):
    """Python for a template. `environment` has a method for each operation that Jinja would leave to Python."""

    _written_chars = 0

    def write(self, x: str) -> None:
        self._written_chars += len(x)
        if self._written_chars > MAX_PYTHON_CHARS:
            raise SecurityError("the template is too long to be compiled")
        super().write(x)

    def blockvisit(self, nodes: Iterable[nodes.Node], frame: Frame) -> None:
        body = list(nodes)
        self.writeline(f"environment.step({_own_nodes(body)})")
        super().blockvisit(body, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.join_parts((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if not isinstance(node.arg, nodes.Slice):
            super().visit_Getitem(node, frame)
            return
        self.write("environment.sliced(")
        self.visit(node.node, frame)
        for part in (node.arg.start, node.arg.stop, node.arg.step):
            self.write(", ")
            if part is None:
                self.write("None")
            else:
                self.visit(part, frame)
        self.write(")")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        first, *further = node.ops
        self.write(f"environment.compared({first.op!r}, ")
        self.visit(node.expr, frame)
        self.write(", ")
        self.visit(first.expr, frame)
        # What comes behind a comparison that is false is not looked at.
        for operand in further:
            self.write(f", ({operand.op!r}, lambda: ")
            self.visit(operand.expr, frame)
            self.write(")")
        self.write(")")

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx != "load":
            super().visit_Tuple(node, frame)
            return
        # Hashed wherever it is a key: no deeper than can be written out.
        self._through("weighed", node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self.write("{")
        for pair in node.items:
            if isinstance(pair.key, nodes.Const):
                self.visit(pair.key, frame)
            else:
                self.write("environment.weighed(")
                self.visit(pair.key, frame)
                self.write(")")
            self.write(": ")
            self.visit(pair.value, frame)
            self.write(", ")
        self.write("}")

    def _through(self, method: str, node: nodes.Tuple, frame: Frame) -> None:
        self.write(f"environment.{method}(")
        super().visit_Tuple(node, frame)
        self.write(")")
