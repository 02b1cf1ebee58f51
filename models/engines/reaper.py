"""Ends an engine's processes when the process that they serve is gone, however it went.

    python reaper.py OWNER MARK    with a pipe as standard input, whose other end the owner alone holds

vLLM ends its processes when their owner exits in order. After a SIGKILL they would stay and hold their memory. The
pipe's end tells of any death, at any moment; a parent-death signal would not do, since it fires when the thread that
started the engine ends, and tasks run in threads. The owner writes STARTED once the engine runs, and CLOSED before
it closes the pipe in order.
"""

import contextlib
import os
import select
import sys

import psutil

MARK = "GLEANER_ENGINE"
"""Environment variable that marks the engine's processes while they start."""
STARTED, CLOSED = b"s", b"c"
LOOK_EVERY = 0.5
"""Seconds between looks while the engine starts. A process that renames itself overwrites its own environment, so
it has to be seen before: vLLM's do so after seconds of imports."""


def processes(owner: psutil.Process, mark: str, known: set[psutil.Process]) -> set[psutil.Process]:
    """The engine's processes: the owner's marked descendants, and all descendants of those known."""
    found = set(known)
    with contextlib.suppress(psutil.Error):
        for process in owner.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == mark:
                    found.add(process)
    for process in list(found):
        with contextlib.suppress(psutil.Error):
            found.update(process.children(recursive=True))
    return found


def main(owner_pid: int, mark: str) -> None:
    owner = psutil.Process(owner_pid)
    known: set[psutil.Process] = set()
    starting = True
    while True:
        told = select.select([sys.stdin], [], [], LOOK_EVERY)[0] if starting else [sys.stdin]
        known = processes(owner, mark, known)
        if told:
            word = os.read(sys.stdin.fileno(), 1)
            if word == CLOSED:
                return
            if not word:
                break
            starting = False
    for process in processes(owner, mark, known):
        with contextlib.suppress(psutil.Error):
            process.kill()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
