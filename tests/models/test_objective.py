"""The one loss against hand-worked numbers: clipping by side and sign, GSPO, CISPO, k3, distillation, poison."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gleaner.models.objective import (
    TokenBatch,
    explained_variance,
    loss_metrics,
    policy_loss,
    value_loss,
)
from gleaner.models.signal import Objective

NAN, INF = float("nan"), float("inf")


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def make_batch(old, advantage, coef=None, row=None, **terms) -> TokenBatch:
    count = len(old)
    rows = torch.tensor(row if row is not None else [0] * count)
    return TokenBatch(
        row_N=rows,
        rows=int(rows.max()) + 1,
        pg_coef_N=tensor(coef if coef is not None else [1.0 / count] * count),
        advantage_N=tensor(advantage),
        old_logprobs_N=tensor(old),
        sampler_logprobs_N=terms.pop("sampler", torch.full((count,), NAN, dtype=torch.float64)),
        **{name: tensor(value) for name, value in terms.items()},
    )


def run(objective, batch, logprobs, support=None):
    """Loss, gradient on the log-probabilities, metrics."""
    logprobs_N = tensor(logprobs).requires_grad_()
    outputs = policy_loss(objective, batch, logprobs_N, torch.zeros_like(logprobs_N), support)
    gradient = torch.autograd.grad(outputs.loss, logprobs_N, allow_unused=True)[0]
    sums = {name: float(value) for name, value in outputs.sums.items()}
    return float(outputs.loss.detach()), gradient, loss_metrics([sums])


def test_at_ratio_one_the_loss_is_minus_the_mean_advantage():
    logprobs, advantage = [-1.0, -2.0, -0.5, -3.0], [1.0, -2.0, 0.5, 0.0]
    loss, gradient, metrics = run(Objective(), make_batch(logprobs, advantage), logprobs)
    assert loss == pytest.approx(-(1.0 - 2.0 + 0.5) / 4)
    torch.testing.assert_close(gradient, -tensor(advantage) / 4)
    assert metrics["approx_kl"] == 0
    assert metrics["clip_low"] == metrics["clip_high"] == 0


@pytest.mark.parametrize(
    ("advantage", "ratio", "moves"),
    [
        (1.0, 1.4, False),  # already likelier than allowed: no push further
        (1.0, 0.7, True),  # a good token that lost probability is pulled back
        (-1.0, 0.7, False),
        (-1.0, 1.4, True),
        (1.0, 1.2, True),
        (-1.0, 0.9, True),
    ],
)
def test_clipping_stops_the_gradient_on_one_side_only(advantage, ratio, moves):
    objective = Objective(clip_low=0.2, clip_high=0.28)
    loss, gradient, metrics = run(objective, make_batch([0.0], [advantage]), [math.log(ratio)])
    assert float(gradient[0]) == (pytest.approx(-ratio * advantage) if moves else 0.0)
    clipped = {"clip_low": advantage < 0 and not moves, "clip_high": advantage > 0 and not moves}
    assert {name: bool(metrics[name]) for name in clipped} == clipped
    assert loss == pytest.approx(-min(ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage))


def test_the_dual_clip_bounds_what_a_bad_token_can_cost():
    batch = make_batch([0.0], [-1.0])
    loss, gradient, _ = run(Objective(dual_clip=3.0), batch, [math.log(5.0)])
    assert loss == pytest.approx(3.0)
    assert gradient[0] == 0
    loss, gradient, _ = run(Objective(dual_clip=3.0), batch, [math.log(2.0)])
    assert (loss, float(gradient[0])) == (pytest.approx(2.0), pytest.approx(2.0))


def test_cispo_never_drops_a_token():
    objective = Objective(surrogate="cispo", cispo_max=5.0)
    logprobs = [math.log(7.0), -1.0]
    loss, gradient, metrics = run(objective, make_batch([0.0, -1.0], [2.0, -1.0]), logprobs)
    assert loss == pytest.approx(-(5.0 * 2.0 * math.log(7.0) + 1.0 * -1.0 * -1.0) / 2)
    torch.testing.assert_close(gradient, tensor([-5.0, 0.5]))  # -min(rho, 5) A / 2
    assert metrics["clip_high"] == 0.5


def test_unclipped_has_no_bounds():
    loss, gradient, _ = run(Objective(surrogate="unclipped"), make_batch([0.0], [1.0]), [math.log(4.0)])
    assert loss == pytest.approx(-4.0)
    assert float(gradient[0]) == pytest.approx(-4.0)


def test_the_sequence_ratio_is_the_geometric_mean_of_the_row():
    objective = Objective(ratio="sequence", clip_low=0.5, clip_high=0.5)
    batch = make_batch([0.0, 0.0, 0.0], [1.0, 1.0, -1.0], coef=[0.25, 0.25, 0.5], row=[0, 0, 1])
    loss, gradient, _ = run(objective, batch, [0.2, 0.4, -0.1])
    first, second = math.exp(0.3), math.exp(-0.1)
    assert loss == pytest.approx(-(0.5 * first - 0.5 * second))
    # d exp(mean) / d logp_t = exp(mean) / n, once for each of the row's tokens
    torch.testing.assert_close(gradient, tensor([-0.25 * first, -0.25 * first, 0.5 * second]))


def test_the_sequence_ratio_does_not_change_with_tokens_at_its_mean():
    objective = Objective(ratio="sequence", surrogate="unclipped")
    short = run(objective, make_batch([0.0, 0.0], [1.0, 1.0], coef=[0.5, 0.5]), [0.1, 0.3])[0]
    longer = make_batch([0.0] * 4, [1.0] * 4, coef=[0.25] * 4)
    assert run(objective, longer, [0.1, 0.3, 0.2, 0.2])[0] == pytest.approx(short)


@pytest.mark.parametrize("poison", [NAN, -INF, INF, -200.0, 200.0])
@pytest.mark.parametrize(
    "objective",
    [Objective(), Objective(dual_clip=3.0), Objective(surrogate="cispo"), Objective(surrogate="unclipped")],
    ids=["clip", "dual", "cispo", "unclipped"],
)
def test_a_token_without_coefficient_cannot_poison_the_loss(objective, poison):
    clean = run(objective, make_batch([-1.0, -2.0], [1.0, 1.0], coef=[0.5, 0.0]), [-1.1, -2.0])
    dirty = run(objective, make_batch([-1.0, poison], [1.0, 1.0], coef=[0.5, 0.0]), [-1.1, -2.0])
    no_advantage = run(objective, make_batch([-1.0, poison], [1.0, 0.0], coef=[0.5, 0.5]), [-1.1, -2.0])
    for loss, gradient, metrics in (dirty, no_advantage):
        assert loss == clean[0]
        assert torch.equal(gradient, clean[1])
        assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("poison", [NAN, -INF])
def test_an_unknown_token_counts_as_unmoved_in_the_sequence_ratio(poison):
    objective = Objective(ratio="sequence")
    loss, gradient, _ = run(objective, make_batch([-1.0, poison], [1.0, 1.0], coef=[0.5, 0.0]), [-1.1, -2.0])
    assert loss == pytest.approx(-0.5 * math.exp(-0.05))
    assert torch.isfinite(gradient).all()


def test_a_dead_row_beside_a_live_one_gets_no_gradient():
    for ratio in ("token", "sequence"):
        batch = make_batch([-1.0, -INF, -1.0], [1.0, 0.0, 0.0], row=[0, 1, 1])
        loss, gradient, _ = run(Objective(ratio=ratio), batch, [-1.0, -2.0, -3.0])
        assert loss == pytest.approx(-1 / 3)
        assert gradient[1] == gradient[2] == 0


def test_k3_is_zero_at_the_reference_and_pulls_towards_it():
    at = make_batch([-1.0], [0.0], kl_coef_N=[0.5], reference_logprobs_N=[-1.0])
    assert run(Objective(), at, [-1.0])[0] == 0
    away = make_batch([-1.0], [0.0], kl_coef_N=[0.5], reference_logprobs_N=[-2.0])
    loss, gradient, metrics = run(Objective(), away, [-1.0])
    k3 = math.exp(-1) + 1 - 1
    assert loss == pytest.approx(0.5 * k3)
    assert float(gradient[0]) == pytest.approx(0.5 * (1 - math.exp(-1)))  # downhill lowers logp, towards -2
    assert metrics["kl_reference"] == pytest.approx(k3)


def test_off_policy_rows_of_negative_advantage_are_dropped_and_stay_in_the_denominator():
    sampler = tensor([-0.5, -0.5, -0.5, -1.0])
    batch = make_batch([-1.0] * 4, [-1.0, -1.0, 1.0, -1.0], row=[0, 0, 1, 2], sampler=sampler)
    loss, gradient, metrics = run(Objective(off_policy_delta=0.4), batch, [-1.0] * 4)
    torch.testing.assert_close(gradient, tensor([0.0, 0.0, -0.25, 0.25]))
    assert loss == pytest.approx(0)
    assert metrics["off_policy"] == 0.5
    assert run(Objective(off_policy_delta=0.6), batch, [-1.0] * 4)[1][0] == 0.25


def test_sampled_distillation_raises_what_the_teacher_likes_better():
    batch = make_batch(
        [-1.0, -1.0, -1.0], [0.0] * 3, sampled_coef_N=[0.5, 0.5, 0.0], teacher_logprobs_N=[-0.4, -3.0, NAN]
    )
    loss, gradient, _ = run(Objective(), batch, [-1.0, -1.0, -1.0])
    torch.testing.assert_close(gradient, tensor([-0.3, 1.0, 0.0]))  # -coef * rho * (teacher - logp)
    assert loss == pytest.approx(-0.5 * 0.6 + 0.5 * 2.0)


def test_sampled_distillation_is_not_clipped_and_uses_the_current_policy():
    batch = make_batch([-1.0], [0.0], sampled_coef_N=[1.0], teacher_logprobs_N=[-0.2])
    _, gradient, _ = run(Objective(), batch, [-0.5])
    assert float(gradient[0]) == pytest.approx(-math.exp(0.5) * 0.3)


def test_a_teacher_that_agrees_gives_no_gradient():
    batch = make_batch([-1.0], [0.0], sampled_coef_N=[1.0], teacher_logprobs_N=[-0.7])
    loss, gradient, _ = run(Objective(), batch, [-0.7])
    assert (loss, float(gradient[0])) == (0, 0)


def test_topk_distillation_is_reverse_kl_on_the_renormalised_support():
    student = torch.log_softmax(tensor([[0.3, -0.2, 0.5]]), 1).requires_grad_()
    teacher = tensor([[-1.0, -2.0, -0.7]])  # not normalised on the support
    batch = make_batch([-1.0], [0.0], support_coef_M=[0.25])
    batch = replace(batch, support_logprobs_MK=teacher)
    outputs = policy_loss(Objective(), batch, tensor([-1.0]), tensor([0.0]), student)
    p, q = student.detach().exp()[0], torch.softmax(teacher, 1)[0]
    assert float(outputs.loss.detach()) == pytest.approx(0.25 * float((p * (p / q).log()).sum()))
    same = replace(batch, support_logprobs_MK=student.detach() - 3.0)
    assert float(
        policy_loss(Objective(), same, tensor([-1.0]), tensor([0.0]), student).loss.detach()
    ) == pytest.approx(0, abs=1e-12)


def test_with_its_own_terms_at_zero_the_loss_is_the_baseline_bit_for_bit():
    logprobs, old = [-1.3, -0.2, -2.4], [-1.0, -0.5, -2.0]
    baseline = run(Objective(), make_batch(old, [0.7, -1.1, 0.3]), logprobs)
    zeros = make_batch(
        old, [0.7, -1.1, 0.3], sampled_coef_N=[0.0] * 3, teacher_logprobs_N=[NAN, -1.0, INF],
        kl_coef_N=[0.0] * 3, reference_logprobs_N=[NAN, -1.0, -INF],
    )  # fmt: skip
    found = run(Objective(), zeros, logprobs)
    assert found[0] == baseline[0]
    assert torch.equal(found[1], baseline[1])


@given(
    st.lists(st.tuples(st.floats(-2, 2), st.floats(-3, 3), st.floats(0.001, 1)), min_size=1, max_size=12),
    st.integers(1, 11),
)
def test_the_loss_adds_up_over_micro_batches(tokens, cut):
    drift, advantage, coef = (list(column) for column in zip(*tokens, strict=True))
    old = [-3.0] * len(tokens)
    logprobs = [-3.0 + value for value in drift]
    whole = run(Objective(), make_batch(old, advantage, coef), logprobs)[0]
    parts = 0.0
    for part in (slice(0, cut), slice(cut, None)):
        if old[part]:
            parts += run(Objective(), make_batch(old[part], advantage[part], coef[part]), logprobs[part])[0]
    assert parts == pytest.approx(whole, rel=1e-9, abs=1e-9)


def test_the_value_loss_is_half_the_squared_error_and_its_clip_bounds_the_move():
    values, returns, old = tensor([0.5, 2.0]), tensor([1.0, 0.0]), tensor([0.5, 0.0])
    coef = tensor([0.5, 0.5])
    assert float(value_loss(values, returns, old, coef, None)) == pytest.approx(0.5 * 0.5 * (0.25 + 4.0))
    clipped = value_loss(tensor([-2.0]), tensor([-2.0]), tensor([0.0]), tensor([1.0]), 0.5)
    assert float(clipped) == pytest.approx(0.5 * 1.5**2)  # the larger of exact and clipped error
    assert float(value_loss(tensor([NAN]), tensor([1.0]), tensor([NAN]), tensor([0.0]), 0.5)) == 0


def test_explained_variance_says_none_where_there_is_nothing_to_explain():
    assert explained_variance(tensor([0.1, 0.9]), tensor([1.0, 1.0])) is None  # constant returns
    assert explained_variance(tensor([0.3]), tensor([1.0])) is None  # a single token
    assert explained_variance(tensor([1.0, 0.0]), tensor([1.0, 0.0])) == 1
    assert explained_variance(tensor([0.4, 0.4]), tensor([1.0, 0.0])) == 0  # constant values
