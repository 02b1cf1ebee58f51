"""GRPO through the flow that users start: real rollouts, verdicts, signals and updates."""

import json
from pathlib import Path

import pytest
import torch
from prefect import flow
from transformers import AutoModelForCausalLM

from gleaner.conf.errors import ConfigurationError
from gleaner.flows.grpo import grpo
from gleaner.models import tables
from gleaner.tasks import context as context_module
from gleaner.tasks.context import RunContext
from gleaner.tasks.residents import resident
from gleaner.tasks.sampling import draw_prompts
from gleaner.tasks.signals import Batch, load_groups
from gleaner.tasks.starting import start_key
from gleaner.tasks.stored_signals import load_signal
from gleaner.tasks.updating import update


def context_of(settings):
    return RunContext.of(settings.run.name, settings)


def entries_of(settings):
    return [entry for _, entry in context_of(settings).journal.entries()]


def by_words(*, prompt, text, transcript, success):
    """A reward of one's own that differs from rollout to rollout."""
    return sum(len(message["content"]) for message in transcript) % 7 / 7


def test_a_run_journals_every_step_with_its_ledger_and_budget(small):
    settings = small("run.steps=2")
    summary = grpo(settings)
    entries = entries_of(settings)
    assert summary.steps == len(entries) == 2
    assert [entry["budget"]["rollouts"] for entry in entries] == [12, 24]
    assert summary.budget["rollouts"] == 24
    for entry in entries:
        rows = [
            s for ref in entry["rollouts"] for s in context_of(settings).store.get_rows(tables.ROLLOUTS, ref)
        ]
        assert len(rows) == 12
        assert all(len(row.logprobs) == sum(row.loss_mask) for row in rows)
        assert entry["metrics"]["signal/recovered"] == 0.0  # GRPO learns nothing from an all-fail group


