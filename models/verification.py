"""Verdicts, from verifiers and reward functions that run in processes which can be killed.

A verifier may hang in a long integer power, crash, or answer with something that is no number. None of these is a
wrong answer: the episode is then unscored (`timeout` or `error`), and the group policy decides what becomes of it.

The deadline is the kernel's: a worker arms an alarm whose default action ends the process, so a loop that never
returns to Python ends too, and a worker whose run was killed does not outlive its deadline. Imports happen before the
alarm is armed. Works from any thread, since everything with signals happens in the workers' main threads.
"""

import contextlib
import json
import math
import multiprocessing
import numbers
import resource
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, wait
from concurrent.futures import TimeoutError as DeadlineExceeded
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from typing import Any, Self

from pebble import ProcessExpired, ProcessPool

from gleaner.conf.errors import ContractError, VerifierContractError
from gleaner.conf.schema import RewardSettings, VerificationSettings
from gleaner.models.environments.base import Environment, Outcome
from gleaner.models.plugins import absolute, load_object
from gleaner.models.records import Message, Prompt, Segment, Status, Verdict

IMPORT_ALLOWANCE_SECONDS = 120.0
"""Time beyond the deadline that importing a verifier or a reward function may take, once per worker."""
WORKER_MEMORY_BYTES = 8 * 2**30
"""Above this an allocation in a worker fails (and the episode is unscored), instead of the trainer being killed."""


@dataclass(frozen=True)
class Episode:
    """What a verdict is about: one rollout, whole."""

    prompt: Prompt
    sample: int
    text: str
    transcript: list[Message]
    environment_result: dict[str, Any]
    failed: bool = False
    """The engine or the environment broke down in it: there is nothing to verify."""


@dataclass(frozen=True)
class _Job:
    """One episode's work. `outcome` is given where the verifier already ran in the caller's process."""

    verifier: str
    outcome: Outcome | None
    functions: tuple[str, ...]
    episode: Episode


@dataclass(frozen=True)
class _Answer:
    """What became of a job: outcome and values if scored, else the reason."""

    status: Status
    outcome: Outcome | None = None
    values: tuple[float, ...] = ()
    reason: str = ""


def judge(
    environment: Environment,
    prompts: Sequence[Prompt],
    segments: Sequence[Segment],
    settings: VerificationSettings,
    rewards: Sequence[RewardSettings],
    pool: "VerifierPool",
) -> list[Verdict]:
    """A verdict for every episode (prompt_id, sample) of `segments`, in the order of their first segments.

    The reward is the weighted sum of `rewards`: the verifier's own, and functions called as
    f(prompt=Prompt, text=str, transcript=list, success=bool) -> float. If one of them answers None, NaN or an
    infinity, or fails, the episode is unscored; success is the verifier's alone. With `on_unscored="retry"` unscored
    episodes are verified again, up to `retries` times. An episode of several segments is judged by its last text and
    its joined transcript.

    Raises:
        ContractError: a segment belongs to none of the prompts.
    """
    episodes = _episodes(prompts, segments)
    tries = 1 + (settings.retries if settings.on_unscored == "retry" else 0)
    return _judge_episodes(environment, episodes, rewards, pool, tries)


def judge_texts(
    environment: Environment, texts: Sequence[tuple[Prompt, str]], pool: "VerifierPool"
) -> list[Verdict]:
    """The verifier's verdict on single answers, for instance on gold answers before training starts."""
    episodes = [
        Episode(prompt, index, text, [{"role": "assistant", "content": text}], {})
        for index, (prompt, text) in enumerate(texts)
    ]
    return _judge_episodes(environment, episodes, [RewardSettings()], pool, tries=1)


def check_rewards(rewards: Sequence[RewardSettings], pool: "VerifierPool") -> list[str]:
    """Sentences that say which reward functions cannot be loaded in a worker; empty if all can."""
    names = _user_functions(rewards)
    return [reason for name in names if (reason := pool.why_not(name))]


