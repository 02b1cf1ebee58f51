"""Any world behind an OpenEnv server: one WebSocket session an episode.

The wire protocol is that of OpenEnv 0.10 (`openenv.core.env_server.types`). A client sends {"type": "reset", "step" or
"close", "data": …} to BASE_URL/ws; the server answers {"type": "observation", "data": {observation, reward, done}} or
{"type": "error", "data": {message, code}}.

It is spoken here directly: the openenv package needs an older mcp than the pinned stack holds, and its client
reconnects by itself, so that after a lost connection the next step reaches a new world in the middle of an episode.

Nobody can replay such a world, so the server's own reward is the outcome. It is read at the step that ends the episode.
"""

import contextlib
import json
import math
import threading
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from websockets.exceptions import ConnectionClosed, WebSocketException
from websockets.sync.client import ClientConnection, connect

from gleaner.conf.errors import ConfigurationError, GleanerError, TransientError, VerifierContractError
from gleaner.conf.schema import OpenEnvEnvironment, Split
from gleaner.models.environments.base import Demonstration, Observation, Outcome, VerifierSpec
from gleaner.models.environments.prompts import content_digest, make_prompt
from gleaner.models.records import Message, Prompt

ORDER: tuple[Split, ...] = ("test", "validation", "train")
"""Of tasks that have one number: another number of training prompts then leaves the others as they are. It is also the
order of WebShop's goals."""
LARGEST_MESSAGE = 100 * 2**20
"""Bytes; the OpenEnv client's default."""
SHORT_CLOSE_SECONDS = 2.0
"""Patience with a server that no longer answers."""


class OpenEnv:
    """The environment.

    A prompt is the first observation of the server's reset, which is therefore asked for when a prompt is first
    needed, and again when its episodes begin. An episode that begins otherwise than its prompt says has failed: a
    reset that does not determine the task would give a group different tasks.
    """

    name = "openenv"
    verifier = VerifierSpec("gleaner.models.environments.openenv:verify", version="openenv-1", isolated=False)

    def __init__(self, settings: OpenEnvEnvironment, seed: int) -> None:
        self.settings = settings
        self.seed = seed
        self.max_turns = settings.max_turns
        self.parallel_episodes = settings.sessions
        self._prompts: dict[tuple[Split, int], Prompt] = {}
        self._lock = threading.Lock()

    @property
    def version(self) -> str:
        return f"1 {self.settings.revision}".strip()

    def size(self, split: Split) -> int:
        settings = self.settings
        return {
            "train": settings.train_prompts,
            "validation": settings.validation_prompts,
            "test": settings.test_prompts,
        }[split]

    def prompt(self, split: Split, index: int) -> Prompt:
        """
        Raises:
            ConfigurationError: `index` is out of range, or what the server answers is no first observation.
            TransientError: the server cannot be reached, or failed.
        """
        if not 0 <= index < self.size(split):
            raise ConfigurationError(
                f"{split} has {self.size(split)} tasks, not number {index}: raise environment.{split}_prompts"
            )
        with self._lock:
            if (split, index) not in self._prompts:
                self._prompts[split, index] = self._ask_for_prompt(split, index)
            return self._prompts[split, index]

    def begin(self, prompt: Prompt, seed: int) -> "OpenEnvEpisode":
        """
        Raises:
            ConfigurationError: the episode begins otherwise than its prompt says.
            TransientError: the server cannot be reached, or failed.
        """
        session = Session(self.settings)
        try:
            first = session.reset(prompt.payload["reset"])
            if self._messages(first) != prompt.messages:
                raise ConfigurationError(
                    f"reset({prompt.payload['reset']}) began with another observation than before "
                    f"({_short(first.text)}): pass arguments in environment.reset that determine the task"
                )
        except BaseException:
            session.close()
            raise
        return OpenEnvEpisode(session)

    def demonstrations(self, count: int, noise: float, seed: int) -> Sequence[Demonstration]:
        raise ConfigurationError(
            "an OpenEnv server has no expert to imitate: set warmstart=null, and choose a policy that can act "
            "already (policy=smollm2, policy=pretrained)"
        )

    def validate(self) -> list[str]:
        """Whether the server can be reached, takes the action's field, holds as many sessions, begins a task the same
        way in each of them, and has the last task of every split."""
        try:
            sentences = self._wrong_action_field()
            prompt = self.prompt("train", 0)
        except GleanerError as error:
            return [str(error)]
        sentences += self._wrong_sessions(prompt)
        for split in ORDER:
            try:
                self.prompt(split, self.size(split) - 1)
            except GleanerError as error:
                sentences.append(
                    f"the last of environment.{split}_prompts={self.size(split)} tasks cannot be started ({error}): "
                    "lower the number, or correct environment.reset"
                )
        return sentences

    def _ask_for_prompt(self, split: Split, index: int) -> Prompt:
        arguments = self._reset_arguments(split, index)
        session = Session(self.settings)
        try:
            first = session.reset(arguments)
        finally:
            session.close()
        payload = {"reset": arguments, "success_at": self.settings.success_at}
        return make_prompt(self.name, split, self._messages(first), payload)

    def _messages(self, first: "Reply") -> list[Message]:
        content = "\n".join(part for part in (self.settings.instruction, first.text) if part)
        if not content:
            raise ConfigurationError(
                f"the first observation's {self.settings.observation_field} is empty: set environment.instruction, or "
                "another environment.observation_field"
            )
        return [{"role": "user", "content": content}]

    def _reset_arguments(self, split: Split, index: int) -> dict[str, Any]:
        reset = self.settings.reset
        inside_split = any("{split}" in value for value in reset.values() if isinstance(value, str))
        before = 0 if inside_split else sum(map(self.size, ORDER[: ORDER.index(split)]))
        run_seed = self.seed if split == "train" else 0
        known = {
            "seed": int(content_digest([run_seed, split, index])[:8], 16) >> 1,
            "index": before + index,
            "split": split,
        }
        return {name: _filled(value, known) for name, value in reset.items()}

    def _wrong_action_field(self) -> list[str]:
        """From the server's own schema, where it publishes one."""
        field, address = self.settings.action_field, urlsplit(self.settings.base_url.rstrip("/"))
        secure = {"ws": "http", "wss": "https"}
        http = address._replace(scheme=secure.get(address.scheme, address.scheme)).geturl()
        try:
            with urllib.request.urlopen(f"{http}/schema", timeout=self.settings.connect_seconds) as answer:
                action = json.load(answer)["action"]
                fields = sorted(set(action["properties"]) - {"metadata"})
        except (urllib.error.HTTPError, ValueError, KeyError, TypeError):
            return []
        except OSError as error:
            raise unreachable(self.settings, error) from error
        if field in fields or action.get("additionalProperties", True):
            return []
        return [f"environment.action_field={field}: the server's action has {', '.join(fields)}; choose one"]

    def _wrong_sessions(self, prompt: Prompt) -> list[str]:
        """One sentence for all sessions that could not be begun together."""
        begun: list[OpenEnvEpisode] = []
        errors: set[str] = set()

        def begin(_: int) -> None:
            try:
                begun.append(self.begin(prompt, prompt.seed))
            except GleanerError as error:
                errors.add(str(error))

        with ThreadPoolExecutor(self.settings.sessions) as pool:
            list(pool.map(begin, range(self.settings.sessions)))
            list(pool.map(lambda episode: episode.close(), begun))
        if not errors:
            return []
        return [
            f"of environment.sessions={self.settings.sessions} sessions, {len(begun)} could be begun together "
            f"({min(errors)})"
        ]


