"""Environments by name, and of a user's own."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gleaner.conf.errors import ConfigurationError
from gleaner.conf.schema import (
    HouseholdEnvironment,
    MathEnvironment,
    PythonEnvironment,
    ReasoningGymEnvironment,
)
from gleaner.models.environments import MEMBERS, make_environment
from gleaner.models.environments.base import Environment
from gleaner.models.plugins import load_object
from gleaner.models.verification import VerifierPool, judge_texts

OWN = """
from gleaner.models.environments.base import Outcome, VerifierSpec
from gleaner.models.environments.prompts import make_prompt
from helper_beside import GREETING

class Own:
    name, version, max_turns, parallel_episodes = "own", "1", 2, 1
    verifier = VerifierSpec(f"{__file__}:verify", "1")
    def __init__(self, word, seed=None): self.word, self.seed = word, seed
    def size(self, split): return 1
    def prompt(self, split, index):
        return make_prompt(self.name, split, [{"role": "user", "content": GREETING}], {"answer": self.word})
    def begin(self, prompt, seed): raise NotImplementedError
    def demonstrations(self, count, noise, seed): return []
    def validate(self): return []

class Half:
    name, version = "half", "1"
    def prompt(self, split, index): ...

def verify(payload, text, transcript, environment_result):
    return Outcome(text == payload["answer"], float(len(text)))

NUMBER = 3
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "helper_beside.py").write_text('GREETING = "Say it."')
    path = tmp_path / "own_world.py"
    path.write_text(OWN)
    return path


@pytest.mark.parametrize("settings", [MathEnvironment(), ReasoningGymEnvironment(), HouseholdEnvironment()])
def test_every_kind_has_all_members_of_the_protocol(settings: Any) -> None:
    environment = make_environment(settings, seed=0)
    assert isinstance(environment, Environment)
    assert all(hasattr(environment, member) for member in MEMBERS)
    assert environment.max_turns == settings.max_turns


def test_members_are_those_of_the_protocol() -> None:
    declared = {
        *Environment.__annotations__,
        *(name for name in vars(Environment) if not name.startswith("_")),
    }
    assert set(MEMBERS) == declared


def test_a_class_in_a_file_is_made_with_its_options_and_the_seed_and_verifies_in_a_worker(own: Path) -> None:
    settings = PythonEnvironment(path=f"{own}:Own", options={"word": "hi"})
    environment: Any = make_environment(settings, seed=7)
    assert (environment.word, environment.seed) == ("hi", 7)
    with VerifierPool(1, 10.0) as pool:
        prompt = environment.prompt("train", 0)
        verdicts = judge_texts(environment, [(prompt, "hi"), (prompt, "no!")], pool)
    assert [(verdict.success, verdict.reward) for verdict in verdicts] == [(True, 2.0), (False, 3.0)]


def test_a_path_relative_to_the_working_folder_and_a_module_in_it(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(own.parent)
    for path in ("own_world.py:Own", "own_world:Own"):
        settings = PythonEnvironment(path=path, options={"word": "hi"})
        assert make_environment(settings, seed=0).name == "own"


@pytest.mark.parametrize(
    ("path", "options", "words"),
    [
        (
            "{own}:Half",
            {},
            ["lacks max_turns, parallel_episodes, verifier, size, begin, demonstrations, validate"],
        ),
        ("{own}:Own", {}, ["does not suit", "(word, seed=None)", "correct the options"]),
        ("{own}:Own", {"word": "x", "wrong": 1}, ["does not suit", "wrong"]),
        ("{own}:Missing", {}, ["has no Missing", "Half"]),
        ("{own}:NUMBER", {}, ["is no class"]),
        ("{own.parent}/nowhere.py:Own", {}, ["nowhere.py does not exist"]),
        ("no_such_module:Own", {}, ["importing no_such_module failed"]),
    ],
)
def test_what_is_no_environment_is_refused_with_the_fix(
    path: str, options: dict[str, Any], words: list[str], own: Path
) -> None:
    with pytest.raises(ConfigurationError) as error:
        make_environment(PythonEnvironment(path=path.format(own=own), options=options), seed=0)
    assert all(word in str(error.value) for word in words)


def test_turns_that_the_class_does_not_have_are_refused(own: Path) -> None:
    with pytest.raises(ConfigurationError, match="has 2 turns"):
        make_environment(PythonEnvironment(path=f"{own}:Own", options={"word": "x"}, max_turns=9), seed=0)


@pytest.mark.parametrize("settings", [MathEnvironment(max_turns=2), ReasoningGymEnvironment(max_turns=2)])
def test_a_single_turn_environment_refuses_more_turns(settings: Any) -> None:
    with pytest.raises(ConfigurationError, match="one turn"):
        make_environment(settings, seed=0)


def test_a_folder_of_the_user_shadows_nothing_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("dumps = None")
    (tmp_path / "mine.py").write_text("import json\ndumps = json.dumps")
    monkeypatch.chdir(tmp_path)
    assert load_object("mine:dumps")([1]) == "[1]"


def test_two_files_of_one_name_stay_apart(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "rewards.py").write_text(f"WHERE = {folder!r}")
    assert [load_object(f"{tmp_path / folder}/rewards.py:WHERE") for folder in ("a", "b")] == ["a", "b"]


def test_a_worker_that_verifies_mathematics_imports_nothing_heavy_but_math_verify() -> None:
    code = (
        "import sys, gleaner.models.verification, gleaner.models.environments, gleaner.models.math_verdicts\n"
        "heavy = {'torch', 'sympy', 'math_verify', 'reasoning_gym', 'prefect', 'mlflow', 'datasets', 'fsspec'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert output.stdout.strip() == "[]"
