"""piPPO and PPO through the flow that users start: a policy and a critic, trained side by side."""

from pathlib import Path

import numpy as np
import pytest

from gleaner.conf.errors import ConfigurationError
from gleaner.flows.grpo import grpo
from gleaner.flows.pippo import pippo
from gleaner.flows.values import report_values
from gleaner.models import tables
from gleaner.tasks.context import RunContext
from gleaner.tasks.critics import critic_context
from gleaner.tasks.residents import CRITIC, discard_residents, resident
from gleaner.tasks.starting import start_key
from gleaner.tasks.stored_signals import load_signal

LOTTERY = [
    "environment=python",
    f"environment.path={Path(__file__).parent / 'lottery.py'}:Lottery",
    "run.prompts_per_step=8",
]
PIPPO = [*LOTTERY, "method=pippo", "method.critic.lr=1e-3", "method.critic.reference_tokens=48"]
UNCHECKED = [*PIPPO, "method.critic.require_reading=false"]


def context_of(settings):
    return RunContext.of(settings.run.name, settings)


def entries_of(settings):
    return [entry for _, entry in context_of(settings).journal.entries()]


def rows_of(settings, entry):
    return load_signal(context_of(settings).store, entry["signal"]).rows


def test_advantages_are_reward_minus_value_and_every_group_moves_the_policy(small):
    settings = small(*UNCHECKED, "run.name=pippo-plain")
    summary = pippo(settings)
    entries = entries_of(settings)
    store = context_of(settings).store
    for entry in entries:
        verdicts = {
            (v.prompt_id, v.sample): v
            for table in entry["verdicts"]
            for v in store.get_rows(tables.VERDICTS, table)
        }
        rows = rows_of(settings, entry)
        own = {(r.prompt_id, r.sample): r for r in rows if r.slot == "policy"}
        critics = {(r.prompt_id, r.sample): r for r in rows if r.slot == CRITIC}
        assert own.keys() == critics.keys()
        assert len(own) == 8 * 4
        for key, row in own.items():
            judged = critics[key]
            np.testing.assert_allclose(row.advantage, verdicts[key].reward - judged.old_values, atol=1e-6)
            assert (judged.returns == verdicts[key].reward).all()
    assert (
        np.abs(np.concatenate([r.old_values for r in critics.values()])).max() > 0
    )  # it has learned by step 1
    assert entries[1]["metrics"]["signal/recovered"] == 1.0
    assert entries[0]["metrics"]["value/mean"] == 0.0  # the head starts at zero
    assert summary.budget["forward_tokens/critic"] > 0


def test_the_policy_reads_the_same_with_and_without_a_critic(small):
    pippo(small(*UNCHECKED, "run.name=pippo-beside", "run.steps=1"))
    grpo(small(*LOTTERY, "run.name=pippo-alone", "run.steps=1"))
    judged, alone = (
        entries_of(small(*LOTTERY, f"run.name={name}")) for name in ("pippo-beside", "pippo-alone")
    )
    assert judged[0]["rollouts"] == alone[0]["rollouts"]
    settings = small(*UNCHECKED, "run.name=pippo-beside")
    store = context_of(settings).store
    sampled = {
        (s.prompt_id, s.sample): s
        for ref in judged[0]["rollouts"]
        for s in store.get_rows(tables.ROLLOUTS, ref)
    }
    longer = 0
    for row in rows_of(settings, judged[0]):
        segment = sampled[row.prompt_id, row.sample]
        assert row.sampled_ids.tolist() == segment.sampled_ids
        if row.slot == "policy":
            assert row.context_ids.tolist() == segment.context_ids
        else:
            longer += len(row.context_ids) > len(segment.context_ids)
    assert longer == 8 * 4  # every critic's row has references, and no policy's has


def test_a_plain_critic_reads_what_the_policy_reads(small):
    settings = small(*LOTTERY, "method=ppo", "method.critic.lr=1e-3", "run.name=ppo", "run.steps=1")
    pippo(settings)
    rows = rows_of(settings, entries_of(settings)[0])
    own = {(r.prompt_id, r.sample): r.context_ids.tolist() for r in rows if r.slot == "policy"}
    assert own == {(r.prompt_id, r.sample): r.context_ids.tolist() for r in rows if r.slot == CRITIC}


