"""The transformers engine: model families, shared modules, the canary, and the cache's bookkeeping."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from gleaner.conf.errors import ConfigurationError, ContractError, StaleWeightsError
from gleaner.conf.schema import LoraSettings, SamplingSettings, TinyPolicy
from gleaner.conf.schema import TransformersEngine as Settings
from gleaner.models.engines.base import Completion, Turn
from gleaner.models.engines.transformers import TransformersEngine, chunks, draw, truncate, turn_uniforms
from gleaner.models.policy import Policy, build_policy
from tests.models.grid import Grid

TOKENIZER = build_policy(TinyPolicy(), Grid(), 0).tokenizer
SHAPE: dict[str, Any] = {
    "vocab_size": len(TOKENIZER),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}
LOCAL = ["sliding_attention", "full_attention"] * 2
FAMILIES: dict[str, Any] = {
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
    "qwen2_sliding": lambda: Qwen2ForCausalLM(
        Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=5, layer_types=LOCAL)
    ),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "llama_with_biases": lambda: LlamaForCausalLM(
        LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True, head_dim=16, tie_word_embeddings=True)
    ),
    "llama3_rotation": lambda: LlamaForCausalLM(
        LlamaConfig(
            **SHAPE,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        )
    ),
    "mistral_sliding": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=5)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=16)),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(**SHAPE, head_dim=8, sliding_window=5, layer_types=LOCAL)
    ),
}


def policy_of(model: Any) -> Policy:
    return Policy(model.eval(), TOKENIZER, 256)


def engine_on(policy: Policy, **settings: Any) -> TransformersEngine:
    return TransformersEngine(Settings(**settings), context_limit=256, policy=policy, version="0")


def context(row: int, length: int) -> list[int]:
    return [5 + (7 * row + 3 * place) % 250 for place in range(length)]


def logprobs_of(policy: Policy, before: list[int], ids: list[int]) -> list[float]:
    with torch.no_grad():
        logits = policy.language_model(torch.tensor([before + ids])).logits[0, len(before) - 1 : -1]
    return logits.float().log_softmax(-1)[range(len(ids)), ids].tolist()


def two_turns(engine: TransformersEngine, rows: int = 5) -> list[tuple[list[int], Completion]]:
    """(context, completion) of two turns of rows of many lengths, the contexts longer than a window of 5."""
    pairs = []
    with engine.session(SamplingSettings(max_new_tokens=8)) as session:
        contexts = [context(row // 2, 4 + 3 * (row // 2)) for row in range(rows)]
        for turn in range(2):
            completions = session.sample(
                [Turn(row, ids, 10 * turn + row) for row, ids in enumerate(contexts)]
            )
            pairs += list(zip(contexts, completions, strict=True))
            contexts = [
                ids + c.ids + context(row, 1 + 2 * row)
                for row, (ids, c) in enumerate(zip(contexts, completions, strict=True))
            ]
    return pairs


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_samples_and_scores_as_its_own_forward_pass_does(
    family: str, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    policy = policy_of(FAMILIES[family]())
    for name, parameter in policy.model.named_parameters():
        if "norm" in name or "bias" in name:
            torch.nn.init.normal_(parameter, mean=1, std=0.3)
    if not fused:
        monkeypatch.setattr("gleaner.models.engines.fused.COPY_LIMIT", 0)
    engine = engine_on(policy, tokens_per_forward=64)
    assert (engine.decoder.fused is not None) == (fused and family not in ("gemma3", "mistral_sliding"))
    pairs = two_turns(engine)
    for before, completion in pairs:
        assert completion.logprobs == pytest.approx(logprobs_of(policy, before, completion.ids), abs=1e-4)
    scored = engine.score([before for before, _ in pairs], [completion.ids for _, completion in pairs])
    for (_, completion), score in zip(pairs, scored, strict=True):
        assert completion.logprobs == pytest.approx(score.logprobs, abs=1e-4)


@pytest.mark.parametrize("fused", [True, False])
def test_bfloat16_is_sampled_and_not_called_exact(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not fused:
        monkeypatch.setattr("gleaner.models.engines.fused.COPY_LIMIT", 0)
    torch.manual_seed(0)
    policy = policy_of(FAMILIES["llama"]().bfloat16())
    engine = engine_on(policy)
    assert not engine.exact
    for before, completion in two_turns(engine):
        expected = torch.tensor(logprobs_of(policy, before, completion.ids))
        assert (torch.tensor(completion.logprobs) - expected).abs().mean() < 0.1


def test_models_that_cannot_be_cached_here_are_refused_with_the_fix() -> None:
    shape = {"vocab_size": len(TOKENIZER), "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
    with pytest.raises(ConfigurationError, match="engine=vllm"):
        engine_on(policy_of(MambaForCausalLM(MambaConfig(**shape))))
    softcapped = Gemma2ForCausalLM(Gemma2Config(**SHAPE, head_dim=8))
    with pytest.raises(ConfigurationError, match="engine=vllm"):
        engine_on(policy_of(softcapped))


def test_a_shared_module_keeps_its_mode_its_attention_and_its_gradients() -> None:
    policy = build_policy(TinyPolicy(), Grid(), 0)
    engine = engine_on(policy)
    policy.model.train()
    two_turns(engine)
    engine.score([[5]], [[6, 7]])
    assert policy.model.training
    assert policy.language_model.config._attn_implementation == "sdpa"
    policy.model(torch.tensor([[5, 6, 7]]), labels=torch.tensor([[5, 6, 7]])).loss.backward()
    assert all(parameter.grad is not None for parameter in policy.model.parameters())


def test_a_lora_policy_is_sampled_with_its_adapters() -> None:
    policy = build_policy(TinyPolicy(lora=LoraSettings(rank=4)), Grid(), 0)
    engine = engine_on(policy)
    without = engine.score([[5, 6]], [[7, 8, 9]])[0].logprobs
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.5, generator=torch.Generator().manual_seed(0))
    engine.adopt("1")
    got = engine.score([[5, 6]], [[7, 8, 9]])[0].logprobs
    assert got == pytest.approx(logprobs_of(policy, [5, 6], [7, 8, 9]), abs=1e-5)
    assert got != pytest.approx(without, abs=1e-3)


def test_an_update_in_place_is_adopted_and_ends_open_sessions() -> None:
    policy = build_policy(TinyPolicy(), Grid(), 0)
    engine = engine_on(policy)
    with engine.session(SamplingSettings(max_new_tokens=4)) as session:
        (completion,) = session.sample([Turn(0, [5, 6, 7], 0)])
        with torch.no_grad():
            policy.language_model.get_input_embeddings().weight.mul_(5)
        engine.adopt("1")
        assert engine.version == "1"
        with pytest.raises(ContractError, match="new session"):
            session.sample([Turn(0, [5, 6, 7, *completion.ids, 8], 1)])
    assert engine.score([[5]], [[6]])[0].logprobs == pytest.approx(logprobs_of(policy, [5], [6]), abs=1e-5)


def test_weights_written_in_place_are_never_served_stale() -> None:
    policy = build_policy(TinyPolicy(), Grid(), 0)
    engine = engine_on(policy)
    ids = [7, 8, 9]
    weight = policy.language_model.model.layers[0].self_attn.q_proj.weight
    before = engine.score([[5, 6]], [ids])[0].logprobs
    with torch.no_grad():
        policy.language_model.model.layers[0].mlp.up_proj.weight.normal_()
    changed = engine.score([[5, 6]], [ids])[0].logprobs
    assert changed == pytest.approx(logprobs_of(policy, [5, 6], ids), abs=1e-5)
    assert changed != pytest.approx(before, abs=1e-4)
    weight.data.normal_()  # autograd does not see this one: `adopt` must
    engine.adopt("1")
    assert engine.score([[5, 6]], [ids])[0].logprobs == pytest.approx(
        logprobs_of(policy, [5, 6], ids), abs=1e-5
    )


def test_the_canary_catches_a_head_that_kept_its_old_weights() -> None:
    policy = build_policy(TinyPolicy(), Grid(), 0)
    engine = engine_on(policy)
    stale = torch.nn.Linear(64, len(policy.tokenizer), bias=False)
    engine.decoder.head = stale
    with pytest.raises(StaleWeightsError, match="restart"):
        engine.adopt("1")
    assert engine.version is None


def test_a_rewritten_history_is_refused() -> None:
    engine = engine_on(build_policy(TinyPolicy(), Grid(), 0))
    with engine.session(SamplingSettings(max_new_tokens=4)) as session:
        (completion,) = session.sample([Turn(0, [5, 6, 7], 0)])
        with pytest.raises(ContractError, match="history"):
            session.sample([Turn(0, [5, 9, 7, *completion.ids, 8], 1)])
        with pytest.raises(ContractError, match="a row of its own"):
            session.sample([Turn(1, [5], 0), Turn(1, [5], 0)])


def test_weights_that_are_not_finite_are_named() -> None:
    policy = build_policy(TinyPolicy(), Grid(), 0)
    engine = engine_on(policy)
    with torch.no_grad():
        policy.language_model.get_input_embeddings().weight[7] = torch.nan
    with pytest.raises(ContractError, match="not finite"):
        two_turns(engine)
    with pytest.raises(StaleWeightsError):
        engine.adopt("1")


def test_rows_keep_their_history_through_every_reordering_of_slots() -> None:
    torch.manual_seed(0)
    policy = policy_of(FAMILIES["qwen2"]())
    engine = engine_on(policy, tokens_per_forward=128)
    rng = np.random.default_rng(0)
    ids: dict[int, list[int]] = {}
    with engine.session(SamplingSettings(max_new_tokens=12)) as session:
        for turn in range(8):
            for _ in range(4):
                ids[len(ids)] = context(len(ids) % 5, int(rng.integers(1, 14)))
            active = [
                int(row) for row in rng.permutation(list(ids)) if rng.random() < 0.6 and len(ids[row]) < 200
            ]
            completions = session.sample([Turn(row, ids[row], 100 * turn + row) for row in active])
            for row, completion in zip(active, completions, strict=True):
                expected = logprobs_of(policy, ids[row], completion.ids)
                assert completion.logprobs == pytest.approx(expected, abs=1e-4)
                ids[row] = ids[row] + completion.ids + context(row, int(rng.integers(1, 8)))
    assert sorted(session.row_at) == sorted(session.stored)


def test_scores_do_not_depend_on_how_rows_are_packed() -> None:
    policy = build_policy(TinyPolicy(), Grid(), 0)
    contexts = [context(row, 1 + row * 5 % 23) for row in range(9)]
    ids = [context(row, row * 3 % 11) for row in range(9)]
    small = engine_on(policy, tokens_per_forward=64).score(contexts, ids)
    large = engine_on(policy, tokens_per_forward=100_000).score(contexts, ids)
    for one, other, row in zip(small, large, ids, strict=True):
        assert len(one.logprobs) == len(row)
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    with pytest.raises(ContractError, match="context"):
        engine_on(policy).score([[]], [[5]])


def test_truncation_keeps_the_nucleus_and_the_k_likeliest() -> None:
    probability = torch.tensor([[0.1, 0.4, 0.2, 0.3]])
    kept = truncate(probability.log(), 0, 0.6).softmax(-1)
    # 0.4 alone is short of 0.6; with 0.3 the set reaches it.
    torch.testing.assert_close(kept, torch.tensor([[0, 0.4 / 0.7, 0, 0.3 / 0.7]]))
    torch.testing.assert_close(
        truncate(probability.log(), 3, 1.0).softmax(-1), torch.tensor([[0, 0.4 / 0.9, 0.2 / 0.9, 0.3 / 0.9]])
    )
    torch.testing.assert_close(
        truncate(probability.log(), 0, 1e-6).softmax(-1), torch.tensor([[0, 1.0, 0, 0]])
    )


def test_a_draw_inverts_the_cumulative_distribution() -> None:
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()
    sampling = SamplingSettings()
    for uniform, token in (
        (0.0, 0),
        (0.09, 0),
        (0.11, 1),
        (0.49, 1),
        (0.51, 2),
        (0.69, 2),
        (0.71, 3),
        (1 - 2**-24, 3),
    ):
        tokens, logprobs = draw(logits.clone(), torch.tensor([uniform]), sampling)
        assert tokens.tolist() == [token]
        assert logprobs[0] == pytest.approx(logits[0, token].item(), abs=1e-6)


def test_a_draw_never_picks_what_truncation_removed() -> None:
    logits = torch.randn(64, 50, generator=torch.Generator().manual_seed(0))
    sampling = SamplingSettings(top_k=3, temperature=0.7)
    ends = torch.tensor([0.0, 1 - 2**-24] * 32)
    tokens, logprobs = draw(logits.clone(), ends, sampling)
    allowed = logits.topk(3).indices
    assert bool((allowed == tokens[:, None]).any(-1).all())
    assert bool(torch.isfinite(logprobs).all())


def test_uniforms_depend_on_the_seed_alone_and_stay_below_one() -> None:
    alone = np.random.Generator(np.random.Philox(key=3)).random(8, dtype=np.float32)
    assert (turn_uniforms([9, 3], 8)[:, 1] == alone).all()
    assert (turn_uniforms([3], 5)[:, 0] == alone[:5]).all()
    many = turn_uniforms(range(4000), 1)[0]
    assert len(set(many.tolist())) > 3990
    assert many.min() >= 0
    assert many.max() <= 1 - 2**-24
    assert abs(many.mean() - 0.5) < 0.02


def test_chunks_respect_the_budget_unless_one_item_exceeds_it() -> None:
    assert list(chunks([0, 1, 2, 3], [2, 2, 3, 9], 6)) == [[0, 1], [2], [3]]
    assert list(chunks([], [], 6)) == []
    assert Counter(
        i for chunk in chunks(range(50), [1 + i % 7 for i in range(50)], 20) for i in chunk
    ) == Counter(range(50))
