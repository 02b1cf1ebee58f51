"""A small text household: find an object, perhaps clean it, and put it where the task says.

This project's own world, in the manner of ALFWorld: partially observable (closed places hide what is in them), short
commands, one reward at the end. A score here is not an ALFWorld score.

Commands, with P a place (`cabinet 1`) and O an object (`mug`): `go to P`, `open P`, `take O from P`, `put O in P` (or
`on`), `clean O`. Anything else, and anything impossible, is answered with "Nothing happens.".
"""

import itertools
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from gleaner.conf.errors import ConfigurationError
from gleaner.conf.schema import HouseholdEnvironment, Split
from gleaner.models.environments.base import Demonstration, Finding, Observation, Outcome, VerifierSpec
from gleaner.models.environments.prompts import content_digest, make_prompt, split_of, split_size
from gleaner.models.records import Message, Prompt
from gleaner.models.regions import Cells

CLOSED_KINDS = ("cabinet", "drawer", "fridge")
OPEN_KINDS = ("shelf", "table", "desk", "bed")
SINK = "sink 1"
ONE_ROOM = tuple(
    f"{kind} {number}"
    for number in (1, 2)
    for kind in ("cabinet", "shelf", "drawer", "table", "fridge", "desk", "bed")
)
"""The fixed layout: its first places are the room's."""
OBJECTS = ("apple", "book", "bowl", "cup", "egg", "fork", "key", "knife", "mug", "pan", "pen", "plate")
NOTHING_HAPPENS = "Nothing happens."
LAYOUTS = 1000
"""Tries for one task's layout: it must fall into the split, and the expert must solve it in the turn limit."""

Task = Literal["put", "clean"]


