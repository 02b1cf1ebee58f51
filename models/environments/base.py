"""What an environment is to the rest of Gleaner: prompts, turns, a verifier, an expert.

A single-turn environment implements `Environment` with `max_turns` 1 and never sees `begin`. A multi-turn one
returns an `Episode`, which may be slow, keep state, live outside the process (a JVM, a server) or show images:
the turn loop steps episodes in threads when `parallel_episodes` is above one and always closes them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from gleaner.conf.schema import Split
from gleaner.models.records import Message, Prompt
from gleaner.models.regions import Region


@dataclass(frozen=True)
class Outcome:
    """A verifier's answer: success in {True, False}, reward finite (usually in [0, 1])."""

    success: bool
    reward: float
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class VerifierSpec:
    """Where the verifier is, so that a separate process can import it.

    Attributes:
        function: `package.module:function`, called as
            f(payload, text, transcript, environment_result) -> Outcome.
        version: part of cache keys and of every verdict; bump it when the answer may change.
        isolated: run in a killable process with a deadline. False only for checks that cannot hang, such as reading
            the environment's own success flag.
    """

    function: str
    version: str
    isolated: bool = True


@dataclass(frozen=True)
class Observation:
    """What an episode says after an action.

    Attributes:
        text: shown to the policy as the next user message.
        images: encoded images (PNG or JPEG) shown with it.
        done: the episode ended.
        result: once done, what the environment says of the episode; goes to the verifier. Running into a turn limit
            is not success: report the environment's own flag.
    """

    text: str
    images: tuple[bytes, ...] = ()
    done: bool = False
    result: dict[str, Any] = field(default_factory=dict)


class Episode(Protocol):
    """One episode in progress."""

    def step(self, action: str) -> Observation:
        """Apply the policy's turn. A malformed action is answered in the observation, never raised."""
        ...

    def result(self) -> dict[str, Any]:
        """The environment's word on the episode so far; read when the turn limit ends it."""
        ...

    def close(self) -> None:
        """Free what the episode holds; called exactly once, whatever happened."""
        ...


@dataclass(frozen=True)
class Demonstration:
    """An expert's episode: the prompt's messages and the turns after it, assistant turns first.

    Attributes:
        success: whether it reached its goal; a noisy one may not.
        images: digest → encoded image, of those that the turns name.
    """

    prompt: Prompt
    turns: list[Message]
    success: bool = True
    images: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Finding:
    """What one turn of an episode found out, as another attempt at the same task may be told.

    Attributes:
        turn: which of the episode's turns, from 0.
        rationale: what the policy said in that turn, with its tool call.
        action: the tool call alone, in words.
        region: what the answer covers.
        text: the environment's answer.
        images: digests of the images in it.
    """

    turn: int
    rationale: str
    action: str
    region: Region
    text: str
    images: tuple[str, ...] = ()


@runtime_checkable
class Environment(Protocol):
    name: str
    max_turns: int
    parallel_episodes: int
    """Episodes that may be stepped at once from threads; 1: one after the other in the caller's thread."""
    verifier: VerifierSpec

    @property
    def version(self) -> str:
        """Part of cache keys; another one whenever prompts or behaviour change. A class attribute will do."""
        ...

    def size(self, split: Split) -> int:
        """Number of prompts in a split."""
        ...

    def prompt(self, split: Split, index: int) -> Prompt:
        """The split's prompt at `index` (0 <= index < size). Splits share no prompt_id."""
        ...

    def begin(self, prompt: Prompt, seed: int) -> Episode:
        """Start an episode. Single-turn environments raise NotImplementedError."""
        ...

    def demonstrations(self, count: int, noise: float, seed: int) -> Sequence[Demonstration]:
        """Expert episodes on training prompts, for warm starts. `noise` is the share of actions drawn at random.

        Raises:
            ConfigurationError: the environment has no expert and its gold answers are no demonstrations.
        """
        ...

    def validate(self) -> list[str]:
        """Sentences that say what is wrong, each with its fix; empty when training may start. Runs the verifier on
        gold answers or expert episodes, and checks the data (naming file and line)."""
        ...


@runtime_checkable
class HasTopics(Protocol):
    """An environment whose prompts fall into topics, of which a warm start may take some and leave others."""

    def topic(self, prompt: Prompt) -> str: ...


@runtime_checkable
class HasAnswers(Protocol):
    """An environment that knows its prompts' ground-truth answers in words: a critic may read them, a policy never."""

    def answer(self, prompt: Prompt) -> str: ...


@runtime_checkable
class HasImages(Protocol):
    """An environment whose prompts show images. A prompt names them by digest, in parts of type image."""

    def images(self, prompt: Prompt) -> list[bytes]:
        """The encoded images (PNG or JPEG) that the prompt names, in its order."""
        ...


@runtime_checkable
class HasFindings(Protocol):
    """An environment whose turns find things out that hold for every attempt at a task (VISTA)."""

    def findings(self, transcript: Sequence[Message]) -> list[Finding]:
        """What each turn with a valid tool result found, by what was said in the episode alone. Turns that give the
        final answer, or end the episode, find nothing."""
        ...

    def demonstrate(self, prompt: Prompt, known: Sequence[Finding], noise: float, seed: int) -> Demonstration:
        """An expert's episode that starts with what other attempts found; `noise` as in `demonstrations`."""
        ...
