"""From words on a command line to checked settings: Hydra composes the presets, pydantic judges the result.

A preset is a YAML file beside this module (`environment/math.yaml`), or one of the user's in a folder of the same
layout. A preset lists only what differs from the schema's defaults, yet any field of the schema can be set. What is
wrong ends as one ConfigurationError, whichever library noticed it.
"""

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, overload

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from pydantic import BaseModel, ValidationError

from gleaner.conf.errors import ConfigurationError
from gleaner.conf.explain import explain
from gleaner.conf.presets import BUILT_IN, GROUPS, available_presets
from gleaner.conf.schema import CompareSettings, GleanerSettings

PRIMARY: dict[type[BaseModel], str] = {GleanerSettings: "run", CompareSettings: "comparison"}
"""Which YAML file a root starts from."""

PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")
"""What a comparison fills in, such as {seed}."""
QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")

Root = TypeVar("Root", bound=BaseModel)

_hydra_is_one_per_process = threading.Lock()


@overload
def compose(overrides: Sequence[str], *, presets: Path | None = None) -> GleanerSettings: ...


@overload
def compose(overrides: Sequence[str], root: type[Root], *, presets: Path | None = None) -> Root: ...


def compose(
    overrides: Sequence[str], root: type[BaseModel] = GleanerSettings, *, presets: Path | None = None
) -> BaseModel:
    """Settings from overrides such as `environment=math environment.path=my.jsonl run.steps=20`.

    `GROUP=NAME` chooses a preset, `dotted.name=VALUE` sets a field, both in Hydra's syntax; an unquoted value that
    Hydra cannot read is taken as text. Later overrides win, and fields win over presets.

    Args:
        overrides: as on the command line.
        root: GleanerSettings for a run, CompareSettings for a comparison.
        presets: a folder of the user's own presets, searched after the built-in ones.

    Raises:
        ConfigurationError: a preset, a name, a value or a combination is wrong. The message names the fix.
    """
    return validate(compose_values(overrides, root, presets=presets), root)


def compose_values(
    overrides: Sequence[str], root: type[BaseModel] = GleanerSettings, *, presets: Path | None = None
) -> dict[str, Any]:
    """As `compose`, before the result is judged: plain values, in which text such as {seed} may still be filled in.

    Raises:
        ConfigurationError: a preset or the form of an override is wrong.
    """
    if presets is not None and not presets.is_dir():
        raise ConfigurationError(
            f"no folder {presets}: give --presets a folder such as mine/ with mine/experiment/x.yaml"
        )
    translated = [_translate(override, presets) for override in overrides]
    if presets is not None:
        translated.append(f"hydra.searchpath=['file://{presets.resolve()}']")
    return _compose_presets(PRIMARY[root], translated)


def validate(values: Mapping[str, Any], root: type[Root]) -> Root:
    """Settings from plain values, as `compose` and a saved JSON give them.

    Raises:
        ConfigurationError: a name, a value or a combination is wrong. The message names the fix.
    """
    try:
        return root.model_validate(values)
    except ValidationError as error:
        raise ConfigurationError(explain(error, root)) from error


def digest(model: BaseModel, exclude: Any = None) -> str:
    """SHA-256 of the settings' canonical JSON, in hex.

    Args:
        exclude: what must not count, in pydantic's words: {"run": {"name"}, "tracking": True}.
    """
    values = model.model_dump(mode="json", exclude=exclude)
    text = json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


BESIDE_TRAINING: dict[str, Any] = {
    "run": {"name", "steps", "budget_rollouts", "checkpoint_every", "steps_per_task"},
    "verification": {"workers"},
    "evaluation": True,
    "storage": True,
    "tracking": True,
}
"""Settings that may change between two starts of one run: they change no step that both would make."""


def run_identity(settings: GleanerSettings) -> dict[str, Any]:
    """The settings that every start of a run must share."""
    return settings.model_dump(mode="json", exclude=BESIDE_TRAINING)


