"""The command `gleaner`. It stays light: torch, Prefect and MLflow are imported by the command that needs them."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.markup import escape
from rich.syntax import Syntax
from rich.table import Column, Table

from gleaner.conf.errors import ConfigurationError, GleanerError
from gleaner.conf.presets import GROUPS, available_presets
from gleaner.conf.schema import CompareSettings, GleanerSettings, Settings, WarmstartSettings
from gleaner.flows.runtime import prepare_process

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
bank_app = typer.Typer(no_args_is_help=True, help="The rollouts of every run: list, show, export.")
app.add_typer(bank_app, name="bank")

console = Console()

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="OVERRIDES",
        help="GROUP=PRESET (see `gleaner presets`) and setting=value (see `gleaner settings`).",
        show_default=False,
    ),
]
Presets = Annotated[
    Path | None,
    typer.Option("--presets", help="Folder of your own presets, such as FOLDER/experiment/mine.yaml."),
]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Print the resolved settings and where results would go; load nothing."),
]


@app.callback()
def gleaner(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Post-train language models with verifiable rewards, and learn from the rollouts that GRPO discards.

    For example: gleaner run grpo environment=math environment.path=my.jsonl policy=smollm2 run.steps=20
    """


@app.command()
def run(
    method: Annotated[
        str, typer.Argument(metavar="METHOD", help=f"warmstart, or {', '.join(available_presets('method'))}.")
    ],
    overrides: Overrides = None,
    presets: Presets = None,
    dry_run: DryRun = False,
) -> None:
    """Train a policy. The same command again resumes where it stopped.

    `gleaner run grpo method=dapo` and `gleaner run dapo` are one: METHOD is a preset, and an override wins.
    """
    settings = _run_settings(method, overrides or [], presets)
    if dry_run:
        _print_resolved(settings, _destinations(settings))
        return
    flow = "warmstart" if method == "warmstart" else settings.method.kind
    trains = _load(f"gleaner.flows.{flow}:{flow}")
    _load("gleaner.flows.console:run_in_terminal")(trains, settings)


@app.command()
def evaluate(
    overrides: Overrides = None,
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy", help="Folder of an exported policy; without it, the run that the settings name."
        ),
    ] = None,
    presets: Presets = None,
    dry_run: DryRun = False,
) -> None:
    """Measure success and pass@k on the test prompts, with intervals."""
    settings = _compose(overrides or [], presets)
    if dry_run:
        _print_resolved(settings, _destinations(settings))
        return
    _load("gleaner.flows.evaluate:evaluate")(settings, policy)


@app.command()
def values(
    overrides: Overrides = None,
    presets: Presets = None,
    prompts: Annotated[int, typer.Option(min=1, help="Validation prompts, each with a fresh group.")] = 32,
    places: Annotated[
        int, typer.Option(min=1, help="Prefixes of each group's first rollout that are continued.")
    ] = 8,
    continuations: Annotated[int, typer.Option(min=2, help="Continuations of each prefix.")] = 16,
) -> None:
    """Measure a critic's values against what the policy really earns from the middle of its rollouts.

    The settings name a finished run of pippo or ppo: pass the words that it was started with.
    """
    settings = _compose(overrides or [], presets)
    _load("gleaner.flows.values:report_values")(settings, prompts, places, continuations)


@app.command()
def compare(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PRESET OVERRIDES",
            help=f"One of {', '.join(available_presets('compare'))}, and settings such as seeds=[0,1,2].",
            show_default=False,
        ),
    ] = None,
    presets: Presets = None,
    tune: Annotated[
        bool,
        typer.Option(
            "--tune",
            help="Search every arm's settings on validation prompts first, and write the choice to a file.",
        ),
    ] = False,
    dry_run: DryRun = False,
) -> None:
    """Run arms x seeds at an equal budget of rollouts, and report paired intervals.

    The same command again goes on where it stopped.
    """
    from gleaner.conf.compose import compose

    words = [word if "=" in word else f"compare={word}" for word in overrides or []]
    if presets is not None:
        words.append(f"presets={presets.resolve()}")
    settings = compose(words, CompareSettings, presets=presets)
    if dry_run:
        _print_resolved(settings, _planned(settings, tune))
        return
    _load(f"gleaner.flows.compare:{'tune' if tune else 'compare'}")(settings)


