"""The same frozen batch through TRL's GRPOTrainer and through the learner: equal loss, equal gradient.

The batch has a dead group, a truncated row, unequal lengths, observations between turns, several micro-batches (cut
differently by the two), and old log-probabilities that put ratios beyond both clip bounds under both signs of the
advantage. Without injected old log-probabilities TRL's ratio would be 1 and its clipping untested.
"""

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from trl import GRPOConfig, GRPOTrainer

from gleaner.conf.schema import GrpoMethod, UpdateSettings
from gleaner.models.methods.grpo import grpo_signal
from gleaner.models.records import Segment, Verdict
from gleaner.models.signal import LearningSignal, group_rollouts
from gleaner.models.training import Learner

VOCABULARY, MAX_TOKENS, GROUP = 61, 12, 4
TEMPERATURE = 0.8
REWARDS = {"mixed": [1.0, 0.0, 0.0, 1.0], "dead": [0.0, 0.0, 0.0, 0.0], "graded": [0.2, 0.9, 0.4, 0.4]}
LENGTHS = [9, 3, 12, 5, 7, 7, 2, 11, 4, 12, 6, 8]
TRUNCATED = (2, 9)
"""Rows that ran out of tokens: the longest two."""


@dataclass(frozen=True)
class Case:
    """A loss, named by TRL's arguments and by ours."""

    trl: dict[str, Any]
    ours: dict[str, Any]
    rows_in_mean: bool = False
    """TRL's mean counts fully masked rows in its denominator, ours does not."""
    extra: dict[str, Any] = field(default_factory=dict)


WIDE = {"epsilon": 0.2, "epsilon_high": 0.28}
NARROW = {"epsilon": 3e-4, "epsilon_high": 4e-4}
CASES = {
    "dapo": Case({"loss_type": "dapo", **WIDE}, {"aggregation": "token_mean"}),
    "grpo": Case({"loss_type": "grpo", **WIDE}, {"aggregation": "sequence_mean"}, rows_in_mean=True),
    "dr_grpo": Case(
        {"loss_type": "dr_grpo", **WIDE}, {"aggregation": "constant", "scale": "none"}, rows_in_mean=True
    ),
    "gspo": Case(
        {"loss_type": "grpo", "importance_sampling_level": "sequence", **NARROW},
        {"aggregation": "sequence_mean", "ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4},
        rows_in_mean=True,
    ),
    "cispo": Case({"loss_type": "cispo", "epsilon_high": 5.0}, {"surrogate": "cispo", "cispo_max": 5.0}),
    "dapo_dual_clip": Case({"loss_type": "dapo", "delta": 1.6, **WIDE}, {"dual_clip": 1.6}),
    "dapo_kl": Case(
        {"loss_type": "dapo", "use_bias_correction_kl": False, **WIDE},
        {"kl_coef": 0.04},
        extra={"beta": 0.04},
    ),
    "dapo_tis": Case({"loss_type": "dapo", **WIDE}, {"importance_cap": 2.0}, extra={"tis": True}),
    "grpo_off_policy": Case(
        {"loss_type": "grpo", "off_policy_mask_threshold": 0.02, **WIDE},
        {"aggregation": "sequence_mean", "off_policy_delta": 0.02},
        rows_in_mean=True,
    ),
}


def make_model(dtype: torch.dtype) -> Qwen2ForCausalLM:
    torch.manual_seed(7)
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.25, tie_word_embeddings=False,
        pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    if dtype == torch.float64:
        # transformers' norm computes in float32 whatever it is given.
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, Qwen2RMSNorm):
                    setattr(parent, name, torch.nn.RMSNorm(len(child.weight), eps=child.variance_epsilon))
    return model.to(dtype)


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<end>": 1} | {f"w{i}": i for i in range(2, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")


@dataclass
class Batch:
    """The frozen batch: what was sampled, and log-probabilities by row (learnable tokens only)."""

    segments: list[Segment]
    verdicts: list[Verdict]
    old: list[np.ndarray]
    sampler: list[np.ndarray]
    reference: list[np.ndarray]


