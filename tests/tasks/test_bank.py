import json

import pytest

from gleaner.conf.errors import ConfigurationError
from gleaner.models.records import Prompt, Segment, Verdict
from gleaner.models.tables import PROMPTS, ROLLOUTS, VERDICTS
from gleaner.tasks import bank
from gleaner.tasks.journal import Journal

GOLD = "forty-two-is-gold"


def prompt(name):
    messages = [{"role": "user", "content": f"Question {name}?"}]
    return Prompt(name, "math", "train", 0, messages, {"answer": GOLD, "nested": {"gold": GOLD}})


def segment(name, sample, part=0):
    transcript = [{"role": "assistant", "content": f"answer {sample}.{part}"}]
    return Segment(
        name,
        sample,
        part,
        [1, 2],
        [3, 4, 5],
        [1, 0, 1],
        [-0.5, -0.25],
        "version-1",
        "digest",
        9,
        "stop",
        f"answer {sample}.{part}",
        transcript,
        {"goal": GOLD},
        [],
    )


def verdict(name, sample, success):
    if success is None:
        return Verdict(name, sample, "timeout", None, None, {}, "1")
    return Verdict(name, sample, "scored", success, float(success), {"gold": GOLD, "parsed": "7"}, "1")


@pytest.fixture
def filled(store):
    """Run `one` with two steps of two groups of two: 3 of 7 scored succeed. Sample 1 of `aa11` has two segments, and
    the second step's rollouts lie in two shards, not in order."""
    journal = Journal(store, "one")
    journal.header({"run": {"seed": 0}})
    outcomes = [{("aa11", 0): True, ("aa11", 1): False, ("bb22", 0): None, ("bb22", 1): True}]
    outcomes.append({("aa11", 0): False, ("aa11", 1): False, ("ab33", 0): False, ("ab33", 1): True})
    for step, outcome in enumerate(outcomes):
        segments = [segment(*episode) for episode in outcome] + [segment("aa11", 1, part=1)]
        shards = [segments] if step == 0 else [segments[3:], segments[:3]]
        journal.append(
            step,
            {
                "prompts": [
                    store.put_rows(PROMPTS, [prompt(name) for name in sorted({name for name, _ in outcome})])
                ],
                "rollouts": [store.put_rows(ROLLOUTS, shard) for shard in shards],
                "verdicts": [
                    store.put_rows(VERDICTS, [verdict(*e, success) for e, success in outcome.items()])
                ],
            },
        )
    return store


def test_runs_are_summed_up(filled):
    [summary] = bank.runs(filled)
    assert (summary.run, summary.steps, summary.rollouts, summary.scored, summary.successes) == (
        "one",
        2,
        8,
        7,
        3,
    )
    assert summary.success_share == pytest.approx(3 / 7)
    assert summary.started


def test_an_empty_store_has_no_runs_and_an_empty_run_no_share(store):
    assert bank.runs(store) == []
    Journal(store, "new").header({})
    [summary] = bank.runs(store)
    assert (summary.steps, summary.rollouts, summary.success_share) == (0, 0, None)


def test_counts_of_the_entry_save_reading_the_tables(store):
    counted = bank.counts([verdict("p", 0, True), verdict("p", 1, None), verdict("p", 2, False)])
    assert counted == {"rollouts": 3, "scored": 2, "successes": 1}
    Journal(store, "one").append(0, {"verdicts": ["0" * 64], "counts": counted})
    assert bank.runs(store)[0].success_share == 0.5


def test_the_groups_of_a_step_are_listed(filled):
    assert bank.groups(filled, "one", 0) == [
        bank.GroupSummary("aa11", 2, 2, 1),
        bank.GroupSummary("bb22", 2, 1, 1),
    ]


def test_a_group_is_shown_with_its_verdicts(filled):
    group = bank.group(filled, "one", 1, "aa11")
    assert group.prompt == prompt("aa11")
    assert [member.sample for member in group.members] == [0, 1]
    assert [part.segment for part in group.members[1].segments] == [0, 1]
    assert [member.verdict.success for member in group.members] == [False, False]
    assert bank.group(filled, "one", 0, "bb") == bank.group(filled, "one", 0, "bb22")
    assert bank.group(filled, "one", 0, "bb").members[0].verdict.status == "timeout"


def test_what_is_not_there_is_named(filled, tmp_path):
    with pytest.raises(ConfigurationError, match=r"no run two.*\(one\)"):
        bank.group(filled, "two", 0, "aa11")
    with pytest.raises(ConfigurationError, match="no step 7: its steps are 0 to 1"):
        bank.group(filled, "one", 7, "aa11")
    with pytest.raises(ConfigurationError, match=r"2 prompts of step 1 .* aa11, ab33"):
        bank.group(filled, "one", 1, "a")
    with pytest.raises(ConfigurationError, match="0 prompts"):
        bank.group(filled, "one", 1, "zz")
    with pytest.raises(ConfigurationError, match="no run two"):
        bank.export(filled, "two", tmp_path / "x" / "y")
    assert list(tmp_path.glob("x")) == []


def test_an_export_has_one_line_an_episode_and_no_answers(filled, tmp_path):
    path = tmp_path / "out" / "rollouts.jsonl"
    assert bank.export(filled, "one", path) == 8
    text = path.read_text()
    assert GOLD not in text
    lines = [json.loads(line) for line in text.splitlines()]
    assert len(lines) == 8
    assert [(line["step"], line["prompt_id"], line["sample"]) for line in lines[:3]] == [
        (0, "aa11", 0),
        (0, "aa11", 1),
        (0, "bb22", 0),
    ]
    first, second, third = lines[:3]
    assert first["messages"] == [{"role": "user", "content": "Question aa11?"}]
    assert first["verdict"] == {"status": "scored", "success": True, "reward": 1.0, "verifier_version": "1"}
    assert (first["text"], first["sampled_tokens"], first["finish_reason"]) == (["answer 0.0"], 2, "stop")
    assert (second["text"], second["sampled_tokens"]) == (["answer 1.0", "answer 1.1"], 4)
    assert (third["verdict"]["status"], third["verdict"]["reward"]) == ("timeout", None)
    assert [entry.name for entry in path.parent.iterdir()] == ["rollouts.jsonl"]


def test_answers_are_exported_when_asked_for(filled, tmp_path):
    path = tmp_path / "rollouts.jsonl"
    bank.export(filled, "one", path, include_answers=True)
    line = json.loads(path.read_text().splitlines()[0])
    assert line["payload"]["answer"] == GOLD
    assert line["verdict"]["details"]["gold"] == GOLD
    assert line["environment_result"] == {"goal": GOLD}
