"""The wheel as its users get it: built from the source archive, in an environment without the sources."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from importlib.metadata import packages_distributions, version
from pathlib import Path

import numpy as np
import pytest
from nodes_support import LAYOUT, prefill_toml, wait_for

from kvmanager.clients.admin import AdminClient
from kvmanager.clients.attached_engine import AttachedEngine
from kvmanager.demo.nodes import NAMESPACE
from kvmanager.errors import KVError

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("kvmanager", "allocators", "transport", "protos", "clients")
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "build", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis")
OPTIONAL = {"triton", "vllm", "transformers", "pytest"}
"""Imported where a GPU, an engine or a test suite is; extras, or its own environment, bring them."""


def test_what_is_imported_is_required() -> None:
    """Every distribution that a file of the package imports is a dependency of its own, not another's by chance."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    required = {re.split(r"[><=!~; \[]", line)[0].replace("_", "-").lower() for line in project["dependencies"]}
    owners = packages_distributions()
    missing = {}
    for path in (path for folder in PACKAGES for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for top in {name.split(".")[0] for name in names} - {*sys.stdlib_module_names, "kvmanager", *OPTIONAL}:
                if not {owner.replace("_", "-").lower() for owner in owners.get(top, ())} & required:
                    missing[top] = str(path.relative_to(ROOT))
    assert missing == {}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the source archive of a copy of the tree."""
    work = tmp_path_factory.mktemp("dist")
    tree, out = work / "tree", work / "out"
    shutil.copytree(ROOT, tree, symlinks=True, ignore=LEFT_OUT)
    out.mkdir()
    command = f"from setuptools import build_meta; build_meta.build_sdist({str(out)!r})"
    subprocess.run([sys.executable, "-c", command], cwd=tree, check=True, capture_output=True)
    (archive,) = out.glob("*.tar.gz")
    quiet = ["-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *quiet, "-w", str(out), str(archive)], check=True)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`bin` of a new environment with the wheel.

    What it depends on comes by a path file from the environment of the tests, so that nothing is downloaded. That one
    knows the sources by a path file of its own, which is not followed from here.
    """
    where = tmp_path_factory.mktemp("venv")
    venv.create(where, with_pip=False, symlinks=True)
    (site,) = where.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    target = ["--python", str(where / "bin/python")]
    quiet = ["-q", "--no-deps", "--no-index", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "pip", *target, "install", *quiet, str(wheel)], check=True)
    return where / "bin"


def environment() -> dict[str, str]:
    """Without a word of where the sources are."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def ask(installed: Path, *words: str) -> str:
    done = subprocess.run(
        [installed / "kvmanager", *words], env=environment(), cwd="/", capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long  # builds twice, and installs: some 30 s
def test_the_wheel_holds_all_that_the_tree_has(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
    ours = {
        str(Path("" if folder == "kvmanager" else "kvmanager") / path.relative_to(ROOT))
        for folder in PACKAGES
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert ours - inside == set()
    for kind in (".proto", ".cu", ".c", ".toml", ".service", ".yaml", ".xz", "py.typed"):
        assert any(name.endswith(kind) for name in inside), kind
    outside = {name for name in inside if not name.startswith(("kvmanager/", "kvmanager-"))}
    assert outside == set(), "nothing with a generic name lands in anybody's site-packages"


@pytest.mark.long
def test_the_installed_command_runs_a_node(installed: Path, tmp_path: Path) -> None:
    said = subprocess.run(
        [installed / "python", "-c", "import kvmanager; print(kvmanager.__file__)"],
        env=environment(), cwd="/", capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert Path(said.stdout.strip()).is_relative_to(installed.parent)
    assert "Exit codes" in ask(installed, "--help")
    assert ask(installed, "--version").strip() == f"kvmanager {version('kvmanager')}"
    runtime_dir, config, log = tmp_path / "node", tmp_path / "node.toml", tmp_path / "log"
    config.write_text(prefill_toml(runtime_dir))
    assert "fits" in ask(installed, "config", "check", str(config), "--here")
    with log.open("wb") as output:
        node = subprocess.Popen(
            [installed / "kvmanager", "serve", "--config", str(config)], env=environment(), cwd="/",
            stdout=output, stderr=output,
        )  # fmt: skip
    try:
        wait_for(lambda: serves(runtime_dir), log.read_text)
        engine = AttachedEngine(
            runtime_dir, "engine", group="prefill", namespace=NAMESPACE, layouts=[LAYOUT], ranks=2
        )
        assert np.asarray(engine.workers.ranks[0].classes["kv"].device).nbytes > 0
        engine.close()
        assert "ledger adds up" in ask(installed, "status", "--config", str(config))
    finally:
        node.terminate()
        assert node.wait(timeout=60) == 0, log.read_text()


def serves(runtime_dir: Path) -> bool:
    try:
        with AdminClient(runtime_dir) as client:
            return client.status().state == "serving"
    except KVError:
        return False