class Household:
    """The environment.

    The prompt lists the places; where the objects are is in the payload alone. Training tasks follow the run's seed;
    validation and test tasks are the same for every seed. Every task can be solved by an expert that knows no more
    than the observations say, within `max_turns`.
    """

    name = "household"
    version = "1"
    parallel_episodes = 1
    verifier = VerifierSpec(
        "gleaner.models.environments.household:verify", version="household-1", isolated=False
    )

    def __init__(self, settings: HouseholdEnvironment, seed: int) -> None:
        largest = 1 + 2 * (len(CLOSED_KINDS) + len(OPEN_KINDS))
        if not 3 <= settings.receptacles <= largest:
            raise ConfigurationError(
                f"environment.receptacles={settings.receptacles}: choose 3 to {largest} (a sink, a place to search, a "
                "place to put things)"
            )
        if settings.objects > len(OBJECTS):
            raise ConfigurationError(
                f"environment.objects={settings.objects}: choose at most {len(OBJECTS)}, there are no more kinds"
            )
        self.settings = settings
        self.max_turns = settings.max_turns
        self.seed = seed

    def size(self, split: Split) -> int:
        settings = self.settings
        return split_size(split, settings.size, settings.validation_share, settings.test_share)

    def prompt(self, split: Split, index: int) -> Prompt:
        """
        Raises:
            ConfigurationError: `index` is out of range, or the turn limit is too small for such a household.
        """
        if not 0 <= index < self.size(split):
            raise ConfigurationError(
                f"{split} has {self.size(split)} tasks, not number {index}: raise environment.size"
            )
        run_seed = self.seed if split == "train" else 0
        draw = random.Random(f"{run_seed}/{split}/{index}")
        settings = self.settings
        for _ in range(LAYOUTS):
            world = _draw_world(draw, settings)
            if split_of(content_digest(world), settings.validation_share, settings.test_share) != split:
                continue
            if len(_expert_actions(world)) <= self.max_turns:
                return make_prompt(self.name, split, [{"role": "user", "content": _task_text(world)}], world)
        raise ConfigurationError(
            f"environment.max_turns={self.max_turns} is too few for {settings.receptacles} receptacles: raise it, or "
            "lower environment.receptacles"
        )

    def begin(self, prompt: Prompt, seed: int) -> "HouseholdEpisode":
        return HouseholdEpisode(prompt.payload)

    def topic(self, prompt: Prompt) -> str:
        """The object that the task is about."""
        return str(prompt.payload["object"])

    def demonstrations(self, count: int, noise: float, seed: int) -> Sequence[Demonstration]:
        """The expert's episodes. With `noise` that share of its actions is replaced by random possible ones, after
        which it plans anew; an episode that then runs into the turn limit is kept as it is."""
        draw = random.Random(seed)
        prompts = (self.prompt("train", index % self.size("train")) for index in range(count))
        return [self._demonstration(prompt, (), noise, draw) for prompt in prompts]

    def findings(self, transcript: Sequence[Message]) -> list[Finding]:
        """What was seen in each place that was looked at."""
        found = []
        turns = [message for message in transcript if message["role"] == "assistant"]
        answers = [message for message in transcript if message["role"] != "assistant"]
        for turn, (said, answer) in enumerate(zip(turns, answers, strict=False)):
            if listing := LISTING.fullmatch(answer["content"]):
                region = Cells(frozenset([listing[1]]))
                found.append(Finding(turn, said["content"], said["content"], region, answer["content"]))
        return found

    def demonstrate(self, prompt: Prompt, known: Sequence[Finding], noise: float, seed: int) -> Demonstration:
        """The expert goes first where another attempt saw the object."""
        return self._demonstration(prompt, known, noise, random.Random(seed))

    def validate(self) -> list[str]:
        """Whether tasks can be made, and whether the expert's episodes succeed."""
        try:
            prompts = [self.prompt(split, 0) for split in ("train", "validation", "test")]
        except ConfigurationError as error:
            return [str(error)]
        sentences = []
        for prompt in prompts:
            episode = self.begin(prompt, prompt.seed)
            for action in _expert_actions(prompt.payload):
                episode.step(action)
            if not verify(prompt.payload, "", [], episode.result()).success:
                sentences.append(f"the expert fails {prompt.messages[0]['content']!r}: report this as a bug")
        return sentences

    def _demonstration(
        self, prompt: Prompt, known: Sequence[Finding], noise: float, draw: random.Random
    ) -> Demonstration:
        episode, expert = HouseholdEpisode(prompt.payload), Expert(prompt.payload)
        for finding in known:
            expert.hear(finding.text)
        turns: list[Message] = []
        for turn in itertools.count(1):
            action = expert.action()
            if draw.random() < noise:
                action = draw.choice(episode.possible_actions())
            turns.append({"role": "assistant", "content": action})
            observation = episode.step(action)
            if observation.done or turn == self.max_turns:
                return Demonstration(prompt, turns, episode.won)
            turns.append({"role": "user", "content": observation.text})
            expert.see(action, observation.text)
        raise AssertionError("unreachable")


def verify(
    payload: dict[str, Any], text: str, transcript: list[Message], environment_result: dict[str, Any]
) -> Outcome:
    """The world's own flag: an episode that ran into the turn limit has not won."""
    won = environment_result.get("won") is True
    return Outcome(won, float(won), {"turns": environment_result.get("turns")})


# ------------------------------------------------------------------------------------------------ the world


