"""Verifiers and rewards that hang, crash, or answer nonsense: unscored is never wrong, and the pool goes on."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from gleaner.conf.errors import ContractError
from gleaner.conf.schema import RewardSettings, Split, VerificationSettings
from gleaner.models.environments.base import Demonstration, Episode, VerifierSpec
from gleaner.models.environments.prompts import make_prompt
from gleaner.models.records import Prompt, Segment, Verdict
from gleaner.models.verification import VerifierPool, check_rewards, judge

FUNCTIONS = '''
import ctypes, math, os, signal, sys, time
import numpy as np
from gleaner.models.environments.base import Outcome

CALLS = {"flaky": 0}

def verify(payload, text, transcript, environment_result):
    """Does what the text says."""
    if text == "hang in python":
        while True: pass
    if text == "hang in C":
        ctypes.PyDLL(None).sleep(600)  # never comes back to Python, and holds the interpreter's lock
    if text == "sleep":
        time.sleep(600)
    if text == "crash":
        os._exit(3)
    if text == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if text == "raise":
        raise KeyError("no such thing")
    if text == "exit":
        sys.exit(1)
    if text == "alarm":
        signal.signal(signal.SIGALRM, lambda *_: None)  # fails outside a main thread
        signal.alarm(5)
        signal.alarm(0)
    if text == "none":
        return None
    if text == "flaky":
        CALLS["flaky"] += 1
        if CALLS["flaky"] % 2:
            raise ConnectionError("try again")
    rewards = {"nan": math.nan, "inf": math.inf, "text": "1.0", "numpy": np.float32(0.5)}
    success = {"success is text": "yes"}.get(text, text not in ("wrong",))
    details = {"nan details": {"x": math.nan}, "strange details": {"x": object()}}.get(text, {"pid": os.getpid()})
    return Outcome(success, rewards.get(text, float(success is True)), details)

def length(prompt, text, transcript, success):
    return float(len(text))

def needs_gold(prompt, text, transcript, success):
    return 1.0 if prompt.payload["answer"] == "gold" and success else -1.0

def none_for_shy(prompt, text, transcript, success):
    return None if text == "shy" else 0.25

def nan_for_shy(prompt, text, transcript, success):
    return math.nan if text == "shy" else 0.25

def always_none(prompt, text, transcript, success):
    return None

def hangs_for_shy(prompt, text, transcript, success):
    while text == "shy": pass
    return True

NOT_A_FUNCTION = 3
'''


class Asking:
    """An environment whose verifier obeys the text."""

    name = "asking"
    version = "1"
    max_turns = 1
    parallel_episodes = 1

    def __init__(self, file: Path, isolated: bool = True) -> None:
        self.verifier = VerifierSpec(f"{file}:verify", version="asking-7", isolated=isolated)

    def size(self, split: Split) -> int:
        return 1

    def prompt(self, split: Split, index: int) -> Prompt:
        return make_prompt(self.name, split, [{"role": "user", "content": "?"}], {"answer": "gold"})

    def begin(self, prompt: Prompt, seed: int) -> Episode:
        raise NotImplementedError

    def demonstrations(self, count: int, noise: float, seed: int) -> Sequence[Demonstration]:
        return []

    def validate(self) -> list[str]:
        return []


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("functions") / "functions.py"
    path.write_text(FUNCTIONS)
    return path


@pytest.fixture(scope="module")
def pool() -> Iterator[VerifierPool]:
    with VerifierPool(workers=1, deadline_seconds=1.0) as pool:
        yield pool


def segment(prompt: Prompt, text: str, sample: int, **changes: Any) -> Segment:
    fields: dict[str, Any] = {
        "prompt_id": prompt.prompt_id, "sample": sample, "segment": 0, "context_ids": [1], "sampled_ids": [2],
        "loss_mask": [1], "logprobs": [0.0], "policy_version": "v", "sampling_digest": "s", "seed": 0,
        "finish_reason": "stop", "text": text, "transcript": [], "environment_result": {}, "images": [],
    }  # fmt: skip
    return Segment(**{**fields, **changes})


def verdicts_of(
    texts: Sequence[str],
    file: Path,
    pool: VerifierPool,
    rewards: Sequence[RewardSettings] = (RewardSettings(),),
    settings: VerificationSettings | None = None,
    isolated: bool = True,
) -> list[Verdict]:
    environment = Asking(file, isolated)
    prompt = environment.prompt("train", 0)
    segments = [segment(prompt, text, sample) for sample, text in enumerate(texts)]
    return judge(environment, [prompt], segments, settings or VerificationSettings(), rewards, pool)


def reward(file: Path, name: str, weight: float = 1.0) -> RewardSettings:
    return RewardSettings(function=name if name == "verifier" else f"{file}:{name}", weight=weight)


def assert_unscored(verdict: Verdict, status: str, word: str) -> None:
    assert verdict.status == status
    assert verdict.success is None
    assert verdict.reward is None
    assert word in verdict.details["reason"]


def test_verdicts_come_in_the_order_of_the_episodes(file: Path, pool: VerifierPool) -> None:
    verdicts = verdicts_of(["right", "wrong", "right"], file, pool)
    assert [verdict.sample for verdict in verdicts] == [0, 1, 2]
    assert [(verdict.success, verdict.reward) for verdict in verdicts] == [
        (True, 1.0),
        (False, 0.0),
        (True, 1.0),
    ]
    assert {verdict.verifier_version for verdict in verdicts} == {"asking-7"}
    assert verdicts[0].details["pid"] != os.getpid()


@pytest.mark.parametrize("text", ["hang in python", "hang in C", "sleep"])
def test_what_hangs_is_killed_at_the_deadline_and_the_pool_serves_the_next_hundred(
    text: str, file: Path, pool: VerifierPool
) -> None:
    pid = verdicts_of(["right"], file, pool)[0].details["pid"]
    started = time.monotonic()
    verdicts = verdicts_of([text, *["right"] * 100], file, pool)
    assert time.monotonic() - started < 20  # the deadline of 1 s, a new process and its imports
    assert_unscored(verdicts[0], "timeout", "deadline of 1 s")
    assert [verdict.reward for verdict in verdicts[1:]] == [1.0] * 100
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize(
    ("text", "word"),
    [("crash", "exit code 3"), ("segfault", "SIGSEGV"), ("raise", "KeyError"), ("exit", "SystemExit")],
)
def test_a_crash_leaves_its_own_episode_unscored_and_no_other(
    text: str, word: str, file: Path, pool: VerifierPool
) -> None:
    verdicts = verdicts_of(["right", text, "right", "right"], file, pool)
    assert_unscored(verdicts[1], "error", word)
    assert [verdicts[index].reward for index in (0, 2, 3)] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    "text", ["none", "nan", "inf", "text", "success is text", "nan details", "strange details"]
)
def test_an_answer_that_is_no_verdict_is_an_error_not_a_zero(
    text: str, file: Path, pool: VerifierPool
) -> None:
    assert_unscored(verdicts_of([text], file, pool)[0], "error", "VerifierContractError")


@pytest.mark.parametrize("text", ["none", "nan", "raise"])
def test_a_verifier_in_the_callers_process_is_held_to_the_same_contract(
    text: str, file: Path, pool: VerifierPool
) -> None:
    verdicts = verdicts_of([text, "right"], file, pool, isolated=False)
    assert_unscored(verdicts[0], "error", "Error")
    assert verdicts[1].details["pid"] == os.getpid()


def test_a_number_of_numpy_is_a_number(file: Path, pool: VerifierPool) -> None:
    verdict = verdicts_of(["numpy"], file, pool)[0]
    assert verdict.reward == 0.5
    assert type(verdict.reward) is float


def test_an_alarm_works_although_the_caller_is_a_thread(file: Path, pool: VerifierPool) -> None:
    verdicts: list[Verdict] = []
    threads = [
        threading.Thread(target=lambda: verdicts.extend(verdicts_of(["alarm"] * 5, file, pool)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [verdict.status for verdict in verdicts] == ["scored"] * 20


def test_the_reward_is_the_weighted_sum_and_success_is_the_verifiers(file: Path, pool: VerifierPool) -> None:
    rewards = [reward(file, "verifier", 2.0), reward(file, "length", 0.5), reward(file, "needs_gold", 1.0)]
    right, wrong = verdicts_of(["right", "wrong"], file, pool, rewards)
    assert (right.success, right.reward) == (True, 2.0 * 1 + 0.5 * 5 + 1)
    assert (wrong.success, wrong.reward) == (False, 2.0 * 0 + 0.5 * 5 - 1)
    assert right.details["rewards"] == {"verifier": 1.0, f"{file}:length": 5.0, f"{file}:needs_gold": 1.0}


def test_without_the_verifier_among_the_rewards_it_still_decides_success(
    file: Path, pool: VerifierPool
) -> None:
    verdict = verdicts_of(["wrong"], file, pool, [reward(file, "length")])[0]
    assert (verdict.success, verdict.reward) == (False, 5.0)


@pytest.mark.parametrize("shy", ["none_for_shy", "nan_for_shy"])
@pytest.mark.parametrize("isolated", [True, False])
def test_one_of_two_functions_without_an_answer_makes_that_episode_unscored_alone(
    shy: str, isolated: bool, file: Path, pool: VerifierPool
) -> None:
    rewards = [reward(file, "verifier"), reward(file, shy)]
    shy_one, other = verdicts_of(["shy", "right"], file, pool, rewards, isolated=isolated)
    assert_unscored(shy_one, "error", "VerifierContractError")
    assert shy in shy_one.details["reason"]
    assert shy_one.details["rewards"] == {"verifier": 1.0}
    assert (other.status, other.reward) == ("scored", 1.25)


def test_all_without_an_answer_is_all_unscored_never_zero(file: Path, pool: VerifierPool) -> None:
    verdicts = verdicts_of(
        ["a", "b", "c"], file, pool, [reward(file, "verifier"), reward(file, "always_none")]
    )
    assert [(verdict.status, verdict.reward) for verdict in verdicts] == [("error", None)] * 3


def test_a_reward_function_that_hangs_is_killed_and_may_answer_true(file: Path, pool: VerifierPool) -> None:
    hung, other = verdicts_of(["shy", "right"], file, pool, [reward(file, "hangs_for_shy")])
    assert_unscored(hung, "timeout", "deadline")
    assert other.reward == 1.0


def test_retry_verifies_the_unscored_again_and_drop_does_not(file: Path, pool: VerifierPool) -> None:
    dropped = verdicts_of(["flaky"], file, pool, settings=VerificationSettings(on_unscored="drop_group"))
    verdicts_of(["flaky"], file, pool)  # the file counts its calls: even calls succeed
    retried = verdicts_of(
        ["flaky"], file, pool, settings=VerificationSettings(on_unscored="retry", retries=1)
    )
    assert_unscored(dropped[0], "error", "ConnectionError")
    assert (retried[0].status, retried[0].reward) == ("scored", 1.0)


def test_an_episode_that_broke_down_is_unscored_without_asking_the_verifier(
    file: Path, pool: VerifierPool
) -> None:
    environment = Asking(file)
    prompt = environment.prompt("train", 0)
    segments = [segment(prompt, "right", 0, finish_reason="error"), segment(prompt, "right", 1)]
    broken, whole = judge(environment, [prompt], segments, VerificationSettings(), [RewardSettings()], pool)
    assert_unscored(broken, "error", "broke down")
    assert whole.reward == 1.0


def test_several_segments_are_one_episode_judged_by_its_last_text(file: Path, pool: VerifierPool) -> None:
    environment = Asking(file)
    prompt = environment.prompt("train", 0)
    segments = [segment(prompt, "wrong", 0, segment=0), segment(prompt, "right", 0, segment=1)]
    verdicts = judge(environment, [prompt], segments[::-1], VerificationSettings(), [RewardSettings()], pool)
    assert [(verdict.sample, verdict.success) for verdict in verdicts] == [(0, True)]


def test_a_rollout_of_no_prompt_is_refused(file: Path, pool: VerifierPool) -> None:
    environment = Asking(file)
    stray = segment(environment.prompt("test", 0), "right", 0, prompt_id="unknown")
    with pytest.raises(ContractError, match="unknown/0 belongs to no prompt"):
        judge(
            environment,
            [environment.prompt("train", 0)],
            [stray],
            VerificationSettings(),
            [RewardSettings()],
            pool,
        )


def test_reward_functions_that_cannot_be_loaded_are_named_beforehand(
    file: Path, pool: VerifierPool, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("import no_such_module_anywhere")
    functions = ["length", "missing", "NOT_A_FUNCTION"]
    rewards = [reward(file, name) for name in functions] + [
        RewardSettings(function=f"{broken}:f"),
        RewardSettings(),
    ]
    sentences = check_rewards(rewards, pool)
    assert len(sentences) == 3
    assert "has no missing; it has" in sentences[0]
    assert "is no function" in sentences[1]
    assert "no_such_module_anywhere" in sentences[2]


def test_a_pool_whose_workers_were_all_killed_starts_anew(file: Path) -> None:
    with VerifierPool(workers=2, deadline_seconds=5.0) as pool:
        pids = {verdict.details["pid"] for verdict in verdicts_of(["right"] * 40, file, pool)}
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.5)
        assert [verdict.reward for verdict in verdicts_of(["right"] * 10, file, pool)] == [1.0] * 10
        assert [verdict.reward for verdict in verdicts_of(["right"] * 10, file, pool)] == [1.0] * 10


def test_closing_the_pool_ends_its_processes(file: Path) -> None:
    with VerifierPool(workers=1, deadline_seconds=5.0) as pool:
        pid = verdicts_of(["right"], file, pool)[0].details["pid"]
    assert not psutil.pid_exists(pid)


ORPHAN_MAKER = """
import sys
from pathlib import Path
sys.path.insert(0, {folder!r})
import test_verification as t

if __name__ == "__main__":
    pool = t.VerifierPool(workers=2, deadline_seconds=3.0)
    t.verdicts_of(["right"] * 30, Path({file!r}), pool)
    print("ready", flush=True)
    t.verdicts_of(["hang in C"] * 30, Path({file!r}), pool)
"""


def test_the_workers_of_a_killed_run_end_by_themselves(file: Path, tmp_path: Path) -> None:
    script = tmp_path / "orphan_maker.py"
    script.write_text(ORPHAN_MAKER.format(folder=str(Path(__file__).parent), file=str(file)))
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "ready\n"
        workers = psutil.Process(run.pid).children(recursive=True)
        assert len(workers) >= 2
        run.kill()
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert alive == []
