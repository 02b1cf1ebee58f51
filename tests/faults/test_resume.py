"""A run killed with SIGKILL anywhere, started again with the same command, ends where it would have ended."""

import pytest

from gleaner.tasks.faults import fail_at


@pytest.mark.parametrize(
    ("place", "resampled"),
    [
        (("sample", 1, "before_shard_1"), 0),  # first shard committed, second not begun
        (("sample", 1, "shard_1_sampled"), 8),  # second shard in flight: sampled, not stored
        (("update", 1, "before_optimizer"), 0),
        (("update", 1, "after_optimizer"), 0),
        (("checkpoint", 1, "before_write"), 0),
        (("checkpoint", 1, "before_publish"), 0),
        (("journal", 1, "before_append"), 0),
    ],
    ids=lambda value: ":".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_a_killed_run_ends_with_the_bits_of_an_uninterrupted_one(workplace, uninterrupted, place, resampled):
    assert workplace.start(fail_at=fail_at(*place)) == -9, workplace.output
    committed = workplace.made("rollouts")
    assert len(committed) >= 2

    assert workplace.start() == 0, workplace.output

    assert workplace.summary["version"] == uninterrupted.summary["version"]
    assert workplace.final_state() == uninterrupted.final_state()
    for step in range(3):
        mine, theirs = workplace.journal.read(step), uninterrupted.journal.read(step)
        assert mine["rollouts"] == theirs["rollouts"]  # content addresses: the same tokens, bit for bit
        assert mine["signal"] == theirs["signal"]
    # No committed shard was begun a second time; the one in flight was, and both count.
    after = workplace.made("rollouts")
    assert {key: after[key] for key in committed} == committed
    assert sorted(after.values())[-1] == (2 if resampled else 1)
    assert workplace.summary["budget"]["rollouts"] == uninterrupted.summary["budget"]["rollouts"] + resampled


def test_the_same_command_twice_makes_nothing_twice(workplace):
    assert workplace.start() == 0, workplace.output
    kinds = ("rollouts", "verdicts", "signal", "version")
    before = {kind: workplace.made(kind) for kind in kinds}
    assert {kind: len(made) for kind, made in before.items()} == {
        "rollouts": 6,
        "verdicts": 3,
        "signal": 3,
        "version": 3,
    }

    assert workplace.start() == 0, workplace.output

    assert {kind: workplace.made(kind) for kind in kinds} == before


def test_more_steps_go_on_from_the_last_one(workplace, uninterrupted):
    assert workplace.start("run.steps=2") == 0, workplace.output
    assert workplace.start("run.steps=3") == 0, workplace.output
    assert workplace.final_state() == uninterrupted.final_state()
    assert set(workplace.made("rollouts").values()) == {1}


@pytest.mark.parametrize("change", ["run.seed=1", "sampling.temperature=0.9", "environment.objects=3"])
def test_another_seed_sampling_parameter_or_prompts_sample_anew(workplace, change):
    assert workplace.start("run.steps=1") == 0, workplace.output
    assert workplace.start("run.steps=1", "run.name=other", change) == 0, workplace.output
    assert len(workplace.made("rollouts")) == 4


def test_two_processes_of_one_run_make_each_artifact_once(workplace, uninterrupted):
    both = [workplace.begin(), workplace.begin()]
    assert [process.wait() for process in both] == [0, 0], "\n".join(process.output for process in both)
    for kind, count in (("rollouts", 6), ("verdicts", 3), ("signal", 3), ("version", 3)):
        assert list(workplace.made(kind).values()) == [1] * count
    assert workplace.final_state() == uninterrupted.final_state()
    assert workplace.summary["budget"] == uninterrupted.summary["budget"]


def test_another_configuration_under_one_name_is_refused(workplace):
    assert workplace.start("run.steps=1") == 0, workplace.output
    assert workplace.start("run.steps=1", "update.lr=0.001") == 2
    assert "update.lr" in workplace.output
    assert "run.name" in workplace.output


def test_a_transient_failure_is_tried_again(workplace, uninterrupted):
    assert workplace.start(fail_at=fail_at("verify", 1, "before", "transient")) == 0, workplace.output
    assert workplace.final_state() == uninterrupted.final_state()


def test_a_bug_fails_the_run_at_once_and_the_next_start_goes_on(workplace, uninterrupted):
    assert workplace.start(fail_at=fail_at("verify", 1, "before", "error")) == 1
    assert workplace.start() == 0, workplace.output
    assert workplace.final_state() == uninterrupted.final_state()
    assert set(workplace.made("rollouts").values()) == {1}