@dataclass
class HouseholdEpisode:
    """A world in progress, rebuilt from the payload alone.

    Attributes:
        contents: objects in each place, in the order in which they are listed.
        opened: places whose contents can be seen and reached.
    """

    world: dict[str, Any]
    contents: dict[str, list[str]] = field(init=False)
    opened: set[str] = field(init=False)
    here: str | None = None
    holding: str | None = None
    cleaned: set[str] = field(default_factory=set)
    turns: int = 0
    won: bool = False

    def __post_init__(self) -> None:
        self.contents = {place: list(objects) for place, objects in self.world["contents"].items()}
        self.opened = {place for place in self.contents if not _is_closed(place)}

    def step(self, action: str) -> Observation:
        self.turns += 1
        text = NOTHING_HAPPENS if self.won else self._apply(action)
        return Observation(text, done=self.won, result=self.result() if self.won else {})

    def result(self) -> dict[str, Any]:
        return {"won": self.won, "turns": self.turns}

    def close(self) -> None:
        """Nothing to free."""

    def possible_actions(self) -> list[str]:
        """Commands that change something, in a fixed order."""
        actions = [f"go to {place}" for place in self.contents if place != self.here]
        if self.here is None:
            return actions
        if self.here not in self.opened:
            return [*actions, f"open {self.here}"]
        if self.holding is None:
            actions += [f"take {thing} from {self.here}" for thing in self.contents[self.here]]
        else:
            actions.append(_put(self.holding, self.here))
            if self.here == SINK and self.holding not in self.cleaned:
                actions.append(f"clean {self.holding}")
        return actions

    def _apply(self, action: str) -> str:
        match parse(action):
            case ("go", place) if place in self.contents and place != self.here:
                self.here = place
                return self._look() if place in self.opened else f"{place} is closed."
            case ("open", place) if place == self.here and place not in self.opened:
                self.opened.add(place)
                return self._look()
            case ("take", thing, place) if self.holding is None and self._reaches(place, thing):
                self.contents[place].remove(thing)
                self.holding = thing
                return f"You take {thing}."
            case ("clean", thing) if thing == self.holding and self.here == SINK:
                self.cleaned.add(thing)
                return f"You clean {thing}."
            case ("put", thing, place) if (
                thing == self.holding and place == self.here and place in self.opened
            ):
                self.contents[place].append(thing)
                self.holding = None
                self.won = self._reached_goal(thing, place)
                return f"You put {thing} {_preposition(place)} {place}."
        return NOTHING_HAPPENS

    def _look(self) -> str:
        assert self.here is not None
        things = ", ".join(self.contents[self.here]) or "nothing"
        return f"{_preposition(self.here).capitalize()} {self.here}: {things}."

    def _reaches(self, place: str, thing: str) -> bool:
        return place == self.here and place in self.opened and thing in self.contents[place]

    def _reached_goal(self, thing: str, place: str) -> bool:
        goal = self.world
        clean_enough = goal["task"] == "put" or thing in self.cleaned
        return thing == goal["object"] and place.split()[0] == goal["target"] and clean_enough


LISTING = re.compile(r"(?:In|On) (\w+ \d+): (.*)\.")
COMMANDS = tuple(
    (verb, re.compile(pattern))
    for verb, pattern in (
        ("go", r"go to (\w+ \d+)"),
        ("open", r"open (\w+ \d+)"),
        ("take", r"take (\w+) from (\w+ \d+)"),
        ("put", r"put (\w+) (?:in|on) (\w+ \d+)"),
        ("clean", r"clean (\w+)"),
    )
)


def parse(action: str) -> tuple[str, ...] | None:
    """(verb, arguments…) of a command; None if it is none. Case, spaces and a final full stop do not matter."""
    plain = " ".join(action.lower().split()).removesuffix(".")
    for verb, pattern in COMMANDS:
        if match := pattern.fullmatch(plain):
            return verb, *match.groups()
    return None


def _draw_world(draw: random.Random, settings: HouseholdEnvironment) -> dict[str, Any]:
    """Places with their contents, and the goal. The payload of a prompt."""
    kinds = list(ONE_ROOM[: settings.receptacles - 1])
    if settings.layout == "varied":
        numbered = [f"{kind} {number}" for kind in (*CLOSED_KINDS, *OPEN_KINDS) for number in (1, 2)]
        kinds = draw.sample(numbered, settings.receptacles - 1)
    # Number 2 of a kind without number 1 would look odd: number anew, in the order in which prompts list the places.
    counts = {kind: sum(place.split()[0] == kind for place in kinds) for kind in (*CLOSED_KINDS, *OPEN_KINDS)}
    places = [f"{kind} {number + 1}" for kind, count in counts.items() for number in range(count)]
    target = draw.choice([kind for kind, count in counts.items() if count])
    objects = draw.sample(OBJECTS, settings.objects)
    contents: dict[str, list[str]] = {place: [] for place in [*places, SINK]}
    sources = [place for place in contents if place.split()[0] != target]
    for position, thing in enumerate(objects):
        contents[draw.choice(sources if position == 0 else list(contents))].append(thing)
    for things in contents.values():
        things.sort()
    return {"task": draw.choice(settings.tasks), "object": objects[0], "target": target, "contents": contents}