def run_name(settings: GleanerSettings) -> str:
    """`run.name`, or a name made of everything that training depends on: two starts of one command share it, and so
    does one that asks for more steps."""
    if settings.run.name is not None:
        return settings.run.name
    return f"{settings.method.kind}-{settings.environment.kind}-{digest(settings, BESIDE_TRAINING)[:10]}"


def _compose_presets(primary: str, overrides: list[str]) -> dict[str, Any]:
    try:
        with _own_hydra():
            composed: DictConfig = hydra_compose(primary, overrides=overrides)
        values: dict[str, Any] = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)  # type: ignore[assignment]
    except MissingMandatoryValue as error:
        raise ConfigurationError(f"{error.full_key} has no value: set {error.full_key}=VALUE") from error
    except OmegaConfBaseException as error:
        first_line = str(error).splitlines()[0]
        raise ConfigurationError(f"{error.full_key}: {first_line}; write \\${{ for a literal ${{") from error
    except (HydraException, yaml.YAMLError) as error:
        raise ConfigurationError(f"a preset cannot be composed: {' '.join(str(error).split())}") from error
    return values


@contextlib.contextmanager
def _own_hydra() -> Iterator[None]:
    """Hydra keeps one state a process: take it for a moment, and give back what a program around us had there."""
    with _hydra_is_one_per_process:
        hydra_state = GlobalHydra.instance()
        theirs, hydra_state.hydra = hydra_state.hydra, None
        try:
            with initialize_config_dir(config_dir=str(BUILT_IN), version_base="1.3"):
                yield
        finally:
            GlobalHydra.instance().hydra = theirs


def _translate(override: str, presets: Path | None) -> str:
    """An override in Hydra's words. Fields get `++` (set whether or not a preset lists it): the schema judges names."""
    name, equals, value = override.partition("=")
    name = name.strip().lstrip("+")
    if name.startswith("~"):
        raise ConfigurationError(
            f"{override}: settings are not deleted; set {name[1:]}=null to switch one off"
        )
    if not equals:
        raise ConfigurationError(f"{override} has no value: write {override}=VALUE")
    if name in GROUPS:
        _check_preset(name, value, presets)
        return f"{name}={value}"
    if not re.fullmatch(r"[A-Za-z_][\w-]*(\.[\w-]+)*", name) or name.split(".")[0] == "hydra":
        raise ConfigurationError(
            f"{override}: {name} is no setting; write GROUP=PRESET or a dotted name like run.steps=20"
        )
    if PLACEHOLDER.search(QUOTED.sub("", value)):
        return f"++{name}={_quoted(value)}"  # as text: Hydra would read a dictionary
    try:
        parsed = OverridesParser.create().parse_override(f"++{name}={value}")
    except HydraException as error:
        if value[:1] in tuple("[{'\""):
            raise ConfigurationError(
                f"{override} is not well-formed: check its brackets, commas and quotes: "
                "[1,2], {a: 1}, ['run.steps=4']"
            ) from error
        return f"++{name}={_quoted(value)}"
    if parsed.is_sweep_override():
        raise ConfigurationError(
            f"{override} means several runs: write {name}=[{value}] for a list, quote it for text, "
            "or use gleaner compare"
        )
    return f"++{name}={value}"


def _quoted(value: str) -> str:
    escaped = re.sub(r"(\\*)('|$)", lambda match: match[1] * 2 + ("\\'" if match[2] else ""), value)
    return f"'{escaped}'"


def _check_preset(group: str, value: str, presets: Path | None) -> None:
    known = available_presets(group, presets)
    for name in value.strip("[]").split(","):
        if name.strip() in known or (group == "experiment" and name in ("null", "")):
            continue
        message = f"{group}={value} is no preset: choose one of {', '.join(known)}"
        if group == "policy":
            message += f", or for a folder or hub id write policy=pretrained policy.path={value}"
        if group == "environment":
            message += (
                "; for an environment of your own write environment=python environment.path=FILE.py:CLASS"
            )
        raise ConfigurationError(message)
