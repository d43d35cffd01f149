"""The rules of the house that no linter knows: who may need torch, how fast the command answers, what a file may hold.

They are checked in child processes, so that what other tests have imported cannot hide a breach.
"""

from __future__ import annotations

import ast
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "src" / "holdfast"
COMMAND = Path(sys.executable).parent / "holdfast"

FILE_LINES_LIMIT = 500
"""What one can read in one sitting. Split a file by what it owns, never for its lines."""
FOLDER_LIMIT = 12
"""Modules and folders in a folder; but for one file a model family."""
FUNCTION_LINES_LIMIT = 80
"""The aim is 60; what is beyond this is refused."""
COMMAND_LIMIT_S = 0.3
ATTEMPTS = 12
"""A busy machine may slow some runs down; one undisturbed run among these is enough to prove the limit."""

BRAIN = (
    "errors", "units", "records", "engine_profiles", "config", "models", "checkpoints", "hardware", "kvcache",
    "observability", "footprint", "planner", "scheduler", "text",
)  # fmt: skip
FRONT = ("server", "bench", "tune", "cli")

IMPORT_WITHOUT_TORCH = """
import importlib, pkgutil, sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "triton"):
            raise ImportError("blocked by the test: " + name)
        return None

sys.meta_path.insert(0, NoTorch())
count = 0
for room in sys.argv[1:]:
    module = importlib.import_module("holdfast." + room)
    names = [module.__name__]
    if hasattr(module, "__path__"):
        names += [found.name for found in pkgutil.walk_packages(module.__path__, module.__name__ + ".")]
    for name in names:
        if not name.endswith("__main__"):
            importlib.import_module(name)
            count += 1
assert "torch" not in sys.modules
print(count)
"""

HELP_WITHOUT_TORCH = """
import sys
sys.argv = ["holdfast", "--help"]
from holdfast.cli.main import main
try:
    status = main()
except SystemExit as ended:
    status = ended.code
print("status", status or 0, "torch" in sys.modules, file=sys.stderr)
"""


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60)


def best_seconds(command: list[str], limit_s: float) -> float:
    """Of a processor, not of the clock: a busy machine must not decide."""
    best = float("inf")
    for _ in range(ATTEMPTS):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        best = min(best, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        if best < limit_s:
            break
    return best


def tracked_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


@pytest.mark.parametrize("room", BRAIN)
def test_the_brain_imports_with_torch_blocked(room: str) -> None:
    done = run_python(IMPORT_WITHOUT_TORCH, room)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 1


@pytest.mark.parametrize("room", FRONT)
def test_the_front_imports_with_torch_blocked(room: str) -> None:
    done = run_python(IMPORT_WITHOUT_TORCH, room)
    assert done.returncode == 0, done.stderr


def test_the_torch_blocker_blocks() -> None:
    done = run_python(IMPORT_WITHOUT_TORCH.replace("count = 0", "import torch"), "errors")
    assert "blocked by the test: torch" in done.stderr


def test_import_holdfast_needs_no_torch() -> None:
    done = run_python("import sys, holdfast; holdfast.SamplingParams; sys.exit('torch' in sys.modules)")
    assert done.returncode == 0, done.stderr


def test_the_front_end_of_serve_needs_no_numpy() -> None:
    """A tenth of a second of every start, and 11 MB."""
    front = ("cli.commands.serve", "engine.process.client", "engine.startup.build", "server.app", "server.run")
    imports = ", ".join(f"holdfast.{name}" for name in front)
    done = run_python(f"import sys, {imports}; sys.exit('numpy' in sys.modules)")
    assert done.returncode == 0, done.stderr


def test_help_needs_no_torch() -> None:
    done = run_python(HELP_WITHOUT_TORCH)
    assert done.stderr.strip().endswith("status 0 False"), done.stderr
    assert "serve" in done.stdout


def test_import_holdfast_is_quick() -> None:
    assert best_seconds([sys.executable, "-c", "import holdfast"], COMMAND_LIMIT_S) < COMMAND_LIMIT_S


def test_help_is_quick() -> None:
    if not COMMAND.exists():
        pytest.skip("the holdfast command is not installed beside this Python")
    assert best_seconds([str(COMMAND), "--help"], COMMAND_LIMIT_S) < COMMAND_LIMIT_S


def test_no_tracked_file_names_a_path_of_somebodys_machine() -> None:
    folders = "|".join(("work", "opt", "root", r"home/(?!you\b|user\b)\w+"))
    private = re.compile(rf"(?<![\w.\-}}$/])/(?:{folders})/[\w.]|\.\./shared/")
    found = []
    for path in tracked_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if not private.search(text):
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if private.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert not found, "\n".join(found)


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """At any depth. What they are made of is not looked at: it is the larger part by far, and has no functions."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        for inner in getattr(node, field, ()):
            yield inner
            yield from statements(inner)


def test_source_files_say_what_they_own_and_stay_short() -> None:
    complaints = []
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        name = path.relative_to(ROOT)
        if len(text.splitlines()) > FILE_LINES_LIMIT:
            complaints.append(
                f"{name}: {len(text.splitlines())} lines, at most {FILE_LINES_LIMIT}: split it by what it owns"
            )
        tree = parsed(path)
        if tree.body and ast.get_docstring(tree) is None:
            complaints.append(f"{name}: open it with a line or two on what it owns")
        for node in statements(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > FUNCTION_LINES_LIMIT:
                    complaints.append(
                        f"{name}:{node.lineno} {node.name}: {length} lines, at most {FUNCTION_LINES_LIMIT}"
                    )
    assert not complaints, "\n".join(complaints)


def test_folders_have_few_children() -> None:
    crowded = {}
    for folder in (PACKAGE, *(path for path in PACKAGE.rglob("*") if (path / "__init__.py").exists())):
        children = [path for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
        count = len([path for path in children if path.name != "__init__.py"])
        if count > FOLDER_LIMIT:
            crowded[str(folder.relative_to(PACKAGE))] = count
    # Families are a list, not a structure (docs/decisions.md).
    assert crowded.keys() <= {".", "execution", "models/families"}, crowded


def test_no_class_name_twice() -> None:
    found: dict[str, list[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Imports for types alone and those inside functions count too."""
    graph = grimp.build_graph("holdfast")
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    while leaves := {module for module, imported in imports.items() if not imported & imports.keys()}:
        for module in leaves:
            del imports[module]
    while tops := imports.keys() - set().union(*imports.values()):
        for module in tops:
            del imports[module]
    assert sorted(imports) == []


def test_every_error_has_a_code_of_its_own_and_a_page() -> None:
    from holdfast import errors

    codes: dict[str, str] = {}
    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, errors.HoldfastError):
            assert value.code not in codes, f"{name} and {codes[value.code]} share {value.code}"
            codes[value.code] = name
    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    undocumented = [f"{code} ({name})" for code, name in codes.items() if code not in page or name not in page]
    assert not undocumented, undocumented


def test_every_code_in_the_source_is_documented() -> None:
    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    undocumented = {
        f"{code} ({path.relative_to(ROOT)})"
        for path in PACKAGE.rglob("*.py")
        for code in re.findall(r'"(HFW?\d{2,3})"', path.read_text(encoding="utf-8"))
        if code not in page
    }
    assert not undocumented, sorted(undocumented)


def test_links_between_documents_lead_somewhere() -> None:
    broken = []
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if not (page.parent / target).exists():
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert not broken, broken
