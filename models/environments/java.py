"""Environments whose engine is a Java program: its processes, and what worlds in them have in common.

A Java process holds many worlds at once, since the turn loop begins every episode of a shard before it steps one. It
answers one call at a time. A process that dies, hangs or runs out of memory takes its worlds with it: each of their
episodes fails (a bad rollout is data), and the next world gets a new process.

The same prompt and actions give the same observations in any process. Java sets iterate in the order of identity
hashes, which are random by default; here every object's is the same, so that the order is that of insertion.
"""

import atexit
import functools
import importlib.util
import json
import logging
import os
import random
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from itertools import cycle, islice
from pathlib import Path
from subprocess import Popen
from typing import TYPE_CHECKING, Any, TypeVar

from gleaner.conf.errors import ConfigurationError
from gleaner.conf.schema import Split
from gleaner.models.environments.base import Demonstration, Observation, VerifierSpec
from gleaner.models.environments.prompts import make_prompt
from gleaner.models.records import Message, Prompt

if TYPE_CHECKING:
    from py4j.java_gateway import JavaGateway

Result = TypeVar("Result")

ANSWER_SECONDS = 180.0
"""A process that is silent for longer is taken for hung. ScienceWorld's slowest expert paths take 30 s."""
JAVA_OPTIONS = (
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",  # worlds are short-lived: the optimising compiler costs more than it gains
    "-XX:+ExitOnOutOfMemoryError",
    "-XX:-UsePerfData",
    "-XX:+UnlockExperimentalVMOptions",
    "-XX:hashCode=2",
)
WORLDS_PER_PROCESS = 4096
"""After so many a process takes no further worlds and ends with its last one: whatever it leaks stays bounded."""
TASKS_VALIDATED = 8


class LostWorldError(Exception):
    """The Java process of this world is gone."""


@dataclass(frozen=True)
class JavaEngine:
    """A Java program that a Python package brings along.

    Attributes:
        distribution: name of the package in registries.
        package: its import name; the program runs in its folder, where it finds its data.
        jar: file name in that folder.
        heap_megabytes: upper bound of a process's heap.
    """

    distribution: str
    package: str
    jar: str
    heap_megabytes: int

    def version(self) -> str:
        """
        Raises:
            ConfigurationError: the package is not installed.
        """
        try:
            return installed_version(self.distribution)
        except PackageNotFoundError:
            raise ConfigurationError(
                f"this environment needs the package {self.distribution}: run `pip install 'gleaner[java]'`"
            ) from None

    def folder(self) -> Path:
        self.version()
        spec = importlib.util.find_spec(self.package)
        assert spec is not None
        assert spec.origin is not None
        return Path(spec.origin).parent


class JavaProcess:
    """One running engine. It ends with the process that started it, however that one ends: its standard input is a
    pipe that this process alone holds, and it exits at the end of the pipe."""

    def __init__(self, engine: JavaEngine) -> None:
        self.worlds = 0
        self.worlds_taken = 0
        self._lock = threading.Lock()
        self._gateway, self._process = _launch(engine)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def run(self, work: Callable[[Any], Result]) -> Result:
        """Call `work` with py4j's view of the process, while no other thread speaks to it.

        Raises:
            LostWorldError: the process is gone, or was silent for ANSWER_SECONDS and has been ended.
            RuntimeError: the engine raised an exception of its own.
        """
        from py4j.protocol import Py4JError, Py4JJavaError

        with self._lock:
            if not self.alive:
                raise LostWorldError(f"the Java process {self.pid} has ended")
            try:
                return work(self._gateway.jvm)
            except Py4JJavaError as error:
                reason = str(error.java_exception.toString())
            except (Py4JError, OSError) as error:
                self.end()
                raise LostWorldError(f"the Java process {self.pid} does not answer ({error})") from error
        raise RuntimeError(f"the engine failed: {reason}")

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._gateway.close()


