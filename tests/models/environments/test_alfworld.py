"""ALFWorld's engine, expert and wording, on games generated here: what is measured on them is no ALFWorld score.

A generated game has four places and two objects. The data that ALFWorld's scores are about is a download that these
tests do without.
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from gleaner.conf.errors import ConfigurationError
from gleaner.conf.schema import AlfworldEnvironment
from gleaner.models.environments import make_environment
from gleaner.models.environments.alfworld import Alfworld, verify
from gleaner.models.environments.base import Environment

PLACES = {"Drawer": True, "Shelf": False, "Cabinet": True, "Desk": False}  # whether it opens
WALKTHROUGH = [
    "go to cabinet 1",
    "open cabinet 1",
    "take mug 1 from cabinet 1",
    "go to desk 1",
    "move mug 1 to desk 1",
]


def write_game(folder: Path, mug_in: str, **changes: Any) -> None:
    """A game "put a mug in desk", in the files and with the fields of ALFWorld's own."""
    from alfworld.gen.goal_library import gdict
    from alfworld.info import ALFRED_PDDL_PATH, ALFRED_TWL2_PATH

    things = {"Mug": mug_in, "Pencil": "Drawer"}
    objects = ["agent1 - agent", "start - location"]
    facts = ["(atLocation agent1 start)", "(= (total-cost) 0)"]
    for place, opens in PLACES.items():
        name = f"{place}_bar__plus_01"
        objects += [f"{name} - receptacle", f"at{place} - location", f"{place}Type - rtype"]
        facts += [f"(receptacleAtLocation {name} at{place})", f"(receptacleType {name} {place}Type)"]
        facts += [f"(openable {name})"] * opens + [
            f"(canContain {place}Type {thing}Type)" for thing in things
        ]
    for thing, place in things.items():
        name = f"{thing}_bar__plus_01"
        objects += [f"{name} - object", f"{thing}Type - otype"]
        facts += [f"(objectType {name} {thing}Type)", f"(pickupable {name})"]
        facts += [f"(inReceptacle {name} {place}_bar__plus_01)", f"(objectAtLocation {name} at{place})"]
    goal = gdict["pick_and_place_simple"]["pddl"].replace("#", "-").format(obj="Mug", recep="Desk")
    problem = f"(define (problem p) (:domain alfred) (:objects {' '.join(objects)}) (:init {' '.join(facts)}) {goal}"
    game = {
        "pddl_domain": Path(ALFRED_PDDL_PATH).read_text(),
        "grammar": Path(ALFRED_TWL2_PATH).read_text().replace("UNKNOWN GOAL", "put a mug in desk"),
        "pddl_problem": problem,
        "solvable": True,
        "walkthrough": WALKTHROUGH,
    }
    parameters = {"object_target": "Mug", "parent_target": "Desk", "toggle_target": "", "mrecep_target": ""}
    trajectory = {
        "task_type": "pick_and_place_simple",
        "pddl_params": {**parameters, "object_sliced": False},
    }
    folder.mkdir(parents=True)
    (folder / "game.tw-pddl").write_text(json.dumps({**game, **changes}))
    (folder / "traj_data.json").write_text(json.dumps(trajectory))


def world_at(path: Path, **changes: Any) -> Alfworld:
    made = make_environment(AlfworldEnvironment(path=str(path), **changes), seed=0)
    assert isinstance(made, Alfworld)
    return made


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("alfworld", reason="pip install 'gleaner[alfworld]'")
    root = tmp_path_factory.mktemp("alfworld") / "json_2.1.1"
    for folder, mug_in in (("train", "Cabinet"), ("valid_seen", "Drawer"), ("valid_unseen", "Shelf")):
        write_game(root / folder / "pick_and_place_simple-Mug-None-Desk-301" / "trial_1", mug_in)
    write_game(
        root / "train" / "pick_and_place_simple-Mug-None-Desk-302" / "trial_1", "Shelf", solvable=False
    )
    write_game(root / "train" / "pick_and_place_with_movable_recep-Mug-Cup-Desk-301" / "trial_1", "Shelf")
    return root