def test_in_the_warm_up_the_critic_alone_learns(small):
    settings = small(*UNCHECKED, "run.name=pippo-warm", "run.steps=3", "method.critic.warmup_steps=2")
    pippo(settings)
    start = start_key(context_of(settings))
    entries = entries_of(settings)
    assert [entry["version"] == start for entry in entries] == [True, True, False]
    critics = [entry["method_state"]["critic"] for entry in entries]
    assert len({start, *critics}) == 4
    assert {row.slot for row in rows_of(settings, entries[0])} == {CRITIC}
    assert entries[0]["budget"]["rollouts"] == 32  # the warm-up's rollouts are paid for


def test_neither_gradient_reaches_the_other_model(small):
    """A policy that may not move leaves the critic what it was, and the other way round."""
    still = pippo(small(*UNCHECKED, "run.name=pippo-still", "run.steps=1", "update.lr=1e-12"))
    moved = pippo(small(*UNCHECKED, "run.name=pippo-moved", "run.steps=1", "update.lr=1e-2"))
    assert still.version != moved.version
    settings = [small(*UNCHECKED, f"run.name={name}") for name in ("pippo-still", "pippo-moved")]
    critics = []
    for one, lr in zip(settings, ("1e-12", "1e-2"), strict=True):
        discard_residents()
        context = context_of(small(*UNCHECKED, f"run.name={one.run.name}", "run.steps=1", f"update.lr={lr}"))
        holder = resident(critic_context(context), CRITIC)
        holder.bring_to(entries_of(one)[0]["method_state"]["critic"])
        critics.append({name: t.clone() for name, t in holder.learner.state_tensors().items()})
    assert critics[0].keys() == critics[1].keys()
    assert all((critics[0][name] == critics[1][name]).all() for name in critics[0])


def test_a_critic_that_cannot_read_stops_the_run(small):
    settings = small(*PIPPO, "run.name=pippo-blind", "method.critic.warmup_steps=1")
    with pytest.raises(ConfigurationError, match="does not read its references"):
        pippo(settings)
    assert len(entries_of(settings)) == 1  # the warm-up is kept, and the policy never moved


def test_a_critic_of_another_tokenizer_is_refused_before_anything_is_sampled(small):
    settings = small(
        *UNCHECKED,
        "run.name=pippo-stranger",
        "method.critic.policy={kind: tiny, hidden: 32, heads: 2, vocabulary: 300, context: 2048}",
        "policy.vocabulary=512",
    )
    with pytest.raises(ConfigurationError, match="critic's tokenizer is not the policy's"):
        pippo(settings)
    assert entries_of(settings) == []


def test_references_that_do_not_fit_are_refused_with_the_context_they_need(small):
    settings = small("method=pippo", "run.name=pippo-cramped")
    with pytest.raises(
        ConfigurationError, match=r"set method.critic.policy to a copy of policy with context=2176"
    ):
        pippo(settings)


def test_a_smaller_critic_judges_episodes_of_many_turns(small):
    settings = small(
        "method=pippo", "run.name=pippo-house", "run.steps=1", "method.critic.require_reading=false",
        "method.critic.reference_tokens=64",
        "method.critic.policy={kind: tiny, hidden: 16, heads: 2, layers: 1, context: 2048}",
        "method.critic.warmstart={demonstrations: 10, steps: 2, batch: 4}",
    )  # fmt: skip
    pippo(settings)
    (entry,) = entries_of(settings)
    critics = [row for row in rows_of(settings, entry) if row.slot == CRITIC]
    assert any(0 < row.loss_mask.sum() < len(row.loss_mask) for row in critics)
    for row in critics:
        assert len(row.old_values) == row.loss_mask.sum()  # values on the policy's own tokens alone


def test_values_are_measured_on_fresh_rollouts_against_continuations(small, tmp_path):
    settings = small(*UNCHECKED, "run.name=pippo-values", "evaluation.validation_prompts=8")
    pippo(settings)
    report = report_values(settings, prompts=6, places=4, continuations=4)
    assert 0 < len(report.values) <= 6 * 4
    assert report.metrics["mc/places"] == len(report.values) == len(report.truths)
    assert all(0 <= truth <= 1 and truth * 4 == round(truth * 4) for truth in report.truths)
    assert "value/error" in report.metrics
    assert (tmp_path / ".gleaner/runs/pippo-values/values.png").exists()
    assert report_values(settings, prompts=6, places=4, continuations=4) == report


def test_values_of_a_run_without_a_critic_are_refused(small):
    with pytest.raises(ConfigurationError, match="has no critic"):
        report_values(small(*LOTTERY, "run.name=pippo-none"), 2, 2, 2)