def verify(
    payload: dict[str, Any], text: str, transcript: list[Message], environment_result: dict[str, Any]
) -> Outcome:
    """The server's own reward. An episode that did not end has none: it is no success, whatever its steps gave."""
    if "done" not in environment_result:
        raise VerifierContractError("the episode carries no result of its server")
    done, reward = bool(environment_result["done"]), float(environment_result["reward"])
    details = {"turns": environment_result["turns"], "done": done}
    return Outcome(done and reward >= payload["success_at"], reward if done else 0.0, details)


class OpenEnvEpisode:
    """A session after its reset.

    Attributes:
        reward: of the last step.
    """

    def __init__(self, session: "Session") -> None:
        self.session = session
        self.turns = 0
        self.reward = 0.0
        self.done = False

    def step(self, action: str) -> Observation:
        """
        Raises:
            ConfigurationError, TransientError: the server is lost, late, or answered with no observation. What the
                server's schema refuses is the policy's mistake, and is told to it.
        """
        self.turns += 1
        reply = self.session.step(action.strip())
        self.reward, self.done = reply.reward, reply.done
        return Observation(reply.text, done=reply.done, result=self.result() if reply.done else {})

    def result(self) -> dict[str, Any]:
        return {"done": self.done, "reward": self.reward, "turns": self.turns}

    def close(self) -> None:
        self.session.close()


@dataclass(frozen=True)
class Reply:
    text: str
    reward: float
    done: bool


