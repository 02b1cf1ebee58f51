"""Objects that a setting names: `package.module:name`, or `file.py:name`."""

import functools
import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from gleaner.conf.errors import ConfigurationError


def load_object(path: str) -> Any:
    """The object that `path` names. A file's folder, and the working folder, become importable (last in line, so
    that nothing installed is shadowed).

    Raises:
        ConfigurationError: the module, the file or the name is missing, or importing it failed.
    """
    module_name, _, name = path.rpartition(":")
    if not module_name or not name:
        raise ConfigurationError(f"{path} names nothing: write package.module:name or file.py:name")
    module = _module(absolute(module_name))
    try:
        return getattr(module, name)
    except AttributeError:
        known = ", ".join(sorted(key for key in vars(module) if not key.startswith("_"))[:20])
        raise ConfigurationError(
            f"{path}: {module_name} has no {name}; it has {known or 'nothing'}"
        ) from None


def absolute(module_name: str) -> str:
    """A file's name with its whole path, so that another process finds it; a module's name as it is."""
    return str(Path(module_name).expanduser().resolve()) if module_name.endswith(".py") else module_name


@functools.lru_cache(maxsize=256)
def _module(module_name: str) -> ModuleType:
    _importable(Path.cwd())
    if not module_name.endswith(".py"):
        try:
            return importlib.import_module(module_name)
        except Exception as error:
            raise ConfigurationError(
                f"importing {module_name} failed ({type(error).__name__}: {error}): correct its name, install it, or "
                "name a file as file.py:name"
            ) from error
    file = Path(module_name)
    if not file.is_file():
        raise ConfigurationError(f"{file} does not exist: correct the path")
    _importable(file.parent)
    # A name of its own in sys.modules, so that two files called rewards.py stay apart.
    unique = f"{file.stem}_{hashlib.sha256(module_name.encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(unique, file)
    if spec is None or spec.loader is None:
        raise ConfigurationError(f"{file} is no Python file: correct the path")
    module = importlib.util.module_from_spec(spec)
    sys.modules[unique] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[unique]
        raise ConfigurationError(
            f"running {file} failed ({type(error).__name__}: {error}): correct the file"
        ) from error
    return module


def _importable(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