class VerifierPool:
    """Worker processes that a deadline can kill; replaced when they end, and as a whole if the pool breaks.

    Workers are spawned (not forked: the caller may hold a GPU and threads), so a script that starts a run needs
    Python's usual `if __name__ == "__main__":`.
    """

    def __init__(self, workers: int, deadline_seconds: float) -> None:
        self.workers = workers
        self.deadline_seconds = deadline_seconds
        self._lock = threading.Lock()
        self._pool: ProcessPool | None = None
        self._last_progress = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers. The pool starts anew if it is used again."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            _end(pool)

    def why_not(self, function: str) -> str:
        """Empty if a worker can load `function`, else the reason with its fix."""
        future: Any = self._started().schedule(_loadable, args=(function,), timeout=IMPORT_ALLOWANCE_SECONDS)
        try:
            return str(future.result())
        except Exception as error:
            return f"loading {function} ended its process ({error}): correct the module"

    def run(self, jobs: Sequence[_Job]) -> list[_Answer]:
        """Answers to `jobs`, in order. A job whose pool broke around it is run once more."""
        answers: dict[int, _Answer] = {}
        for _ in range(2):
            waiting = [index for index in range(len(jobs)) if index not in answers]
            if not waiting:
                break
            answers |= self._run_once(self._started(), {index: jobs[index] for index in waiting})
        broken = _Answer("error", reason="the verifier's process pool broke down twice")
        return [answers.get(index, broken) for index in range(len(jobs))]

    def _started(self) -> ProcessPool:
        with self._lock:
            if self._pool is None or not self._pool.active:
                self._pool = ProcessPool(
                    max_workers=self.workers,
                    initializer=_start_worker,
                    context=multiprocessing.get_context("spawn"),
                )
            return self._pool

    def _discard(self, pool: ProcessPool) -> None:
        with self._lock:
            if self._pool is pool:
                self._pool = None
        _end(pool)

    def _run_once(self, pool: ProcessPool, jobs: dict[int, _Job]) -> dict[int, _Answer]:
        """Answers of the jobs that this pool could finish; the others are left out, and the pool is discarded."""
        limit = self.deadline_seconds + IMPORT_ALLOWANCE_SECONDS
        futures: dict[Any, int] = {}
        answers: dict[int, _Answer] = {}
        self._last_progress = time.monotonic()
        broken = False
        try:
            for index, job in jobs.items():
                submitted: Any = pool.schedule(_run_job, args=(job, self.deadline_seconds), timeout=limit)
                submitted.add_done_callback(self._note_progress)
                futures[submitted] = index
            pending = set(futures)
            while pending and not broken:
                done, pending = wait(pending, timeout=5.0)
                for future in done:
                    answer = self._answer_of(future)
                    if answer is None:
                        broken = True
                    else:
                        answers[futures[future]] = answer
                # A worker that died between taking a job and saying so leaves a job that nobody will finish, and so
                # does a pool that another thread found broken.
                stalled = time.monotonic() - self._last_progress > limit + 10
                broken = broken or (not done and (stalled or pool is not self._pool))
        except (BrokenProcessPool, RuntimeError):
            broken = True
        finally:
            for future in futures:
                future.cancel()
        if broken:
            self._discard(pool)
        return answers

    def _note_progress(self, _: object) -> None:
        self._last_progress = time.monotonic()

    def _answer_of(self, future: Any) -> _Answer | None:
        """The job's answer; None if it is the pool's fault that there is none."""
        timeout = _Answer("timeout", reason=f"killed at the deadline of {self.deadline_seconds:g} s")
        try:
            answer: _Answer = future.result(timeout=0)
            return answer
        except ProcessExpired as expired:
            if expired.exitcode == -signal.SIGALRM:
                return timeout
            return _Answer("error", reason=f"the verifier's process died ({_exit_name(expired.exitcode)})")
        except (BrokenProcessPool, CancelledError):
            return None
        except DeadlineExceeded:
            return timeout
        except Exception as error:
            return _Answer("error", reason=f"{type(error).__name__}: {error}")


def _end(pool: Any) -> None:
    pool.stop()
    pool.join()


# ------------------------------------------------------------------------------------- in the caller's process


def _episodes(prompts: Sequence[Prompt], segments: Sequence[Segment]) -> list[Episode]:
    by_id = {prompt.prompt_id: prompt for prompt in prompts}
    grouped: dict[tuple[str, int], list[Segment]] = {}
    for segment in segments:
        if segment.prompt_id not in by_id:
            raise ContractError(
                f"rollout {segment.prompt_id}/{segment.sample} belongs to no prompt of the batch: pass the prompts "
                "that it was sampled from"
            )
        grouped.setdefault((segment.prompt_id, segment.sample), []).append(segment)
    return [
        Episode(
            prompt=by_id[prompt_id],
            sample=sample,
            text=max(parts, key=lambda part: part.segment).text,
            transcript=[m for part in sorted(parts, key=lambda part: part.segment) for m in part.transcript],
            environment_result=max(parts, key=lambda part: part.segment).environment_result,
            failed=any(part.finish_reason == "error" for part in parts),
        )
        for (prompt_id, sample), parts in grouped.items()
    ]


def _judge_episodes(
    environment: Environment,
    episodes: Sequence[Episode],
    rewards: Sequence[RewardSettings],
    pool: VerifierPool,
    tries: int,
) -> list[Verdict]:
    broken_down = _Answer("error", reason="the episode broke down while it was sampled")
    answers: list[_Answer | None] = [broken_down if episode.failed else None for episode in episodes]
    waiting = [index for index, answer in enumerate(answers) if answer is None]
    for _ in range(tries):
        if not waiting:
            break
        for index, answer in zip(
            waiting, _answers(environment, [episodes[i] for i in waiting], rewards, pool), strict=True
        ):
            answers[index] = answer
        waiting = [index for index in waiting if (answers[index] or broken_down).status != "scored"]
    return [
        _verdict(environment, episode, answer or broken_down, rewards)
        for episode, answer in zip(episodes, answers, strict=True)
    ]