class JavaPool:
    """At most `size` processes of an engine (besides those that only wait for their last worlds to end), started when
    worlds need them."""

    def __init__(self, engine: JavaEngine, size: int) -> None:
        self.engine = engine
        self.size = size
        self._lock = threading.Lock()
        self._processes: list[JavaProcess] = []
        self._retiring: list[JavaProcess] = []
        atexit.register(self.close)

    def take(self) -> JavaProcess:
        """The process that the next world is to live in; `give_back` once the world has ended.

        Raises:
            ConfigurationError: there is no Java, or it does not start.
        """
        with self._lock:
            self._processes = [process for process in self._processes if process.alive]
            process = min(self._processes, key=lambda process: process.worlds, default=None)
            if process is None or (process.worlds and len(self._processes) < self.size):
                process = JavaProcess(self.engine)
                self._processes.append(process)
            process.worlds += 1
            process.worlds_taken += 1
            if process.worlds_taken >= WORLDS_PER_PROCESS:
                self._processes.remove(process)
                self._retiring.append(process)
            return process

    def give_back(self, process: JavaProcess) -> None:
        with self._lock:
            process.worlds -= 1
            if process in self._retiring and not process.worlds:
                self._retiring.remove(process)
                process.end()

    def processes(self) -> list[JavaProcess]:
        """Those that run now."""
        with self._lock:
            return [process for process in (*self._processes, *self._retiring) if process.alive]

    def close(self) -> None:
        """End all processes. The pool starts new ones if it is used again."""
        for process in self.processes():
            process.end()


@functools.lru_cache(maxsize=16)
def java_pool(engine: JavaEngine, size: int) -> JavaPool:
    """This process's pool: environments of the same engine share it."""
    return JavaPool(engine, size)


def _launch(engine: JavaEngine) -> tuple["JavaGateway", Popen[bytes]]:
    folder = engine.folder()
    from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway

    # What goes wrong is raised; py4j would also print it.
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else "java"
    with tempfile.TemporaryFile() as last_words:
        try:
            port, token, process = launch_gateway(
                classpath=str(folder / engine.jar),
                javaopts=[f"-Xmx{engine.heap_megabytes}m", *JAVA_OPTIONS],
                java_path=java,
                die_on_exit=True,
                enable_auth=True,  # else anybody on this machine could run code through the port
                cwd=str(folder),
                redirect_stderr=last_words,
                return_proc=True,
            )
        except OSError as error:
            raise ConfigurationError(
                f"{engine.distribution} needs Java, and {java} does not start ({error}): install a Java runtime, "
                "version 11 or later (Debian: apt-get install default-jre-headless), or set JAVA_HOME to one"
            ) from None
        except ValueError:
            last_words.seek(0)
            said = last_words.read().decode(errors="replace").strip()[-500:]
            raise ConfigurationError(
                f"{java} does not run {engine.distribution} ({said or 'no message'}): install a 64-bit OpenJDK, "
                "version 11 or later, or set JAVA_HOME to one"
            ) from None
    parameters = GatewayParameters(port=port, auth_token=token, read_timeout=ANSWER_SECONDS)
    return JavaGateway(gateway_parameters=parameters), process


# -------------------------------------------------------------------------------- worlds and environments


class JavaWorld(ABC):
    """An episode in a Java process.

    Attributes:
        opening: what the policy is told at first.
        over: the episode has ended, won or lost.
        won: it was won.
        turns: actions so far.
    """

    opening: str
    over = False
    won = False
    turns = 0

    def __init__(self, pool: JavaPool) -> None:
        self._pool = pool
        self._process = pool.take()

    def step(self, action: str) -> Observation:
        """
        Raises:
            LostWorldError: the Java process is gone.
            RuntimeError: the engine failed.
        """
        self.turns += 1
        text = self.act(" ".join(action.split())[:LONGEST_ACTION])
        return Observation(text, done=self.over, result=self.result() if self.over else {})

    def close(self) -> None:
        self._pool.give_back(self._process)

    @abstractmethod
    def act(self, action: str) -> str:
        """Apply an action (one line) and say what happened."""

    @abstractmethod
    def result(self) -> dict[str, Any]: ...

    @abstractmethod
    def valid_actions(self) -> list[str]:
        """What the engine would accept now, in a fixed order."""

    @abstractmethod
    def accepts(self, expert_action: str) -> bool:
        """Whether the expert may go on with this action now."""


LONGEST_ACTION = 300
"""Characters; no command is longer, and what a policy babbles need not cross to Java whole."""


