import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

from gleaner.conf.errors import ConfigurationError
from gleaner.conf.schema import GleanerSettings, S3Storage, TrackingSettings
from gleaner.tasks.spool import Spool
from gleaner.tasks.tracking import PARAM_LENGTH, RunTracker, _locate, budget_metrics

SETTINGS = yaml.safe_dump(GleanerSettings().model_dump(mode="json"))


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """One folder and one database for the module: MLflow takes seconds to create a database."""
    return tmp_path_factory.mktemp("tracking")


@pytest.fixture
def tracking(workplace):
    return TrackingSettings(uri=f"sqlite:///{workplace}/mlflow.db")


@pytest.fixture
def start(workplace, tracking):
    def begin(run_id, settings=SETTINGS, tags=None, **changes):
        return RunTracker.start(
            tracking.model_copy(update=changes), run_id, settings, tags, root=workplace / "spool"
        )

    return begin


@pytest.fixture
def mlflow(tracking):
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=tracking.uri)


def history(client, summary, key):
    return {metric.step: metric.value for metric in client.get_metric_history(summary["mlflow_run_id"], key)}


def count(client, summary, key):
    return len(client.get_metric_history(summary["mlflow_run_id"], key))


def read(client, summary, path):
    return Path(client.download_artifacts(summary["mlflow_run_id"], path)).read_text()


def closed_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_run_arrives_whole(start, mlflow, tmp_path):
    tracker = start("whole", tags={"arm": "dapo"})
    for step in range(30):
        tracker.metrics(step, {f"group/{i}": step + i / 100 for i in range(60)})
    (tmp_path / "plot.png").write_bytes(b"png")
    tracker.artifact(tmp_path / "plot.png", "plots")
    (tmp_path / "plot.png").write_bytes(b"changed later")
    tracker.table(
        "rollouts", [{"prompt": "a", "reward": 1.0}, {"prompt": "b", "reward": math.nan, "note": "x"}]
    )
    tracker.data_set("household", "0123456789abcdef" * 4, {"train": 14_000, "test": 4_000})
    summary = tracker.finish()

    assert summary["delivered"], summary
    assert summary["message"] == "MLflow has everything."
    assert history(mlflow, summary, "group/59") == {step: step + 0.59 for step in range(30)}
    run = mlflow.get_run(summary["mlflow_run_id"])
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "whole"
    assert run.data.tags["gleaner.run_id"] == "whole"
    assert run.data.tags["gleaner.method"] == "grpo"
    assert run.data.tags["gleaner.environment"] == "household"
    assert run.data.tags["gleaner.seed"] == "0"
    assert run.data.tags["arm"] == "dapo"
    assert len(run.data.tags["gleaner.code_digest"]) == 64
    assert run.data.params["run.group_size"] == "8"
    assert run.data.params["update.betas"] == "[0.9, 0.999]"
    assert run.data.tags["gleaner.prompts.train"] == "14000"
    [data] = run.inputs.dataset_inputs
    assert (data.dataset.name, json.loads(data.dataset.profile)) == (
        "household",
        {"train": 14_000, "test": 4_000},
    )
    assert read(mlflow, summary, "plots/plot.png") == "png"
    assert yaml.safe_load(read(mlflow, summary, "settings.yaml"))["run"]["seed"] == 0
    assert json.loads(read(mlflow, summary, "rollouts.json")) == {
        "columns": ["prompt", "reward", "note"],
        "data": [["a", 1.0, None], ["b", None, "x"]],
    }
    assert json.loads(run.data.tags["mlflow.loggedArtifacts"]) == [{"path": "rollouts.json", "type": "table"}]


def test_a_resumed_run_goes_on_in_its_mlflow_run_with_each_step_once(start, mlflow):
    first = start("resumed")
    for step in range(10):
        first.metrics(step, {"reward/mean": step})
    before = first.finish("FAILED")
    assert mlflow.get_run(before["mlflow_run_id"]).info.status == "FAILED"

    second = start("resumed")
    for step in range(7, 15):  # steps 7 to 9 are replayed from the journal
        second.metrics(step, {"reward/mean": step + 0.5})
    after = second.finish()

    assert after["mlflow_run_id"] == before["mlflow_run_id"]
    assert mlflow.get_run(after["mlflow_run_id"]).info.status == "FINISHED"
    assert count(mlflow, after, "reward/mean") == 15
    assert history(mlflow, after, "reward/mean") == {s: s if s < 10 else s + 0.5 for s in range(15)}


