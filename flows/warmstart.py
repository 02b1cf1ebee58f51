"""Warm start: supervised fine-tuning on expert demonstrations, as a flow of its own."""

from prefect import flow

from gleaner.conf.compose import run_name
from gleaner.conf.schema import GleanerSettings
from gleaner.flows.loop import RunSummary
from gleaner.flows.naming import flow_run_name
from gleaner.tasks.context import RunContext
from gleaner.tasks.evaluating import evaluate_version
from gleaner.tasks.preflight import preflight
from gleaner.tasks.publishing import publish
from gleaner.tasks.reporting import Reporter
from gleaner.tasks.starting import start_policy


@flow(name="warmstart", flow_run_name=flow_run_name, persist_result=False)
def warmstart(settings: GleanerSettings) -> RunSummary:
    """Train the policy that runs start from, test it, and publish it as a folder."""
    context = RunContext.of(run_name(settings), settings)
    checked = preflight(context)
    with Reporter(context, checked) as reporter:
        start = start_policy(context)
        reporter.warm_start(start["metrics"])
        prompts = settings.evaluation.test_prompts
        after = evaluate_version(context, start["version"], "test", prompts) if prompts else None
        if after is not None:
            reporter.test(0, after)
        published = publish(context, start["version"])
        report = reporter.finish(None, after, published)
    return RunSummary(
        run_id=context.run_id,
        version=start["version"],
        steps=0,
        budget={},
        before={},
        after=after.metrics if after else {},
        policy_folder=published.folder,
        report_folder=report.folder,
        mlflow_run=report.mlflow_run,
    )
