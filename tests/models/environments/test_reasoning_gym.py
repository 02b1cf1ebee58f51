"""Generated problems: lazy, reproducible, disjoint; and data sets from which nothing could be learned are refused."""

import json
import os
import subprocess
import sys
import time
from typing import Any

import pytest

from gleaner.conf.errors import ConfigurationError
from gleaner.conf.schema import ReasoningGymEnvironment
from gleaner.models.environments.reasoning_gym import (
    HASH_ORDERED,
    ReasoningGymProblems,
    extract_answer,
    verify,
)
from gleaner.models.verification import VerifierPool, judge_texts

SMALL = {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}


def problems(dataset: str = "chain_sum", seed: int = 0, **changes: Any) -> ReasoningGymProblems:
    return ReasoningGymProblems(ReasoningGymEnvironment(dataset=dataset, **changes), seed)


def question(prompt: Any) -> str:
    return str(prompt.messages[0]["content"])


def test_splits_share_no_question_even_where_few_questions_exist() -> None:
    small = problems(options=SMALL, size=1500)
    asked = {
        split: {question(small.prompt(split, index)) for index in range(small.size(split))}
        for split in ("train", "validation", "test")
    }
    assert small.size("train") == 1050
    assert not asked["train"] & asked["validation"]
    assert not asked["train"] & asked["test"]
    assert not asked["validation"] & asked["test"]


def test_a_prompt_depends_on_nothing_but_seed_split_and_index() -> None:
    first, second = problems(), problems()
    last = second.prompt("train", second.size("train") - 1)
    assert first.prompt("train", 7) == second.prompt("train", 7)
    assert first.prompt("train", first.size("train") - 1) == last


def test_the_run_seed_draws_training_problems_and_leaves_the_test_as_it_is() -> None:
    zero, one = problems(seed=0), problems(seed=1)
    assert zero.prompt("train", 0) != one.prompt("train", 0)
    assert zero.prompt("test", 0) == one.prompt("test", 0)
    assert zero.prompt("validation", 3) == one.prompt("validation", 3)


def test_the_same_problems_come_in_another_process_with_another_hash_seed() -> None:
    code = (
        "from gleaner.conf.schema import ReasoningGymEnvironment as S\n"
        "from gleaner.models.environments.reasoning_gym import ReasoningGymProblems as P\n"
        "print(*[P(S(dataset=d), 3).prompt('train', 11).prompt_id for d in ('chain_sum', 'maze', 'syllogism')])"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    output = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    here = [
        problems(dataset, seed=3).prompt("train", 11).prompt_id
        for dataset in ("chain_sum", "maze", "syllogism")
    ]
    assert output.stdout.split() == here


def test_a_slow_generator_makes_only_what_is_asked_for() -> None:
    countdown = problems("countdown")
    countdown.prompt("train", 0)
    started = time.monotonic()
    countdown.prompt("train", 13_000)
    assert time.monotonic() - started < 5  # 20,000 problems would take a quarter of an hour


def test_the_gold_answer_is_in_the_payload_and_not_in_the_prompt() -> None:
    cipher = problems("caesar_cipher")
    for index in range(20):
        prompt = cipher.prompt("train", index)
        assert json.loads(json.dumps(prompt.payload)) == prompt.payload
        assert prompt.payload["answer"] not in json.dumps(prompt.messages)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("12", "12"),
        ("  12\n", "12"),
        ("I think <answer>3</answer>, no, <answer> 12 </answer>.", "12"),
        ("<answer>a\nb</answer>", "a\nb"),
        ("<answer>12", "<answer>12"),
        ("", ""),
    ],
)
def test_the_answer_of_a_text(text: str, answer: str) -> None:
    assert extract_answer(text) == answer


def test_scores_are_the_data_sets_own() -> None:
    environment = problems()
    prompt = environment.prompt("train", 0)
    gold = prompt.payload["answer"]
    assert verify(prompt.payload, gold, [], {}).reward == 1.0
    assert verify(prompt.payload, f"so <answer>{gold}</answer>", [], {}).success
    partly = verify(prompt.payload, f"{gold} or so", [], {})
    assert not partly.success
    assert partly.reward == len(gold) / len(f"{gold} or so")
    lenient = problems(success_at=0.1).prompt("train", 0)
    assert verify(lenient.payload, f"{gold} or so", [], {}).success


def test_text_that_makes_a_scorer_fail_is_a_wrong_answer_since_it_accepts_its_own() -> None:
    prompt = problems("prime_factorization").prompt("train", 0)
    outcome = verify(prompt.payload, "seven times seven", [], {})
    assert (outcome.success, outcome.reward) == (False, 0.0)
    assert "ValueError" in outcome.details["malformed"]


