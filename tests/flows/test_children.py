"""Runs in processes of their own: order, failures, and what is not started twice."""

import pytest

from gleaner.conf.compose import compose
from gleaner.flows.children import ChildFailedError, _settle, finished


def test_what_builds_on_a_failed_run_is_not_started():
    waiting = {name: compose([f"run.name={name}"]) for name in ("student", "matched", "grpo")}
    missing = {"student": {"teacher"}, "matched": {"student"}, "grpo": set()}
    ended = {"teacher": ChildFailedError("broken")}
    _settle("teacher", ended, waiting, missing)
    assert list(waiting) == ["grpo"]
    assert str(ended["student"]) == "run student was not started: it builds on teacher, which failed"
    assert "it builds on student" in str(ended["matched"])


def test_a_run_waits_for_all_that_it_builds_on():
    waiting = {"student": compose(["run.name=student"])}
    missing = {"student": {"teacher", "other"}}
    _settle("teacher", {"teacher": {}}, waiting, missing)
    assert missing["student"] == {"other"}


@pytest.mark.parametrize("left", [None, "", "{}", '{"steps": 1}'])
def test_a_run_that_left_no_whole_summary_is_not_finished(tmp_path, monkeypatch, left):
    monkeypatch.chdir(tmp_path)
    settings = compose(["run.name=half"])
    folder = tmp_path / ".gleaner/runs/half"
    folder.mkdir(parents=True)
    (folder / "order.json").write_text(settings.model_dump_json())
    if left is not None:
        (folder / "summary.json").write_text(left)
    assert finished(settings) is None
