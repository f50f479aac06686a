"""Who may import what: planners never torch, the runtime never a solver, front doors lazily."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOLVERS = {"pulp", "ortools", "highspy"}

# The front doors may reach the runtime; everything else in the package and the formulations plans.
FRONT_DOORS = {
    "zbsolve/cli/running.py",
    "zbsolve/cli/measuring.py",
    "zbsolve/endtoend/predictions.py",
    "zbsolve/endtoend/demo.py",
}


def sources(folder: str) -> list[Path]:
    """Python files of a real folder (links in zbsolve/ are the other folders themselves)."""
    root = ROOT / folder
    return sorted(
        path
        for path in root.rglob("*.py")
        if not any(parent.is_symlink() for parent in path.parents if parent.is_relative_to(root))
    )


def short(path: Path) -> str:
    """A file's name within the repository."""
    return path.relative_to(ROOT).as_posix()


def imported(tree: ast.AST) -> set[str]:
    """Full dotted names that a piece of code imports, ``from a import b`` as ``a.b``."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where a name comes from"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def at_import_time(tree: ast.Module) -> ast.Module:
    """The module without its function bodies and its ``if TYPE_CHECKING`` blocks."""

    class Strip(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
            return None

        def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
            return None

        def visit_If(self, node: ast.If) -> ast.AST | None:
            return None if ast.unparse(node.test) == "TYPE_CHECKING" else self.generic_visit(node)

    return Strip().visit(tree)


def uses(names: set[str], package: str) -> bool:
    """Whether any name is the package or lies in it."""
    return any(name == package or name.startswith(f"{package}.") for name in names)


def read(path: Path) -> tuple[str, set[str]]:
    """Repository-relative name of a file and what it imports."""
    return short(path), imported(ast.parse(path.read_text(encoding="utf-8")))


def test_the_rule_sees_every_form_of_import() -> None:
    """The helper itself: plain, aliased, from and nested imports are found."""
    code = "import torch.nn as nn\nfrom zbsolve import runtime\ndef f():\n    import pulp\n"
    assert imported(ast.parse(code)) == {"torch.nn", "zbsolve.runtime", "pulp"}
    assert imported(at_import_time(ast.parse(code))) == {"torch.nn", "zbsolve.runtime"}


@pytest.mark.parametrize("path", [*sources("zbsolve"), *sources("formulations")], ids=short)
def test_planners_import_neither_torch_nor_the_runtime(path: Path) -> None:
    """A laptop without torch can plan; only the command line and the demo reach the runtime."""
    name, names = read(path)
    assert not uses(names, "torch"), f"{name} imports torch"
    if name not in FRONT_DOORS:
        assert not uses(names, "zbsolve.runtime"), f"{name} imports the runtime"


@pytest.mark.parametrize("path", sources("runtime"), ids=short)
def test_the_runtime_imports_no_solver(path: Path) -> None:
    """A node that runs plans needs only the plan file."""
    name, names = read(path)
    forbidden = [*SOLVERS, "zbsolve.formulations", "zbsolve.solver", "zbsolve.search"]
    for package in forbidden:
        assert not uses(names, package), f"{name} imports {package}"


@pytest.mark.parametrize(
    "path", [*sources("zbsolve"), *sources("formulations"), *sources("runtime")], ids=str
)
def test_solver_libraries_have_one_importer_each(path: Path) -> None:
    """pulp (and HiGHS behind it) belongs to milp.py, ortools to cpsat.py."""
    name, names = read(path)
    if name != "formulations/milp.py":
        assert not uses(names, "pulp"), f"{name} imports pulp"
        assert not uses(names, "highspy"), f"{name} imports highspy"
    if name not in ("formulations/cpsat.py", "formulations/cpsat_lags.py", "formulations/cpsat_periodic.py"):
        assert not uses(names, "ortools"), f"{name} imports ortools"


@pytest.mark.parametrize("path", sources("zbsolve/cli"), ids=lambda path: path.name)
def test_the_command_line_loads_nothing_heavy(path: Path) -> None:
    """At import the command line needs typer and the errors, nothing else outside the standard library."""
    names = imported(at_import_time(ast.parse(path.read_text(encoding="utf-8"))))
    assert all(
        name.startswith(("zbsolve.cli.", "zbsolve.errors.")) for name in names if name.startswith("zbsolve")
    )
    for package in ("rich", "numpy", "pydantic", "matplotlib", "torch", *SOLVERS):
        assert not uses(names, package)
