"""The command as a user types it: in processes of its own, from folders that are not the repository."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from gleaner.conf.compose import compose, validate
from gleaner.conf.schema import CompareSettings, GleanerSettings
from gleaner.flows.cli import _print_messages, app, main
from gleaner.flows.runtime import prepare_process

COMMAND = Path(sys.executable).with_name("gleaner")


def gleaner(*words: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    # Wide, so that tables and messages are not folded.
    environment = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1", **variables}
    return subprocess.run(
        [COMMAND, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )


def test_what_needs_no_heavy_library_imports_none(tmp_path: Path) -> None:
    """One process for all commands: what any of them imported would be there at the end."""
    commands = [
        ["--help"],
        ["run", "--help"],
        ["bank", "--help"],
        ["version"],
        ["presets"],
        ["settings"],
        ["run", "grpo", "--dry-run"],
        ["compare", "smoke", "--dry-run"],
    ]
    program = (
        "import contextlib, sys\n"
        "from gleaner.flows.cli import main\n"
        f"for words in {commands!r}:\n"
        "    sys.argv = ['gleaner', *words]\n"
        "    with contextlib.suppress(SystemExit):\n"
        "        main()\n"
        "heavy = {'torch', 'prefect', 'mlflow', 'transformers', 'trl', 'polars', 'datasets', 'vllm'}\n"
        "print('HEAVY', *sorted(heavy & set(sys.modules)))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-P", "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    assert "compare-smoke" in ended.stdout
    assert ended.stdout.splitlines()[-1] == "HEAVY"


def test_folders_of_the_same_names_around_it_do_not_matter(tmp_path: Path) -> None:
    for name in ("models", "tasks", "flows", "conf", "yaml_presets"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(
            "raise RuntimeError('somebody else’s code was imported')\n"
        )
    (tmp_path / "conf" / "run.yaml").write_text("defaults: [nothing: here]\n")
    (tmp_path / "conf" / "environment").mkdir()
    (tmp_path / "conf" / "environment" / "household.yaml").write_text("kind: unrelated\n")
    for words in (["--help"], ["run", "grpo", "--dry-run"], ["bank", "ls"]):
        ended = gleaner(*words, folder=tmp_path)
        assert ended.returncode == 0, ended.stderr


def test_a_dry_run_prints_settings_that_can_be_read_back_and_writes_nothing(tmp_path: Path) -> None:
    words = ["environment=math", "environment.path=my.jsonl", "policy=smollm2", "run.steps=20", "method=dapo"]
    ended = gleaner("run", "grpo", *words, "--dry-run", folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert validate(yaml.safe_load(ended.stdout), GleanerSettings) == compose(words)
    assert f"# store: {tmp_path}/.gleaner/store" in ended.stdout
    assert "# run: grpo-math-" in ended.stdout
    assert "# tracking: sqlite:///.gleaner/mlflow.db (experiment gleaner)" in ended.stdout
    assert list(tmp_path.iterdir()) == []


def dry_run(*words: str) -> str:
    """In this process, which saves the start of another."""
    ended = CliRunner().invoke(app, [*words, "--dry-run"], catch_exceptions=False)
    assert ended.exit_code == 0
    return ended.output


def test_a_method_is_a_preset_and_an_override_wins() -> None:
    def method(*words: str) -> object:
        return yaml.safe_load(dry_run("run", *words))["method"]

    assert method("dapo") == method("grpo", "method=dapo")
    assert method("dapo", "method=gspo") == method("gspo")


def test_a_warm_start_has_settings_even_where_the_preset_has_none() -> None:
    assert yaml.safe_load(dry_run("run", "warmstart", "policy=smollm2"))["warmstart"]["steps"] == 200


def test_a_comparison_shows_its_runs() -> None:
    output = dry_run("compare", "smoke", "seeds=[4]")
    assert validate(yaml.safe_load(output), CompareSettings).seeds == [4]
    assert "# run: compare-smoke-larger_groups-seed4" in output


def test_a_comparison_hands_the_users_presets_to_its_arms(tmp_path: Path) -> None:
    (tmp_path / "method").mkdir()
    (tmp_path / "method" / "mine.yaml").write_text("kind: grpo\n")
    words = ["arms={grpo:['method=mine']}", "budget_rollouts=128"]
    assert "# run: grpo-family-grpo-seed0" in dry_run("compare", *words, "--presets", str(tmp_path))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["run", "grpo", "run.stesp=4"], "run.stesp is no setting: did you mean run.steps?"),
        (
            ["run", "grop"],
            "grop is no method: run warmstart or one of cispo, dapo, dr_grpo, gats",
        ),
        (
            ["run", "grpo", "run.group_size=1"],
            "a group of one has no advantage: set run.group_size to 2",
        ),
        (["compare", "smok"], "compare=smok is no preset: choose one of gap, gats_household"),
        (["presets", "colour"], "colour is no group of presets: choose one of environment"),
        (["bank", "show", "no-such-run"], "has no run no-such-run: name one of its runs (none)"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_an_error_is_one_message_and_exit_code_2(
    words: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["gleaner", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith("gleaner: ")
    assert sentence in message
    assert len(message.strip().splitlines()) == 1


def test_a_traceback_is_shown_only_on_request(tmp_path: Path) -> None:
    plain = gleaner("run", "grpo", "a=1", folder=tmp_path)
    assert plain.returncode == 2
    assert "Traceback" not in plain.stderr
    debugged = gleaner("run", "grpo", "a=1", "--debug", folder=tmp_path)
    assert "Traceback" in debugged.stderr
    assert "ConfigurationError: a is no setting" in debugged.stderr


def test_presets_and_settings_are_listed(tmp_path: Path) -> None:
    assert "environment=math500" in gleaner("presets", folder=tmp_path).stdout
    listed = gleaner("settings", "method", folder=tmp_path).stdout
    assert "method.clip_high" in listed
    assert "0.28" in listed
    assert "run.steps" not in listed


def test_a_folder_of_own_presets_is_used_and_listed(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "quick.yaml").write_text(
        "# @package _global_\n# Over in a moment.\nrun: {steps: 1}\n"
    )
    resolved = yaml.safe_load(dry_run("run", "grpo", "experiment=quick", "--presets", str(tmp_path)))
    assert resolved["run"]["steps"] == 1
    assert "Over in a moment." in gleaner("presets", "experiment", "--presets", ".", folder=tmp_path).stdout


def test_preparing_a_process_sets_what_is_unset_and_keeps_what_the_user_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = (
        "PREFECT_HOME",
        "PREFECT_MEMO_STORE_PATH",
        "PREFECT_SERVER_ANALYTICS_ENABLED",
        "MLFLOW_DISABLE_TELEMETRY",
    )
    for name in (*names, "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"):
        monkeypatch.setenv(name, "")  # so that monkeypatch restores it
        monkeypatch.delenv(name)
    monkeypatch.setenv("DO_NOT_TRACK", "0")
    prepare_process(tmp_path / ".gleaner")
    assert os.environ["PREFECT_HOME"] == str(tmp_path / ".gleaner" / "prefect")
    assert os.environ["PREFECT_MEMO_STORE_PATH"].startswith(os.environ["PREFECT_HOME"])
    assert os.environ["DO_NOT_TRACK"] == "0"


def test_prefect_sees_what_the_process_was_given(tmp_path: Path) -> None:
    program = (
        "from gleaner.flows.runtime import prepare_process\n"
        "prepare_process()\n"
        "from prefect.settings import get_current_settings\n"
        "s = get_current_settings()\n"
        "print(s.home, s.server.memo_store_path, s.server.ephemeral.startup_timeout_seconds,"
        " s.server.analytics_enabled)\n"
    )
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    ended = subprocess.run(
        [sys.executable, "-P", "-c", program],
        cwd=tmp_path,
        env=clean,
        capture_output=True,
        text=True,
        timeout=120,
    )
    home = tmp_path / ".gleaner" / "prefect"
    assert ended.stdout.split() == [str(home), str(home / "memo_store.toml"), "120", "False"], ended.stderr


def test_what_a_policy_sampled_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    _print_messages([{"role": "assistant", "content": "a\x1b[2Jb\n[red]c"}])
    assert capsys.readouterr().out == "assistant a\ufffd[2Jb\n[red]c\n"