class JavaEnvironment(ABC):
    """What the environments of Java engines share: prompts from cases, demonstrations from the engine's gold paths.

    A case is a prompt's payload: everything that a world is made from.
    """

    name: str
    engine: JavaEngine
    verifier: VerifierSpec

    def __init__(self, max_turns: int, parallel_episodes: int) -> None:
        self._package_version = self.engine.version()
        self.max_turns = max_turns
        self.parallel_episodes = parallel_episodes
        self.pool = java_pool(self.engine, parallel_episodes)
        self._prompts: dict[tuple[Split, int], Prompt] = {}
        self._experts: dict[str, tuple[str, ...]] = {}

    @property
    def version(self) -> str:
        return f"1-{self._package_version}"

    @abstractmethod
    def cases(self, split: Split) -> Sequence[dict[str, Any]]:
        """The split's cases, in the order of its prompts."""

    @abstractmethod
    def world(self, case: dict[str, Any]) -> JavaWorld:
        """A new world at its start."""

    @abstractmethod
    def make_expert_actions(self, case: dict[str, Any]) -> list[str]:
        """The engine's gold path."""

    def size(self, split: Split) -> int:
        return len(self.cases(split))

    def prompt(self, split: Split, index: int) -> Prompt:
        """
        Raises:
            ConfigurationError: `index` is out of range, or the engine refuses the settings or does not start.
        """
        if not 0 <= index < self.size(split):
            raise ConfigurationError(
                f"{split} has {self.size(split)} prompts, not number {index}: ask for fewer"
            )
        if (split, index) not in self._prompts:
            case = self.cases(split)[index]
            world = self.world(case)
            world.close()
            question: Message = {"role": "user", "content": world.opening}
            self._prompts[split, index] = make_prompt(self.name, split, [question], case)
        return self._prompts[split, index]

    def begin(self, prompt: Prompt, seed: int) -> JavaWorld:
        return self.world(prompt.payload)

    def demonstrations(self, count: int, noise: float, seed: int) -> Sequence[Demonstration]:
        """Gold paths of training prompts that fit into `max_turns`. With `noise`, that share of the actions is a random
        valid one; the expert then goes on where it was, as soon as the world accepts its action, and tries others
        until then. An episode that runs into the turn limit, or is lost, is kept as it is.

        Raises:
            ConfigurationError: no gold path fits into the turn limit.
        """
        draw = random.Random(seed)
        prompts = list(islice(self._solvable(), count))
        if not prompts:
            raise ConfigurationError(self._too_few_turns(self.size("train")))
        return [
            Demonstration(prompt, self._expert_turns(prompt, noise, draw))
            for prompt in islice(cycle(prompts), count)
        ]

    def validate(self) -> list[str]:
        """Whether the engine runs, every split's prompts can be made, and a gold path wins within the turn limit."""
        try:
            for split in ("validation", "test"):
                self.prompt(split, 0)
            if next(self._solvable(TASKS_VALIDATED), None) is None:
                return [self._too_few_turns(TASKS_VALIDATED)]
        except (ConfigurationError, LostWorldError, RuntimeError) as error:
            return [str(error)]
        return []

    def expert_actions(self, case: dict[str, Any]) -> tuple[str, ...]:
        """The gold path up to the action that wins; empty if it does not win, as some of the engines' do not."""
        key = json.dumps(case, sort_keys=True)
        if key not in self._experts:
            self._experts[key] = self._winning(case, self.make_expert_actions(case))
        return self._experts[key]

    def _winning(self, case: dict[str, Any], actions: Sequence[str]) -> tuple[str, ...]:
        world = self.world(case)
        try:
            for turn, action in enumerate(actions, start=1):
                if world.step(action).done:
                    return tuple(actions[:turn]) if world.won else ()
        finally:
            world.close()
        return ()

    def _solvable(self, tried: int | None = None) -> Iterator[Prompt]:
        """Training prompts whose gold path fits into the turn limit."""
        for index, case in enumerate(self.cases("train")[:tried]):
            if 0 < len(self.expert_actions(case)) <= self.max_turns:
                yield self.prompt("train", index)

    def _too_few_turns(self, tried: int) -> str:
        paths = [self.expert_actions(case) for case in self.cases("train")[:tried]]
        winning = [len(path) for path in paths if path]
        if not winning:
            return f"none of the engine's own {len(paths)} gold paths wins: choose other tasks"
        return (
            f"environment.max_turns={self.max_turns} is too few: the shortest of {len(winning)} gold paths has "
            f"{min(winning)} actions: raise it, or choose easier tasks"
        )

    def _expert_turns(self, prompt: Prompt, noise: float, draw: random.Random) -> list[Message]:
        world, turns = self.begin(prompt, prompt.seed), list[Message]()
        waiting = list(self.expert_actions(prompt.payload))
        try:
            while True:
                # In this order: without noise nobody asks for the valid actions, which can take long.
                if draw.random() < noise or not world.accepts(waiting[0]):
                    action = draw.choice(world.valid_actions())
                else:
                    action = waiting[0]
                if action == waiting[0]:
                    waiting.pop(0)
                turns.append({"role": "assistant", "content": action})
                observation = world.step(action)
                if observation.done or world.turns == self.max_turns or not waiting:
                    return turns
                turns.append({"role": "user", "content": observation.text})
        finally:
            world.close()
