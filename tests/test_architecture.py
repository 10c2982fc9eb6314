"""Imports follow the table of docs/architecture.md, package by package."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "mmlda"
FRONT = {SOURCE / name for name in ("__init__.py", "__main__.py", "_api.py", "recipes.py")}  # name what others define
FILES = [path for path in sorted(SOURCE.rglob("*.py")) if path not in FRONT]


def package_of(path):
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(path):
    """What a file imports, wherever it does: (dotted name, whether it is done on import)."""
    found = []

    def visit(node, inside):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                found.extend((alias.name, not inside) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert not child.level, f"{path}: a relative import"
                found.extend((f"{child.module}.{alias.name}", not inside) for alias in child.names)
            typing_only = isinstance(child, ast.If) and getattr(child.test, "id", "") == "TYPE_CHECKING"
            visit(child, inside or typing_only or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))

    visit(ast.parse(path.read_text()), False)
    return found


def table():
    """Packages in order, each with what it may import, from docs/architecture.md."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| [^|]* \|([^|]*)\|$", text, re.M)
    return {package: set(re.findall(r"`(\w+)`", allowed)) for package, allowed in rows}


PACKAGES = table()


def test_the_table_has_every_package():
    assert set(PACKAGES) == {package_of(path) for path in FILES}


def test_a_package_imports_only_packages_above_it():
    above = set()
    for package, allowed in PACKAGES.items():
        assert allowed <= above, f"{package} may import {allowed - above}, which come after it"
        above.add(package)


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_are_those_the_table_allows(package):
    allowed = PACKAGES[package] | {package, "_version"}
    for path in FILES:
        if package_of(path) != package or package == "cli":
            continue
        for name, _ in imports(path):
            if name.split(".")[0] == "mmlda":
                assert "." in name, f"{path} imports the whole package"
                assert name.split(".")[1] in allowed, f"{path} imports {name}: see docs/architecture.md"


def test_attacks_import_nothing_of_the_package():
    assert PACKAGES["attacks"] == set()


def test_results_and_report_do_without_torch():
    for path in FILES:
        at_once = {name.split(".")[0] for name, first in imports(path) if first}
        if package_of(path) == "results":
            assert at_once <= sys.stdlib_module_names | {"mmlda"}, path
        if package_of(path) == "report":
            assert "torch" not in {name.split(".")[0] for name, _ in imports(path)}, path


def test_heavy_modules_are_imported_where_they_are_used():
    heavy = {"matplotlib", "sklearn", "scipy", "jinja2", "PIL", "ray", "foolbox", "rich", "triton"}
    for path in FILES:
        first = {name.split(".")[0] for name, at_once in imports(path) if at_once}
        own = {"triton"} if path.name.startswith("triton_") else {"sklearn"} if path.name == "sklearn.py" else set()
        assert not first & (heavy - own), path
        assert "typer" not in first or package_of(path) == "cli", path
        assert not {name.split(".")[0] for name, _ in imports(path)} & {"pickle", "dill"}, path


@pytest.mark.parametrize("package", sorted(path.parent.name for path in SOURCE.glob("*/__init__.py")))
def test_every_package_can_be_imported_first(package):
    """In a process of its own: the order of imports decides whether two packages can wait for each other."""
    done = subprocess.run([sys.executable, "-c", f"import mmlda.{package}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_public_names_are_imported_without_collecting_garbage():
    """A pass of the collector over what torch has loaded takes longer than the package's modules."""
    collected = "gc.get_stats()[2]['collections']"
    text = f"import gc, torch, mmlda; before = {collected}; mmlda.fit; print({collected} - before, gc.isenabled())"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "True"]
