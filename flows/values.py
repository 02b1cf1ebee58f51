"""The value report: a run's critic on fresh rollouts, against Monte-Carlo continuations of its policy."""

import json
from dataclasses import asdict

from prefect import flow
from rich.console import Console
from rich.table import Table

from gleaner.conf.compose import run_name
from gleaner.conf.errors import ConfigurationError
from gleaner.conf.schema import GleanerSettings, PippoMethod
from gleaner.flows.naming import flow_run_name
from gleaner.flows.services import prefect_server
from gleaner.models.plots import value_plot
from gleaner.tasks.context import RunContext
from gleaner.tasks.preflight import preflight
from gleaner.tasks.publishing import RUNS_FOLDER
from gleaner.tasks.starting import start_policy
from gleaner.tasks.values import ValueReport, measure_values


def report_values(settings: GleanerSettings, prompts: int, places: int, continuations: int) -> ValueReport:
    """Measure, print, and leave values.json and values.png in the run's folder."""
    with prefect_server(RUNS_FOLDER / "prefect-server.log"):
        found: ValueReport = values_flow(settings, prompts, places, continuations)
    folder = RUNS_FOLDER / run_name(settings)
    (folder / "values.json").write_text(json.dumps(asdict(found), indent=1))
    value_plot(found.values, found.truths, found.positions, folder / "values.png", title=run_name(settings))
    table = Table("metric", "figure", title=run_name(settings))
    for name, figure in sorted(found.metrics.items()):
        table.add_row(name, f"{figure:.4f}")
    Console().print(table)
    return found


@flow(name="values", flow_run_name=flow_run_name, persist_result=False)
def values_flow(settings: GleanerSettings, prompts: int, places: int, continuations: int) -> ValueReport:
    """Values of the critic at the run's last step.

    Raises:
        ConfigurationError: the method has no critic, or the run has no step yet.
    """
    if not isinstance(settings.method, PippoMethod):
        raise ConfigurationError(
            f"method={settings.method.kind} has no critic: name a run of pippo or ppo (gleaner values method=pippo …)"
        )
    context = RunContext.of(run_name(settings), settings)
    preflight(context)
    start_policy(context)
    last = context.journal.last()
    if last is None:
        raise ConfigurationError(f"run {context.run_id} has no step yet: train it first, or set run.name")
    _, entry = last
    critic: str = entry["method_state"]["critic"]
    return measure_values(context, entry["version"], critic, prompts, places, continuations)
