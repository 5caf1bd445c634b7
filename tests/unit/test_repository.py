"""The layout of the repository: folders, who may import whom, and what no file may hold."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINKED = ("allocators", "transport", "protos", "clients")
GENERATED = re.compile(r"kvmanager_pb2(_grpc)?\.pyi?$")
MAX_LINES = 500
BASE = ("errors", "units", "geometry", "layout")
"""Pure value modules that everything may import."""
DAEMON_FREE = (*BASE, "exitcodes", "wire", "planwire", "framing", "plainframes", "runtime_dir", "killpoints")
"""Modules at the top of the package that are not daemon files."""
HARMLESS_FOR_CORE = {
    "abc", "array", "bisect", "collections", "contextlib", "copy", "dataclasses", "enum", "functools", "hashlib",
    "heapq", "itertools", "json", "marshal", "math", "operator", "re", "struct", "types", "typing",
}  # fmt: skip
"""Standard library without I/O, threads, clock or randomness."""


def _python_files(folder: str) -> list[Path]:
    return sorted(path for path in (ROOT / folder).rglob("*.py") if not GENERATED.search(path.name))


def _own_package_files() -> list[Path]:
    """Files under kvmanager/ that are not reached through one of its symlinks."""
    return [path for path in _python_files("kvmanager") if path.relative_to(ROOT / "kvmanager").parts[0] not in LINKED]


def _imports(path: Path) -> Iterator[str]:
    """Dotted names of everything a file imports, also inside functions and TYPE_CHECKING blocks."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.relative_to(ROOT)}:{node.lineno}: relative import"
            module = node.module or ""
            yield from (f"{module}.{alias.name}" for alias in node.names)


def _kvmanager_parts(path: Path) -> set[str]:
    """The first names below kvmanager that a file imports: {"core", "errors", ...}."""
    return {name.split(".")[1] for name in _imports(path) if name.startswith("kvmanager.")}


def _forbidden(path: Path, allowed: tuple[str, ...]) -> list[str]:
    where = path.relative_to(ROOT)
    return [f"{where} imports kvmanager.{part}" for part in sorted(_kvmanager_parts(path) - {*allowed, "__version__"})]


def test_top_level_folders_and_links() -> None:
    for name in ("kvmanager", "allocators", "transport", "protos", "clients", "tests"):
        assert (ROOT / name).is_dir(), name
    files = ("pyproject.toml", "constraints.txt", "Makefile", "LICENSE", "README.md", "GLOSSARY.md", "CHANGELOG.md")
    for name in files:
        assert (ROOT / name).is_file(), name
    for name in LINKED:
        link = ROOT / "kvmanager" / name
        assert link.is_symlink(), name
        assert link.readlink() == Path("..") / name


@pytest.mark.parametrize(
    ("folder", "allowed"),
    [
        ("allocators", (*BASE, "allocators")),
        ("kvmanager/core", (*BASE, "allocators", "core")),
        ("transport", (*DAEMON_FREE, "allocators", "core", "protos", "transport")),
        ("clients", (*DAEMON_FREE, "protos", "transport", "clients")),
    ],
)
def test_imports_go_one_way(folder: str, allowed: tuple[str, ...]) -> None:
    found = [line for path in _python_files(folder) for line in _forbidden(path, allowed)]
    assert found == []


@pytest.mark.parametrize("module", BASE)
def test_base_modules_import_only_each_other(module: str) -> None:
    assert _forbidden(ROOT / "kvmanager" / f"{module}.py", BASE) == []


def test_core_is_pure() -> None:
    """No I/O, threads, clock or randomness in the core: a short list of standard modules, and numpy."""
    found = []
    for path in _python_files("kvmanager/core"):
        for name in _imports(path):
            top = name.split(".")[0]
            if top not in HARMLESS_FOR_CORE | {"numpy", "kvmanager", "__future__"}:
                found.append(f"{path.relative_to(ROOT)} imports {name}")
    assert found == []


def test_the_package_never_imports_bare_folders() -> None:
    files = [*_own_package_files(), *(path for folder in LINKED for path in _python_files(folder))]
    found = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in files
        for name in _imports(path)
        if name.split(".")[0] in LINKED
    ]
    assert found == []


CALLERS = ("command", "demo", "pressure", "replay")
"""Packages that call nodes as engines and operators do."""


