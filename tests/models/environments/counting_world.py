"""A world behind an OpenEnv server, for tests: reach a number by "up" and "down".

    python counting_world.py plain SESSIONS      speaks the protocol with nothing but websockets
    python counting_world.py openenv SESSIONS    the openenv package's own server

Prints its port, then serves. The goal is the reset's index modulo 3, plus 1. Reaching it ends the episode with reward
1, "stop" ends it with 0.25. "sleep" takes three seconds, "die" ends the server, "raise" is a bug in the world (as is
any command in an odd task with the wording "brittle"), and "garble" has the plain server answer with something else
than the protocol says.
"""

import json
import os
import socket
import sys
import time
from http import HTTPStatus
from typing import Any


class CountingWorld:
    def __init__(self) -> None:
        self.goal, self.value, self.broken = 0, 0, False

    def reset(self, index: int, wording: str) -> str:
        self.goal, self.value = index % 3 + 1, 0
        self.broken = wording == "brittle" and index % 2 == 1
        noise = f" Clock {time.perf_counter_ns()}." if wording == "clock" else ""
        return f"Task {index}: reach {self.goal}.{noise}"

    def step(self, command: str) -> tuple[str, float, bool]:
        """Observation, reward, done."""
        if command == "sleep":
            time.sleep(3)
        if command == "die":
            os._exit(3)
        if command == "raise" or self.broken:
            raise RuntimeError("a bug in the world")
        if command == "stop":
            return f"Stopped at {self.value}.", 0.25, True
        self.value += {"up": 1, "down": -1}.get(command, 0)
        done = self.value == self.goal
        return f"You are at {self.value}.", float(done), done


SCHEMA = {"action": {"additionalProperties": False, "properties": {"command": {}, "metadata": {}}}}


def serve_plain(sessions: int) -> None:
    from websockets.sync.server import serve

    active = 0

    def handle(connection: Any) -> None:
        nonlocal active
        if active >= sessions:
            answer("error", code="CAPACITY_REACHED", message="full", max_sessions=sessions, to=connection)
            return
        active += 1
        try:
            serve_session(connection)
        finally:
            active -= 1

    def answer(kind: str, to: Any, **data: Any) -> None:
        to.send(json.dumps({"type": kind, "data": data}))

    def serve_session(connection: Any) -> None:
        world = CountingWorld()
        for text in connection:
            message = json.loads(text)
            data = message.get("data", {})
            if message["type"] == "close":
                return
            if message["type"] == "reset":
                if data["index"] > 1000:
                    answer("error", code="EXECUTION_ERROR", message="no such task", to=connection)
                    continue
                screen = {"text": world.reset(data["index"], data.get("wording", ""))}
                answer("observation", observation={"screen": screen}, done=False, reward=None, to=connection)
                continue
            command = data["command"]
            if command == "garble":
                connection.send("<html>")
            elif len(command) > 20:
                errors = [{"msg": "at most 20 characters"}]
                answer("error", code="VALIDATION_ERROR", message="Invalid", errors=errors, to=connection)
            else:
                try:
                    observation, reward, done = world.step(command)
                except RuntimeError as error:
                    answer("error", code="EXECUTION_ERROR", message=str(error), to=connection)
                    continue
                screen = {"text": observation}
                answer("observation", observation={"screen": screen}, done=done, reward=reward, to=connection)

    def http(connection: Any, request: Any) -> Any:
        if request.path == "/schema":
            return connection.respond(HTTPStatus.OK, json.dumps(SCHEMA))
        return None

    with serve(handle, "127.0.0.1", 0, process_request=http) as server:
        print(server.socket.getsockname()[1], flush=True)
        server.serve_forever()


def serve_openenv(sessions: int) -> None:
    import uvicorn
    from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
    from pydantic import Field

    class Command(Action):
        command: str = Field(max_length=20)

    class Screen(Observation):
        screen: dict[str, str]

    class World(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            super().__init__()
            self.world = CountingWorld()

        def reset(self, seed: Any = None, episode_id: Any = None, index: int = 0, wording: str = "") -> Any:
            if index > 1000:
                raise ValueError("no such task")
            return Screen(screen={"text": self.world.reset(index, wording)})

        def step(self, action: Any, timeout_s: Any = None) -> Any:
            observation, reward, done = self.world.step(action.command)
            return Screen(screen={"text": observation}, reward=reward, done=done)

        @property
        def state(self) -> Any:
            return State()

    app = create_fastapi_app(World, Command, Screen, max_concurrent_envs=sessions)
    listening = socket.create_server(("127.0.0.1", 0))
    print(listening.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listening])


if __name__ == "__main__":
    {"plain": serve_plain, "openenv": serve_openenv}[sys.argv[1]](int(sys.argv[2]))
