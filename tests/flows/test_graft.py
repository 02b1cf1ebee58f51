"""GRAFT through the flow that users start: two policies trained side by side, and groups from the rollout bank."""

from pathlib import Path

import pytest
from transformers import Qwen2Config, Qwen2ForCausalLM

from gleaner.conf.errors import ConfigurationError
from gleaner.conf.schema import TinyPolicy
from gleaner.flows.graft import graft, peer_context
from gleaner.flows.grpo import grpo
from gleaner.models import tables
from gleaner.models.policy import build_policy
from gleaner.tasks import context as context_module
from gleaner.tasks.context import RunContext
from gleaner.tasks.publishing import RUNS_FOLDER
from gleaner.tasks.residents import discard_residents, resident
from gleaner.tasks.stored_signals import load_signal

LOTTERY = ["environment=python", f"environment.path={Path(__file__).parent / 'lottery.py'}:Lottery"]
LIKE_GRAFT = ["method.aggregation=token_mean", "method.clip_high=0.28"]
TRAINED_HERE = [
    "method=graft",
    "method.peer.policy={kind: tiny, hidden: 48, heads: 2, layers: 1, vocabulary: 320}",
]


def context_of(settings):
    return RunContext.of(settings.run.name, settings)


def entries_of(settings):
    return [entry for _, entry in context_of(settings).journal.entries()]


def test_without_candidates_every_version_is_grpos(small):
    grpo(small("run.name=graft-idle", "run.steps=0"))  # a peer that sampled nothing
    alone = grpo(small("run.name=graft-alone", *LIKE_GRAFT))
    beside = graft(small("run.name=beside", "method=graft", "method.peer.run=graft-idle"))
    assert beside.version == alone.version  # a version's name is made of every signal since the start


def test_an_untrained_peer_that_solves_nothing_leaves_grpo(small):
    settings = small(*TRAINED_HERE, "run.name=graft-two")
    alone = grpo(small("run.name=graft-one", *LIKE_GRAFT))
    together = graft(settings)
    if all(entry["peer"]["counts"]["successes"] == 0 for entry in entries_of(settings)):
        assert together.version == alone.version
    assert all(
        entry["metrics"]["graft/exchanged"] == 0 for entry in entries_of(settings)
    )  # balanced with none
    assert together.budget["peer/rollouts"] == together.budget["rollouts"] == 24


@pytest.fixture
def qwen(small, tmp_path):
    """A random Qwen2 with a tokenizer of another vocabulary: another architecture on disk, as a hub id would be."""
    environment = context_of(small(*LOTTERY)).shared_environment
    tokenizer = build_policy(TinyPolicy(vocabulary=300), environment, 0).tokenizer
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=1024, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    folder = tmp_path / "qwen"
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def said(context, refs):
    """(prompt_id, sample) → what a policy said, and whether it ended by itself."""
    segments = [s for ref in refs for s in context.store.get_rows(tables.ROLLOUTS, ref)]
    return {
        (s.prompt_id, s.sample): (
            "".join(str(m["content"]) for m in s.transcript if m["role"] == "assistant"),
            s.finish_reason == "stop",
        )
        for s in segments
    }


def assert_own_words(receiver, rows, spoken):
    """Every grafted row is, in the receiver's tokens, what the source had said."""
    chat = resident(receiver).chat
    for row in rows:
        ids = row.sampled_ids.tolist()
        text, ended = spoken[row.prompt_id, row.sample]
        assert chat.decode(ids) == text
        assert (ids[-1] == chat.end_id) == ended
        assert row.loss_mask.all()


def test_two_architectures_with_tokenizers_of_their_own_exchange_trajectories(small, qwen, tmp_path):
    settings = small(
        *LOTTERY,
        "method=graft",
        f"method.peer.policy={{kind: pretrained, path: {qwen}, context: 1024}}",
        "method.peer.warmstart={demonstrations: 40, steps: 10, batch: 8}",
        "method.floor=0.0",
        "run.prompts_per_step=16",
        "evaluation.test_prompts=8",
    )
    summary = graft(settings)
    context, entries = context_of(settings), entries_of(settings)
    peer = peer_context(context)
    taken = {"policy": 0, "peer": 0}
    for entry in entries:
        own, beside = entry, entry["peer"]
        for name, receiver, mine, source, prefix in (
            ("policy", context, own, beside, ""), ("peer", peer, beside, own, "peer/")
        ):  # fmt: skip
            rows = load_signal(context.store, mine["signal"]).rows
            grafts = [row for row in rows if row.origin == "peer"]
            assert_own_words(receiver, grafts, said(context, source["rollouts"]))
            metrics = {n.removeprefix(prefix): v for n, v in entry["metrics"].items() if n.startswith(prefix)}
            receiving = len({row.prompt_id for row in grafts})
            assert metrics["graft/groups"] == receiving
            failed = metrics["groups/all_fail"] * metrics["groups/kept"]
            assert metrics["signal/recovered"] == pytest.approx(receiving / failed if failed else 0.0)
            taken[name] += receiving
    assert taken["policy"] > 0
    assert taken["peer"] > 0
    assert summary.budget["forward_tokens/old"] > 0  # scoring what was taken over is counted
    assert summary.budget["peer/forward_tokens/old"] > 0
    assert summary.peer_after.keys() == summary.peer_before.keys() != set()
    for name in ("policy", "peer"):
        assert (tmp_path / RUNS_FOLDER / settings.run.name / name / "model.safetensors").exists()


