"""GATS on ScienceWorld, its Java engine included: a large student's step, and ten of a tiny one."""

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from gleaner.conf.compose import compose
from gleaner.flows.gats import gats
from gleaner.flows.warmstart import warmstart
from gleaner.models.environments.scienceworld import Scienceworld
from gleaner.models.records import Prompt
from gleaner.models.tables import PROMPTS, ROLLOUTS
from gleaner.tasks.context import RunContext
from gleaner.tasks.journal import Journal

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        importlib.util.find_spec("scienceworld") is None, reason="the extra is not installed: make java"
    ),
]

# A task whose gold path may have no more than five actions, and 62 variations: a tiny policy's tokenizer reads all.
WORLD = [
    "environment=scienceworld",
    "environment.tasks=[lifespan-longest-lived]",
    "environment.simplifications=[easy]",
    "environment.max_turns=5",
    "sampling.max_new_tokens=16",
    "evaluation.every=0",
    "evaluation.test_prompts=0",
]
# M_T set by hand: with these few steps a teacher has no record worth the name. What follows shows mechanics alone.
PLUMBING = ["method=gats", "method.teacher.run=teacher", "method.teacher.success=0.5"]


def test_a_pretrained_student_takes_a_guided_step(prefect_api, tmp_path, monkeypatch):
    """SmolLM2, two prompts of four episodes; its teacher is SmolLM2 after a warm start on gold paths."""
    monkeypatch.chdir(tmp_path)
    policy = [*WORLD, "policy=smollm2"]
    gold = ["warmstart.demonstrations=4", "warmstart.steps=4", "warmstart.batch=1", "warmstart.lr=5e-5"]
    taught = warmstart(compose([*policy, *gold, "run.name=teacher"]))
    assert taught.steps == 0
    settings = compose(
        [*policy, *PLUMBING, "run.name=student", "run.steps=1", "run.prompts_per_step=2", "run.group_size=4"]
    )
    gats(settings)
    context = RunContext.of("student", settings)
    ((_, entry),) = context.journal.entries()
    metrics = entry["metrics"]
    assert (metrics["gats/lambda"], metrics["gats/M_T"], metrics["gats/M_T_episodes"]) == (1.0, 0.5, 0)
    assert entry["counts"]["rollouts"] == 8
    segments = [segment for ref in entry["rollouts"] for segment in context.store.get_rows(ROLLOUTS, ref)]
    assert metrics["forward_tokens/teacher"] == sum(len(s.context_ids) + len(s.sampled_ids) for s in segments)
    assert metrics["gats/teacher_gain"] != 0.0
    assert metrics["update/grad_norm"] > 0.0
    assert entry["version"] != entry["parent"]
    prompts: list[Prompt] = [
        prompt for ref in entry["prompts"] for prompt in context.store.get_rows(PROMPTS, ref)
    ]
    assert all("the longest life span" in prompt.messages[0]["content"] for prompt in prompts)


def test_ten_guided_steps_stay_within_bounds_and_leave_no_java_behind(prefect_api, tmp_path):
    place = Place(tmp_path)
    gold = ["warmstart.demonstrations=12", "warmstart.steps=60", "warmstart.batch=4", "warmstart.lr=3e-3"]
    assert place.begin("warmstart", "run.name=teacher", *gold).wait() == 0
    student = [*PLUMBING, "warmstart.demonstrations=4", "warmstart.steps=20", "warmstart.batch=4"]
    steps = ["run.steps=10", "run.prompts_per_step=2", "run.group_size=4"]
    run = place.begin("gats", "run.name=student", *student, *steps)
    python_N: dict[int, int] = {}  # resident bytes by the steps done
    java: set[int] = set()
    largest = 0
    while run.poll() is None:
        members = family(run.pid)
        python = sum(bytes for name, bytes in members.values() if name != "java")
        found = {pid: bytes for pid, (name, bytes) in members.items() if name == "java"}
        java |= found.keys()
        largest = max(largest, *found.values(), 0)
        done = len(place.journal.steps())
        python_N[done] = max(python_N.get(done, 0), python)
        time.sleep(0.2)
    assert run.returncode == 0, place.log.read_text()
    entries = [entry for _, entry in place.journal.entries()]
    assert len(entries) == 10
    for entry in entries:
        metrics = entry["metrics"]
        if not metrics["gats/withdrawn"] and metrics["groups/all_fail"]:
            assert metrics["signal/recovered"] > 0.9
        assert (metrics.get("forward_tokens/teacher", 0) > 0) == (metrics["gats/lambda"] > 0)
    assert java, "no Java process was seen, so nothing of it was tried"
    assert_gone(java)
    # Java keeps what it once took, up to its bound. Python has every engine, pool and cache after the first steps: what
    # grows from then on is a leak.
    assert largest < (Scienceworld.engine.heap_megabytes + 512) * 2**20
    early, late = max(python_N.get(n, 0) for n in (2, 3, 4)), max(python_N.get(n, 0) for n in (8, 9))
    assert late - early < 150e6, python_N


def test_a_run_that_is_killed_takes_its_java_with_it(prefect_api, tmp_path):
    place = Place(tmp_path)
    start = ["warmstart.demonstrations=8", "warmstart.steps=2", "warmstart.batch=4"]
    run = place.begin("grpo", "run.name=student", "run.steps=1000", *start)
    deadline = time.monotonic() + 300
    while not place.journal.steps() and run.poll() is None and time.monotonic() < deadline:
        time.sleep(0.2)
    assert run.poll() is None, place.log.read_text()
    java = {pid for pid, (name, _) in family(run.pid).items() if name == "java"}
    assert java
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    assert_gone(java)


class Place:
    """A folder in which the command line is started."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, folder / "log.txt"

    def begin(self, method: str, *overrides: str) -> "subprocess.Popen[bytes]":
        words = [*WORLD, "policy=tiny", "policy.context=1536", "run.steps_per_task=2", *overrides]
        with self.log.open("ab") as log:
            command = [sys.executable, "-m", "gleaner.flows.cli", "run", method, *words]
            return subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log)

    @property
    def journal(self) -> Journal:
        store = RunContext.of("student", compose([f"storage.path={self.folder}/.gleaner/store"])).store
        return Journal(store, "student")


def family(pid: int) -> dict[int, tuple[str, int]]:
    """Name and resident bytes of a process and of all that it started."""
    members: dict[int, tuple[str, int]] = {}
    try:
        own = psutil.Process(pid)
        processes = [own, *own.children(recursive=True)]
    except psutil.Error:
        return members
    for process in processes:
        with contextlib.suppress(psutil.Error):
            members[process.pid] = (process.name(), process.memory_info().rss)
    return members


def assert_gone(pids: set[int], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not any(psutil.pid_exists(pid) for pid in pids)