@pytest.mark.slow
def test_splits_are_the_folders_and_leave_out_what_alfworld_leaves_out(data: Path) -> None:
    world = world_at(data)
    assert isinstance(world, Environment)
    assert [world.size(split) for split in ("train", "validation", "test")] == [1, 1, 1]
    prompts = [world.prompt(split, 0) for split in ("train", "validation", "test")]
    assert len({prompt.prompt_id for prompt in prompts}) == 3
    assert [prompt.payload["game"].split("/")[0] for prompt in prompts] == [
        "train",
        "valid_seen",
        "valid_unseen",
    ]
    (message,) = prompts[0].messages
    assert "you see a cabinet 1, a desk 1, a drawer 1, and a shelf 1." in message["content"]
    assert message["content"].endswith("Your task is to: put a mug in desk.")
    assert "take mug" not in message["content"]


@pytest.mark.slow
def test_the_walkthrough_wins_and_a_wandering_episode_does_not(data: Path) -> None:
    world = world_at(data)
    prompt = world.prompt("train", 0)
    arguments = sys.argv
    winner, wanderer = world.begin(prompt, 0), world.begin(prompt, 0)  # in turns: they share nothing
    for action in WALKTHROUGH:
        assert wanderer.step("please help me").text == "Nothing happens."
        last = winner.step(f" {action.capitalize()}. ")
    assert (last.text, last.done) == ("You move the mug 1 to the desk 1.", True)
    assert last.result == winner.result() == {"won": True, "turns": 5}
    assert wanderer.result() == {"won": False, "turns": 5}
    outcomes = [verify(prompt.payload, "", [], each.result()) for each in (winner, wanderer)]
    assert [(outcome.success, outcome.reward) for outcome in outcomes] == [(True, 1.0), (False, 0.0)]
    assert outcomes[0].details["task"] == "pick_and_place_simple"
    winner.close()
    wanderer.close()
    again = world.begin(prompt, 0)  # on a used engine
    assert again.step("inventory").text == "You are not carrying anything."
    again.close()
    assert sys.argv is arguments


@pytest.mark.slow
def test_the_expert_searches_wins_and_repeats_itself_by_seed(data: Path) -> None:
    world = world_at(data)
    state = random.getstate()
    (shown,) = world.demonstrations(1, 0.0, 3)
    assert random.getstate() == state
    actions = [turn["content"] for turn in shown.turns[::2]]
    assert [turn["role"] for turn in shown.turns[:3]] == ["assistant", "user", "assistant"]
    assert (actions[0], actions[-1]) == ("look", "move mug 1 to desk 1")
    noisy = [world.demonstrations(1, 0.5, seed)[0].turns for seed in (3, 3, 4)]
    assert noisy[0] == noisy[1] != noisy[2]
    cut = world_at(data, max_turns=3).demonstrations(1, 0.0, 3)[0].turns
    assert cut == shown.turns[:5]


@pytest.mark.slow
def test_where_the_expert_gives_up_the_files_walkthrough_is_shown(data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "train" / "game" / "trial_1"
    write_game(folder, "Cabinet")
    trajectory = json.loads((folder / "traj_data.json").read_text())
    # Told to look for what is not there, the expert searches until it gives up.
    trajectory["pddl_params"]["object_target"] = "Vase"
    (folder / "traj_data.json").write_text(json.dumps(trajectory))
    (shown,) = world_at(tmp_path, max_turns=500).demonstrations(1, 0.0, 0)
    assert [turn["content"] for turn in shown.turns[::2]] == WALKTHROUGH


@pytest.mark.slow
def test_validation_plays_a_game_and_says_what_is_missing(data: Path, tmp_path: Path) -> None:
    assert world_at(data).validate() == []
    (few,) = world_at(data, max_turns=3).validate()
    assert "within environment.max_turns=3: raise it" in few
    write_game(tmp_path / "train" / "game" / "trial_1", "Cabinet")
    (lacking,) = world_at(tmp_path).validate()
    assert "has no folder valid_seen: run alfworld-download" in lacking


def test_missing_data_is_named_with_its_fix(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match="has no folder train: run alfworld-download, and name the folder"
    ):
        world_at(tmp_path / "json_2.1.1").size("train")


def test_a_missing_package_is_named_with_its_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gleaner.models.environments import alfworld

    alfworld._package.cache_clear()
    monkeypatch.setitem(sys.modules, "textworld", None)
    (sentence,) = world_at(tmp_path).validate()
    assert "pip install 'gleaner[alfworld]'" in sentence
    alfworld._package.cache_clear()