def make_batch(model: Qwen2ForCausalLM, equal_prompts: bool) -> Batch:
    random = np.random.default_rng(3)
    segments: list[Segment] = []
    verdicts: list[Verdict] = []
    for row, length in enumerate(LENGTHS):
        prompt, sample = list(REWARDS)[row // GROUP], row % GROUP
        context = np.random.default_rng(row // GROUP).integers(
            2, VOCABULARY, 6 if equal_prompts else 4 + row // GROUP
        )
        mask = [1] * length
        if length > 7:
            mask[3:5] = [0, 0]  # an observation between two turns
        segments.append(
            Segment(
                prompt_id=prompt,
                sample=sample,
                segment=0,
                context_ids=context.tolist(),
                sampled_ids=random.integers(2, VOCABULARY, length).tolist(),
                loss_mask=mask,
                logprobs=[0.0] * sum(mask),
                policy_version="v",
                sampling_digest="s",
                seed=0,
                text="",
                transcript=[],
                environment_result={},
                images=[],
                finish_reason="length" if row in TRUNCATED else "stop",
            )
        )
        reward = REWARDS[prompt][sample]
        verdicts.append(Verdict(prompt, sample, "scored", reward == 1, reward, {}, "1"))
    now = Learner(SimpleNamespace(model=model), UpdateSettings()).score(segments, temperature=TEMPERATURE)
    old, sampler, reference = [], [], []
    for row, current in enumerate(now):
        drift = random.normal(0, 0.6, len(current))
        drift[: min(2, len(drift))] = [0.5, -0.5][: len(drift)]  # beyond both bounds in every row
        if row == 0:
            drift[2] = -2.0  # a ratio of 7.4, beyond CISPO's 5
        old.append(current + drift)
        sampler.append(old[-1] + random.normal(0, 0.5, len(current)))
        reference.append(current + random.normal(0, 0.3, len(current)))
    return Batch(segments, verdicts, old, sampler, reference)


def our_signal(batch: Batch, case: Case, mask_truncated: bool) -> LearningSignal:
    sampler = batch.sampler if case.extra.get("tis") else batch.old
    segments = [replace(s, logprobs=mu.tolist()) for s, mu in zip(batch.segments, sampler, strict=True)]
    groups, _ = group_rollouts(segments, batch.verdicts, "drop_group", 2)
    keys = [(s.prompt_id, s.sample, s.segment) for s in segments]
    method = GrpoMethod(**{"overlong": "mask" if mask_truncated else "keep", **case.ours})
    signal, _ = grpo_signal(
        groups, method, rollouts="r", minibatches=1, max_new_tokens=MAX_TOKENS, temperature=TEMPERATURE,
        old_logprobs=dict(zip(keys, batch.old, strict=True)),
        reference_logprobs=dict(zip(keys, batch.reference, strict=True)) if method.kl_coef else None,
    )  # fmt: skip
    return signal


def our_loss_and_gradient(
    model, signal: LearningSignal
) -> tuple[float, dict[str, torch.Tensor], dict[str, float]]:
    settings = UpdateSettings(tokens_per_microbatch=64, logprob_chunk=16, max_grad_norm=1e9)
    learner = Learner(SimpleNamespace(model=model), settings)
    gradient: dict[str, torch.Tensor] = {}

    def take_gradient_instead_of_a_step() -> None:
        gradient.update({name: p.grad.clone() for name, p in model.named_parameters()})

    learner.optimizer.step = take_gradient_instead_of_a_step
    metrics = learner.apply(signal)
    return metrics["update/loss"], gradient, metrics


def make_trainer(model, case: Case, mask_truncated: bool, folder) -> GRPOTrainer:
    arguments = GRPOConfig(
        output_dir=str(folder), use_cpu=True, bf16=False, report_to=[], per_device_train_batch_size=GROUP,
        gradient_accumulation_steps=3, steps_per_generation=3, num_generations=GROUP, temperature=TEMPERATURE,
        max_completion_length=MAX_TOKENS, mask_truncated_completions=mask_truncated, gradient_checkpointing=False,
        disable_dropout=True, **case.trl,
    )  # fmt: skip
    prompts = Dataset.from_dict({"prompt": ["w2 w3"] * 12})
    trainer = GRPOTrainer(
        model=model, args=arguments, train_dataset=prompts, processing_class=make_tokenizer(),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
    )  # fmt: skip
    trainer.beta = case.extra.get(
        "beta", 0.0
    )  # set late: TRL would load a reference model, and we inject its answers
    if case.extra.get("tis"):  # as with vLLM, whose log-probabilities the correction is about
        trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
    return trainer


def trl_inputs(batch: Batch, signal: LearningSignal, mask_truncated: bool, dtype) -> dict[str, torch.Tensor]:
    """What TRL's trainer would hand to its loss: prompts left-padded, completions right-padded."""
    rows = len(batch.segments)
    width = max(len(s.context_ids) for s in batch.segments)
    inputs = {name: torch.zeros(rows, width, dtype=torch.long) for name in ("prompt_ids", "prompt_mask")}
    for name in ("completion_ids", "completion_mask", "tool_mask"):
        inputs[name] = torch.zeros(rows, MAX_TOKENS, dtype=torch.long)
    for name in ("old_per_token_logps", "sampling_per_token_logps", "ref_per_token_logps"):
        inputs[name] = torch.zeros(rows, MAX_TOKENS, dtype=dtype)
    for row, segment in enumerate(batch.segments):
        inputs["prompt_ids"][row, width - len(segment.context_ids) :] = torch.tensor(segment.context_ids)
        inputs["prompt_mask"][row, width - len(segment.context_ids) :] = 1
        length = len(segment.sampled_ids)
        inputs["completion_ids"][row, :length] = torch.tensor(segment.sampled_ids)
        masked = mask_truncated and segment.finish_reason == "length"
        inputs["completion_mask"][row, :length] = 0 if masked else 1
        inputs["tool_mask"][row, :length] = torch.tensor(segment.loss_mask)
        learnable = torch.tensor(segment.loss_mask).nonzero().squeeze(1)
        for name, values in (
            ("old_per_token_logps", batch.old),
            ("sampling_per_token_logps", batch.sampler),
            ("ref_per_token_logps", batch.reference),
        ):
            inputs[name][row, learnable] = torch.tensor(values[row], dtype=dtype)
    inputs["advantages"] = torch.tensor([row.advantage[0] for row in signal.rows], dtype=dtype)
    loss_mask = inputs["completion_mask"] * inputs["tool_mask"]
    inputs["num_items_in_batch"] = loss_mask.sum()
    ratio = torch.exp((inputs["old_per_token_logps"] - inputs["sampling_per_token_logps"]) * loss_mask)
    inputs["importance_sampling_ratio"] = ratio.clamp(max=2.0)
    return inputs


def plain_logprobs(self, model, input_ids, attention_mask, logits_to_keep, **_):
    """TRL's fused head computes in float32 on every device; its loss does not. This head does not either."""
    logits = model(input_ids=input_ids, attention_mask=attention_mask).logits[:, -logits_to_keep - 1 : -1]
    logprobs = torch.log_softmax(logits / self.temperature, dim=-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(2, input_ids[:, -logits_to_keep:].unsqueeze(2)).squeeze(2), entropy, None


def trl_loss_and_gradient(trainer: GRPOTrainer, inputs) -> tuple[float, dict[str, torch.Tensor]]:
    model = trainer.model.train()
    model.zero_grad()
    trainer.current_gradient_accumulation_steps = 3
    total = 0.0
    for start in range(0, len(LENGTHS), GROUP):
        part = {
            name: value if value.dim() == 0 else value[start : start + GROUP]
            for name, value in inputs.items()
        }
        if not trainer.off_policy_mask_threshold and not trainer.use_vllm:
            part.pop("sampling_per_token_logps")
        if trainer.off_policy_mask_threshold and not trainer.use_vllm:
            part["sampling_per_token_logps"] = part["old_per_token_logps"]
        loss = trainer._compute_loss(model, part)
        loss.backward()
        total += float(loss.detach())
    return total, {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_parity(ours, theirs, tolerance: float, factor: float = 1.0) -> None:
    loss, gradient = ours
    trl_loss, trl_gradient = theirs
    assert abs(loss - trl_loss * factor) <= tolerance * max(1.0, abs(trl_loss))
    assert gradient.keys() == trl_gradient.keys()
    for name, expected in trl_gradient.items():
        expected = expected * factor
        assert float(expected.norm()) > 0, name
        error = float((gradient[name] - expected).norm() / expected.norm())
        assert error <= tolerance, f"{name}: {error:.2e}"


def clipped_of_all_signs(batch: Batch, signal: LearningSignal, now: list[np.ndarray]) -> dict[str, int]:
    """Tokens by side of the ratio and sign of the advantage, counted apart from either implementation."""
    counts = dict.fromkeys(["high+", "high-", "low+", "low-"], 0)
    for row, current in zip(signal.rows, now, strict=True):
        ratio = np.exp(current - row.old_logprobs)
        sign = "+" if row.advantage[0] > 0 else "-" if row.advantage[0] < 0 else None
        if sign:
            counts["high" + sign] += int((ratio > 1.28).sum())
            counts["low" + sign] += int((ratio < 0.8).sum())
    return counts


@pytest.mark.parametrize("mask_truncated", [False, True], ids=["keep", "mask"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_loss_and_gradient_equal_those_of_trl(name, mask_truncated, dtype, tmp_path, monkeypatch):
    case = CASES[name]
    model = make_model(dtype)
    batch = make_batch(model, equal_prompts=dtype == torch.float64)
    now = Learner(SimpleNamespace(model=model), UpdateSettings()).score(
        batch.segments, temperature=TEMPERATURE
    )
    signal = our_signal(batch, case, mask_truncated)
    assert all(count > 0 for count in clipped_of_all_signs(batch, signal, now).values())

    *ours, metrics = our_loss_and_gradient(model, signal)
    assert metrics["update/clip_high"] > 0
    if name != "cispo":
        assert metrics["update/clip_low"] > 0
    if name == "grpo_off_policy":
        assert metrics["update/off_policy"] > 0
    assert metrics["update/rows"] == len(LENGTHS) - (0 if case.ours.get("kl_coef") else GROUP) - (
        2 if mask_truncated else 0
    )

    trainer = make_trainer(model, case, mask_truncated, tmp_path)
    if dtype == torch.float64:
        monkeypatch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", plain_logprobs)
    theirs = trl_loss_and_gradient(trainer, trl_inputs(batch, signal, mask_truncated, dtype))
    if name != "cispo":
        assert max(trainer._metrics["train"]["clip_ratio/low_mean"]) > 0
        assert max(trainer._metrics["train"]["clip_ratio/high_mean"]) > 0
    # A truncated row leaves our mean altogether; TRL's mean over rows still counts it.
    rows = len(LENGTHS)
    factor = rows / (rows - len(TRUNCATED)) if mask_truncated and case.rows_in_mean else 1.0
    assert_parity(ours, theirs, 1e-9 if dtype == torch.float64 else 1e-5, factor)


def test_parity_notices_a_wrong_clip(tmp_path):
    """The oracle is sharp: one bound off by 0.01 is no parity."""
    model = make_model(torch.float32)
    batch = make_batch(model, equal_prompts=False)
    right = CASES["dapo"]
    wrong = our_signal(batch, Case(right.trl, {**right.ours, "clip_high": 0.29}), False)
    *ours, _ = our_loss_and_gradient(model, wrong)
    theirs = trl_loss_and_gradient(
        make_trainer(model, right, False, tmp_path), trl_inputs(batch, wrong, False, torch.float32)
    )
    with pytest.raises(AssertionError):
        assert_parity(ours, theirs, 1e-5)
