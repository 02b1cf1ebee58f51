"""A phase of a step: an ordinary function that is a Prefect task, or runs plainly inside a block of short steps.

A Prefect task call costs 5 to 15 ms. Where a step takes half a second that is too much, so a block task runs several
steps and calls the same phases inline. Either way the phase's own artifacts are keyed in the store, so what was
made once is not made again: Prefect's cache is not used, because a hit there cannot know that the object behind
its reference is gone.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from prefect import task
from prefect.client.schemas.objects import State, TaskRun
from prefect.results import ResultRecord  # type: ignore[attr-defined]  # it is there, if not in __all__
from prefect.states import Completed
from prefect.tasks import Task

from gleaner.conf.errors import GleanerError

Inputs = ParamSpec("Inputs")
Record = TypeVar("Record")

GPU_TAGS = {"gpu"} if torch.cuda.is_available() else set()
"""A tagged task asks the Prefect API for a slot, which on an SQLite server can take two seconds: so the tag, and any
concurrency limit on it, is for machines that have a GPU to share."""

_inline: ContextVar[bool] = ContextVar("gleaner_inline", default=False)


@dataclass(frozen=True)
class Made(Generic[Record]):
    """What a phase returns: its record, and whether the store already had it."""

    record: Record
    hit: bool


@contextlib.contextmanager
def inline_phases() -> Iterator[None]:
    """Within it, phases run as plain calls instead of Prefect tasks."""
    token = _inline.set(True)
    try:
        yield
    finally:
        _inline.reset(token)


def is_retryable(_task: Task[..., Any], _run: TaskRun, state: State[Any]) -> bool:
    """Retry lost workers, timeouts and 5xx; never a configuration, contract or verifier-contract error."""
    error = state.data if isinstance(state.data, BaseException) else None
    if error is None:
        try:
            state.result()
        except BaseException as raised:
            error = raised
    if isinstance(error, GleanerError):
        return error.retryable
    return isinstance(error, (ConnectionError, TimeoutError))


def phase(
    *, gpu: bool = False, retries: int = 3
) -> Callable[[Callable[Inputs, Made[Record]]], Callable[Inputs, Record]]:
    """Make a function that returns `Made` a phase that returns its record.

    As a Prefect task it ends in the state Cached where the store already had the record, and on a machine with a GPU
    it carries the tag `gpu` if it needs one.
    """

    def decorate(function: Callable[Inputs, Made[Record]]) -> Callable[Inputs, Record]:
        @functools.wraps(function)
        def as_state(*args: Inputs.args, **kwargs: Inputs.kwargs) -> Any:
            made = function(*args, **kwargs)
            return Completed(name="Cached", data=made.record) if made.hit else made.record

        prefect_task: Callable[..., Any] = task(
            name=function.__name__,
            description=inspect.getdoc(function),
            tags=GPU_TAGS if gpu else set(),
            retries=retries,
            retry_delay_seconds=[1.0, 5.0, 20.0][:retries],
            retry_condition_fn=is_retryable,
            persist_result=False,
        )(as_state)

        @functools.wraps(function)
        def call(*args: Inputs.args, **kwargs: Inputs.kwargs) -> Record:
            if _inline.get():
                return function(*args, **kwargs).record
            returned = prefect_task(*args, **kwargs)
            if isinstance(returned, State):  # Cached: Prefect hands a returned state on as it is
                returned = returned.data.result if isinstance(returned.data, ResultRecord) else returned.data
            return returned

        return call

    return decorate