def test_a_crash_between_log_and_acknowledgement_repeats_nothing(start, mlflow, workplace):
    tracker = start("unacknowledged")
    for step in range(5):
        tracker.metrics(step, {"reward/mean": step})
    assert tracker.finish()["delivered"]
    state = workplace / "spool" / "unacknowledged" / "state.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "offset": 0}))

    tracker = start("unacknowledged")
    tracker.metrics(5, {"reward/mean": 5})
    summary = tracker.finish()
    assert count(mlflow, summary, "reward/mean") == 6


def test_a_lost_spool_continues_the_run_that_carries_its_name(start, mlflow, workplace):
    import shutil

    tracker = start("moved")
    tracker.metrics(0, {"reward/mean": 0.0})
    before = tracker.finish()
    shutil.rmtree(workplace / "spool" / "moved")  # as on another machine

    tracker = start("moved")
    tracker.metrics(0, {"reward/mean": 9.0})
    tracker.metrics(1, {"reward/mean": 1.0})
    after = tracker.finish()
    assert after["mlflow_run_id"] == before["mlflow_run_id"]
    assert history(mlflow, after, "reward/mean") == {0: 0.0, 1: 1.0}


def test_an_mlflow_that_never_answers_costs_a_bounded_wait_and_the_next_start_delivers(
    start, mlflow, tmp_path
):
    down = start("outage", uri=f"http://127.0.0.1:{closed_port()}")
    slowest = 0.0
    for step in range(200):
        begun = time.perf_counter()
        down.metrics(step, {f"group/{i}": float(step) for i in range(60)})
        slowest = max(slowest, time.perf_counter() - begun)
    down.content("notes.txt", "kept")
    begun = time.monotonic()
    summary = down.finish(wait_seconds=1.0)
    assert time.monotonic() - begun < 15
    assert not summary["delivered"]
    assert summary["pending_bytes"] > 0
    assert summary["pending_artifacts"] == 2  # settings.yaml and notes.txt
    assert "Start the same run again" in summary["message"]
    assert str(Path(summary["spool"])) in summary["message"]

    up = start("outage")
    up.metrics(200, {"group/3": 200.0})
    summary = up.finish()
    assert summary["delivered"], summary
    assert history(mlflow, summary, "group/3") == {step: float(step) for step in range(201)}
    assert count(mlflow, summary, "group/3") == 201
    assert read(mlflow, summary, "notes.txt") == "kept"


def test_recording_takes_under_a_millisecond(start):
    tracker = start("fast")
    values = {f"group/{i}": i / 7 for i in range(60)}
    durations = []
    for step in range(100):
        begun = time.perf_counter()
        tracker.metrics(step, values)
        durations.append(time.perf_counter() - begun)
    assert np.median(durations) < 1e-3
    assert tracker.finish()["delivered"]


def test_a_long_parameter_is_cut_and_kept_whole_as_an_artifact(start, mlflow):
    settings = yaml.safe_dump(
        {"environment": {"kind": "python", "options": {"rules": "x" * 9_000}}, "run": {"seed": 3}}
    )
    summary = start("long", settings).finish()
    assert summary["delivered"], summary
    params = mlflow.get_run(summary["mlflow_run_id"]).data.params
    assert params["environment.options.rules"] == "x" * (PARAM_LENGTH - 1) + "…"
    assert params["run.seed"] == "3"
    assert read(mlflow, summary, "params/environment.options.rules.txt") == "x" * 9_000


def test_a_changed_parameter_becomes_a_tag(start, mlflow):
    start("longer", yaml.safe_dump({"run": {"steps": 10}})).finish()
    summary = start("longer", yaml.safe_dump({"run": {"steps": 20, "seed": 1}})).finish()
    run = mlflow.get_run(summary["mlflow_run_id"])
    assert run.data.params == {"run.steps": "10", "run.seed": "1"}
    assert run.data.tags["gleaner.changed.run.steps"] == "20"


