"""ALFWorld's text games, on the data that a user has downloaded.

Engine, commands and texts are those of the alfworld package; a game is a folder with `game.tw-pddl` and
`traj_data.json`, as `alfworld-download` makes them. Left out is what ALFWorld's own loader leaves out: movable
receptacles, sliced objects, and games that are not marked solvable.
"""

import contextlib
import functools
import hashlib
import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gleaner.conf.errors import ConfigurationError
from gleaner.conf.schema import AlfworldEnvironment, Split
from gleaner.models.environments.base import Demonstration, Observation, Outcome, VerifierSpec
from gleaner.models.environments.prompts import make_prompt
from gleaner.models.records import Message, Prompt

FOLDERS: dict[Split, str] = {"train": "train", "validation": "valid_seen", "test": "valid_unseen"}
GAME = "game.tw-pddl"
TRAJECTORY = "traj_data.json"


class Alfworld:
    """The environment.

    The prompt is the game's introduction: the places, and the task. Episodes end when the game is won; the step limit
    is this environment's `max_turns`, and running into it is no success.
    """

    name = "alfworld"
    version = "1"
    parallel_episodes = 1
    """A step is Python for the most part, so threads would only wait for each other."""
    verifier = VerifierSpec(
        "gleaner.models.environments.alfworld:verify", version="alfworld-1", isolated=False
    )

    def __init__(self, settings: AlfworldEnvironment) -> None:
        self.settings = settings
        self.max_turns = settings.max_turns
        self.root = Path(settings.path).expanduser()
        self._games: dict[Split, list[Path]] = {}
        self._prompts: dict[tuple[Split, int], Prompt] = {}
        self._idle: list[Any] = []
        """Engines that no episode uses. They are used again, since a planner library is never unloaded."""

    def size(self, split: Split) -> int:
        """
        Raises:
            ConfigurationError: the data is missing.
        """
        return len(self.games(split))

    def prompt(self, split: Split, index: int) -> Prompt:
        """
        Raises:
            ConfigurationError: the package or the data is missing, or `index` is out of range.
        """
        games = self.games(split)
        if not 0 <= index < len(games):
            raise ConfigurationError(f"{split} has {len(games)} games, not number {index}")
        if (split, index) not in self._prompts:
            self._prompts[split, index] = self._make_prompt(split, games[index])
        return self._prompts[split, index]

    def begin(self, prompt: Prompt, seed: int) -> "AlfworldEpisode":
        engine = self._idle.pop() if self._idle else make_engine()
        return AlfworldEpisode(engine, self.root / prompt.payload["game"] / GAME, self._idle)

    def demonstrations(self, count: int, noise: float, seed: int) -> Sequence[Demonstration]:
        """ALFWorld's handcoded expert; where it gives up, the walkthrough in the game's file.

        With `noise` that share of the expert's actions is replaced by random admissible ones. What runs into the turn
        limit is kept as it is. An episode takes seconds.
        """
        draw = random.Random(seed)
        engine = make_expert_engine()
        prompts = (self.prompt("train", index % self.size("train")) for index in range(count))
        return [Demonstration(prompt, self._expert_turns(engine, prompt, noise, draw)) for prompt in prompts]

    def validate(self) -> list[str]:
        """Whether package and data are there, and whether the expert wins the first training game."""
        try:
            (shown,) = self.demonstrations(1, 0.0, 0)
            sizes = {split: self.size(split) for split in FOLDERS}
        except ConfigurationError as error:
            return [str(error)]
        episode = self.begin(shown.prompt, 0)
        for turn in shown.turns[::2]:
            episode.step(turn["content"])
        won = episode.won
        episode.close()
        sentences = [
            f"environment.path={self.root} has no game in {FOLDERS[split]}: run alfworld-download again"
            for split, size in sizes.items()
            if not size
        ]
        if not won:
            sentences.append(
                f"the expert does not win {shown.prompt.payload['game']} within environment.max_turns="
                f"{self.max_turns}: raise it (ALFWorld's is 50), or run alfworld-download again"
            )
        return sentences

    def games(self, split: Split) -> list[Path]:
        """Folders of the split's games below the data's root, sorted."""
        if split not in self._games:
            folder = self.root / FOLDERS[split]
            if not folder.is_dir():
                raise ConfigurationError(
                    f"environment.path={self.settings.path} has no folder {FOLDERS[split]}: run alfworld-download, and "
                    "name the folder json_2.1.1 that it makes"
                )
            found = sorted(file.parent.relative_to(self.root) for file in folder.rglob(GAME))
            self._games[split] = [game for game in found if self._is_playable(game)]
            if split == "train" and not self._games[split]:
                raise ConfigurationError(
                    f"environment.path={self.settings.path} has no solvable game in train: run alfworld-download again"
                )
        return self._games[split]

    def _is_playable(self, game: Path) -> bool:
        if "movable" in str(game) or "Sliced" in str(game) or not (self.root / game / TRAJECTORY).exists():
            return False
        return self._read(game).get("solvable") is True

    def _read(self, game: Path) -> dict[str, Any]:
        file = self.root / game / GAME
        try:
            read: dict[str, Any] = json.loads(file.read_bytes())
        except ValueError as error:
            raise ConfigurationError(f"{file} is no JSON ({error}): run alfworld-download again") from error
        return read

    def _make_prompt(self, split: Split, game: Path) -> Prompt:
        content = (self.root / game / GAME).read_bytes()
        task = json.loads((self.root / game / TRAJECTORY).read_bytes())["task_type"]
        payload = {"game": game.as_posix(), "sha256": hashlib.sha256(content).hexdigest(), "task": task}
        engine = self._idle.pop() if self._idle else make_engine()
        episode = AlfworldEpisode(engine, self.root / game / GAME, self._idle)
        episode.close()
        text = "\n".join(part for part in (self.settings.instruction, episode.introduction) if part)
        return make_prompt(self.name, split, [{"role": "user", "content": text}], payload)

    def _expert_turns(self, engine: Any, prompt: Prompt, noise: float, draw: random.Random) -> list[Message]:
        file = self.root / prompt.payload["game"] / GAME
        turns: list[Message] = []
        with _drawing_from(draw):
            try:
                state = _reset(engine, file)
                while True:
                    action = state["extra.expert_plan"][0]
                    if draw.random() < noise:
                        action = draw.choice(state["admissible_commands"])
                    turns.append({"role": "assistant", "content": action})
                    state, _, done = engine.step(action)
                    if done or len(turns) // 2 + 1 == self.max_turns:
                        return turns
                    turns.append({"role": "user", "content": state.feedback.strip()})
            except Exception as gave_up:  # its timeout is a plain Exception, and its failure a NameError
                walkthrough = self._read(Path(prompt.payload["game"])).get("walkthrough")
                if not walkthrough:
                    raise ConfigurationError(
                        f"ALFWorld's expert gives up on {prompt.payload['game']} ({gave_up!r}), and the file has no "
                        "walkthrough: run alfworld-download again, or lower warmstart.noise"
                    ) from gave_up
        return self._played(prompt, walkthrough)

    def _played(self, prompt: Prompt, actions: Sequence[str]) -> list[Message]:
        episode, turns = self.begin(prompt, 0), list[Message]()
        for action in actions[: self.max_turns]:
            turns.append({"role": "assistant", "content": action})
            observation = episode.step(action)
            if observation.done:
                break
            turns.append({"role": "user", "content": observation.text})
        episode.close()
        return turns if turns[-1]["role"] == "assistant" else turns[:-1]


