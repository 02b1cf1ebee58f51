"""ScienceWorld (Wang et al. 2022, arXiv 2203.07540): thirty tasks of elementary science in a text world, in Java.

Variations come in the tasks' own sets for training, development and test. The reward is the score, 0 to 100, over
100; success is the full score.
"""

import functools
import json
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, TypeVar

from gleaner.conf.errors import ConfigurationError
from gleaner.conf.schema import ScienceworldEnvironment, Split
from gleaner.models.environments.base import Outcome, VerifierSpec
from gleaner.models.environments.java import JavaEngine, JavaEnvironment, JavaPool, JavaWorld
from gleaner.models.records import Message

Result = TypeVar("Result")

SETS: dict[Split, str] = {
    "train": "getVariationsTrain",
    "validation": "getVariationsDev",
    "test": "getVariationsTest",
}
NO_ACTION_OF_A_POLICY = ("reset task",)


class Scienceworld(JavaEnvironment):
    """The environment. Prompts of the chosen tasks take turns, so that the first few show every task."""

    name = "scienceworld"
    engine = JavaEngine("scienceworld", "scienceworld", "scienceworld.jar", heap_megabytes=1536)
    verifier = VerifierSpec(
        "gleaner.models.environments.scienceworld:verify", version="scienceworld-1", isolated=False
    )

    def __init__(self, settings: ScienceworldEnvironment) -> None:
        super().__init__(settings.max_turns, settings.parallel_episodes)
        self.settings = settings

    @functools.cached_property
    def _cases(self) -> dict[Split, list[dict[str, Any]]]:
        settings = self.settings
        shared = {
            "simplifications": ",".join(settings.simplifications),
            "valid_actions": settings.valid_actions,
            "longest_observation": settings.longest_observation,
        }
        variations = _variations(self.pool, tuple(settings.tasks))
        return {
            split: [
                {"task": task, "variation": variation, **shared}
                for round_of_tasks in zip_longest(*(variations[task][split] for task in settings.tasks))
                for task, variation in zip(settings.tasks, round_of_tasks, strict=True)
                if variation is not None
            ]
            for split in SETS
        }

    def cases(self, split: Split) -> Sequence[dict[str, Any]]:
        return self._cases[split]

    def world(self, case: dict[str, Any]) -> "ScienceworldWorld":
        return ScienceworldWorld(self.pool, case)

    def make_expert_actions(self, case: dict[str, Any]) -> list[str]:
        world = ScienceworldWorld(self.pool, case)
        try:
            return world.make_gold_path(case)
        finally:
            world.close()


