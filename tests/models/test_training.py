"""The update, on a real (tiny) model: determinism, state, skipped steps, rows without gradient, LoRA."""

import copy
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from gleaner.conf.errors import ConfigurationError, ContractError, CorruptArtifactError
from gleaner.conf.schema import GrpoMethod, UpdateSettings
from gleaner.models.methods.grpo import grpo_signal
from gleaner.models.records import Segment, Verdict
from gleaner.models.signal import LearningSignal, Objective, group_rollouts, row_of
from gleaner.models.training import Learner, microbatches

SETTINGS = UpdateSettings(lr=1e-2, tokens_per_microbatch=64, logprob_chunk=16, weight_decay=0.01)


def tiny_model(seed: int = 0) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True,
        initializer_range=0.3,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).eval()


def make_learner(settings: UpdateSettings = SETTINGS, model=None, **kwargs) -> Learner:
    return Learner(SimpleNamespace(model=model or tiny_model()), settings, **kwargs)


def make_segment(prompt: str, sample: int, length: int, logprobs=None, finish="stop", mask=None) -> Segment:
    random = np.random.default_rng([*prompt.encode(), sample, length])
    mask = mask or [1] * length
    n = sum(mask)
    return Segment(
        prompt_id=prompt, sample=sample, segment=0, context_ids=random.integers(0, 50, 5).tolist(),
        sampled_ids=random.integers(0, 50, length).tolist(), loss_mask=mask,
        logprobs=[-3.9] * n if logprobs is None else logprobs, policy_version="v0", sampling_digest="d",
        seed=0, finish_reason=finish, text="", transcript=[], environment_result={}, images=[],
    )  # fmt: skip


def make_groups(rewards_by_prompt, lengths=(7, 4, 9, 6)):
    segments, verdicts = [], []
    for prompt, rewards in rewards_by_prompt.items():
        for sample, reward in enumerate(rewards):
            segments.append(make_segment(prompt, sample, lengths[sample % len(lengths)]))
            verdicts.append(Verdict(prompt, sample, "scored", reward > 0.5, reward, {}, "1"))
    return group_rollouts(segments, verdicts, "drop_group", 2)[0]


def make_signal(rewards_by_prompt, minibatches=1, **method) -> LearningSignal:
    signal, _ = grpo_signal(
        make_groups(rewards_by_prompt), GrpoMethod(**method), rollouts="r", minibatches=minibatches,
        max_new_tokens=16, temperature=1.0,
    )  # fmt: skip
    return signal


MIXED = {"a": [1.0, 0.0, 0.0, 1.0], "b": [0.0, 1.0, 0.0, 0.0]}
WITH_DEAD = {**MIXED, "c": [0.0] * 4, "d": [1.0] * 4}


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in learner.model.named_parameters()}


def assert_same_bits(left, right):
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


def test_microbatches_are_sorted_and_within_the_budget():
    batches = microbatches([9, 3, 4, 30, 5], budget=16)
    assert batches == [[1, 2, 4], [0], [3]]  # 3 x 5 <= 16; 9; 30 alone although longer than the budget


def test_same_state_and_signal_give_the_same_bits():
    first, second = make_learner(), make_learner()
    signal = make_signal(WITH_DEAD, minibatches=2)
    one, two = first.apply(signal), second.apply(signal)
    assert_same_bits(weights(first), weights(second))
    assert one["update/loss"] == two["update/loss"]
    assert one["update/steps"] == 1  # both dead groups share the second mini-batch
    assert one["update/empty"] == 1


def test_rows_without_gradient_never_enter_the_forward_pass():
    signal = make_signal(WITH_DEAD)
    learner, plain = make_learner(), make_learner()
    metrics = learner.apply(signal)
    assert metrics["update/rows"] == 8
    assert metrics["update/rows_without_gradient"] == 8
    for row in signal.rows:  # force every row through the model
        row.__dict__["active"] = True
    everything = plain.apply(signal)
    assert everything["update/rows"] == 16
    assert everything["update/grad_norm"] == pytest.approx(metrics["update/grad_norm"], rel=1e-5)
    for name, value in weights(learner).items():
        torch.testing.assert_close(value, weights(plain)[name], rtol=1e-3, atol=1e-5)


