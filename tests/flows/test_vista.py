"""VISTA through the flow that users start: what siblings found, the teacher's reading, the routed update."""

from pathlib import Path

import numpy as np
import pytest

from gleaner.conf.errors import ConfigurationError
from gleaner.flows.grpo import grpo
from gleaner.flows.vista import vista
from gleaner.models import tables
from gleaner.models.engines.transformers import TransformersSession
from gleaner.tasks import experience as tasks
from gleaner.tasks.context import RunContext
from gleaner.tasks.residents import discard_residents
from gleaner.tasks.stored_signals import load_signal

PEEKING = [
    "environment=python",
    f"environment.path={Path(__file__).parent / 'peeking.py'}:Peeking",
    "environment.max_turns=3",
    "run.prompts_per_step=8",
]
VISTA = [*PEEKING, "method=vista", "method.support=16"]
UNCHECKED = [*VISTA, "method.experience.require_reading=false"]


def context_of(settings):
    return RunContext.of(settings.run.name, settings)


def entries_of(settings):
    return [entry for _, entry in context_of(settings).journal.entries()]


def rows_of(settings, entry):
    discard_residents()
    return load_signal(context_of(settings).store, entry["signal"]).rows


def verdicts_of(settings, entry):
    store = context_of(settings).store
    return {
        (v.prompt_id, v.sample): v
        for table in entry["verdicts"]
        for v in store.get_rows(tables.VERDICTS, table)
    }


def test_failures_learn_from_experience_and_successes_from_their_reward(small):
    settings = small(*UNCHECKED, "run.name=vista-plain")
    summary = vista(settings)
    for entry in entries_of(settings):
        verdicts = verdicts_of(settings, entry)
        taught = 0
        for row in rows_of(settings, entry):
            won = verdicts[row.prompt_id, row.sample].success
            if row.distill_coef is not None:
                taught += 1
                assert not won
                assert not row.advantage.any()
                assert row.support_ids.shape == (len(row.support_tokens), 16)
                np.testing.assert_allclose(np.exp(row.support_logprobs).sum(1), 1.0, atol=1e-5)
        assert taught > 0
        metrics = entry["metrics"]
        assert metrics["experience/regions_group"] > metrics["experience/regions_rollout"]
        # An all-fail group gives GRPO nothing; here its rollouts teach each other.
        assert metrics["signal/recovered"] == metrics["vista/all_fail_taught"]
        if metrics["groups/all_fail"]:
            assert metrics["signal/recovered"] > 0.9
    assert summary.budget["forward_tokens/experience"] > 0
    assert {e["source"] for entry in entries_of(settings) for e in entry["ledger"]} == {
        "reward",
        "experience",
    }


def test_the_policy_reads_what_it_reads_under_grpo(small):
    """Rollouts and the loss's inputs are byte for byte those of GRPO; the teacher's context is nowhere in them."""
    taught, plain = (
        small(*UNCHECKED, "run.name=vista-beside", "run.steps=1"),
        small(*PEEKING, "run.name=vista-alone", "run.steps=1"),
    )
    vista(taught)
    grpo(plain)
    ours, theirs = entries_of(taught)[0], entries_of(plain)[0]
    assert ours["rollouts"] == theirs["rollouts"]
    sampled = {
        (s.prompt_id, s.sample): s
        for ref in ours["rollouts"]
        for s in context_of(taught).store.get_rows(tables.ROLLOUTS, ref)
    }
    for row in rows_of(taught, ours):
        segment = sampled[row.prompt_id, row.sample]
        assert row.context_ids.tolist() == segment.context_ids
        assert row.sampled_ids.tolist() == segment.sampled_ids
        assert row.loss_mask.tolist() == segment.loss_mask


def test_nothing_is_generated_for_the_teacher(small, monkeypatch):
    settings = small(*UNCHECKED, "run.name=vista-forward", "run.steps=1", "run.seed=5")
    sample, learn, sampled, learned = TransformersSession.sample, tasks._distributions, [], []

    def counted(self, turns):
        sampled.append(len(turns))
        return sample(self, turns)

    def watched(*arguments):
        before = len(sampled)
        made = learn(*arguments)
        learned.append(len(sampled) - before)
        return made

    monkeypatch.setattr(TransformersSession, "sample", counted)
    monkeypatch.setattr(tasks, "_distributions", watched)
    vista(settings)
    assert sampled
    assert learned == [0]


