"""Monte-Carlo values, by hand and against a policy whose continuations are known."""

import numpy as np
import pytest

from gleaner.conf.schema import SamplingSettings, TinyPolicy, TransformersEngine
from gleaner.models.chat import Chat
from gleaner.models.continuations import against_truth, continued, probes
from gleaner.models.engines.transformers import TransformersEngine as Engine
from gleaner.models.policy import build_policy
from gleaner.models.records import Segment
from tests.models.grid import Grid


def segment(tokens):
    ids = list(range(20, 20 + tokens))
    return Segment(
        "p", 0, 0, [5, 6], ids, [1] * tokens, [-1.0] * tokens, "v", "d", 3, "stop", "", [], {}, []
    )  # fmt: skip


def test_places_are_spread_evenly_from_the_start():
    assert [p.token for p in probes(segment(16), 8)] == [0, 2, 4, 6, 8, 10, 12, 14]
    assert [p.token for p in probes(segment(3), 8)] == [0, 1, 2]
    assert probes(segment(0), 8) == []


def test_errors_by_hand():
    """Truths 0.5 and 1; the noise of the first is 0.25 * (4/3) / 4 = 1/12 and of the second 0: 1/24 on average."""
    rewards = np.array([[0.0, 1.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    found = against_truth(np.array([0.7, 0.9]), rewards)
    assert found["mc/error"] == pytest.approx((0.04 + 0.01) / 2 - 1 / 24)
    assert found["mc/error_mean"] == pytest.approx(0.0625 - 1 / 24)
    assert found["mc/bias"] == pytest.approx((0.2 - 0.1) / 2)
    assert found["mc/correlation"] == pytest.approx(1.0)


def test_the_noise_that_is_taken_off_is_the_noise_that_is_there():
    """Perfect values have no error, whatever the number of continuations."""
    random = np.random.default_rng(0)
    truth = random.uniform(0, 1, 40_000)
    for count in (2, 16):
        rewards = (random.random((40_000, count)) < truth[:, None]).astype(float)
        found = against_truth(truth, rewards)
        assert abs(found["mc/error"]) < 0.005
        assert found["mc/explained"] == pytest.approx(1.0, abs=0.06)
        assert against_truth(np.full(40_000, 0.5), rewards)["mc/explained"] == pytest.approx(0.0, abs=0.06)


def test_where_truth_does_not_vary_nothing_is_explained():
    found = against_truth(np.array([0.1, 0.2]), np.ones((2, 4)))
    assert "mc/explained" not in found
    assert "mc/correlation" not in found


def test_continuations_begin_with_their_prefix_and_have_seeds_of_their_own():
    policy = build_policy(TinyPolicy(hidden=16, heads=2, layers=1, context=64), Grid(), 0)
    engine = Engine(TransformersEngine(), context_limit=64, policy=policy, version="v")
    chat = Chat(policy.tokenizer, multi_turn=False)
    places = probes(segment(6), 3)
    made = continued(engine, chat, places, 4, SamplingSettings(max_new_tokens=8), 0)
    assert len(made) == 12
    assert [s.sample for s in made] == list(range(12))
    for index, one in enumerate(made):
        prefix = places[index // 4].token
        assert one.sampled_ids[:prefix] == segment(6).sampled_ids[:prefix]
        assert len(one.sampled_ids) <= 8
        assert len(one.logprobs) == sum(one.loss_mask) == len(one.sampled_ids) - prefix
        assert one.transcript == [{"role": "assistant", "content": one.text}]
    assert len({tuple(s.sampled_ids) for s in made[:4]}) > 1
    again = continued(engine, chat, places, 4, SamplingSettings(max_new_tokens=8), 0)
    assert [s.sampled_ids for s in again] == [s.sampled_ids for s in made]
