"""Evaluation: success and pass@k of a policy on the test prompts, with intervals."""

from pathlib import Path

from prefect import flow
from prefect.artifacts import create_markdown_artifact
from rich.console import Console

from gleaner.conf.compose import run_name
from gleaner.conf.errors import ConfigurationError
from gleaner.conf.schema import GleanerSettings, PretrainedPolicy
from gleaner.flows.naming import flow_run_name
from gleaner.flows.services import prefect_server
from gleaner.tasks.context import RunContext
from gleaner.tasks.evaluating import Evaluation, evaluate_version
from gleaner.tasks.preflight import preflight
from gleaner.tasks.publishing import RUNS_FOLDER
from gleaner.tasks.starting import start_policy

DEFAULT_PROMPTS = 256


def evaluate(settings: GleanerSettings, policy: str | None = None) -> Evaluation:
    """Evaluate a policy folder, or without one the newest version of the run that the settings name; print the result.

    Raises:
        ConfigurationError: no such folder, or the run has no step yet.
    """
    if not settings.evaluation.test_prompts:
        evaluation = settings.evaluation.model_copy(update={"test_prompts": DEFAULT_PROMPTS})
        settings = settings.model_copy(update={"evaluation": evaluation})
    if policy is not None:
        settings = _with_policy(settings, policy)
    with prefect_server(RUNS_FOLDER / "prefect-server.log"):
        found: Evaluation = evaluate_flow(settings, of_run=policy is None)
    Console().print(_markdown(found), markup=False, highlight=False)
    return found


@flow(name="evaluate", flow_run_name=flow_run_name, persist_result=False)
def evaluate_flow(settings: GleanerSettings, of_run: bool) -> Evaluation:
    """Sample and verify the test prompts.

    Args:
        of_run: evaluate the run that the settings name at its last step, instead of the settings' own policy.
    """
    context = RunContext.of(run_name(settings), settings)
    preflight(context)
    version = start_policy(context)["version"]
    if of_run:
        last = context.journal.last()
        if last is None:
            raise ConfigurationError(
                f"run {context.run_id} has no step yet: train it first, set run.name, or pass --policy FOLDER"
            )
        version = last[1]["version"]
    found = evaluate_version(context, version, "test", settings.evaluation.test_prompts)
    create_markdown_artifact(_markdown(found), key="evaluation", description=context.run_id)
    return found


def _with_policy(settings: GleanerSettings, policy: str) -> GleanerSettings:
    if not (Path(policy) / "config.json").is_file():
        raise ConfigurationError(f"{policy} holds no config.json: pass the folder of an exported policy")
    pretrained = PretrainedPolicy(path=policy, context=settings.policy.context)
    return settings.model_copy(update={"policy": pretrained, "warmstart": None})


def _markdown(found: Evaluation) -> str:
    lines = [
        f"{found.split} success {found.success:.3f}, 95 % interval {found.low:.3f} to {found.high:.3f}",
        f"({found.prompts} prompts x {found.samples} samples, {found.scored} scored)",
    ]
    lines += [f"pass@{k}: {value:.3f}" for k, value in found.pass_at.items()]
    return "\n".join(lines)