def test_experience_that_may_not_be_read_teaches_nothing(small):
    """The control without experience: the same rows are routed, and the teacher is the policy itself."""
    settings = small(*UNCHECKED, "run.name=vista-nothing", "run.steps=1", "method.experience.reads=nothing")
    vista(settings)
    (entry,) = entries_of(settings)
    taught = [row for row in rows_of(settings, entry) if row.distill_coef is not None]
    assert taught
    assert entry["metrics"]["vista/teacher_gain"] == pytest.approx(0.0, abs=1e-5)


def test_shuffled_experience_changes_what_the_teacher_says_and_not_how_much_it_says(small):
    signals = {}
    for reads in ("aligned", "shuffled"):
        settings = small(
            *UNCHECKED, f"run.name=vista-{reads}", "run.steps=1", f"method.experience.reads={reads}"
        )
        vista(settings)
        (entry,) = entries_of(settings)
        signals[reads] = {
            (row.prompt_id, row.sample): row
            for row in rows_of(settings, entry)
            if row.distill_coef is not None
        }
    both = signals["aligned"].keys() & signals["shuffled"].keys()
    assert len(both) > 4
    assert any(
        signals["aligned"][key].support_logprobs.shape != signals["shuffled"][key].support_logprobs.shape
        or np.abs(signals["aligned"][key].support_logprobs - signals["shuffled"][key].support_logprobs).max()
        > 1e-4
        for key in both
    )


def test_a_policy_that_cannot_read_experience_stops_the_run_before_it_learns(small):
    settings = small(*VISTA, "run.name=vista-blind")
    with pytest.raises(ConfigurationError, match="does not read experience"):
        vista(settings)
    assert entries_of(settings) == []


def test_an_environment_whose_turns_find_nothing_is_refused_before_anything_is_sampled(small):
    lottery = f"environment.path={Path(__file__).parent / 'lottery.py'}:Lottery"
    settings = small("environment=python", lottery, "method=vista", "run.name=vista-lottery")
    with pytest.raises(ConfigurationError, match="does not say what its turns found"):
        vista(settings)
    assert entries_of(settings) == []


def test_household_episodes_teach_each_other(small):
    settings = small(
        "method=vista", "run.name=vista-house", "run.steps=1", "method.experience.require_reading=false",
        "warmstart.demonstrations=200", "warmstart.steps=60", "warmstart.informed=0.5", "run.prompts_per_step=4",
    )  # fmt: skip
    vista(settings)
    (entry,) = entries_of(settings)
    metrics = entry["metrics"]
    assert metrics["experience/informed"] > 0
    assert metrics["vista/tokens"] > 0


VISUAL = [
    "environment=visual_search", "policy=tiny_vlm", "policy.vision_hidden=32", "policy.vision_layers=1",
    "policy.context=512", "warmstart.demonstrations=60", "warmstart.steps=30", "warmstart.batch=16",
    "warmstart.lr=1e-2", "sampling.max_new_tokens=16",
]  # fmt: skip


def test_a_policy_that_sees_learns_from_the_crops_of_its_siblings(small):
    settings = small(
        *VISUAL, "method=vista", "method.support=16", "method.experience.require_reading=false", "run.name=vista-sees",
        "warmstart.informed=0.5", "run.prompts_per_step=4", "update.minibatches=2",
    )  # fmt: skip
    summary = vista(settings)
    assert summary.steps == 2
    store = context_of(settings).store
    for entry in entries_of(settings):
        assert entry["metrics"]["experience/informed"] > 0
        assert entry["metrics"]["vista/tokens"] > 0
        assert entry["metrics"]["update/approx_kl"] < 0.05
        for ref in entry["rollouts"]:
            for segment in store.get_rows(tables.ROLLOUTS, ref):
                assert segment.images[0]["start"] < 0
                for image in segment.images:
                    assert store.get_bytes(image["digest"]).startswith(b"\x89PNG")


def test_a_policy_of_text_is_refused_on_pages_before_anything_is_sampled(small):
    settings = small("environment=visual_search", "policy=tiny", "run.name=vista-textual")
    with pytest.raises(ConfigurationError, match="choose policy=tiny_vlm"):
        grpo(settings)
    assert entries_of(settings) == []


@pytest.mark.parametrize("method", ["ppo", "graft"])
def test_methods_that_read_text_alone_are_refused_for_a_policy_that_sees(small, method):
    from gleaner.flows import graft, pippo

    words = [*VISUAL, f"method={method}", f"run.name=vista-{method}"]
    if method == "graft":
        words += ["method.peer.policy={kind: tiny}", "method.peer.warmstart={demonstrations: 10, steps: 2}"]
    with pytest.raises(ConfigurationError, match="readers of text alone"):
        (graft.graft if method == "graft" else pippo.pippo)(small(*words))
