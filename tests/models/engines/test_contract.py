"""What every engine promises, on the same cases: log-probabilities, stops, groups, turns, updates."""

import importlib.util
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chisquare

from gleaner.conf.schema import AnyEngine, SamplingSettings, TinyPolicy, TransformersEngine, VllmEngine
from gleaner.models.engines import make_engine
from gleaner.models.engines.base import Completion, Engine, Turn
from gleaner.models.policy import Policy, build_policy, load_policy, save_policy
from tests.models.grid import Grid

CONTEXT = 128
ENGINES: list[Any] = [
    pytest.param(TransformersEngine(tokens_per_forward=256), id="transformers"),
    pytest.param(
        VllmEngine(kv_cache_gb=1, max_num_seqs=16, enforce_eager=True),
        id="vllm",
        marks=[
            pytest.mark.slow,
            pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
        ],
    ),
]


def sharp_policy(seed: int) -> Policy:
    """A tiny policy whose next-token distribution is far from uniform. Heads of 32: vLLM's CPU kernels have no 16."""
    policy = build_policy(TinyPolicy(hidden=64, heads=2, context=CONTEXT), Grid(), seed)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(2)
    return policy


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("policies")
    for seed in (0, 1):
        save_policy(sharp_policy(seed), root / str(seed))
    return [root / "0", root / "1"]


@pytest.fixture(scope="module", params=ENGINES)
def resident(request: pytest.FixtureRequest, folders: list[Path]) -> Iterator[Engine]:
    settings: AnyEngine = request.param
    engine = make_engine(settings, context_limit=CONTEXT, folder=folders[0], version="0")
    yield engine
    close = getattr(engine, "close", None)
    if close is not None:
        close()


@pytest.fixture
def engine(resident: Engine, folders: list[Path]) -> Engine:
    if resident.version != "0":
        resident.load(folders[0], "0")
    return resident


@pytest.fixture(scope="module")
def oracle(folders: list[Path]) -> Policy:
    return load_policy(folders[0])


