"""TextWorldExpress (Jansen and Côté 2022, arXiv 2208.01174): text games made from a seed, played in Java.

twc puts objects where they belong, cookingworld cooks after a recipe, coin searches a house. Seeds come in the games'
own folds for training, development and test, which also hold other objects and recipes. One reward, at the end.
"""

import json
from collections.abc import Sequence
from typing import Any

from gleaner.conf.errors import ConfigurationError
from gleaner.conf.schema import Split, TextworldExpressEnvironment
from gleaner.models.environments.base import Outcome, VerifierSpec
from gleaner.models.environments.java import JavaEngine, JavaEnvironment, JavaPool, JavaWorld
from gleaner.models.records import Message

FOLDS: dict[Split, str] = {"train": "train", "validation": "dev", "test": "test"}
FIRST_SEED: dict[Split, int] = {"train": 0, "validation": 10_000, "test": 20_000}
SEEDS = 1000
"""Of each fold, in every game."""


class TextworldExpress(JavaEnvironment):
    """The environment. Prompts are the same for every run's seed: a fold has a thousand."""

    name = "textworld_express"
    engine = JavaEngine("textworld-express", "textworld_express", "textworld-express.jar", heap_megabytes=512)
    verifier = VerifierSpec(
        "gleaner.models.environments.textworld_express:verify", version="textworld-express-1", isolated=False
    )

    def __init__(self, settings: TextworldExpressEnvironment) -> None:
        super().__init__(settings.max_turns, settings.parallel_episodes)
        self.settings = settings

    def cases(self, split: Split) -> Sequence[dict[str, Any]]:
        first = FIRST_SEED[split]
        shared = {
            "game": self.settings.game,
            "parameters": self.settings.parameters,
            "fold": FOLDS[split],
            "valid_actions": self.settings.valid_actions,
        }
        return [{**shared, "seed": seed} for seed in range(first, first + SEEDS)]

    def world(self, case: dict[str, Any]) -> "TextworldGame":
        return TextworldGame(self.pool, case)

    def make_expert_actions(self, case: dict[str, Any]) -> list[str]:
        game = TextworldGame(self.pool, case, gold_path=True)
        try:
            return game.gold_path()
        finally:
            game.close()


class TextworldGame(JavaWorld):
    """One game.

    Args:
        case: game, parameters, fold, seed, and valid_actions (list them in every observation).
        gold_path: have the engine solve the game too.

    Raises:
        ConfigurationError: the engine refuses the parameters.
    """

    def __init__(self, pool: JavaPool, case: dict[str, Any], gold_path: bool = False) -> None:
        super().__init__(pool)
        self._lists_actions: bool = case["valid_actions"]
        self._score = 0.0

        def start(jvm: Any) -> tuple[Any, str, str, str]:
            engine = jvm.textworldexpress.runtime.PythonInterface()
            parameters = ",".join(f"{name}={value}" for name, value in case["parameters"].items())
            refusal = engine.load(case["game"], parameters)
            if refusal:
                return engine, refusal, "", ""
            state = engine.generateNewGameJSON(case["seed"], case["fold"], gold_path)
            return engine, "", engine.getTaskDescription(), state

        try:
            self._engine, refusal, task, state = self._process.run(start)
            if refusal:
                raise ConfigurationError(
                    f"environment.parameters={case['parameters']} does not suit {case['game']} ({refusal.strip()}): "
                    "correct the parameters"
                )
        except BaseException:
            self.close()
            raise
        self.opening = f"{task.strip()}\n{self._see(state)}"

    def act(self, action: str) -> str:
        # The engine's commands have capitals here and there (`TV stand`), which a policy need not get right.
        command = self._valid.get(action.lower().removesuffix("."), action)
        return self._see(self._process.run(lambda jvm: self._engine.stepJSON(command)))

    def result(self) -> dict[str, Any]:
        return {"won": self.won, "score": self._score, "turns": self.turns}

    def valid_actions(self) -> list[str]:
        return list(self._valid.values())

    def accepts(self, expert_action: str) -> bool:
        return expert_action.lower() in self._valid

    def gold_path(self) -> list[str]:
        return list(self._process.run(lambda jvm: list(self._engine.getGoldActionSequence())))

    def _see(self, state_json: str) -> str:
        state = json.loads(state_json)
        self._score = float(state["score"])
        self.won = bool(state["tasksuccess"]) or self._score >= 1
        self.over = self.won or bool(state["taskfailure"])
        self._valid = {action.lower(): action for action in sorted(state["validActions"])}
        text = str(state["observation"]).strip()
        return f"{text}\nActions: {', '.join(self._valid.values())}." if self._lists_actions else text


def verify(
    payload: dict[str, Any], text: str, transcript: list[Message], environment_result: dict[str, Any]
) -> Outcome:
    """The game's own flag. A share of the score is no success, and neither is the turn limit."""
    won = environment_result.get("won") is True
    details = {name: environment_result.get(name) for name in ("score", "turns")}
    return Outcome(won, float(won), details)
