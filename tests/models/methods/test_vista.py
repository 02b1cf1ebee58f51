"""VISTA's routing and weights, with numbers worked by hand, and its gradient on a real tiny model."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from transformers import Qwen2Config, Qwen2ForCausalLM

from gleaner.conf.schema import ExperienceSettings, GrpoMethod, UpdateSettings, VistaMethod
from gleaner.models.methods.grpo import grpo_signal
from gleaner.models.methods.vista import Lesson, distilled, entropy_weights, vista_signal
from gleaner.models.records import Segment, Verdict
from gleaner.models.signal import audit, group_rollouts
from gleaner.models.training import Learner

METHOD = VistaMethod(aggregation="token_mean", support=5, entropy_weight=0.0)
UPDATE = UpdateSettings(lr=1e-2, tokens_per_microbatch=64)
FOLDING = {"rollouts": "r", "minibatches": 1, "max_new_tokens": 6, "temperature": 1.0}
MASK = [1, 1, 0, 1, 1]
"""Two turns of two tokens, and an observation of one between them."""


def make_groups(outcomes_by_prompt):
    segments, verdicts = [], []
    for prompt, outcomes in outcomes_by_prompt.items():
        for sample, won in enumerate(outcomes):
            random = np.random.default_rng([*prompt.encode(), sample])
            segments.append(
                Segment(
                    prompt,
                    sample,
                    0,
                    random.integers(0, 50, 4).tolist(),
                    random.integers(0, 50, 5).tolist(),
                    MASK,
                    [-3.0] * 4,
                    "v",
                    "d",
                    0,
                    "stop",
                    "",
                    [],
                    {},
                    [],
                )
            )
            verdicts.append(Verdict(prompt, sample, "scored", bool(won), float(won), {}, "1"))
    return group_rollouts(segments, verdicts, "drop_group", 2)[0]


def a_lesson(tokens=(2, 3), entropy=None, seed=0):
    random = np.random.default_rng(seed)
    m = len(tokens)
    support = np.log(random.dirichlet(np.ones(5), m))
    ids = np.stack([random.permutation(50)[:5] for _ in tokens]) if m else np.zeros((0, 5), dtype=np.int64)
    return Lesson(
        np.array(tokens, dtype=np.int64),
        ids,
        support.reshape(m, 5),
        np.ones(m) if entropy is None else np.array(entropy),
        np.full(m, -1.0),
    )


def lessons_for(groups, **kwargs):
    return {(g.prompt_id, e.sample, 0): a_lesson(seed=e.sample, **kwargs) for g in groups for e in g.episodes}


def make_learner(**changes):
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    settings = UPDATE.model_copy(update=changes)
    return Learner(SimpleNamespace(model=Qwen2ForCausalLM(config).eval()), settings)


def weights_after(signal):
    learner = make_learner()
    metrics = learner.apply(signal)
    return {name: p.detach().clone() for name, p in learner.model.named_parameters()}, metrics


def rows_of(signal):
    return {(row.prompt_id, row.sample): row for row in signal.rows}


MIXED = make_groups({"p": [1, 0, 0, 1]})
ALL_FAIL = make_groups({"p": [0, 0, 0, 0]})


# ------------------------------------------------------------------------------------------------- routing


def test_coefficients_by_hand():
    """16 tokens in all: a policy-gradient coefficient is 1/16. With eta 0.5 a distilled token's is 1/32."""
    method = METHOD.model_copy(update={"coef": 0.5})
    signal, metrics = vista_signal(MIXED, method, lessons_for(MIXED), **FOLDING)
    rows = rows_of(signal)
    for sample in (1, 2):
        assert (rows["p", sample].advantage == 0).all()
        np.testing.assert_allclose(rows["p", sample].distill_coef, [0, 0, 1 / 32, 1 / 32])
        assert rows["p", sample].distill_source == "experience"
    for sample in (0, 3):
        assert rows["p", sample].distill_coef is None
        np.testing.assert_allclose(
            rows["p", sample].pg_coef * rows["p", sample].advantage, 0.8660 / 16, atol=1e-4
        )
    assert metrics["vista/routed"] == 0.5
    assert metrics["vista/routed_failures"] == 1.0
    assert metrics["vista/tokens"] == 0.25
    assert metrics["vista/teacher_gain"] == 2.0


def test_a_failure_without_experience_keeps_its_policy_gradient():
    lessons = {("p", 1, 0): a_lesson()}
    rows = rows_of(vista_signal(MIXED, METHOD, lessons, **FOLDING)[0])
    plain = rows_of(grpo_signal(MIXED, METHOD, **FOLDING)[0])
    assert rows["p", 1].distill_coef is not None
    assert rows["p", 2].distill_coef is None
    np.testing.assert_array_equal(rows["p", 2].advantage, plain["p", 2].advantage)
    assert (plain["p", 2].advantage < 0).all()