def _answers(
    environment: Environment,
    episodes: Sequence[Episode],
    rewards: Sequence[RewardSettings],
    pool: VerifierPool,
) -> list[_Answer]:
    verifier = _absolute_name(environment.verifier.function)
    functions = tuple(_user_functions(rewards))
    jobs = [_Job(verifier, None, functions, episode) for episode in episodes]
    if environment.verifier.isolated:
        return pool.run(jobs)
    answers = [_run_verifier(job) for job in jobs]
    if not functions:
        return answers
    scored = [index for index, answer in enumerate(answers) if answer.status == "scored"]
    rewarded = pool.run([replace(jobs[index], outcome=answers[index].outcome) for index in scored])
    for index, answer in zip(scored, rewarded, strict=True):
        answers[index] = answer
    return answers


def _verdict(
    environment: Environment, episode: Episode, answer: _Answer, rewards: Sequence[RewardSettings]
) -> Verdict:
    names = [reward.function for reward in rewards]
    values: dict[str, float] = {}
    details: dict[str, Any] = {}
    status, reason, reward = answer.status, answer.reason, 0.0
    if answer.outcome is not None:
        details = dict(answer.outcome.details)
        values = dict(zip([name for name in names if name != "verifier"], answer.values, strict=False))
        values["verifier"] = float(answer.outcome.reward)
        if status == "scored":
            reward = math.fsum(setting.weight * values[setting.function] for setting in rewards)
            if not math.isfinite(reward):
                status, reason = "error", f"VerifierContractError: the weighted sum of rewards is {reward}"
    if len(names) > 1 or names != ["verifier"]:
        details["rewards"] = values
    if status != "scored":
        details["reason"] = reason
    return Verdict(
        prompt_id=episode.prompt.prompt_id,
        sample=episode.sample,
        status=status,
        success=answer.outcome.success if status == "scored" and answer.outcome is not None else None,
        reward=reward if status == "scored" else None,
        details=details,
        verifier_version=environment.verifier.version,
    )


def _user_functions(rewards: Sequence[RewardSettings]) -> list[str]:
    return [_absolute_name(reward.function) for reward in rewards if reward.function != "verifier"]


def _absolute_name(function: str) -> str:
    module_name, _, name = function.rpartition(":")
    return f"{absolute(module_name)}:{name}"


def _exit_name(code: int | None) -> str:
    if code is not None and code < 0:
        return signal.Signals(-code).name
    return f"exit code {code}"


# ------------------------------------------------------------------------------------------- in a worker


def _start_worker() -> None:
    # pebble's own handler would run Python code on SIGTERM, which a worker that is stuck in C never reaches.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = WORKER_MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(WORKER_MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def _loadable(function: str) -> str:
    try:
        loaded = load_object(function)
    except Exception as error:
        return str(error)
    return "" if callable(loaded) else f"{function} is no function: name one"


def _run_job(job: _Job, deadline_seconds: float) -> _Answer:
    try:
        for name in (*job.functions, *(() if job.outcome else (job.verifier,))):
            load_object(name)
        with _alarm(deadline_seconds):
            answer = _Answer("scored", job.outcome) if job.outcome else _run_verifier(job)
            return answer if answer.outcome is None else _run_functions(job, answer.outcome)
    except BaseException as error:  # SystemExit too: raised again in the caller, it would end the run
        return _Answer("error", reason=f"{type(error).__name__}: {error}")


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """End the process after `seconds`, wherever it is."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _run_verifier(job: _Job) -> _Answer:
    episode = job.episode
    try:
        outcome = load_object(job.verifier)(
            episode.prompt.payload, episode.text, episode.transcript, episode.environment_result
        )
        return _Answer("scored", _checked_outcome(outcome, job.verifier))
    except Exception as error:
        return _Answer("error", reason=f"{type(error).__name__}: {error}")


def _checked_outcome(outcome: Any, function: str) -> Outcome:
    if not isinstance(outcome, Outcome):
        raise VerifierContractError(f"{function} answered {_short(outcome)}: return an Outcome")
    if not isinstance(outcome.success, bool):
        raise VerifierContractError(f"{function} gave success {_short(outcome.success)}: give True or False")
    reward = _checked_number(outcome.reward, function)
    try:
        details = json.loads(json.dumps(outcome.details, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise VerifierContractError(
            f"{function} gave details that are no JSON ({error}): use plain values"
        ) from None
    if not isinstance(details, dict):
        raise VerifierContractError(f"{function} gave details that are no mapping: return a dict")
    return Outcome(outcome.success, reward, details)


def _checked_number(value: Any, function: str) -> float:
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise VerifierContractError(f"{function} answered {_short(value)}: return a finite number")
    return float(value)


def _run_functions(job: _Job, outcome: Outcome) -> _Answer:
    """The user's rewards. Whatever one of them does, the outcome stays the verifier's."""
    episode, values = job.episode, []
    for name in job.functions:
        try:
            value = load_object(name)(
                prompt=episode.prompt,
                text=episode.text,
                transcript=episode.transcript,
                success=outcome.success,
            )
            values.append(_checked_number(value, name))
        except Exception as error:
            return _Answer(
                "error", outcome, tuple(values), reason=f"{type(error).__name__} in {name}: {error}"
            )
    return _Answer("scored", outcome, tuple(values))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