def test_values_that_are_not_finite_are_left_out_and_counted(start, mlflow):
    tracker = start("finite")
    tracker.metrics(0, {"a": math.nan, "b": math.inf, "c": np.float32(0.5), "d": True})
    tracker.metrics(1, {"a": 1.0})
    summary = tracker.finish()
    assert history(mlflow, summary, "a") == {1: 1.0}
    assert history(mlflow, summary, "b") == {}
    assert history(mlflow, summary, "c") == {0: 0.5}
    assert history(mlflow, summary, "d") == {0: 1.0}
    assert history(mlflow, summary, "tracking/not_finite") == {0: 2.0}


def test_names_that_mlflow_refuses_are_spelled_otherwise(start, mlflow):
    tracker = start("names")
    tracker.metrics(0, {"reward[0]=best": 1.0, "k" * 300: 2.0})
    summary = tracker.finish()
    assert summary["rejected"] == 0
    assert set(mlflow.get_run(summary["mlflow_run_id"]).data.metrics) == {"reward_0__best", "k" * 250}


def test_one_record_that_mlflow_refuses_blocks_no_other(start, mlflow, workplace):
    tracker = start("refused")
    spool = Spool(workplace / "spool" / "refused")
    spool.open()
    values = {"good/1": 1.0, "bad[1]": 1.0, "good/2": 2.0}
    spool.append({"kind": "metrics", "time": 1, "step": 0, "values": values})
    tracker.metrics(1, {"good/1": 3.0})
    summary = tracker.finish()
    assert summary["delivered"]
    assert summary["rejected"] == 1
    assert "refused 1" in summary["message"]
    assert history(mlflow, summary, "good/1") == {0: 1.0, 1: 3.0}
    assert history(mlflow, summary, "good/2") == {0: 2.0}


def test_a_line_that_a_crash_cut_costs_that_line_alone(start, mlflow, workplace):
    tracker = start("cut")
    tracker.metrics(0, {"a": 0.0})
    assert tracker.finish()["delivered"]
    with (workplace / "spool" / "cut" / "spool.jsonl").open("ab") as log:
        log.write(b'{"kind":"metrics","time":1,"st')
    tracker = start("cut")
    tracker.metrics(1, {"a": 1.0})
    summary = tracker.finish()
    assert history(mlflow, summary, "a") == {0: 0.0, 1: 1.0}


def test_runs_nest_under_a_parent_by_either_name(start, mlflow):
    parent = start("comparison").finish()
    by_name = start("arm-1", parent_run="comparison").finish()
    by_id = start("arm-2", parent_run=parent["mlflow_run_id"]).finish()
    early = start(
        "arm-3", parent_run="a-later-comparison"
    ).finish()  # its own process has not reached MLflow yet
    late = start("a-later-comparison").finish()

    def parent_of(summary):
        return mlflow.get_run(summary["mlflow_run_id"]).data.tags["mlflow.parentRunId"]

    assert parent_of(by_name) == parent_of(by_id) == parent["mlflow_run_id"]
    assert parent_of(early) == late["mlflow_run_id"]


def test_a_run_that_was_deleted_in_mlflow_is_told_anew(start, mlflow):
    tracker = start("deleted")
    tracker.metrics(0, {"a": 0.0})
    first = tracker.finish()
    mlflow.delete_run(first["mlflow_run_id"])
    tracker = start("deleted")
    tracker.metrics(1, {"a": 1.0})
    second = tracker.finish()
    assert second["mlflow_run_id"] != first["mlflow_run_id"]
    assert history(mlflow, second, "a") == {0: 0.0, 1: 1.0}


def test_passwords_reach_neither_parameters_nor_disk(start, mlflow, workplace):
    settings = {
        "tracking": {"uri": "postgresql://me:hunter2@db/mlflow"},
        "environment": {
            "kind": "python",
            "options": {"api_key": "hunter2", "url": "https://hunter2@host/x", "n": 3},
        },
        "sampling": {"max_new_tokens": 7},
    }
    summary = start("secret", yaml.safe_dump(settings), {"from": "http://u:hunter2@h"}).finish()
    run = mlflow.get_run(summary["mlflow_run_id"])
    assert run.data.params["tracking.uri"] == "postgresql://***@db/mlflow"
    assert run.data.params["environment.options.api_key"] == "***"
    assert run.data.params["sampling.max_new_tokens"] == "7"
    assert run.data.tags["from"] == "http://***@h"
    for path in workplace.rglob("*"):
        assert not path.is_file() or b"hunter2" not in path.read_bytes(), path


