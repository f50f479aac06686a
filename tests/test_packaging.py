"""The distribution: mapped folders, links, and a built wheel that plans where torch is missing."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

from zbsolve import __version__

ROOT = Path(__file__).resolve().parent.parent
MAPPED = ("formulations", "runtime", "instances")


def configuration() -> dict[str, object]:
    """setuptools' part of pyproject.toml."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)["tool"]["setuptools"]


def python_folders(folder: str) -> set[str]:
    """Folders with Python files below a real folder, links not followed."""
    return {
        Path(directory).relative_to(ROOT).as_posix()
        for directory, _, files in os.walk(ROOT / folder)
        if any(name.endswith(".py") for name in files)
    }


def test_packages_list_equals_the_tree() -> None:
    """A folder that is added but not listed would be missing from the wheel."""
    expected = {folder.replace("/", ".") for folder in python_folders("zbsolve")}
    for folder in MAPPED:
        expected |= {f"zbsolve.{name.replace('/', '.')}" for name in python_folders(folder)}
    assert set(configuration()["packages"]) == expected


def test_mapped_folders_are_declared_once() -> None:
    """Each mapped folder is the source of the package of its name."""
    mapping = configuration()["package-dir"]
    assert mapping == {f"zbsolve.{folder}": folder for folder in MAPPED}


@pytest.mark.parametrize("folder", MAPPED)
def test_links_point_at_the_mapped_folders(folder: str) -> None:
    """The links are relative, so that a moved or fresh checkout still resolves them."""
    link = ROOT / "zbsolve" / folder
    assert link.is_symlink()
    assert os.readlink(link) == f"../{folder}"
    assert not (ROOT / folder).is_symlink()


def test_every_import_is_declared() -> None:
    """What the code imports is in the dependencies or, for the runtime, in its extra."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]

    def names(requirements: list[str]) -> set[str]:
        return {re.match(r"[A-Za-z0-9_-]+", text)[0].lower() for text in requirements}

    base = names(project["dependencies"]) | {"zbsolve"}
    extras = project["optional-dependencies"]
    allowed = {
        "zbsolve": base | names(extras["playground"]) | names(extras["ray"]),
        "formulations": base,
        "runtime": base | {"torch", "psutil"},
    }
    assert names(project["optional-dependencies"]["runtime"]) == {"torch", "psutil"}
    for folder, known in allowed.items():
        for inner in python_folders(folder):
            for path in (ROOT / inner).glob("*.py"):
                for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                    modules = []
                    if isinstance(node, ast.Import):
                        modules = [alias.name for alias in node.names]
                    elif isinstance(node, ast.ImportFrom):
                        modules = [node.module or ""]
                    for module in modules:
                        top = module.split(".")[0].lower()
                        assert top in known or top in sys.stdlib_module_names, f"{path}: {module}"


def test_version_is_stated_once() -> None:
    """The distribution's version is the package's."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        assert tomllib.load(file)["project"]["version"] == __version__


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the sources, so that the checkout stays clean."""
    copy = tmp_path_factory.mktemp("source") / "zbsolve"
    copy.mkdir()
    skip = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for folder in ("zbsolve", *MAPPED):
        shutil.copytree(ROOT / folder, copy / folder, symlinks=True, ignore=skip)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    [path] = out.glob("*.whl")
    return path


def test_wheel_holds_every_module_once(wheel: Path) -> None:
    """Python files of all four folders, the instances and the type marker; nothing else at the top."""
    names = zipfile.ZipFile(wheel).namelist()
    expected = {
        path.relative_to(ROOT).as_posix()
        for folder in python_folders("zbsolve")
        for path in (ROOT / folder).glob("*.py")
    }
    for folder in MAPPED:
        for inner in python_folders(folder):
            expected |= {f"zbsolve/{p.relative_to(ROOT).as_posix()}" for p in (ROOT / inner).glob("*.py")}
    expected |= {f"zbsolve/instances/{path.name}" for path in (ROOT / "instances").glob("*.json")}
    expected |= {f"zbsolve/runtime/{path.name}" for path in (ROOT / "runtime").glob("*.txt")}
    for folder in ("zbsolve/report/viewer", "zbsolve/playground/static"):
        expected |= {f"{folder}/{path.name}" for path in (ROOT / folder).iterdir()}
    expected.add("zbsolve/py.typed")
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert len(names) == len(set(names))
    assert any(name.endswith("licenses/LICENSE") for name in names)


INSTANCE = """{"schema": "zbsolve.instance/1", "num_devices": 2, "num_microbatches": 4, "memory_cap": null,
"stages": [{"device": 0, "t_f": 1, "t_b": 1, "t_w": 1}, {"device": 1, "t_f": 1, "t_b": 1, "t_w": 1}]}"""


def test_installed_wheel_plans_without_torch(wheel: Path, tmp_path: Path) -> None:
    """A fresh environment with every dependency but torch solves and checks; run says what is missing."""
    environment = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True, timeout=60)
    python = environment / "bin" / "python"
    install = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--no-deps",
        "--no-index",
        "-q",
    ]
    subprocess.run([*install, "--disable-pip-version-check", str(wheel)], check=True, timeout=60)
    dependencies = tmp_path / "dependencies"
    dependencies.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.lower().startswith(("torch", "functorch", "zbsolve", "__editable__")):
            (dependencies / entry.name).symlink_to(entry)

    def zbsolve(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(environment / "bin" / "zbsolve"), *arguments],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(dependencies), "HOME": str(tmp_path)},
            timeout=60,
        )

    assert "Usage:" in zbsolve("--help").stdout
    (tmp_path / "i.json").write_text(INSTANCE)
    solved = zbsolve("solve", "i.json", "-o", "p.json", "--time-limit", "10")
    assert solved.returncode == 0, solved.stderr
    # p = 2, m = 4, all ones: 4 * 3 of work and one F before device 1 can begin.
    assert "13 ms  <- objective" in solved.stdout
    assert zbsolve("check", "p.json").returncode == 0
    ran = zbsolve("run", "p.json")
    assert ran.returncode == 3
    assert ran.stderr == 'zbsolve: torch is not installed: pip install "zbsolve[runtime]"\n'