def verify(
    payload: dict[str, Any], text: str, transcript: list[Message], environment_result: dict[str, Any]
) -> Outcome:
    """The game's own flag: an episode that ran into the turn limit has not won."""
    won = environment_result["won"] is True
    return Outcome(won, float(won), {"turns": environment_result["turns"], "task": payload["task"]})


class AlfworldEpisode:
    """A game in progress; its engine goes back to the idle ones when it is closed."""

    def __init__(self, engine: Any, file: Path, idle: list[Any]) -> None:
        self.engine, self.idle = engine, idle
        self.turns, self.won = 0, False
        self.introduction: str = _reset(engine, file).feedback.strip()

    def step(self, action: str) -> Observation:
        self.turns += 1
        state, _, _ = self.engine.step(" ".join(action.lower().split()).removesuffix("."))
        self.won = bool(state.won)
        return Observation(state.feedback.strip(), done=self.won, result=self.result() if self.won else {})

    def result(self) -> dict[str, Any]:
        return {"won": self.won, "turns": self.turns}

    def close(self) -> None:
        self.idle.append(self.engine)


def make_engine() -> Any:
    """An engine without a game.

    Raises:
        ConfigurationError: the package is missing.
    """
    textworld, pddl, alfred = _package()
    infos = textworld.EnvInfos(won=True, admissible_commands=True)
    return alfred.AlfredDemangler(pddl.PddlEnv(infos), shuffle=False)


def make_expert_engine() -> Any:
    """An engine whose states carry the handcoded expert's next command."""
    _, _, alfred = _package()
    return alfred.AlfredExpert(make_engine(), expert_type=alfred.AlfredExpertType.HANDCODED)


@functools.cache
def _package() -> tuple[Any, Any, Any]:
    try:
        import textworld
        from alfworld.agents.environment import alfred_tw_env
        from textworld.envs.pddl import pddl
    except ImportError as error:
        raise ConfigurationError(
            f"environment=alfworld needs the alfworld package ({error}): pip install 'gleaner[alfworld]'"
        ) from error
    return textworld, pddl, alfred_tw_env


def _reset(engine: Any, file: Path) -> Any:
    """Load a game and start it. Its PDDL translator overwrites the process's arguments, which are put back."""
    arguments = sys.argv
    try:
        engine.load(str(file))
        return engine.reset()
    finally:
        sys.argv = arguments


@contextlib.contextmanager
def _drawing_from(draw: random.Random) -> Iterator[None]:
    """The expert draws from the process's generator: seed it for a while."""
    before = random.getstate()
    random.seed(draw.getrandbits(32))
    try:
        yield
    finally:
        random.setstate(before)