def gradient(signal: LearningSignal, settings=SETTINGS, model=None) -> dict[str, torch.Tensor]:
    """The gradient of the first mini-batch, before clipping."""
    learner = make_learner(settings.model_copy(update={"max_grad_norm": 1e9}), model=model)
    kept: dict[str, torch.Tensor] = {}
    learner.optimizer.step = lambda: kept.update(
        {name: p.grad.clone() for name, p in learner.model.named_parameters() if p.grad is not None}
    )
    learner.apply(signal)
    return kept


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
def test_splitting_into_microbatches_changes_nothing(aggregation):
    signal = make_signal(WITH_DEAD, aggregation=aggregation)
    whole = gradient(
        signal, SETTINGS.model_copy(update={"tokens_per_microbatch": 100_000}), tiny_model().double()
    )
    split = gradient(signal, SETTINGS.model_copy(update={"tokens_per_microbatch": 16}), tiny_model().double())
    for name in whole:
        torch.testing.assert_close(split[name], whole[name], rtol=1e-9, atol=1e-12)


def test_dead_groups_stay_in_the_denominator():
    alone = gradient(make_signal({"a": [1.0, 0.0, 0.0, 1.0]}), model=tiny_model().double())
    crowd = {"a": [1.0, 0.0, 0.0, 1.0]} | {f"dead{i}": [0.0] * 4 for i in range(7)}
    among_dead = gradient(make_signal(crowd), model=tiny_model().double())
    for name in alone:  # equally many tokens in each group: one live of eight
        torch.testing.assert_close(among_dead[name] * 8, alone[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradient_checkpointing_gives_the_same_gradient(checkpointing):
    signal = make_signal(MIXED)
    expected = gradient(signal)
    found = gradient(signal, SETTINGS.model_copy(update={"gradient_checkpointing": checkpointing}))
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-8)


def test_all_dead_groups_leave_everything_untouched():
    learner = make_learner()
    learner.apply(make_signal(MIXED))
    before, state = weights(learner), {k: v.clone() for k, v in learner.state_tensors().items()}
    metrics = learner.apply(make_signal({"c": [0.0] * 4, "d": [1.0] * 4}))
    assert metrics["update/empty"] == 1
    assert metrics["update/steps"] == 0
    assert_same_bits(weights(learner), before)
    assert_same_bits(learner.state_tensors(), state)


def test_all_truncated_and_masked_is_an_empty_update():
    groups = make_groups(MIXED)
    for group in groups:
        for episode in group.episodes:
            object.__setattr__(episode.segments[0], "finish_reason", "length")
    signal, metrics = grpo_signal(
        groups, GrpoMethod(overlong="mask"), rollouts="r", minibatches=1, max_new_tokens=9, temperature=1.0
    )
    assert metrics["response/truncated"] == 1
    learner = make_learner()
    before = weights(learner)
    update = learner.apply(signal)
    assert update["update/loss"] == 0
    assert update["update/empty"] == 1
    assert all(np.isfinite(value) for value in update.values())
    assert_same_bits(weights(learner), before)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_skips_the_step_and_only_that(poison):
    learner, reference = make_learner(), make_learner()
    signal = make_signal(MIXED, minibatches=2)
    reference.apply(LearningSignal(signal.objective, [row for row in signal.rows if row.minibatch == 0]))
    poisoned = copy.deepcopy(signal)
    next(row for row in poisoned.rows if row.minibatch == 1).advantage[:] = poison
    metrics = learner.apply(poisoned)
    assert metrics["update/skipped"] == 1
    assert metrics["update/steps"] == 1
    assert_same_bits(weights(learner), weights(reference))
    assert_same_bits(learner.state_tensors(), reference.state_tensors())


def test_a_round_trip_and_one_more_step_equal_an_uninterrupted_run(tmp_path):
    learner = make_learner()
    first, second = make_signal(WITH_DEAD, minibatches=2), make_signal({"e": [0.0, 1.0, 1.0, 0.0]})
    learner.apply(first)
    save_file({k: v.contiguous() for k, v in learner.state_tensors().items()}, tmp_path / "state.safetensors")
    description = learner.state_json()
    learner.apply(second)

    resumed = make_learner(model=tiny_model(seed=5))
    resumed.load_state(load_file(tmp_path / "state.safetensors"), description)
    resumed.apply(second)
    assert_same_bits(weights(resumed), weights(learner))
    assert_same_bits(resumed.state_tensors(), learner.state_tensors())


def test_a_state_of_another_model_or_slot_is_refused():
    learner = make_learner()
    tensors, description = learner.state_tensors(), learner.state_json()
    with pytest.raises(CorruptArtifactError, match="slot"):
        make_learner(slot="critic").load_state(tensors, description)
    lost = dict(tensors)
    lost.pop("weights.model.norm.weight")
    with pytest.raises(CorruptArtifactError, match=r"model\.norm\.weight"):
        learner.load_state(lost, description)


def test_a_learner_takes_the_rows_of_its_slot_only():
    signal = make_signal(MIXED)
    rows = [row_of(make_segment("z", 0, 4), "r", 1.0, 1.0, slot="critic"), *signal.rows]
    learner, alone = make_learner(), make_learner()
    learner.apply(LearningSignal(signal.objective, rows))
    alone.apply(signal)
    assert_same_bits(weights(learner), weights(alone))


def test_minibatches_are_applied_in_their_order():
    rows = [row_of(make_segment("a", i, 5), "r", 0.1, 1.0, minibatch=1 - i) for i in range(2)]
    ordered, reversed_ = make_learner(), make_learner()
    ordered.apply(LearningSignal(Objective(), rows))
    reversed_.apply(LearningSignal(Objective(), rows[::-1]))  # the index decides, not the place in the list
    assert_same_bits(weights(ordered), weights(reversed_))


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_the_ratio_is_one_at_the_sampling_temperature(temperature):
    learner = make_learner(SETTINGS.model_copy(update={"lr": 1e-9}))
    segments = [make_segment("a", i, 6) for i in range(4)]
    scores = learner.score(segments, temperature=temperature)
    with torch.no_grad():  # against a plain forward pass
        ids = torch.tensor([segments[0].context_ids + segments[0].sampled_ids])
        logits = learner.model(ids).logits[0, 4:-1] / temperature
        plain = torch.log_softmax(logits, -1).gather(1, ids[0, 5:].unsqueeze(1)).squeeze(1)
    np.testing.assert_allclose(scores[0], plain.numpy(), atol=1e-5)
    rows = [
        row_of(s, "r", 0.1, a, old)
        for s, a, old in zip(segments, [1.0, -1.0, 1.0, -1.0], scores, strict=True)
    ]
    metrics = learner.apply(LearningSignal(Objective(temperature=temperature), rows))
    assert metrics["update/ratio"] == pytest.approx(1, abs=1e-5)
    assert metrics["update/approx_kl"] == pytest.approx(0, abs=1e-6)
    wrong = make_learner().apply(LearningSignal(Objective(temperature=1.6), rows))
    assert wrong["update/approx_kl"] > 1e-3


def test_observations_between_turns_carry_no_gradient():
    learner = make_learner()
    segment = make_segment("a", 0, 8, mask=[1, 1, 0, 0, 0, 1, 1, 1])
    assert learner.score([segment], temperature=1.0)[0].shape == (5,)
    metrics = learner.apply(LearningSignal(Objective(), [row_of(segment, "r", 0.2, 1.0)]))
    assert metrics["update/tokens"] == 5


def test_the_reference_is_the_start_weights_for_full_and_lora_policies():
    from peft import LoraConfig, get_peft_model

    segments = [make_segment("a", i, 6) for i in range(3)]
    adapted = get_peft_model(
        tiny_model(), LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    for model in (tiny_model(), adapted):
        learner = make_learner(model=model, keep_reference=True)
        start = learner.score(segments, temperature=1.0)
        learner.apply(make_signal(MIXED))
        moved = learner.score(segments, temperature=1.0)
        reference = learner.score(segments, temperature=1.0, reference=True)
        for a, b, c in zip(start, moved, reference, strict=True):
            np.testing.assert_array_equal(a, c)
            assert np.abs(a - b).max() > 1e-6
    with adapted.disable_adapter():
        np.testing.assert_allclose(learner.score(segments, temperature=1.0)[0], start[0], atol=1e-6)


def test_a_lora_update_moves_the_adapter_and_its_state_alone():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny_model(), LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    learner = make_learner(model=model)
    before = weights(learner)
    learner.apply(make_signal(MIXED))
    changed = {name for name, value in weights(learner).items() if not torch.equal(value, before[name])}
    assert changed
    assert all("lora_" in name for name in changed)
    assert all("lora_" in name for name in learner.state_tensors() if name.startswith("weights."))


def test_a_head_that_is_no_plain_linear_map_is_refused():
    model = tiny_model()
    original = model.forward

    def capped(*args, **kwargs):
        outputs = original(*args, **kwargs)
        outputs.logits = torch.tanh(outputs.logits * 3)
        return outputs

    model.forward = capped
    with pytest.raises(ConfigurationError, match="caps its logits"):
        make_learner(model=model)


def test_the_k3_term_moves_a_dead_group_back_towards_the_reference():
    learner = make_learner(SETTINGS.model_copy(update={"weight_decay": 0.0}), keep_reference=True)
    segments = [make_segment("c", i, 6) for i in range(4)]
    learner.apply(LearningSignal(Objective(), [row_of(s, "r", 0.2, 1.0) for s in segments]))
    reference = learner.score(segments, temperature=1.0, reference=True)
    moved = learner.score(segments, temperature=1.0)

    def pulled():
        return LearningSignal(
            Objective(),
            [
                row_of(s, "r", 0.1, 0.0, old, kl_coef=np.full(6, 0.04), reference_logprobs=ref)
                for s, old, ref in zip(segments, moved, reference, strict=True)
            ],
        )

    metrics = learner.apply(pulled())
    assert metrics["update/steps"] == 1
    assert metrics["update/kl_reference"] > 0
    for _ in range(8):  # Adam's momentum still carries the first updates away
        later = learner.apply(pulled())
    assert later["update/kl_reference"] < metrics["update/kl_reference"] / 2


# ------------------------------------------------------------------------------------- distillation hooks


def plain_logits(model, segment: Segment) -> torch.Tensor:
    """(n, V) logits that predict the segment's sampled tokens, from an ordinary forward pass."""
    ids = torch.tensor([segment.context_ids + segment.sampled_ids])
    return model(ids).logits[0, len(segment.context_ids) - 1 : -1]


def plain_gradient(model, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-9, atol=1e-12)


def test_topk_supports_of_some_tokens_and_rows_give_the_plain_gradient():
    model, random = tiny_model().double(), np.random.default_rng(1)
    segments = [make_segment("a", i, length) for i, length in enumerate((6, 3, 8))]
    rows, expected = [], torch.zeros((), dtype=torch.float64)
    for index, segment in enumerate(segments):
        n, taught = len(segment.logprobs), np.array([0, 2])
        if index == 1:  # a row without distillation between two with it
            rows.append(row_of(segment, "r", 0.1, 1.0, logprobs_of(model, segment)))
            logprobs = torch.log_softmax(plain_logits(model, segment), 1)
            chosen = logprobs.gather(1, torch.tensor(segment.sampled_ids).unsqueeze(1)).squeeze(1)
            expected = expected - 0.1 * torch.exp(chosen - chosen.detach()).sum()
            continue
        ids = np.stack([random.permutation(50)[:4] for _ in taught])
        teacher = random.normal(-2, 1, (2, 4))
        coef = np.zeros(n)
        coef[taught] = [0.3, 0.7]
        rows.append(
            row_of(
                segment, "r", 0.0, 0.0, distill_kind="topk", distill_source="experience", distill_coef=coef,
                support_tokens=taught, support_ids=ids, support_logprobs=teacher,
            )
        )  # fmt: skip
        student = torch.log_softmax(
            plain_logits(model, segment)[taught].gather(1, torch.tensor(ids)) / 0.7, 1
        )
        target = torch.log_softmax(torch.tensor(teacher), 1)
        expected = (
            expected
            + (
                torch.tensor([0.3, 0.7], dtype=torch.float64) * (student.exp() * (student - target)).sum(1)
            ).sum()
        )
    signal = LearningSignal(Objective(distill_temperature=0.7), rows)
    assert_close(gradient(signal, model=copy.deepcopy(model)), plain_gradient(model, expected))


def logprobs_of(model, segment: Segment) -> np.ndarray:
    return make_learner(model=model).score([segment], temperature=1.0)[0]


def test_a_teacher_moves_an_all_fail_group_that_the_reward_cannot():
    model = tiny_model().double()
    segments = [make_segment("c", i, 5) for i in range(2)]
    teachers = [np.full(5, -1.0), np.full(5, -6.0)]
    rows, expected = [], torch.zeros((), dtype=torch.float64)
    for segment, teacher in zip(segments, teachers, strict=True):
        old = logprobs_of(model, segment)
        rows.append(
            row_of(segment, "r", 0.1, 0.0, old, distill_kind="sampled", distill_source="teacher",
                   distill_coef=np.full(5, 0.2), teacher_logprobs=teacher)
        )  # fmt: skip
        logprobs = torch.log_softmax(plain_logits(model, segment), 1)
        chosen = logprobs.gather(1, torch.tensor(segment.sampled_ids).unsqueeze(1)).squeeze(1)
        expected = expected - (0.2 * (torch.tensor(teacher) - chosen.detach()) * chosen).sum()
    found = gradient(LearningSignal(Objective(), rows), model=copy.deepcopy(model))
    assert_close(found, plain_gradient(model, expected))


def test_a_coefficient_of_zero_leaves_grpo_bit_for_bit():
    signal = make_signal(WITH_DEAD)
    with_zeros = [
        replace(row, distill_kind="sampled", distill_source="teacher", distill_coef=np.zeros(len(row.pg_coef)),
                teacher_logprobs=np.full(len(row.pg_coef), np.nan))
        for row in signal.rows
    ]  # fmt: skip
    plain, zeros = make_learner(), make_learner()
    plain.apply(signal)
    zeros.apply(LearningSignal(signal.objective, with_zeros))
    assert_same_bits(weights(zeros), weights(plain))


def test_supports_of_different_sizes_are_refused():
    rows = [
        row_of(make_segment("a", i, 4), "r", 0.0, 0.0, distill_kind="topk", distill_coef=np.full(4, 0.1),
               support_tokens=np.array([0]), support_ids=np.arange(size)[None], support_logprobs=np.zeros((1, size)))
        for i, size in enumerate((3, 4))
    ]  # fmt: skip
    with pytest.raises(ContractError, match="differ in size"):
        make_learner().apply(LearningSignal(Objective(), rows))


def test_topk_without_supports_is_refused():
    row = row_of(make_segment("a", 0, 4), "r", 0.0, 0.0, distill_kind="topk", distill_coef=np.full(4, 0.1))
    with pytest.raises(ContractError, match="stores none"):
        make_learner().apply(LearningSignal(Objective(), [row]))


def test_a_microbatch_larger_than_the_minibatch_is_one_forward():
    metrics = make_learner(SETTINGS.model_copy(update={"tokens_per_microbatch": 10**9})).apply(
        make_signal(MIXED)
    )
    assert metrics["update/steps"] == 1
    assert np.isfinite(metrics["update/grad_norm"])


# ------------------------------------------------------------------------------------ devices, processes


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_gradient_of_the_cpu():
    signal = make_signal(WITH_DEAD)
    on_gpu = gradient(signal)
    cpu_learner = make_learner(SETTINGS.model_copy(update={"max_grad_norm": 1e9}))
    assert cpu_learner.accelerator.device.type == "cuda"
    model = tiny_model()
    rows = [row for row in signal.rows if row.active]
    loss = torch.zeros(())
    for row in rows:
        ids = torch.tensor([[*row.context_ids, *row.sampled_ids]])
        logprobs = torch.log_softmax(model(ids).logits[0, len(row.context_ids) - 1 : -1], 1)
        chosen = logprobs.gather(1, torch.tensor(row.sampled_ids).unsqueeze(1)).squeeze(1)
        ratio = torch.exp(chosen - torch.tensor(row.old_logprobs, dtype=torch.float32))
        advantage = torch.tensor(row.advantage, dtype=torch.float32)
        surrogate = torch.min(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
        loss = loss - (torch.tensor(row.pg_coef, dtype=torch.float32) * surrogate).sum()
    for name, expected in plain_gradient(model, loss).items():
        assert (on_gpu[name].cpu() - expected).norm() <= 1e-3 * expected.norm() + 1e-6, name


TWO_PROCESSES = """
import faulthandler, sys
faulthandler.dump_traceback_later(100, exit=True)  # a deadlock ends here, and says where
sys.path.insert(0, sys.argv[1])
from test_training import SETTINGS, WITH_DEAD, make_learner, make_signal, weights
from safetensors import safe_open
from safetensors.torch import save_file
learner = make_learner(SETTINGS.model_copy(update={"tokens_per_microbatch": 40}))
metrics = learner.apply(make_signal(WITH_DEAD, minibatches=2))
if learner.accelerator.is_main_process:
    save_file(weights(learner), sys.argv[2], metadata={"processes": str(learner.accelerator.num_processes),
              "tokens": str(metrics["update/tokens"]), "loss": str(metrics["update/loss"])})
"""


@pytest.mark.slow
def test_two_processes_take_the_step_of_one(tmp_path):
    script = tmp_path / "two.py"
    script.write_text(TWO_PROCESSES)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    arguments = [str(script), str(Path(__file__).parent), str(tmp_path / "two.safetensors")]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    subprocess.run([*launch, *arguments], check=True, timeout=150, env=environment)
    with safe_open(tmp_path / "two.safetensors", "pt") as stored:
        metadata = stored.metadata()
    assert metadata["processes"] == "2"
    alone = make_learner(SETTINGS.model_copy(update={"tokens_per_microbatch": 40}))
    metrics = alone.apply(make_signal(WITH_DEAD, minibatches=2))
    assert float(metadata["tokens"]) == metrics["update/tokens"]
    assert float(metadata["loss"]) == pytest.approx(metrics["update/loss"], rel=1e-5)
    for name, value in load_file(tmp_path / "two.safetensors").items():
        torch.testing.assert_close(value, weights(alone)[name], rtol=1e-3, atol=1e-5)