@app.command()
def export(
    run: Annotated[str, typer.Argument(help="Name of the run, as `gleaner bank ls` shows it.")],
    folder: Annotated[Path, typer.Argument(help="Folder to write; transformers and vLLM load it.")],
    overrides: Overrides = None,
    hub: Annotated[str | None, typer.Option("--hub", help="Also push to this repository of the hub.")] = None,
) -> None:
    """Write a run's trained policy (LoRA merged) to a folder, and to the hub on request."""
    _load("gleaner.flows.export:export")(_compose(overrides or [], None).storage, run, folder, hub)


@bank_app.command("ls")
def bank_ls(overrides: Overrides = None) -> None:
    """List the runs in the store: gleaner bank ls [storage=s3 ...]."""
    bank, store = _open_bank(overrides)
    table = Table(Column("run", overflow="fold"), "steps", "rollouts", "scored", "success", "started")
    for summary in bank.runs(store):
        share = "" if summary.success_share is None else f"{summary.success_share:.3f}"
        counts = (summary.steps, summary.rollouts, summary.scored)
        table.add_row(summary.run, *map(str, counts), share, summary.started[:16])
    console.print(table)


@bank_app.command("show")
def bank_show(
    run: Annotated[str, typer.Argument(help="Name of the run.")],
    overrides: Overrides = None,
    step: Annotated[int, typer.Option(help="The step to show.")] = 0,
    prompt: Annotated[
        str | None, typer.Option(help="A prompt's id or the start of it: show its rollouts.")
    ] = None,
) -> None:
    """Show a step's groups, or with --prompt the rollouts of one group."""
    bank, store = _open_bank(overrides)
    if prompt is None:
        table = Table("prompt", "rollouts", "scored", "successes")
        for summary in bank.groups(store, run, step):
            table.add_row(
                summary.prompt_id[:16], *map(str, (summary.rollouts, summary.scored, summary.successes))
            )
        console.print(table)
        return
    group = bank.group(store, run, step, prompt)
    _print_messages(group.prompt.messages)
    for member in group.members:
        verdict = member.verdict
        judged = "not verified" if verdict is None else f"{verdict.status}, reward {verdict.reward}"
        console.rule(f"rollout {member.sample}: {judged}", align="left")
        _print_messages(member.segments[-1].transcript)


@bank_app.command("export")
def bank_export(
    run: Annotated[str, typer.Argument(help="Name of the run.")],
    file: Annotated[Path, typer.Argument(help="JSONL file to write, one rollout a line.")],
    overrides: Overrides = None,
    answers: Annotated[
        bool, typer.Option("--answers", help="Include gold answers and verifier details.")
    ] = False,
) -> None:
    """Write a run's rollouts as JSONL; never with gold answers unless asked."""
    bank, store = _open_bank(overrides)
    lines = bank.export(store, run, file, include_answers=answers)
    console.print(f"{lines} rollouts in {file}", markup=False, highlight=False)


@app.command()
def ui() -> None:
    """Open the Prefect and MLflow pages on this folder's runs."""
    _load("gleaner.flows.ui:ui")()


@app.command()
def demo() -> None:
    """Train two tiny policies within minutes, and show what they learned."""
    _load("gleaner.flows.demo:demo")()


@app.command("presets")
def list_presets(
    group: Annotated[str | None, typer.Argument(help=f"One of {', '.join(GROUPS)}.")] = None,
    presets: Presets = None,
) -> None:
    """List the presets that GROUP=NAME accepts."""
    if group is not None and group not in GROUPS:
        raise ConfigurationError(f"{group} is no group of presets: choose one of {', '.join(GROUPS)}")
    table = Table("override", "what it is")
    for name in [group] if group else GROUPS:
        for preset, comment in available_presets(name, presets).items():
            table.add_row(f"{name}={preset}", escape(comment))
    console.print(table)


@app.command("settings")
def list_settings(
    prefix: Annotated[str, typer.Argument(help="Show only names that start with this, such as method.")] = "",
) -> None:
    """List every setting with its default and its meaning."""
    from gleaner.conf.explain import all_settings

    table = Table("setting", "of kind", "default", "meaning")
    for setting in all_settings(GleanerSettings):
        field = setting.owner.model_fields[setting.leaf]
        if (
            not setting.name.startswith(prefix)
            or isinstance(field.default, Settings)
            or setting.leaf == "kind"
        ):
            continue
        default = "needed" if field.is_required() else str(field.get_default())
        table.add_row(setting.name, setting.kind or "", escape(default), escape(setting.description))
    console.print(table)


