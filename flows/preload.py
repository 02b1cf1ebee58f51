"""What the fork server loads before it forks the first run: everything that any run imports."""

from gleaner.flows.runtime import prepare_process

prepare_process()

from gleaner.flows import gats, graft, grpo, pippo, vista  # noqa: E402, F401