def test_the_start_policys_ratio_is_one_at_a_low_temperature(small):
    settings = small(
        "run.steps=1", "sampling.temperature=0.6", f"rewards=[{{function: '{__file__}:by_words'}}]"
    )
    grpo(settings)
    metrics = entries_of(settings)[0]["metrics"]
    assert metrics["update/ratio"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["update/clip_low"] == metrics["update/clip_high"] == 0.0


def test_rewards_of_ones_own_are_summed_by_weight_and_success_stays_the_verifiers(small):
    settings = small(
        "run.steps=1",
        f"rewards=[{{function: verifier, weight: 1.0}}, {{function: '{__file__}:by_words', weight: 0.5}}]",
    )
    grpo(settings)
    context = context_of(settings)
    entry = entries_of(settings)[0]
    verdicts = context.store.get_rows(tables.VERDICTS, entry["verdicts"][0])
    segments = [s for ref in entry["rollouts"] for s in context.store.get_rows(tables.ROLLOUTS, ref)]
    assert len(verdicts) == len(segments) == 12
    for verdict, segment in zip(verdicts, segments, strict=True):
        own = by_words(prompt=None, text="", transcript=segment.transcript, success=verdict.success)
        assert verdict.reward == pytest.approx(float(verdict.success) + 0.5 * own)
    assert entry["metrics"]["update/tokens"] > 0


def test_blocks_of_steps_end_with_the_weights_of_single_ones(small, tmp_path):
    one = small(
        f"storage.path={tmp_path}/one", "run.steps=3", "run.steps_per_task=1", "run.checkpoint_every=1"
    )
    three = small(
        f"storage.path={tmp_path}/three", "run.steps=3", "run.steps_per_task=3", "run.checkpoint_every=1"
    )
    first, second = grpo(one), grpo(three)
    assert first.version == second.version
    states = [
        context_of(settings).store.lookup(f"checkpoint-{first.version}").objects["state"]
        for settings in (one, three)
    ]
    assert states[0] == states[1]


def test_dynamic_sampling_counts_every_rollout_and_trains_on_mixed_groups_alone(small):
    settings = small("run.steps=1", "method.dynamic_sampling.max_rounds=3", "run.group_size=8")
    grpo(settings)
    context, entry = context_of(settings), entries_of(settings)[0]
    rounds = int(entry["metrics"]["sampling/rounds"])
    assert 1 <= rounds <= 3
    assert entry["budget"]["rollouts"] == rounds * 3 * 8
    assert entry["cursor"] == rounds * 3
    signal = load_signal(context.store, entry["signal"])
    verdicts = [v for ref in entry["verdicts"] for v in context.store.get_rows(tables.VERDICTS, ref)]
    for prompt_id in {row.prompt_id for row in signal.rows}:
        assert {v.success for v in verdicts if v.prompt_id == prompt_id} == {True, False}


def test_a_kl_term_scores_the_reference_and_the_budget_counts_it(small):
    settings = small("run.steps=2", "method.kl_coef=0.05", "update.lr=0.01")
    grpo(settings)
    first, second = entries_of(settings)
    assert first["budget"]["forward_tokens/reference"] > 0
    # At the start policy the reference is the policy itself: k3 is 0 and so is its gradient.
    assert first["metrics"].get("update/kl_reference", 0.0) == pytest.approx(0.0, abs=1e-6)
    signal = load_signal(context_of(settings).store, second["signal"])
    assert all(row.reference_logprobs is not None for row in signal.rows)


def test_recomputed_old_logprobs_equal_the_samplers_where_the_engine_is_exact(small):
    settings = small("run.steps=1", "update.recompute_old=always")
    grpo(settings)
    context, entry = context_of(settings), entries_of(settings)[0]
    assert entry["budget"]["forward_tokens/old"] > 0
    for row in load_signal(context.store, entry["signal"]).rows:
        assert row.old_logprobs == pytest.approx(row.sampler_logprobs, abs=1e-4)
    assert entry["metrics"]["tis/mean"] == pytest.approx(1.0, abs=1e-4)


def test_the_published_folder_loads_in_transformers_with_the_trained_weights(small):
    settings = small("run.steps=1")
    summary = grpo(settings)
    loaded = AutoModelForCausalLM.from_pretrained(summary.policy_folder)
    holder = resident(context_of(settings))
    holder.bring_to(summary.version)
    ids = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, holder.policy.model(ids).logits)


def test_the_report_folder_holds_plots_rollouts_and_a_summary(small):
    settings = small(
        "run.steps=2", "evaluation.test_prompts=4", "evaluation.every=1", "evaluation.validation_prompts=3"
    )
    summary = grpo(settings)
    folder = Path(summary.report_folder)
    assert {path.name for path in folder.glob("*.png")} == {"learning.png", "ledger.png", "before_after.png"}
    shown = json.loads((folder / "rollouts.json").read_text())
    assert {row["when"] for row in shown} == {"before", "after", "training"}
    assert "validation/success" in entries_of(settings)[1]["metrics"]
    assert summary.before.keys() == summary.after.keys()
    assert summary.validated["validation/scored"] == 3


def test_a_training_split_smaller_than_a_step_gives_all_it_has_once(small):
    settings = small("environment.size=12", "run.prompts_per_step=16")
    context = context_of(settings)
    size = context.environment.size("train")
    drawn = draw_prompts(context, 0, 16)
    prompts = [prompt.prompt_id for prompt in context.store.get_rows(tables.PROMPTS, drawn.prompts)]
    assert size < 16
    assert drawn.count == len(prompts) == len(set(prompts)) <= size
    assert draw_prompts(context, drawn.cursor, 16, [drawn]).count == 0