class Session:
    """One WebSocket, and so one world of its own on the server. It never reconnects.

    Raises:
        TransientError: the server cannot be reached.
    """

    def __init__(self, settings: OpenEnvEnvironment) -> None:
        self.settings = settings
        self.healthy = True
        self.connection = self._connect()

    def reset(self, arguments: dict[str, Any]) -> Reply:
        reply = self._reply(self._ask("reset", arguments), ends=False)
        if reply.done:
            raise ConfigurationError(
                f"reset({arguments}) began an episode that was over: leave such tasks out of environment.reset"
            )
        return reply

    def step(self, action: str) -> Reply:
        answer = self._ask("step", {self.settings.action_field: action})
        if answer["type"] == "error":
            refused = ", ".join(str(each.get("msg")) for each in answer["data"].get("errors") or [])
            return Reply(f"Invalid action: {refused or answer['data'].get('message')}", 0.0, False)
        return self._reply(answer, ends=True)

    def close(self) -> None:
        """Ask the server to end the session, and wait until it has: only then is there room for the next one."""
        try:
            if self.healthy:
                self.connection.send(json.dumps({"type": "close"}))
                while True:
                    self.connection.recv(timeout=self.settings.connect_seconds)
        except (ConnectionClosed, TimeoutError, OSError):
            pass
        finally:
            self.connection.close()

    def _connect(self) -> ClientConnection:
        settings = self.settings
        address = urlsplit(settings.base_url.rstrip("/"))
        socket = {"http": "ws", "https": "wss"}.get(address.scheme, address.scheme)
        local = address.hostname in ("localhost", "127.0.0.1", "::1")
        try:
            return connect(
                f"{address._replace(scheme=socket).geturl()}/ws",
                open_timeout=settings.connect_seconds,
                close_timeout=SHORT_CLOSE_SECONDS,
                ping_timeout=settings.reply_seconds,
                max_size=LARGEST_MESSAGE,
                proxy=None if local else True,
            )
        except (OSError, WebSocketException) as error:
            raise unreachable(settings, error) from error

    def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """The server's answer: an observation, or the refusal of an action."""
        settings = self.settings
        try:
            with contextlib.suppress(ConnectionClosed):  # a refused session is told why before it is closed
                self.connection.send(json.dumps({"type": kind, "data": data}))
            answer = json.loads(self.connection.recv(timeout=settings.reply_seconds))
            if not isinstance(answer["data"], dict):
                raise TypeError("its data is no mapping")
            if answer["type"] == "observation":
                return dict(answer)
            if answer["type"] != "error":
                raise ValueError(f"its type is {answer['type']!r}")
        except TimeoutError as error:
            self.healthy = False
            raise TransientError(
                f"{settings.base_url} did not answer a {kind} within environment.reply_seconds="
                f"{settings.reply_seconds:g}: raise it, or lower environment.sessions"
            ) from error
        except (ConnectionClosed, OSError) as error:
            self.healthy = False
            raise TransientError(
                f"{settings.base_url} closed the session at a {kind} ({error}): look into the server's log"
            ) from error
        except (ValueError, KeyError, TypeError) as error:
            self.healthy = False
            raise ConfigurationError(
                f"{settings.base_url} answered a {kind} with something that is no message of OpenEnv "
                f"({type(error).__name__}: {error}): let environment.base_url name an OpenEnv server of version 0.2 "
                "or later"
            ) from error
        code, message = answer["data"].get("code"), answer["data"].get("message")
        if kind == "step" and code == "VALIDATION_ERROR":
            return dict(answer)
        if code == "CAPACITY_REACHED":
            allowed = answer["data"].get("max_sessions")
            raise TransientError(
                f"{settings.base_url} allows {allowed} sessions at once: set environment.sessions={allowed} and "
                "sampling.rows_per_shard to as many, or raise the server's max_concurrent_envs"
            )
        raise TransientError(f"{settings.base_url} failed at {kind}({data}): {message} ({code})")

    def _reply(self, answer: dict[str, Any], *, ends: bool) -> Reply:
        """Checked; where an episode may end with it, a final reward must be there."""
        data = answer["data"]
        value = data.get("observation")
        for part in self.settings.observation_field.split("."):
            try:
                value = value[int(part)] if isinstance(value, list) else value[part]
            except (KeyError, IndexError, TypeError, ValueError):
                has = ", ".join(sorted(value)) if isinstance(value, dict) else _short(value)
                raise ConfigurationError(
                    f"environment.observation_field={self.settings.observation_field}: the server's observation has "
                    f"no {part} ({has}); choose another"
                ) from None
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        done, reward = bool(data.get("done", False)), data.get("reward")
        if ends and done and reward is None:
            raise ConfigurationError(
                f"{self.settings.base_url} ended an episode without a reward: choose a world that gives one"
            )
        if reward is None:
            reward = 0.0
        if not isinstance(reward, int | float) or not math.isfinite(reward):
            raise ConfigurationError(
                f"{self.settings.base_url} gave the reward {_short(reward)}: choose a world whose rewards are numbers"
            )
        return Reply(text, float(reward), done)


def unreachable(settings: OpenEnvEnvironment, error: Exception) -> TransientError:
    return TransientError(
        f"environment.base_url={settings.base_url} cannot be reached ({type(error).__name__}: {error}): start the "
        "server, or correct the address"
    )


def _filled(value: Any, known: dict[str, Any]) -> Any:
    """A value of environment.reset with its placeholders filled in; one that is nothing else keeps its type."""
    if not isinstance(value, str):
        return value
    for name, known_value in known.items():
        if value == f"{{{name}}}":
            return known_value
        value = value.replace(f"{{{name}}}", str(known_value))
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
