"""Cache keys: what an artifact was made from, as one digest.

A key is computed in the flow from the digests of the inputs, the settings that matter, the seed and the code that
computes, and is passed to the task as an argument. What cannot be keyed raises: a missing part would let two
different artifacts share a key, and the wrong one would be trained on.
"""

import ast
import functools
import hashlib
import importlib.util
import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from gleaner.conf.errors import ConfigurationError

FOLLOWED_PACKAGES = ("gleaner.models", "gleaner.tasks")
"""Imports into these packages are part of a module's code version. Settings are keyed by value, not by source."""


def canonical_json(value: Any) -> bytes:
    """The one way to write `value` as JSON: sorted keys, no spaces, UTF-8.

    Accepts what JSON can say exactly (None, bool, int, finite float, str, list, tuple, dict with str keys) and
    pydantic models.

    Raises:
        ConfigurationError: naming the path of the part that cannot be keyed.
    """
    return _dump(_keyable(value, "value"))


def digest_json(value: Any) -> str:
    """sha256 (hex) of `canonical_json(value)`; raises as it does."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def cache_key(kind: str, code: str, /, **parts: Any) -> str:
    """The key of an artifact: `<kind>-<digest>`.

    Args:
        kind: what is made (`rollouts`, `verdicts`, `version`): lower case letters, digits and underscores.
        code: `code_version(...)` of what computes it.
        parts: everything else that the artifact depends on: input digests, settings, seed, library versions.

    Raises:
        ConfigurationError: a part cannot be keyed, or `kind` or `code` is malformed.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,39}", kind):
        raise ConfigurationError(
            f"kind {kind!r} is not a lower-case word: use letters, digits and underscores"
        )
    if not isinstance(code, str) or not code:
        raise ConfigurationError(
            f"the key of {kind} has no code version: pass code_version(...) of what computes it"
        )
    return f"{kind}-{hashlib.sha256(_dump([kind, code, _keyable(parts, kind)])).hexdigest()}"


def code_version(*modules: str) -> str:
    """Digest of the source of `modules` and of every module of FOLLOWED_PACKAGES that they import, however deep.

    A module's name takes that file, a package's name all its Python files, a path that ends in `.py` that file (for
    environments and rewards of a user's own). Following the imports means that a helper which changed changes the
    key. Read once per process: a running process does not see later edits either.

    Raises:
        ConfigurationError: a module has no Python source.
    """
    return _code_version(tuple(sorted(set(modules))))


@functools.lru_cache(maxsize=256)
def _code_version(modules: tuple[str, ...]) -> str:
    if not modules:
        raise ConfigurationError("a code version of nothing is always equal: name the modules that compute")
    digests: dict[str, str] = {}
    waiting = list(modules)
    seen: set[str] = set()
    while waiting:
        module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        for name, path in _sources(module, whole_package=module in modules):
            source = path.read_bytes()
            digests[name] = hashlib.sha256(source).hexdigest()
            waiting += [imported for imported in _imports(source, name) if _source_file(imported) is not None]
    return digest_json(digests)


def _sources(module: str, whole_package: bool) -> list[tuple[str, Path]]:
    """(stable name, file) of a module's sources; of a package its `__init__` alone, unless it was asked for whole."""
    if module.endswith(".py"):
        path = Path(module)
        if not path.is_file():
            raise ConfigurationError(f"{module} does not exist: correct the path of your own code")
        return [(path.name, path)]
    origin = _source_file(module)
    if origin is None:
        raise ConfigurationError(
            f"module {module} has no Python source to take a code version of: name another module"
        )
    if whole_package and origin.name == "__init__.py":
        folder = origin.parent
        return [
            (f"{module}/{path.relative_to(folder).as_posix()}", path) for path in sorted(folder.rglob("*.py"))
        ]
    return [(module, origin)]


def _source_file(module: str) -> Path | None:
    """Where a module's source is; None if there is no such module. Imports no module of FOLLOWED_PACKAGES: they may
    be heavy."""
    for package in FOLLOWED_PACKAGES:
        if module == package or module.startswith(f"{package}."):
            inside = _package_folder(package).joinpath(*module.split(".")[2:])
            found = (inside / "__init__.py", inside.with_suffix(".py"))
            return next((path for path in found if path.is_file()), None)
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin) if spec and spec.origin and spec.origin.endswith(".py") else None


@functools.cache
def _package_folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ConfigurationError(f"package {package} has no files: install Gleaner again")
    return Path(spec.origin).parent


def _imports(source: bytes, name: str) -> Iterable[str]:
    """Names that a source file may import from FOLLOWED_PACKAGES: modules, and members that may be modules."""
    for node in ast.walk(ast.parse(source, filename=name)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        yield from (found for found in names if found.startswith(FOLLOWED_PACKAGES))


def _dump(value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", errors="surrogatepass")


def _keyable(value: Any, path: str) -> Any:
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ConfigurationError(f"{path} is {value}, which cannot be keyed: use a finite number or null")
        return value
    if isinstance(value, list | tuple):
        return [_keyable(item, f"{path}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise ConfigurationError(
                    f"{path} has the key {key!r}, which cannot be keyed: use strings as keys"
                )
        return {key: _keyable(item, f"{path}.{key}") for key, item in value.items()}
    if isinstance(value, BaseModel):
        return _keyable(value.model_dump(mode="json"), path)
    raise ConfigurationError(
        f"{path} is a {type(value).__name__}, which cannot be keyed: pass its digest, or JSON values (a sorted list "
        "for a set)"
    )
