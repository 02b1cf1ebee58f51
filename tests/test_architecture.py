"""What holds the tree together: the direction of imports, and a package list that forgets nothing."""

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
CODE = ("conf", "models", "tasks", "flows")


def test_imports_point_one_way() -> None:
    """flows, tasks, models, conf; and models know neither Prefect nor MLflow (contracts in pyproject.toml)."""
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    assert f"{len(contracts)} kept, 0 broken" in ended.stdout


def test_every_package_and_preset_is_installed() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = {
        "gleaner." + ".".join(file.parent.relative_to(ROOT).parts)
        for folder in CODE
        for file in (ROOT / folder).rglob("__init__.py")
    }
    assert set(setuptools["packages"]) == found
    modules = {file.parent for folder in CODE for file in (ROOT / folder).rglob("*.py")}
    assert all((folder / "__init__.py").exists() for folder in modules)
    assert setuptools["package-data"]["gleaner.conf"] == ["**/*.yaml"]


def test_constraints_pin_every_dependency() -> None:
    def plain(requirement: str) -> str:
        name = requirement.split("[")[0].split(";")[0]
        for sign in "<>=!~ ":
            name = name.split(sign)[0]
        return name.lower().replace("_", "-").replace(".", "-")

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {plain(r) for r in project["dependencies"] + project["optional-dependencies"]["dev"]}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {plain(line) for line in lines if "==" in line}
    assert wanted - pinned == set()