def _task_text(world: dict[str, Any]) -> str:
    thing, target = world["object"], world["target"]
    goal = f"put {thing} {_preposition(target)} {target}"
    if world["task"] == "clean":
        goal = f"clean {thing} at sink, then {goal}"
    return (
        "Commands: go to P, open P, take O from P, put O in P, clean O.\n"
        f"Places: {', '.join(world['contents'])}.\nTask: {goal}."
    )


def _is_closed(place: str) -> bool:
    return place.split()[0] in CLOSED_KINDS


def _preposition(place: str) -> str:
    return "in" if _is_closed(place) or place.startswith("sink") else "on"


def _put(thing: str, place: str) -> str:
    return f"put {thing} {_preposition(place)} {place}"


# ----------------------------------------------------------------------------------------------- the expert


class Expert:
    """Looks through the places in the order of the prompt until it has seen the object, then goes the short way.

    It knows the prompt and what it has seen, nothing else.
    """

    def __init__(self, world: dict[str, Any]) -> None:
        self.task: Task = world["task"]
        self.thing: str = world["object"]
        self.target: str = world["target"]
        self.places = list(world["contents"])
        self.seen: dict[str, list[str]] = {}
        self.heard: dict[str, list[str]] = {}
        self.opened = {place for place in self.places if not _is_closed(place)}
        self.here: str | None = None
        self.holding: str | None = None
        self.cleaned: set[str] = set()

    def action(self) -> str:
        """The next command."""
        if self.holding is not None and self.holding != self.thing and self.here is not None:
            return self._reach(self.here) or _put(self.holding, self.here)
        if self.holding == self.thing:
            if self.task == "clean" and self.thing not in self.cleaned:
                return f"clean {self.thing}" if self.here == SINK else f"go to {SINK}"
            targets = [place for place in self.places if place.split()[0] == self.target]
            goal = min(targets, key=lambda place: (place != self.here, place not in self.opened))
            return self._reach(goal) or _put(self.thing, goal)
        known = next((place for place, things in self.seen.items() if self.thing in things), None)
        if known is not None:
            return self._reach(known) or f"take {self.thing} from {known}"
        # Others may have moved things, so what was heard only orders the search. What lies at the target already would
        # have ended the task: it is searched last.
        unseen = [place for place in self.places if place not in self.seen]
        unseen.sort(
            key=lambda place: (
                self.thing not in self.heard.get(place, ()),
                place in self.heard,
                place != self.here,
                place.split()[0] == self.target,
            )
        )
        action = self._reach(unseen[0])
        assert action is not None, "a place that is reached and open has been seen"
        return action

    def see(self, action: str, observation: str) -> None:
        """Take in what an action did."""
        if observation == NOTHING_HAPPENS:
            return
        match parse(action):
            case ("go", place):
                self.here = place
            case ("open", place):
                self.opened.add(place)
            case ("take", thing, place):
                self.holding = thing
                self.seen[place].remove(thing)
            case ("clean", thing):
                self.cleaned.add(thing)
            case ("put", thing, place):
                self.holding = None
                self.seen.setdefault(place, []).append(thing)
        if listing := LISTING.fullmatch(observation):
            self.seen[listing[1]] = _things(listing[2])

    def hear(self, observation: str) -> None:
        """Take in what another attempt saw."""
        if listing := LISTING.fullmatch(observation):
            self.heard[listing[1]] = sorted({*self.heard.get(listing[1], ()), *_things(listing[2])})

    def _reach(self, place: str) -> str | None:
        """The next command on the way to an open `place`; None once there."""
        if self.here != place:
            return f"go to {place}"
        return None if place in self.opened else f"open {place}"


def _things(listed: str) -> list[str]:
    return [] if listed == "nothing" else listed.split(", ")


def _expert_actions(world: dict[str, Any]) -> list[str]:
    """The expert's whole episode, without noise."""
    episode, expert = HouseholdEpisode(world), Expert(world)
    actions: list[str] = []
    while not episode.won:
        action = expert.action()
        actions.append(action)
        expert.see(action, episode.step(action).text)
    return actions
