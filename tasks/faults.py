"""The fault injector: kills or fails a run at a named place, so that tests can watch it recover.

`GLEANER_FAIL_AT=task:step:where:mode` arms one place in a process, for instance `update:3:before_optimizer:kill`.
Modes: `kill` (SIGKILL to this process), `error` (a plain exception, once), `transient` (a retryable one, once).
Places are listed in PLACES; an unknown one is refused, since a test that never fires proves nothing.
"""

import os
import signal
from typing import Literal, get_args

from gleaner.conf.errors import ConfigurationError, TransientError

Mode = Literal["kill", "error", "transient"]

PLACES = {
    "sample": ("before_shard_0", "before_shard_1", "shard_0_sampled", "shard_1_sampled"),
    "verify": ("before", "after"),
    "exchange": ("before",),
    "signal": ("before",),
    "update": ("before_optimizer", "after_optimizer"),
    "checkpoint": ("before_write", "before_publish"),
    "journal": ("before_append", "after_append"),
}

VARIABLE = "GLEANER_FAIL_AT"


class InjectedError(RuntimeError):
    """Raised by mode `error`: stands for any bug."""


def fail_at(task: str, step: int, where: str, mode: Mode = "kill") -> str:
    """The value of GLEANER_FAIL_AT that arms this place.

    Raises:
        ConfigurationError: no such place or mode.
    """
    if where not in PLACES.get(task, ()):
        known = ", ".join(f"{name}:{place}" for name, places in PLACES.items() for place in places)
        raise ConfigurationError(f"no fault point {task}:{where}: use one of {known}")
    if mode not in get_args(Mode):
        raise ConfigurationError(f"no fault mode {mode}: use one of {', '.join(get_args(Mode))}")
    return f"{task}:{step}:{where}:{mode}"


_fired: set[str] = set()


def fault_point(task: str, step: int, where: str) -> None:
    """Fail here if this place is armed; otherwise a dictionary look-up."""
    armed = os.environ.get(VARIABLE)
    if not armed or armed in _fired:
        return
    fault_task, fault_step, fault_where, mode = armed.split(":")
    if (fault_task, int(fault_step), fault_where) != (task, step, where):
        return
    _fired.add(armed)
    if mode == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "transient":
        raise TransientError(f"injected at {armed}: unset {VARIABLE} to run without it")
    raise InjectedError(f"injected at {armed}: unset {VARIABLE} to run without it")
