"""What a critic may read, and what its values are worth. Unbiasedness by exact enumeration of a whole group."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gleaner.conf.schema import CriticSettings, TinyPolicy
from gleaner.models.chat import Chat
from gleaner.models.critic import (
    Choice,
    Judged,
    Sibling,
    calibration_error,
    choose_references,
    critic_messages,
    explained,
    shown_labels,
    squared_errors_by_prompt,
    value_quality,
    without_middle,
)
from gleaner.models.environments.household import Household
from gleaner.models.policy import build_tiny, train_tokenizer

CONTRAST = CriticSettings(dedupe="none")


def random_of(seed=0):
    return np.random.Generator(np.random.Philox(key=seed))


def siblings_of(outcomes):
    return [Sibling(place, f"text {place}", won) for place, won in enumerate(outcomes)]


def composition(choice):
    successes = sum(reference.success for reference in choice.references)
    return successes, len(choice.references) - successes, choice.answer


# ------------------------------------------------------------------------------------------------ the table

TABLE = {  # (successes, failures) among the siblings → (successes shown, failures shown, answer shown)
    "contrast": {(3, 3): (1, 1, False), (1, 1): (1, 1, False), (3, 0): (2, 0, False), (1, 0): (1, 0, False),
                 (0, 3): (0, 2, True), (0, 1): (0, 1, True), (0, 0): (0, 0, True)},
    "success": {(3, 3): (2, 0, False), (1, 2): (1, 0, False), (0, 3): (0, 0, True)},
    "failure": {(3, 3): (0, 2, False), (3, 0): (0, 0, False), (0, 1): (0, 1, False)},
    "answer": {(3, 3): (0, 0, True), (0, 3): (0, 0, True)},
    "none": {(3, 3): (0, 0, False), (0, 3): (0, 0, False)},
}  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "offered", "shown"), [(rule, *row) for rule, rows in TABLE.items() for row in rows.items()]
)
def test_the_case_table(rule, offered, shown):
    siblings = siblings_of([True] * offered[0] + [False] * offered[1])
    chosen = choose_references(siblings, CriticSettings(context=rule), random_of())
    assert composition(chosen) == shown


def test_the_order_of_success_and_failure_says_nothing():
    siblings = siblings_of([True, False, True, False])
    first = [
        choose_references(siblings, CONTRAST, random_of(seed)).references[0].success for seed in range(2000)
    ]
    assert np.mean(first) == pytest.approx(0.5, abs=3 * 0.5 / math.sqrt(2000))


def test_every_sibling_is_as_likely_as_any_other_of_its_polarity():
    siblings = siblings_of([True, True, True, False])
    counts = Counter(
        reference.place
        for seed in range(3000)
        for reference in choose_references(siblings, CONTRAST, random_of(seed)).references
        if reference.success
    )
    assert all(counts[place] == pytest.approx(1000, abs=100) for place in range(3))


@given(
    outcomes=st.lists(st.booleans(), min_size=0, max_size=7),
    texts=st.lists(st.sampled_from("abc"), min_size=7, max_size=7),
    rule=st.sampled_from(["contrast", "success", "failure", "answer", "none"]),
    dedupe=st.sampled_from(["siblings", "none"]),
    seed=st.integers(0, 2**32),
    target=st.sampled_from("abcd"),
)
def test_the_choice_depends_on_the_siblings_alone(outcomes, texts, rule, dedupe, seed, target):
    siblings = [Sibling(place, texts[place], won) for place, won in enumerate(outcomes)]
    options = CriticSettings(context=rule, dedupe=dedupe)
    chosen = choose_references(siblings, options, random_of(seed), target_text=target)
    assert chosen == choose_references(siblings, options, random_of(seed), target_text="another")
    assert len({reference.place for reference in chosen.references}) == len(chosen.references) <= 2
    assert all(reference in siblings for reference in chosen.references)
    if dedupe == "siblings":
        assert len({reference.text for reference in chosen.references}) == len(chosen.references)


def test_labels_are_true_drawn_or_hidden():
    references = siblings_of([True, False])
    assert shown_labels(references, CriticSettings(), random_of()) == ["[CORRECT]", "[INCORRECT]"]
    assert shown_labels(references, CriticSettings(labels="hidden"), random_of()) == ["", ""]
    drawn = [
        shown_labels(references, CriticSettings(labels="shuffled"), random_of(seed))[0] for seed in range(500)
    ]
    assert Counter(drawn)["[CORRECT]"] == pytest.approx(250, abs=40)


# ----------------------------------------------------------------------------------- unbiased, by enumeration

P, G = 0.2, 8
"""A bandit of one token: it succeeds with probability P = sigmoid(theta); d log pi / d theta is 1 - P or -P."""


def baseline_bias(rule):
    """E[d log pi(a_0) * V(I)] over all groups, exactly: what the baseline adds to the true gradient P (1 - P).

    V is the share of successes among the references, 0.5 with none: any function of the context would do.

    Args:
        rule: outcomes of the group (target first) → the distribution of the context's value, as (probability, V).
    """
    bias = 0.0
    for outcomes in itertools.product([False, True], repeat=G):
        won = sum(outcomes)
        probability = P**won * (1 - P) ** (G - won)
        score = (1 - P) if outcomes[0] else -P
        bias += probability * score * sum(p * value for p, value in rule(outcomes))
    return bias


def share(choice: Choice):
    count = len(choice.references)
    return sum(reference.success for reference in choice.references) / count if count else 0.5


def drawn_by(options, draws=1, text_of=None):
    """The rule of `choose_references`; the value depends on the composition alone, which the case table fixes."""
    cache = {}

    def rule(outcomes):
        texts = text_of(outcomes) if text_of else [str(place) for place in range(G)]
        key = (tuple(outcomes[1:]), tuple(texts[1:]), texts[0] if options.dedupe == "target" else None)
        if key not in cache:
            siblings = [Sibling(place, texts[place], outcomes[place]) for place in range(1, G)]
            found = [
                share(choose_references(siblings, options, random_of(seed), texts[0]))
                for seed in range(draws)
            ]
            cache[key] = [(1 / draws, value) for value in found]
        return cache[key]

    return rule


def by_outcome(outcomes):
    """A bandit's text is its action, and the action decides the verdict: all successes say the same."""
    return ["won" if won else "lost" for won in outcomes]


