"""Warm start: supervised fine-tuning on expert demonstrations, as a flow of its own."""

from prefect import flow

from gleaner.conf.compose import run_name
from gleaner.conf.schema import GleanerSettings
from gleaner.flows.loop import Progress, RunSummary, conclude, test
from gleaner.flows.naming import flow_run_name
from gleaner.tasks.context import RunContext
from gleaner.tasks.preflight import preflight
from gleaner.tasks.reporting import Reporter
from gleaner.tasks.starting import start_policy


@flow(name="warmstart", flow_run_name=flow_run_name, persist_result=False)
def warmstart(settings: GleanerSettings) -> RunSummary:
    """Train the policy that runs start from, test it, and publish it as a folder."""
    context = RunContext.of(run_name(settings), settings)
    checked = preflight(context)
    with Reporter(context, checked) as reporter:
        reporter.status("warm start")
        start = start_policy(context)
        reporter.warm_start(start["metrics"])
        after = test(context, start["version"], reporter, step=0)
        return conclude(
            context, Progress(step=0, version=start["version"]), None, after, reporter, {}, {}, {}
        )
