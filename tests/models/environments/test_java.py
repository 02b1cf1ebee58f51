"""Worlds in Java processes: settings, determinism, lost processes, and gold paths that win."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

import psutil
import pytest

from gleaner.conf.compose import compose
from gleaner.conf.errors import ConfigurationError
from gleaner.conf.schema import ScienceworldEnvironment, TextworldExpressEnvironment
from gleaner.models.environments import java
from gleaner.models.environments.java import JavaEngine, JavaPool, LostWorldError
from gleaner.models.environments.scienceworld import Scienceworld
from gleaner.models.environments.scienceworld import verify as verify_science
from gleaner.models.environments.textworld_express import TextworldExpress
from gleaner.models.environments.textworld_express import verify as verify_game

GAMES = ("textworld_twc", "textworld_coin", "textworld_cookingworld")


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["environment=textworld_twc", "environment.game=chess"], "'twc', 'cookingworld' or 'coin'"),
        (
            ["environment=textworld_twc", "environment.parameters.numDoors=1"],
            "environment.parameters.numDoors is no parameter of twc: it has numLocations",
        ),
        (
            ["environment=textworld_coin", "environment.parameters.numLocations=12"],
            "environment.parameters.numLocations=12: coin takes 1 to 11",
        ),
        (["environment=scienceworld", "environment.tasks=[fly]"], "environment.tasks"),
        (["environment=scienceworld", "environment.tasks=[boil,boil]"], "names a task twice"),
        (
            [
                "environment=scienceworld",
                "environment.tasks=[power-component]",
                "environment.simplifications=[noElectricalAction]",
            ],
            "cannot be done under noElectricalAction",
        ),
    ],
)
def test_a_wrong_setting_is_refused_with_the_right_ones(overrides: list[str], sentence: str) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        compose(overrides)
    assert sentence in str(refusal.value)


def test_a_package_that_is_missing_is_named_with_its_extra() -> None:
    with pytest.raises(
        ConfigurationError, match=r"needs the package no-such-engine: run `pip install 'gleaner\[java\]'`"
    ):
        JavaEngine("no-such-engine", "no_such_engine", "engine.jar", 64).version()


def test_outcomes_are_the_engines_own() -> None:
    assert verify_game({}, "", [], {"won": True, "score": 1.0, "turns": 3}).reward == 1.0
    assert verify_game({}, "", [], {"won": False, "score": 0.7, "turns": 9}).reward == 0.0
    science = verify_science({}, "", [], {"score": 58, "turns": 9})
    assert (science.success, science.reward) == (False, 0.58)
    assert verify_science({}, "", [], {"score": -100, "turns": 2}).reward == 0.0
    assert verify_science({}, "", [], {"score": 100, "turns": 2}).success


# --------------------------------------------------------------------------------------------- real engines

real = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("textworld_express") is None
        or importlib.util.find_spec("scienceworld") is None,
        reason="the extra is not installed: make java",
    ),
]


def real_engine(test: Any) -> Any:
    for mark in real:
        test = mark(test)
    return test


def game(preset: str = "textworld_twc") -> TextworldExpress:
    settings = compose([f"environment={preset}"]).environment
    assert isinstance(settings, TextworldExpressEnvironment)
    return TextworldExpress(settings)


def science(*tasks: str) -> Scienceworld:
    overrides = [
        "environment=scienceworld",
        f"environment.tasks=[{','.join(tasks)}]",
        "environment.simplifications=[easy]",
    ]
    settings = compose(overrides).environment
    assert isinstance(settings, ScienceworldEnvironment)
    return Scienceworld(settings)


def play(environment: Any, index: int) -> tuple[list[str], dict[str, Any]]:
    """The texts along the gold path of a training prompt, and the episode's result."""
    prompt = environment.prompt("train", index)
    world = environment.begin(prompt, 0)
    try:
        said = [world.step(action).text for action in environment.expert_actions(prompt.payload)]
        return [str(prompt.messages[0]["content"]), *said], world.result()
    finally:
        world.close()


@real_engine
@pytest.mark.parametrize("preset", GAMES)
def test_gold_paths_win_and_folds_share_no_prompt(preset: str) -> None:
    environment = game(preset)
    assert environment.validate() == []
    won = [play(environment, index)[1]["won"] for index in range(5)]
    assert any(won)
    prompts = [
        environment.prompt(split, index).prompt_id
        for split in ("train", "validation", "test")
        for index in range(5)
    ]
    assert len(set(prompts)) == 15


@real_engine
def test_a_science_task_is_won_along_its_gold_path() -> None:
    environment = science("find-living-thing", "find-plant")
    _, result = play(environment, 0)
    assert result["won"]
    assert result["score"] == 100


@real_engine
def test_another_process_sees_the_same_world() -> None:
    """Shards are repeated in other processes, so texts must not depend on the process."""
    here = [play(game(), 0)[0], play(science("find-plant"), 0)[0]]
    script = (
        "import json; from tests.models.environments.test_java import game, play, science; "
        "print(json.dumps([play(game(), 0)[0], play(science('find-plant'), 0)[0]]))"
    )
    there = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=300
    )
    assert json.loads(there.stdout.splitlines()[-1]) == here


@real_engine
def test_worlds_of_one_process_do_not_mix() -> None:
    """Two episodes stepped in turns see what each sees alone."""
    environment = science("find-living-thing", "find-plant")
    alone = [play(environment, index)[0] for index in range(2)]
    prompts = [environment.prompt("train", index) for index in range(2)]
    worlds = [environment.begin(prompt, 0) for prompt in prompts]
    paths = [environment.expert_actions(prompt.payload) for prompt in prompts]
    texts: list[list[str]] = [[world.opening] for world in worlds]
    for turn in range(max(map(len, paths))):
        for world, path, seen in zip(worlds, paths, texts, strict=True):
            if turn < len(path):
                seen.append(world.step(path[turn]).text)
    for world in worlds:
        world.close()
    assert texts == alone


@real_engine
def test_a_killed_engine_loses_its_episode_and_the_next_one_gets_a_new_process() -> None:
    environment = game()
    prompt = environment.prompt("train", 0)
    world = environment.begin(prompt, 0)
    os.kill(world._process.pid, signal.SIGKILL)
    with pytest.raises(LostWorldError):
        world.step("look around")
    world.close()
    again = environment.begin(prompt, 0)
    assert again.opening == prompt.messages[0]["content"]
    again.close()


@real_engine
def test_engines_end_with_the_process_that_started_them() -> None:
    script = (
        "import os; from tests.models.environments.test_java import game; environment = game(); "
        "environment.prompt('train', 0); print(environment.pool.processes()[0].pid, flush=True); "
        "os.kill(os.getpid(), 9)"
    )
    killed = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    pid = int(killed.stdout.splitlines()[-1])
    deadline = time.monotonic() + 20
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not psutil.pid_exists(pid)


@real_engine
def test_a_process_retires_after_so_many_worlds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(java, "WORLDS_PER_PROCESS", 2)
    pool = JavaPool(TextworldExpress.engine, 1)
    first, second, third = pool.take(), pool.take(), pool.take()
    assert first is second is not third
    pool.give_back(first)
    assert first.alive
    pool.give_back(second)
    assert not first.alive
    pool.close()
    assert not third.alive