@pytest.mark.parametrize("context", ["contrast", "success", "failure"])
def test_the_baseline_adds_nothing_to_the_gradient(context):
    assert baseline_bias(drawn_by(CriticSettings(context=context, dedupe="none"))) == pytest.approx(
        0, abs=1e-12
    )
    deduplicated = drawn_by(CriticSettings(context=context, dedupe="siblings"), text_of=by_outcome)
    assert baseline_bias(deduplicated) == pytest.approx(0, abs=1e-12)


def test_deduplication_against_the_target_is_caught_with_its_bias():
    """A success takes all successes away from its siblings' references, and V says so."""
    biased = baseline_bias(drawn_by(CriticSettings(dedupe="target"), text_of=by_outcome))
    # A success leaves the failures (V = 0) unless all seven siblings succeed too (nothing is left: V = 0.5); a failure
    # leaves the successes (V = 1) unless all seven fail. So E[V|won] = 0.5 P^7 and E[V|lost] = 1 - 0.5 (1 - P)^7, and
    # the bias is P (1 - P) (E[V|won] - E[V|lost]).
    expected = P * (1 - P) * (0.5 * P**7 - 1 + 0.5 * (1 - P) ** 7)
    assert biased == pytest.approx(expected, abs=1e-12)
    assert abs(biased) > 0.1 * P * (1 - P)


def test_one_composition_a_group_is_caught_with_its_bias():
    """If the whole group decides between a pair and two of a kind, a lone success knows what it is: it is shown two
    failures (V = 0) where a failure beside one success is shown a pair (V = 0.5)."""

    def rule(outcomes):
        mixed = any(outcomes) and not all(outcomes)
        won, lost = sum(outcomes[1:]), G - 1 - sum(outcomes[1:])
        if mixed:
            # A pair where the siblings have both; else the composition of the group, filled up from what there is.
            return [(1.0, 0.5 if won and lost else (1.0 if won else 0.0))]
        return [(1.0, 0.6 if all(outcomes) else 0.4)]  # an unlike group is marked as such

    siblings_fail, siblings_win = (1 - P) ** 7, P**7
    # V differs between a won and a lost target only where its siblings are all alike.
    expected = P * (1 - P) * (siblings_fail * (0.0 - 0.4) + siblings_win * (0.6 - 1.0))
    assert baseline_bias(rule) == pytest.approx(expected, abs=1e-12)
    assert abs(baseline_bias(rule)) > 0.01


def test_the_target_in_its_own_context_is_caught_with_its_bias():
    """V = mean of the whole group, which holds the target: the bias is that of the target's own eighth."""
    biased = baseline_bias(lambda outcomes: [(1.0, sum(outcomes) / G)])
    assert biased == pytest.approx(P * (1 - P) / G, abs=1e-12)


def test_resampling_the_target_alone_leaves_its_context_as_it_was():
    """Over all groups of a prompt, mixed or not: the intervention that tells a leak from a correlation."""
    for options, leaks in ((CriticSettings(), False), (CriticSettings(dedupe="target"), True)):
        rule = drawn_by(options, text_of=by_outcome)
        distribution = {True: Counter(), False: Counter()}
        for others in itertools.product([False, True], repeat=G - 1):
            weight = P ** sum(others) * (1 - P) ** (G - 1 - sum(others))
            for target in (True, False):
                for probability, value in rule((target, *others)):
                    distribution[target][value] += weight * probability
        same = all(
            distribution[True][v] == pytest.approx(distribution[False][v])
            for v in distribution[True] | distribution[False]
        )
        assert same == (not leaks)