def test_the_additive_route_keeps_both_terms():
    rows = rows_of(
        vista_signal(MIXED, METHOD.model_copy(update={"route": "additive"}), lessons_for(MIXED), **FOLDING)[0]
    )
    assert (rows["p", 1].advantage < 0).all()
    assert rows["p", 1].distill_coef.any()


def test_successes_are_distilled_only_by_option():
    everyone = METHOD.model_copy(update={"distil": "all"})
    rows = rows_of(vista_signal(MIXED, everyone, lessons_for(MIXED), **FOLDING)[0])
    assert all(row.distill_coef is not None for row in rows.values())


def test_a_group_without_success_is_left_alone_by_option():
    careful = METHOD.model_copy(update={"experience": ExperienceSettings(require_success=True)})
    (failed,), (mixed,) = ALL_FAIL, MIXED
    assert not distilled(failed.episodes[0], failed, careful)
    assert distilled(mixed.episodes[1], mixed, careful)
    assert distilled(failed.episodes[0], failed, METHOD)


def test_every_failed_group_receives_a_gradient_that_grpo_does_not_give():
    grpo, _ = grpo_signal(ALL_FAIL, METHOD, **FOLDING)
    signal, metrics = vista_signal(ALL_FAIL, METHOD, lessons_for(ALL_FAIL), **FOLDING)
    assert audit(grpo, ALL_FAIL).metrics["signal/recovered"] == 0.0
    ledger = audit(signal, ALL_FAIL)
    assert ledger.metrics["signal/recovered"] == 1.0
    assert [(e.kind, e.source, e.rows, e.tokens) for e in ledger.entries] == [
        ("all_fail", "experience", 4, 8)
    ]
    assert metrics["vista/all_fail_taught"] == 1.0
    before = {name: p.detach().clone() for name, p in make_learner().model.named_parameters()}
    still, _ = weights_after(grpo)
    moved, _ = weights_after(signal)
    assert all((before[name] == still[name]).all() for name in before)
    assert any((before[name] != moved[name]).any() for name in before)


def test_without_lessons_it_is_grpo_bit_for_bit():
    groups = make_groups({"p": [1, 0, 0, 1], "q": [0, 0, 0, 0], "r": [1, 1, 1, 1]})
    ours, _ = weights_after(vista_signal(groups, METHOD, {}, **FOLDING)[0])
    theirs, _ = weights_after(grpo_signal(groups, METHOD, **FOLDING)[0])
    assert all(bool((ours[name] == theirs[name]).all()) for name in ours)


def test_groups_that_all_succeeded_give_nothing():
    groups = make_groups({"p": [1, 1, 1, 1]})
    signal, _ = vista_signal(groups, METHOD, lessons_for(groups), **FOLDING)
    _, metrics = weights_after(signal)
    assert metrics["update/empty"] == 1.0


def test_dynamic_sampling_is_refused():
    with pytest.raises(ValidationError, match="from which VISTA learns"):
        VistaMethod(dynamic_sampling={"max_rounds": 2})


# ------------------------------------------------------------------------------------------------- weights


def test_entropy_weights_by_hand():
    # exp(-1 * (0, ln 3)) = (1, 1/3), mean 2/3
    np.testing.assert_allclose(entropy_weights(np.array([0.0, np.log(3)]), 1.0), [1.5, 0.5])
    assert (entropy_weights(np.array([0.1, 5.0]), 0.0) == 1.0).all()


@given(st.lists(st.floats(0, 2000), min_size=1, max_size=20), st.floats(0, 5))
def test_entropy_weights_have_mean_one_whatever_the_entropies(entropies, beta):
    weights = entropy_weights(np.array(entropies), beta)
    assert np.isfinite(weights).all()
    assert weights.mean() == pytest.approx(1.0)


def test_the_weights_are_scaled_over_all_distilled_tokens():
    lessons = {
        ("p", 1, 0): a_lesson(entropy=[0.0, 0.0]),
        ("p", 2, 0): a_lesson(entropy=[np.log(3), np.log(3)]),
        ("p", 0, 0): a_lesson(entropy=[50.0, 50.0]),  # a success: not distilled, and not in the mean
    }
    rows = rows_of(
        vista_signal(MIXED, METHOD.model_copy(update={"entropy_weight": 1.0}), lessons, **FOLDING)[0]
    )
    np.testing.assert_allclose(rows["p", 1].distill_coef, [0, 0, 1.5 / 16, 1.5 / 16])
    np.testing.assert_allclose(rows["p", 2].distill_coef, [0, 0, 0.5 / 16, 0.5 / 16])


