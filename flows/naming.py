"""Names of flow runs in the Prefect UI: the run's own, so that a resumed run is found beside its first start."""

from prefect.runtime import flow_run

from gleaner.conf.compose import run_name


def flow_run_name() -> str:
    return run_name(flow_run.parameters["settings"])