def test_what_the_siblings_say_can_only_help_to_foretell():
    """Two equally likely prompts that look alike (P 0.1 and 0.7): the best guess given the number of successes among
    seven siblings leaves less variance than the best guess without."""
    rates = (0.1, 0.7)
    blind = sum(rates) / 2
    without = blind * (1 - blind)
    seen = 0.0
    for won in range(G):
        chance = [0.5 * math.comb(7, won) * p**won * (1 - p) ** (7 - won) for p in rates]
        best = sum(c * p for c, p in zip(chance, rates, strict=True)) / sum(chance)
        seen += sum(chance) * best * (1 - best)
    assert seen < without
    knowing_the_rate = 0.3**2 / without  # Var(p) / Var(R): no reader of siblings explains more
    assert 0.3 < 1 - seen / without < knowing_the_rate


# -------------------------------------------------------------------------------------------- what it reads


@pytest.fixture(scope="module")
def chat(household):
    return Chat(build_tiny(TinyPolicy(hidden=16, heads=2), train_tokenizer(household, 400)).tokenizer)


@pytest.fixture(scope="module")
def household():
    from gleaner.conf.schema import HouseholdEnvironment

    return Household(HouseholdEnvironment(), 0)


def test_the_prompt_of_a_plain_critic_is_the_policys():
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert critic_messages(messages, [], None) == messages


def test_references_and_answer_follow_the_problem():
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "What is 2 + 3?"}]
    system, user = critic_messages(messages, [("[CORRECT]", "5"), ("[INCORRECT]", "6")], "5")
    assert system == messages[0]
    assert user["content"] == (
        "What is 2 + 3?\n\nReference attempt 1 [CORRECT]:\n5\n\nReference attempt 2 [INCORRECT]:\n6\n\n"
        "Ground-truth answer: 5\n\nAttempt to evaluate:"
    )
    assert messages[1]["content"] == "What is 2 + 3?"  # the policy's prompt is left as it was


def test_a_long_reference_loses_its_middle(chat):
    text = "first " + "go to the drawer " * 50 + "last"
    kept, cut = without_middle(text, chat, 20)
    assert cut
    assert kept.startswith("first")
    assert kept.endswith("last")
    assert len(chat.answer_ids(kept, ended=False)) <= 20 + 6  # and the mark of the cut
    assert without_middle("short", chat, 20) == ("short", False)


# --------------------------------------------------------------------------------------------- how good it is


def test_value_quality_by_hand():
    judged = [
        Judged("a", np.array([0.5, 0.9]), 1.0, True),
        Judged("a", np.array([0.4, 0.2]), 0.0, False),
        Judged("b", np.array([0.1]), 0.0, False),
        Judged("b", np.array([0.1]), 1.0, True),
    ]
    found = value_quality(judged)
    means, rewards = np.array([0.7, 0.3, 0.1, 0.1]), np.array([1.0, 0, 0, 1])
    assert found["value/explained_variance"] == pytest.approx(1 - np.var(rewards - means) / 0.25)
    assert found["value/contrast"] == pytest.approx((0.7 + 0.1) / 2 - (0.3 + 0.1) / 2)
    assert found["value/ranking"] == pytest.approx((1 + 0.5) / 2)  # the tie counts half
    assert found["value/top1"] == pytest.approx((1 + 0.5) / 2)
    assert found["value/error"] == pytest.approx(np.mean([(0.25 + 0.01) / 2, (0.16 + 0.04) / 2, 0.01, 0.81]))
    assert squared_errors_by_prompt(judged) == pytest.approx({"a": 0.115, "b": 0.41})
    first, last = np.array([0.5, 0.4, 0.1, 0.1]), np.array([0.9, 0.2, 0.1, 0.1])
    assert found["value/explained_variance_0"] == pytest.approx(1 - np.var(rewards - first) / 0.25)
    assert found["value/explained_variance_9"] == pytest.approx(1 - np.var(rewards - last) / 0.25)


def test_a_constant_explains_nothing_and_the_truth_everything():
    rewards = np.array([0.0, 1.0, 1.0, 0.0])
    assert explained(np.full(4, 0.3), rewards) == 0
    assert explained(rewards, rewards) == 1
    assert explained(np.zeros(4), np.ones(4)) is None


def test_what_is_undefined_is_left_out():
    found = value_quality([Judged("a", np.array([0.2]), 0.0, False)] * 3)
    assert not {"value/explained_variance", "value/contrast", "value/ranking", "value/top1"} & found.keys()
    assert value_quality([Judged("a", np.zeros(0), 1.0, True)]) == {}


def test_calibration_by_hand():
    values, success = np.array([0.05, 0.05, 0.95, 1.3]), np.array([False, True, True, True])
    # Half of the first bin succeed where 0.05 was said; the last bin says 1.125 and means 1.
    assert calibration_error(values, success) == pytest.approx(0.5 * 0.45 + 0.5 * 0.125)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=20))
def test_calibration_is_zero_to_one_for_values_in_range(pairs):
    values, success = np.array([v for v, _ in pairs]), np.array([s for _, s in pairs])
    assert 0 <= calibration_error(values, success) <= 1