@app.command()
def version() -> None:
    """Print Gleaner's version."""
    from importlib.metadata import version as installed_version

    typer.echo(installed_version("gleaner"))


def _run_settings(method: str, overrides: list[str], presets: Path | None) -> GleanerSettings:
    known = available_presets("method", presets)
    if method != "warmstart" and method not in known:
        raise ConfigurationError(f"{method} is no method: run warmstart or one of {', '.join(known)}")
    if method not in (
        "warmstart",
        "grpo",
    ):  # grpo is where conf/run.yaml starts, and an experiment may change it
        overrides = [f"method={method}", *overrides]
    settings = _compose(overrides, presets)
    if method == "warmstart" and settings.warmstart is None:
        return settings.model_copy(update={"warmstart": WarmstartSettings()})
    return settings


def _compose(overrides: list[str], presets: Path | None) -> GleanerSettings:
    from gleaner.conf.compose import compose

    return compose(overrides, presets=presets)


def _planned(settings: CompareSettings, tuning: bool) -> list[str]:
    """What a comparison would run: its size, each part's overrides, and the runs in the order of their start."""
    from gleaner.conf.plan import candidates, plan_test, plan_tuning
    from gleaner.conf.tuned import apply_tuned, read_tuned, tuned_file

    lines: list[str] = []
    if tuning:
        plan = plan_tuning(settings)
        lines += [f"candidates of {arm}: {candidates(settings, arm)}" for arm in settings.arms]
    else:
        chosen = settings
        if settings.tune is not None and read_tuned(settings) is None:
            lines.append(f"not tuned yet: --tune writes {tuned_file(settings)}; the arms as they stand:")
        elif settings.tune is not None:
            chosen = apply_tuned(settings)
            lines.append(f"with what {tuned_file(settings)} chose")
        plan = plan_test(chosen)
        lines += [f"arm {arm}: {' '.join(own.overrides)}" for arm, own in chosen.arms.items()]
    lines += [f"before {name}: {' '.join(overrides)}" for name, overrides in settings.before.items()]
    lines.append(f"{len(plan)} runs, {sum(run.most_rollouts for run in plan):,} rollouts")
    for run in plan:
        after = f", after {', '.join(run.needs)}" if run.needs else ""
        kind = run.settings.method.kind
        lines.append(f"run: {run.name} ({kind}, {run.most_rollouts:,} rollouts{after})")
    return lines


def _destinations(settings: GleanerSettings) -> list[str]:
    from gleaner.conf.compose import run_name

    storage = settings.storage
    where = (
        str(Path(storage.path).resolve())
        if storage.kind == "local"
        else f"s3://{storage.bucket}/{storage.prefix}"
    )
    return [
        f"run: {run_name(settings)}",
        f"store: {where}",
        f"tracking: {settings.tracking.uri} (experiment {settings.tracking.experiment})",
    ]


def _print_resolved(settings: Settings, destinations: list[str]) -> None:
    """The settings as YAML, with the destinations as comments above, so that a redirected output stays YAML."""
    comments = "".join(f"# {line}\n" for line in destinations)
    text = comments + yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    if console.is_terminal:
        console.print(Syntax(text, "yaml", background_color="default", word_wrap=True))
    else:
        typer.echo(text, nl=False)


def _open_bank(overrides: list[str] | None) -> tuple[Any, Any]:
    storage = _compose(overrides or [], None).storage
    return importlib.import_module("gleaner.tasks.bank"), _load("gleaner.tasks.store:ObjectStore")(storage)


def _print_messages(messages: list[dict[str, Any]]) -> None:
    for message in messages:
        # A policy may sample anything, the codes that steer a terminal too.
        text = "".join(
            c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}"
            for c in str(message["content"])
        )
        console.print(f"[bold]{message['role']}[/bold] {escape(text)}", highlight=False)


def _load(where: str) -> Callable[..., Any]:
    """Import `module:name`, after the process is ready for Prefect and MLflow."""
    prepare_process()
    module, _, name = where.partition(":")
    loaded: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return loaded


def main() -> None:
    """Entry point. An error that Gleaner raised on purpose is one message and exit code 2; a bug is a traceback.

    --debug counts wherever it stands on the command line.
    """
    words = [word for word in sys.argv[1:] if word != "--debug"]
    debug = len(words) < len(sys.argv) - 1
    try:
        app(args=words, prog_name="gleaner")
    except GleanerError as error:
        if debug:
            raise
        typer.secho(f"gleaner: {error}", fg=typer.colors.RED, err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