def test_a_problem_that_comes_out_differently_than_it_was_asked_is_unscored() -> None:
    environment = problems()
    prompt = environment.prompt("train", 0)
    assert prompt.payload["entry"] is None  # JSON would change it, so the verifier makes it again
    prompt.payload["answer"] = "another"
    with VerifierPool(1, 30.0) as pool:
        verdict = judge_texts(environment, [(prompt, "another")], pool)[0]
    assert verdict.status == "error"
    assert "another problem from the same seed" in verdict.details["reason"]


@pytest.mark.parametrize("dataset", ["chain_sum", "countdown"])
def test_a_sound_data_set_passes_validation(dataset: str) -> None:
    assert problems(dataset).validate() == []


@pytest.mark.parametrize(
    ("dataset", "word"),
    [
        ("boxnet", "does not accept 12 of 12 stored answers"),
        ("game_of_life_halting", "any answer would be rewarded"),
        ("word_ladder", "PYTHONHASHSEED=0"),
    ],
)
def test_a_data_set_from_which_nothing_can_be_learned_is_refused(
    dataset: str, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    sentences = problems(dataset).validate()
    assert len(sentences) == 1
    assert f"environment.dataset={dataset}" in sentences[0]
    assert word in sentences[0]


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"dataset": "chainsum"}, "try chain_sum"),
        ({"options": {"terms": 3}}, "has no terms; its options are"),
        ({"options": {"seed": 3}}, "environment.size and run.seed set these"),
        ({"options": {"min_terms": 9, "max_terms": 2}}, "is refused by chain_sum"),
    ],
)
def test_a_wrong_name_or_option_is_refused_with_the_right_ones(changes: dict[str, Any], word: str) -> None:
    environment = problems(**changes)
    with pytest.raises(ConfigurationError, match=word):
        environment.prompt("train", 0)
    assert len(environment.validate()) == 1


def test_options_with_fewer_questions_than_splits_are_refused() -> None:
    sentences = problems("count_bits", options={"min_n": 1, "max_n": 2}).validate()
    assert len(sentences) == 1
    assert "too few different problems" in sentences[0]


def test_demonstrations_are_the_stored_answers_and_noise_replaces_some() -> None:
    environment = problems()
    clean = environment.demonstrations(50, noise=0.0, seed=0)
    assert all(d.turns == [{"role": "assistant", "content": d.prompt.payload["answer"]}] for d in clean)
    noisy = environment.demonstrations(50, noise=0.4, seed=0)
    wrong = sum(d.turns[0]["content"] != d.prompt.payload["answer"] for d in noisy)
    assert 10 <= wrong <= 30
    assert environment.demonstrations(50, noise=0.4, seed=0) == noisy


TWO = {
    "datasets": [{"name": "number_filtering"}, {"name": "word_sequence_reversal", "config": {"max_words": 4}}]
}


def test_several_data_sets_are_a_composite_whose_topics_are_its_members() -> None:
    both = problems("composite", options=TWO)
    topics = [both.topic(both.prompt("train", index)) for index in range(40)]
    assert set(topics) == {"number_filtering", "word_sequence_reversal"}
    assert both.validate() == []
    for demonstration in both.demonstrations(6, 0.0, 0):
        outcome = verify(demonstration.prompt.payload, demonstration.turns[0]["content"], [], {})
        assert outcome.success


def test_a_composite_with_a_member_in_hash_order_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    (problem,) = problems("composite", options={"datasets": [{"name": HASH_ORDERED[0]}]}).validate()
    assert "PYTHONHASHSEED" in problem


def test_a_composite_of_nothing_is_refused() -> None:
    (problem,) = problems("composite").validate()
    assert "datasets" in problem


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_data_set_is_either_sound_or_refused_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    from reasoning_gym.factory import DATASETS

    refused = {}
    for dataset in sorted(DATASETS):
        if sentences := problems(dataset).validate():
            refused[dataset] = sentences[0]
    unsound = {
        "boxnet",
        "graph_color",
        "propositional_logic",
        "rubiks_cube",
        "rush_hour",
        "game_of_life_halting",
    }
    needs_options = {"composite"}
    assert set(refused) == unsound | needs_options | set(HASH_ORDERED)


@pytest.mark.slow
def test_with_a_fixed_hash_seed_the_data_sets_in_hash_order_are_reproducible_and_sound() -> None:
    code = (
        "from gleaner.conf.schema import ReasoningGymEnvironment as S\n"
        "from gleaner.models.environments.reasoning_gym import ReasoningGymProblems as P\n"
        "if __name__ == '__main__':\n"
        f"    made = [P(S(dataset=d), 3) for d in {HASH_ORDERED!r}]\n"
        "    print([p.prompt('train', 11).prompt_id for p in made], [p.validate() for p in made])"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    command = [sys.executable, "-c", code]
    outputs = [
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    assert outputs[0] == outputs[1]
    assert outputs[0].strip().endswith(str([[] for _ in HASH_ORDERED]))