def plain(policy: Policy, context: list[int], ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """(T, V) log-probabilities of a plain forward pass at the places of `ids`."""
    with torch.inference_mode():
        logits = policy.model(torch.tensor([context + ids])).logits[0, len(context) - 1 : -1]
    return (logits.float() / temperature).log_softmax(-1)


def chosen(table_TV: torch.Tensor, ids: list[int]) -> list[float]:
    return table_TV[range(len(ids)), ids].tolist()


def context(row: int, length: int = 12) -> list[int]:
    return [5 + (7 * row + 3 * place) % 250 for place in range(length)]


def sample(engine: Engine, contexts: list[list[int]], **settings: Any) -> list[Completion]:
    sampling = SamplingSettings(**({"max_new_tokens": 16} | settings))
    with engine.session(sampling) as session:
        return session.sample([Turn(row, ids, 1000 + row) for row, ids in enumerate(contexts)])


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_sampled_logprobs_are_those_of_a_plain_forward_pass(
    engine: Engine, oracle: Policy, temperature: float
) -> None:
    # At temperature 0.6 too: log-probabilities at 1.0 would make the first ratio wrong before any update.
    contexts = [context(row, 3 + 5 * (row % 4)) for row in range(12)]
    for ids, completion in zip(contexts, sample(engine, contexts, temperature=temperature), strict=True):
        expected = torch.tensor(chosen(plain(oracle, ids, completion.ids, temperature), completion.ids))
        got = torch.tensor(completion.logprobs)
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
        torch.testing.assert_close((expected - got).exp(), torch.ones_like(got), atol=1e-4, rtol=0)


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_scores_and_supports_are_those_of_a_plain_forward_pass(
    engine: Engine, oracle: Policy, temperature: float
) -> None:
    contexts = [context(row, 1 + 9 * (row % 3)) for row in range(7)]
    ids = [context(row + 50, [1, 30, 4, 17, 2, 9, 1][row]) for row in range(7)]
    scored = engine.score(contexts, ids, temperature=temperature, support=5)
    for before, row, got in zip(contexts, ids, scored, strict=True):
        table = plain(oracle, before, row, temperature)
        torch.testing.assert_close(
            torch.tensor(got.logprobs), torch.tensor(chosen(table, row)), atol=1e-4, rtol=0
        )
        assert got.support_logprobs is not None
        assert got.support_ids is not None
        torch.testing.assert_close(
            torch.tensor(got.support_logprobs), table.topk(5).values, atol=1e-4, rtol=0
        )
        at = torch.tensor(got.support_ids)
        torch.testing.assert_close(table.gather(1, at), table.topk(5).values, atol=1e-4, rtol=0)


def test_sampled_logprobs_and_scores_agree(engine: Engine) -> None:
    contexts = [context(row) for row in range(6)]
    completions = sample(engine, contexts, temperature=0.6)
    scored = engine.score(contexts, [completion.ids for completion in completions], temperature=0.6)
    for completion, score in zip(completions, scored, strict=True):
        assert completion.logprobs == pytest.approx(score.logprobs, abs=1e-4)
        assert score.support_ids is None


def test_a_turn_ends_with_its_stop_token_or_at_the_limit(engine: Engine, oracle: Policy) -> None:
    stop = oracle.tokenizer.eos_token_id
    completions = sample(engine, [context(row) for row in range(64)], max_new_tokens=40)
    reasons = Counter(completion.finish_reason for completion in completions)
    assert reasons["stop"] > 0
    assert reasons["length"] > 0
    for completion in completions:
        assert len(completion.logprobs) == len(completion.ids)
        assert stop not in completion.ids[:-1]
        if completion.finish_reason == "stop":
            assert completion.ids[-1] == stop
        else:
            assert completion.ids[-1] != stop
            assert len(completion.ids) == 40


def test_a_turn_ends_where_the_context_is_full(engine: Engine) -> None:
    contexts = [context(0, CONTEXT - 5), context(1, 8), context(2, CONTEXT - 1)]
    completions = sample(engine, contexts, max_new_tokens=64)
    assert len(completions[0].ids) <= 5
    assert len(completions[2].ids) == 1
    assert all(len(ids) + len(c.ids) <= CONTEXT for ids, c in zip(contexts, completions, strict=True))


def test_a_group_that_shares_its_prompt_equals_rows_on_their_own(engine: Engine, oracle: Policy) -> None:
    shared = [context(0, 20)] * 4 + [context(9, 7)] * 4
    together = sample(engine, shared)
    assert len({tuple(completion.ids) for completion in together[:4]}) > 1
    for row, completion in enumerate(together):
        with engine.session(SamplingSettings(max_new_tokens=16)) as session:
            (alone,) = session.sample([Turn(row, shared[row], 1000 + row)])
        assert alone.ids == completion.ids
        assert alone.logprobs == pytest.approx(completion.logprobs, abs=1e-4)


def test_later_turns_equal_a_forward_pass_over_all_ids(engine: Engine, oracle: Policy) -> None:
    rows = 10
    ids = {row: context(row % 4, 9 + row % 4) for row in range(rows)}
    with engine.session(SamplingSettings(max_new_tokens=9)) as session:
        for turn in range(4):
            # Rows leave, and row 3 sits one turn out.
            active = [row for row in range(rows) if row < rows - 2 * turn and not (turn == 1 and row == 3)]
            if turn == 2:
                ids[20] = context(77, 5)
                active.insert(2, 20)
            completions = session.sample([Turn(row, ids[row], 100 * turn + row) for row in active])
            for row, completion in zip(active, completions, strict=True):
                expected = chosen(plain(oracle, ids[row], completion.ids), completion.ids)
                assert completion.logprobs == pytest.approx(expected, abs=1e-4)
                ids[row] = ids[row] + completion.ids + context(row + turn, 1 + (row + turn) % 6)


def test_the_same_shard_and_seeds_give_the_same_tokens(engine: Engine) -> None:
    contexts = [context(row % 3, 10) for row in range(12)]
    first, second = sample(engine, contexts), sample(engine, contexts)
    assert [completion.ids for completion in first] == [completion.ids for completion in second]
    assert [completion.logprobs for completion in first] == [completion.logprobs for completion in second]


def test_other_seeds_give_other_tokens(engine: Engine) -> None:
    with engine.session(SamplingSettings(max_new_tokens=16)) as session:
        rows = session.sample([Turn(row, context(0), seed) for row, seed in enumerate([5, 6, 5])])
    assert rows[0].ids != rows[1].ids
    assert rows[0].ids == rows[2].ids


def test_an_update_reaches_the_next_sample_and_score(engine: Engine, folders: list[Path]) -> None:
    contexts, ids = [context(row, 16) for row in range(4)], [context(row + 30, 10) for row in range(4)]
    before = engine.score(contexts, ids)
    engine.load(folders[1], "1")
    assert engine.version == "1"
    new = load_policy(folders[1])
    for row, (got, old) in enumerate(zip(engine.score(contexts, ids), before, strict=True)):
        assert got.logprobs == pytest.approx(chosen(plain(new, contexts[row], ids[row]), ids[row]), abs=1e-4)
        assert got.logprobs != pytest.approx(old.logprobs, abs=0.1)
    for before_ids, completion in zip(contexts, sample(engine, contexts), strict=True):
        expected = chosen(plain(new, before_ids, completion.ids), completion.ids)
        assert completion.logprobs == pytest.approx(expected, abs=1e-4)


def test_frequencies_match_the_distribution(engine: Engine, oracle: Policy) -> None:
    prompt, rows = context(1, 6), 3000
    with engine.session(SamplingSettings(max_new_tokens=1)) as session:
        completions = session.sample([Turn(row, prompt, 7919 * row) for row in range(rows)])
    counts = Counter(completion.ids[0] for completion in completions)
    probability = plain(oracle, prompt, [0])[0].exp().double()
    frequent = [token for token in range(len(probability)) if probability[token] * rows >= 8]
    expected = [float(probability[token]) * rows for token in frequent]
    observed = [counts[token] for token in frequent]
    rest = rows - sum(expected)
    assert chisquare([*observed, rows - sum(observed)], [*expected, rest]).pvalue > 1e-4