class ScienceworldWorld(JavaWorld):
    """One world.

    Args:
        case: task, variation, simplifications (joined by commas), valid_actions, longest_observation.
    """

    def __init__(self, pool: JavaPool, case: dict[str, Any]) -> None:
        super().__init__(pool)
        self._score = 0.0
        self._actions_listed: int = case["valid_actions"]
        self._longest: int = case["longest_observation"]
        self._globals: _Globals | None = None

        def start(jvm: Any) -> tuple[str, list[str], str]:
            own = self._globals = _Globals(jvm)
            with own:
                engine = self._engine = jvm.scienceworld.runtime.pythonapi.PythonInterface()
                engine.load(case["task"], case["variation"], case["simplifications"], False)
                own.adopt_simplifications(engine)
                commands = str(jvm.java.lang.String.join("\n", engine.getPossibleActions())).split("\n")
                return engine.getTaskDescription(), commands, engine.freeActionLook()

        try:
            task, commands, room = self._process.run(start)
            shown = ", ".join(command for command in commands if command not in NO_ACTION_OF_A_POLICY)
            self.opening = f"{task.strip()}\nCommands: {shown}.\n{self._shown(room)}"
        except BaseException:
            self.close()
            raise

    def act(self, action: str) -> str:
        def step(engine: Any) -> tuple[str, float, bool]:
            return engine.step(action), engine.getScore(), engine.getCompleted()

        text, self._score, completed = self._alone(step)
        self.won = self._score >= 1
        # A score below zero says that the task can no longer be done: the wrong object was focused on.
        self.over = bool(completed) or self._score < 0
        return text.strip() if self.over else self._shown(text)

    def result(self) -> dict[str, Any]:
        return {"won": self.won, "score": round(100 * self._score), "turns": self.turns}

    def valid_actions(self) -> list[str]:
        found = json.loads(self._alone(lambda engine: engine.getValidActionObjectCombinationsJSON()))
        return sorted({each["action"] for each in found["validActions"]} - set(NO_ACTION_OF_A_POLICY))

    def accepts(self, expert_action: str) -> bool:
        """Always: gold paths call things by names that the list of valid actions does not use."""
        return True

    def make_gold_path(self, case: dict[str, Any]) -> list[str]:
        """The engine solves the task, after which this world is of no more use."""

        def solve(engine: Any) -> list[str]:
            engine.load(case["task"], case["variation"], case["simplifications"], True)
            return list(engine.getGoldActionSequence())

        return self._alone(solve)

    def _alone(self, work: Callable[[Any], Result]) -> Result:
        """Call `work` with this world's engine, as if there were no other world in the process."""

        def in_own_globals(jvm: Any) -> Result:
            assert self._globals is not None
            with self._globals:
                return work(self._engine)

        return self._process.run(in_own_globals)

    def _shown(self, text: str) -> str:
        """The observation, at most `longest_observation` characters, and valid actions if they are listed."""
        text = text.strip()
        if len(text) > self._longest:
            text = text[: self._longest].rsplit("\n", 1)[0] + "\n…"
        if not self._actions_listed:
            return text
        valid = self.valid_actions()
        # Sorted, hundreds of them begin with the same word: take them evenly.
        step = max(1.0, len(valid) / self._actions_listed)
        some = [valid[int(place * step)] for place in range(min(len(valid), self._actions_listed))]
        return f"{text}\nActions: {', '.join(some)}."


class _Globals:
    """A world's own values of what ScienceWorld keeps once a process: the random generator, the counter of ids, the
    simplifications. As a context it puts them in place, and takes up what became of them."""

    def __init__(self, jvm: Any) -> None:
        self._generators = getattr(getattr(jvm.scala.util, "Random$"), "MODULE$")
        self._generator_field = jvm.java.lang.Class.forName("scala.util.Random").getDeclaredField("self")
        self._generator_field.setAccessible(True)
        self._ids = getattr(getattr(jvm.util, "UniqueIdentifier$"), "MODULE$")
        self._simplifier = jvm.main.scala.scienceworld.runtime.SimplifierProcessor
        self._generator = jvm.java.util.Random(0)
        self._next_id = 0
        self._simplifications: str | None = None

    def __enter__(self) -> None:
        self._generator_field.set(self._generators, self._generator)
        getattr(self._ids, "count_$eq")(self._next_id)
        if self._simplifications is not None:
            self._simplifier.parseSimplificationStr(self._simplifications)

    def __exit__(self, *_: object) -> None:
        self._next_id = self._ids.count()

    def adopt_simplifications(self, engine: Any) -> None:
        """Take up what the engine made of the names (`easy` means others in other tasks)."""
        self._simplifications = str(engine.agentInterface().get().simplificationStr())


@functools.lru_cache(maxsize=16)
def _variations(pool: JavaPool, tasks: tuple[str, ...]) -> dict[str, dict[Split, list[int]]]:
    """Numbers of each task's variations, by split."""

    def ask(jvm: Any) -> dict[str, dict[Split, list[int]]]:
        engine = jvm.scienceworld.runtime.pythonapi.PythonInterface()
        found: dict[str, dict[Split, list[int]]] = {}
        for task in tasks:
            getattr(engine, "taskStr_$eq")(task)  # `load` does that too, and takes a second
            found[task] = {split: list(getattr(engine, name)()) for split, name in SETS.items()}
        return found

    process = pool.take()
    try:
        return process.run(ask)
    finally:
        pool.give_back(process)


def verify(
    payload: dict[str, Any], text: str, transcript: list[Message], environment_result: dict[str, Any]
) -> Outcome:
    """The world's own score. A task that became impossible (a score below zero) earns nothing."""
    score = environment_result.get("score")
    if not isinstance(score, int):
        raise ConfigurationError(f"the episode has no score ({environment_result}): report this as a bug")
    return Outcome(
        score >= 100, max(0, score) / 100, {"score": score, "turns": environment_result.get("turns")}
    )