def test_a_teacher_and_a_peer_go_together(small):
    """The policy's own rollouts are guided as in GATS, the peer's are grafted, and the peer itself has no teacher."""
    grpo(small(*LOTTERY, "run.name=lottery-teacher", "run.steps=1", "run.seed=7"))
    settings = small(
        *LOTTERY, *TRAINED_HERE, "method.peer.warmstart={demonstrations: 40, steps: 10, batch: 8}", "method.floor=0.0",
        "method.teacher.run=lottery-teacher", "method.teacher.success=0.9", "run.prompts_per_step=16", "run.steps=1",
    )  # fmt: skip
    summary = graft(settings)
    (entry,) = entries_of(settings)
    store = context_of(settings).store
    rows = load_signal(store, entry["signal"]).rows
    assert {row.origin for row in rows} == {"self", "peer"}
    for row in rows:
        assert (row.teacher_logprobs is not None) == (row.origin == "self")
    assert all(row.teacher_logprobs is None for row in load_signal(store, entry["peer"]["signal"]).rows)
    assert entry["metrics"]["gats/lambda"] == 1.0
    assert entry["method_state"]["teacher"]["successes"] == [
        entry["counts"]["successes"] / entry["counts"]["scored"]
    ]
    assert summary.budget["forward_tokens/teacher"] > 0
    assert "peer/forward_tokens/teacher" not in summary.budget


def stored_peer(small, *overrides):
    """A finished run with groups of every kind in the bank, of another tokenizer."""
    settings = small(
        *LOTTERY, "run.name=in-the-bank", "policy.vocabulary=300", "run.prompts_per_step=16", *overrides
    )
    grpo(settings)
    return settings


READER = [
    *LOTTERY, "run.name=reader", "method=graft", "method.peer.run=in-the-bank", "method.floor=0.0",
    "run.prompts_per_step=16",
]  # fmt: skip


def test_stored_groups_are_read_by_prompt_and_verified_again(small):
    peer = stored_peer(small)
    settings = small(*READER)
    graft(settings)
    spoken = said(context_of(peer), [ref for entry in entries_of(peer) for ref in entry["rollouts"]])
    grafts = 0
    for entry in entries_of(settings):
        assert entry["metrics"]["graft/quarantined"] == 0
        rows = [
            r for r in load_signal(context_of(settings).store, entry["signal"]).rows if r.origin == "peer"
        ]
        assert_own_words(context_of(settings), rows, spoken)
        grafts += len(rows)
    assert grafts > 0


def test_a_stored_reward_that_is_not_confirmed_is_quarantined_and_counted(small, tmp_path):
    """The judge has changed since the bank was filled: what it now says otherwise is neither right nor wrong."""
    source = (Path(__file__).parent / "lottery.py").read_text()
    world = tmp_path / "world.py"
    here = ["environment.path=" + f"{world}:Lottery"]
    world.write_text(source)
    peer = stored_peer(small, *here, "run.name=judged-once", "run.steps=1")
    discard_residents()
    world.write_text(source.replace("% 3 == 0", "% 3 == 1"))
    context_module._environment.cache_clear()  # a file is read once per process, so the pool is another one too
    context_module._environment_digest.cache_clear()
    settings = small(
        *READER,
        *here,
        "method.peer.run=judged-once",
        "run.name=judged-again",
        "verification.deadline_seconds=9",
        "run.steps=1",
    )
    graft(settings)
    (before,), (after,) = entries_of(peer), entries_of(settings)
    # a third was won before, and another third is won now: both thirds are in quarantine
    assert after["metrics"]["graft/quarantined"] >= before["counts"]["successes"] > 0


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["method.peer.run=nobody"], "run nobody has not ended"),
        (["method.peer.run=graft-warm", "sampling.temperature=0.7"], "sampling.temperature alike"),
    ],
)
def test_a_stored_peer_that_cannot_be_read_is_refused_before_a_policy_is_built(small, overrides, complaint):
    grpo(small("run.name=graft-warm", "run.steps=0"))
    settings = small("method=graft", *overrides)
    with pytest.raises(ConfigurationError, match=complaint):
        graft(settings)
    assert not entries_of(settings)


def test_a_peer_whose_context_is_too_short_is_refused_before_a_policy_is_built(small, qwen):
    settings = small("method=graft", f"method.peer.policy={{kind: pretrained, path: {qwen}, context: 64}}")
    with pytest.raises(ConfigurationError, match=r"policy\.context=64"):
        graft(settings)
    assert not entries_of(settings)