def test_names_that_are_no_folder_are_refused(start):
    with pytest.raises(ConfigurationError, match=r"run\.name='\.\./elsewhere' is no folder name"):
        start("../elsewhere")


def test_artifacts_stay_inside_of_the_run(start):
    tracker = start("inside")
    tracker.content("../outside.txt", "x")
    assert tracker.finish()["lost"] == 1


def test_database_addresses_are_absolute_and_artifacts_lie_beside_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert _locate("sqlite:///.gleaner/mlflow.db", None) == (
        f"sqlite:///{tmp_path}/.gleaner/mlflow.db",
        f"file://{tmp_path}/.gleaner/mlartifacts",
    )
    assert (tmp_path / ".gleaner").is_dir()
    assert (
        _locate("sqlite:///mlflow.db", S3Storage(bucket="bank", prefix="lab/store"))[1]
        == "s3://bank/lab/store-mlartifacts"
    )
    assert _locate("http://host:5000", None) == ("http://host:5000", None)


def test_budget_metrics_have_one_spelling():
    assert budget_metrics(128, 4_000, {"teacher": 900}, {"sampling": 1.5}) == {
        "budget/rollouts": 128.0,
        "budget/generated_tokens": 4_000.0,
        "budget/forward_tokens/teacher": 900.0,
        "seconds/sampling": 1.5,
    }


def test_tracking_imports_no_mlflow():
    code = "import sys, gleaner.tasks.tracking as t; assert not {'mlflow', 'torch', 'prefect'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


SCRIPT = """
import sys, time
from pathlib import Path
from gleaner.conf.schema import TrackingSettings
from gleaner.tasks.tracking import RunTracker
uri, root, run_id, steps = sys.argv[1:5]
tracker = RunTracker.start(TrackingSettings(uri=uri), run_id, "{}", root=Path(root))
for step in range(int(steps)):
    tracker.metrics(step, {f"group/{i}": float(step) for i in range(40)})
    time.sleep(0.01)
if sys.argv[5] == "hang":
    print("waiting", flush=True)
    time.sleep(600)
summary = tracker.finish(wait_seconds=60)
print(summary)
assert summary["delivered"], summary
"""


def process(workplace, tracking, run_id, steps, end):
    arguments = [
        sys.executable,
        "-c",
        SCRIPT,
        tracking.uri,
        str(workplace / "spool"),
        run_id,
        str(steps),
        end,
    ]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_two_processes_share_one_sqlite_database(workplace, tracking, mlflow):
    processes = [process(workplace, tracking, f"shared-{i}", 150, "finish") for i in range(2)]
    outputs = [running.communicate(timeout=120)[0] for running in processes]
    assert [running.returncode for running in processes] == [0, 0], outputs
    for i in range(2):
        [run] = mlflow.search_runs(
            [mlflow.get_experiment_by_name("gleaner").experiment_id], f"tags.`gleaner.run_id` = 'shared-{i}'"
        )
        assert len(mlflow.get_metric_history(run.info.run_id, "group/7")) == 150


def test_two_processes_that_run_the_same_run_log_it_once(workplace, tracking, mlflow):
    processes = [process(workplace, tracking, "twins", 50, "finish") for _ in range(2)]
    outputs = [running.communicate(timeout=120)[0] for running in processes]
    assert [running.returncode for running in processes] == [0, 0], outputs
    [run] = mlflow.search_runs(
        [mlflow.get_experiment_by_name("gleaner").experiment_id], "tags.`gleaner.run_id` = 'twins'"
    )
    assert len(mlflow.get_metric_history(run.info.run_id, "group/7")) == 50
    assert run.info.status == "FINISHED"


@pytest.mark.slow
def test_a_killed_run_is_marked_and_leaves_no_process(workplace, tracking, mlflow):
    running = process(workplace, tracking, "killed", 20, "hang")
    assert running.stdout.readline() == "waiting\n"
    spool = Spool(workplace / "spool" / "killed")
    assert within(60, lambda: spool.state().mlflow_run_id)
    children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
    assert children
    os.kill(running.pid, signal.SIGKILL)
    running.wait()
    assert within(20, lambda: not any(Path(f"/proc/{child}").exists() for child in children))
    run = mlflow.get_run(spool.state().mlflow_run_id)
    assert run.info.status == "KILLED"
    assert len(mlflow.get_metric_history(run.info.run_id, "group/7")) == 20


def within(seconds, condition):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.1)
    return False