def test_slots_learn_apart_from_one_signal(small):
    settings = small("run.steps=1", f"rewards=[{{function: '{__file__}:by_words'}}]")
    grpo(settings)
    context, entry = context_of(settings), entries_of(settings)[0]

    @flow(persist_result=False)
    def update_peer():
        return update(context, entry["parent"], entry["signal"], 0, slot="peer")

    peer = update_peer()
    assert peer.version != entry["version"]
    before = {name: value.clone() for name, value in resident(context).learner.state_tensors().items()}
    resident(context, "peer").bring_to(peer.version)
    after = resident(context).learner.state_tensors()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_unscored_groups_are_left_out_and_counted(small):
    settings = small("run.steps=1", f"rewards=[{{function: '{__file__}:sometimes_silent'}}]")
    grpo(settings)
    context, entry = context_of(settings), entries_of(settings)[0]
    verdicts = context.store.get_rows(tables.VERDICTS, entry["verdicts"][0])
    silent = {v.prompt_id for v in verdicts if v.status != "scored"}
    assert silent
    assert all(v.success is None and v.reward is None for v in verdicts if v.status != "scored")
    assert entry["metrics"]["groups/dropped"] == len(silent)
    assert silent.isdisjoint(row.prompt_id for row in load_signal(context.store, entry["signal"]).rows)


def sometimes_silent(*, prompt, text, transcript, success):
    """None for one prompt in two: an unscored rollout, not a wrong one."""
    return None if int(prompt.prompt_id, 16) % 2 else float(success)


def test_wrong_files_are_refused_before_a_policy_is_built(small, tmp_path):
    (tmp_path / "my.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n{"question": "2+2?"}\n')
    settings = small(
        "environment=math", f"environment.path={tmp_path}/my.jsonl", f"storage.path={tmp_path}/store"
    )
    with pytest.raises(ConfigurationError, match=r"my\.jsonl.*line 2"):
        grpo(settings)
    assert context_of(settings).store.list_keys() == []  # no start policy, no rollout: nothing was made
    assert not (tmp_path / ".gleaner/runs" / settings.run.name / "policy").exists()


def test_groups_of_a_batch_follow_the_group_policy(small):
    settings = small("run.steps=1")
    grpo(settings)
    context, entry = context_of(settings), entries_of(settings)[0]
    from gleaner.tasks.sampling import Rollouts
    from gleaner.tasks.verification import Verdicts

    batch = Batch(
        (Rollouts(tuple(entry["rollouts"]), entry["prompts"][0], 12, 0, 12, 0, 0.0, {}),),
        (Verdicts(entry["verdicts"][0], 12, 0, 0, 0, 0.0),),
    )
    groups, counts = load_groups(context, batch)
    assert [len(group.episodes) for group in groups] == [4, 4, 4]
    assert counts["groups/dropped"] == 0


def test_steps_that_another_process_took_are_neither_taken_again_nor_told_under_another_number(small):
    settings = small("run.steps=2")
    grpo(settings)
    again = grpo(settings)  # everything is journalled: no third step, though this process took none of them
    assert again.steps == 2
    assert context_of(settings).journal.steps() == [0, 1]
    told = [
        json.loads(line)
        for path in Path(".gleaner/spool").rglob("*.jsonl")
        for line in path.read_text().splitlines()
    ]
    rollouts = {
        (r["step"], r["values"]["budget/rollouts"]) for r in told if "budget/rollouts" in r.get("values", {})
    }
    assert rollouts == {(0, 12.0), (1, 24.0)}


def test_a_run_of_more_questions_starts_from_its_own_warm_start(small, tmp_path):
    path = tmp_path / "my.jsonl"

    def start_version():
        lines = [json.dumps({"question": f"{n}+1?", "answer": str(n + 1)}) for n in range(count)]
        path.write_text("\n".join(lines))
        settings = small("environment=math", f"environment.path={path}", f"run.name=questions-{count}")
        return start_key(context_of(settings))

    count = 30
    first = start_version()
    count = 31
    context_module._environment.cache_clear()  # a file is read once per process
    context_module._environment_digest.cache_clear()
    assert start_version() != first