# ------------------------------------------------------------------------------------------- on a real model


def real_lessons(learner, groups, context_of):
    """The learner itself as the teacher, behind another context."""
    segments = {(g.prompt_id, e.sample, 0): e.segments[0] for g in groups for e in g.episodes}
    ids = learner.likeliest(list(segments.values()), 5)
    rows = [
        SimpleNamespace(
            image_places=(), context_ids=context_of(s), sampled_ids=s.sampled_ids, loss_mask=s.loss_mask
        )
        for s in segments.values()
    ]
    read = learner.distributions(rows, ids, temperature=1.0, support_temperature=1.0)
    return {
        key: Lesson(np.arange(4), support, part.support, part.entropy, part.logprobs)
        for key, support, part in zip(segments, ids, read, strict=True)
    }


def test_an_empty_context_before_the_update_has_no_divergence_and_no_gradient():
    learner = make_learner()
    lessons = real_lessons(learner, ALL_FAIL, lambda segment: segment.context_ids)
    signal, _ = vista_signal(ALL_FAIL, METHOD, lessons, **FOLDING)
    metrics = learner.apply(signal)
    assert metrics["update/loss"] == pytest.approx(0.0, abs=1e-7)  # rounding of float32
    assert metrics["update/grad_norm"] == pytest.approx(0.0, abs=1e-6)


def test_a_context_pulls_the_policy_towards_what_it_says_behind_it():
    learner = make_learner(lr=3e-3)
    lessons = real_lessons(learner, ALL_FAIL, lambda segment: [7, 8, 9, *segment.context_ids])
    signal, _ = vista_signal(ALL_FAIL, METHOD, lessons, **FOLDING)
    losses = [learner.apply(signal)["update/loss"] for _ in range(20)]
    assert losses[-1] < 0.3 * losses[0]


def test_distributions_are_the_models_own_and_supports_sum_to_one():
    learner = make_learner()
    segment = MIXED[0].episodes[0].segments[0]
    (ids,) = learner.likeliest([segment], 5)
    (read,) = learner.distributions([segment], [ids], temperature=1.0, support_temperature=1.0)
    whole = [*segment.context_ids, *segment.sampled_ids]
    with torch.no_grad():
        table = torch.log_softmax(learner.model(torch.tensor([whole])).logits[0].double(), -1).numpy()
    places = [3, 4, 6, 7]  # the states in which the four learnable tokens were sampled
    np.testing.assert_allclose(read.logprobs, [table[p, whole[p + 1]] for p in places], atol=1e-5)
    np.testing.assert_allclose(
        read.entropy, [-(np.exp(table[p]) * table[p]).sum() for p in places], atol=1e-5
    )
    for token, p in enumerate(places):
        assert ids[token].tolist() == np.argsort(-table[p])[:5].tolist()
        own = table[p, ids[token]]
        np.testing.assert_allclose(read.support[token], own - np.log(np.exp(own).sum()), atol=1e-5)


def test_the_gradient_is_the_divergences_own():
    """Against autograd through the model's own forward pass, on one rollout."""
    groups = make_groups({"p": [0, 0]})
    learner = make_learner(max_grad_norm=1e9)
    reference = copy.deepcopy(learner.model)
    lessons = {
        key: lesson
        for key, lesson in real_lessons(learner, groups, lambda s: [3, *s.context_ids]).items()
        if key[1] == 0
    }
    signal, _ = vista_signal(groups, METHOD, lessons, **FOLDING)
    norm = learner.apply(signal)["update/grad_norm"]

    segment, lesson = groups[0].episodes[0].segments[0], lessons["p", 0, 0]
    logits = reference(torch.tensor([[*segment.context_ids, *segment.sampled_ids]])).logits[0]
    own = torch.log_softmax(logits[[3, 4, 6, 7]].gather(1, torch.from_numpy(lesson.support_ids)), 1)
    teacher = torch.from_numpy(lesson.support_logprobs).float()
    loss = (own.exp() * (own - teacher)).sum() / 8  # eight tokens in the batch, four of them distilled
    loss.backward()
    expected = torch.sqrt(sum((p.grad**2).sum() for p in reference.parameters() if p.grad is not None))
    assert norm == pytest.approx(float(expected), rel=1e-3)


def test_grpos_settings_hold_for_both_terms():
    constant = VistaMethod(aggregation="constant", entropy_weight=0.0)
    rows = rows_of(vista_signal(MIXED, constant, lessons_for(MIXED), **FOLDING)[0])
    # Dr.GRPO's denominator: 4 rollouts of at most 6 tokens
    np.testing.assert_allclose(rows["p", 1].distill_coef, [0, 0, 1 / 24, 1 / 24])
    assert GrpoMethod(aggregation="constant").aggregation == constant.aggregation
