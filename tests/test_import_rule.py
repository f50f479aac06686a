"""What is loaded when: front doors import lazily. Who may import whom at all is checked by import-linter.

Its contracts are in pyproject.toml, and ``make lint`` holds them.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import zbsolve

ROOT = Path(__file__).resolve().parent.parent
SOLVERS = {"pulp", "ortools", "highspy"}
# What the command line may load of the rest: modules that need nothing but the standard library themselves.
PLAIN = ("zbsolve.errors", "zbsolve.options", "zbsolve.run_options", "zbsolve.words")


def sources(folder: str) -> list[Path]:
    """Python files of a real folder (links in zbsolve/ are the other folders themselves)."""
    root = ROOT / folder
    return sorted(
        path
        for path in root.rglob("*.py")
        if not any(parent.is_symlink() for parent in path.parents if parent.is_relative_to(root))
    )


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


def test_the_rule_sees_every_form_of_import() -> None:
    """The helper itself: plain, aliased, from and nested imports are found."""
    code = "import torch.nn as nn\nfrom zbsolve import runtime\ndef f():\n    import pulp\n"
    assert imported(ast.parse(code)) == {"torch.nn", "zbsolve.runtime", "pulp"}
    assert imported(at_import_time(ast.parse(code))) == {"torch.nn", "zbsolve.runtime"}


@pytest.mark.parametrize("path", sources("zbsolve/cli"), ids=lambda path: path.name)
def test_the_command_line_loads_nothing_heavy(path: Path) -> None:
    """At import the command line needs typer, the errors, and what is declared or spelled with no library."""
    names = imported(at_import_time(ast.parse(path.read_text(encoding="utf-8"))))
    ours = {name for name in names if uses({name}, "zbsolve")}
    assert all(any(uses({name}, allowed) for allowed in ("zbsolve.cli", *PLAIN)) for name in ours)
    for package in ("rich", "numpy", "pydantic", "matplotlib", "torch", *SOLVERS):
        assert not uses(names, package)


@pytest.mark.parametrize("module", PLAIN)
def test_what_the_command_line_is_built_from_needs_the_standard_library_alone(module: str) -> None:
    """Each other import would be paid by every ``--help``."""
    path = ROOT / f"{module.replace('.', '/')}.py"
    names = imported(at_import_time(ast.parse(path.read_text(encoding="utf-8"))))
    allowed = {*sys.stdlib_module_names, *PLAIN}
    assert all(any(uses({name}, a) for a in allowed) for name in names), names


def test_the_public_names_are_there_and_cost_nothing_until_used() -> None:
    """``import zbsolve`` loads nothing of ours but itself, and each public name resolves."""
    code = (
        "import sys, zbsolve; loaded = [m for m in sys.modules if m.startswith('zbsolve.')]; "
        "assert not loaded, loaded; assert 'numpy' not in sys.modules and 'pydantic' not in sys.modules; "
        "assert all(getattr(zbsolve, name) is not None for name in zbsolve.__all__); "
        "assert zbsolve.solve.__module__ == 'zbsolve.solver.portfolio'; "
        "assert set(zbsolve.__all__) <= set(dir(zbsolve)); "
        "assert not {'torch', 'ortools', 'pulp'} & {*sys.modules}"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_a_name_that_is_none_of_ours_is_refused() -> None:
    """As for any module."""
    with pytest.raises(AttributeError, match="no attribute 'sovle'"):
        _ = zbsolve.sovle