def test_only_the_command_the_demo_the_replay_and_the_pressure_suites_use_clients() -> None:
    """A daemon that used its own clients could deadlock on itself.

    `peers.py` calls another node's daemon, and comes in there as every client does.
    """
    found = []
    for path in _own_package_files():
        relative = path.relative_to(ROOT / "kvmanager")
        used = {name for name in _imports(path) if name.startswith("kvmanager.clients")}
        if relative.parts == ("daemon", "peers.py"):
            used = {name for name in used if not name.startswith("kvmanager.clients.attach.")}
        if relative.parts[0] not in CALLERS:
            found += [f"{relative} imports {name}" for name in sorted(used)]
    assert found == []


def test_the_keeper_stays_tiny() -> None:
    """It outlives everything else, so it may load nothing that can fail: standard library only, in short files."""
    beside = ("errors", "exitcodes", "units", "framing", "runtime_dir", "killpoints")
    files = [*_python_files("kvmanager/keeper"), *(ROOT / "kvmanager" / f"{module}.py" for module in beside)]
    for path in files:
        outside = {name.split(".")[0] for name in _imports(path)} - set(sys.stdlib_module_names) - {"kvmanager"}
        assert outside == set(), path
        assert _forbidden(path, (*beside, "keeper")) == []
        assert len(path.read_text(encoding="utf-8").splitlines()) < 300, path


def _text_files() -> Iterator[Path]:
    """Files of the repository, without what git ignores and without generated code."""
    for path in sorted(ROOT.rglob("*")):
        parts = path.relative_to(ROOT).parts
        ignored = parts[0] in {".git", ".venv", "build"} or any(
            part == "__pycache__" or part.endswith((".egg-info", "_cache")) or part == ".hypothesis" for part in parts
        )
        if ignored or not path.is_file() or path.is_symlink() or GENERATED.search(path.name):
            continue
        if parts[0] == "kvmanager" and parts[1] in LINKED:
            continue
        if path.suffix in {".gz", ".xz", ".pyc", ".so"}:
            continue
        yield path


def test_files_are_short() -> None:
    found = {
        str(path.relative_to(ROOT)): lines
        for path in _text_files()
        if path.suffix == ".py" and (lines := len(path.read_text(encoding="utf-8").splitlines())) > MAX_LINES
    }
    assert found == {}


def test_names_say_what_is_inside() -> None:
    names = [path for path in _text_files() if re.search(r"^(utils?|helpers?|misc|common)$|_v\d+$", path.stem)]
    assert names == []


def test_no_path_of_the_machine_it_was_written_on() -> None:
    machine = [f"{ROOT}/", f"{ROOT.parent / 'shared'}", f"{Path.home()}/", "/home" + "/"]
    found = [
        f"{path.relative_to(ROOT)} names {text}"
        for path in _text_files()
        for text in machine
        if text in path.read_text(encoding="utf-8")
    ]
    assert found == []


def _bound_names(path: Path) -> set[str]:
    """What another file may import from a file: names that a statement outside functions and classes binds."""
    found: set[str] = set()
    waiting: list[ast.AST] = list(ast.parse(path.read_text(encoding="utf-8")).body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).split(".")[0])
        else:
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            waiting.extend(ast.iter_child_nodes(node))
    return found


def _file_of(module: str, importer: Path) -> Path | None:
    """The file of a module of ours: by its dotted name from the root, or a test's helper in its folder or another."""
    base = ROOT / Path(*module.split("."))
    folders = (importer.parent, ROOT / "tests" / "integration", *sorted((ROOT / "tests").iterdir()))
    choices = [base.with_suffix(".py"), base / "__init__.py"]
    if "." not in module:
        choices = [folder / f"{module}.py" for folder in folders]
    return next((path for path in choices if path.is_file()), None)


def test_every_name_that_a_test_imports_from_here_is_there() -> None:
    """Tests for a GPU stop at their first line where there is none, so that no run here would find a name gone."""
    found: list[str] = []
    names: dict[Path, set[str]] = {}
    seen = 0
    for path in _python_files("tests"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            source = _file_of(node.module or "", path) if isinstance(node, ast.ImportFrom) else None
            if source is None or "_pb2" in source.name:
                continue
            seen += 1
            if source not in names:
                names[source] = _bound_names(source)
            missing = [alias.name for alias in node.names if alias.name not in names[source]]
            found += [
                f"{path.relative_to(ROOT)}:{node.lineno}: {name}"
                for name in missing
                if not (source.parent / f"{name}.py").is_file() and not (source.parent / name).is_dir()
            ]
    assert seen > 1000
    assert found == []
