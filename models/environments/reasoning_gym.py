"""Problems of reasoning-gym's generators, made when they are asked for, and scored by the generators' own scorers.

Some generators make 20 problems a second, so nothing is generated ahead. `prompt(split, index)` tries the candidates
of that index, one after the other, and takes the first whose question belongs to the split by its digest: splits are
disjoint by construction, and no problem depends on another one.
"""

import difflib
import functools
import hashlib
import json
import os
import random
import re
from collections.abc import Sequence
from typing import Any

from gleaner.conf.errors import ConfigurationError, VerifierContractError
from gleaner.conf.schema import ReasoningGymEnvironment, Split
from gleaner.models.environments.base import Demonstration, Episode, Outcome, VerifierSpec
from gleaner.models.environments.prompts import make_prompt, split_of, split_size
from gleaner.models.records import Message, Prompt
from gleaner.models.verification import VerifierPool, judge_texts

TRIES_TOGETHER = 8
PROBLEMS_TOGETHER = 512
"""A generator object serves 8 candidates of 512 problems each. Making one takes half a second for some data sets, and
work for each of its problems for others; word_ladder refuses more than 20,000."""
CANDIDATES = 160
"""Tries for one problem. With a fifth of the contents in a split, all of them fail once in 10^15 problems."""
CONTENT_SHARE = {"validation": 0.2, "test": 0.2}
"""Share of all possible questions that a split may draw from. Larger than its share of the problems, since finding a
problem costs 1 / share candidates."""
PROBLEMS_VALIDATED = 12
NONSENSE = "no idea whatsoever"

HASH_ORDERED = (
    "codeio", "isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder",
)  # fmt: skip
"""Generators that go through a set in hash order: the same seed gives other problems in another process, unless
PYTHONHASHSEED is fixed (seen with reasoning-gym 0.1.25)."""

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class ReasoningGymProblems:
    """Single-turn problems of one generator.

    Training problems follow the run's seed; validation and test problems are the same for every seed, so that runs
    can be compared.
    """

    name = "reasoning_gym"
    version = "1"
    max_turns = 1
    parallel_episodes = 1
    verifier = VerifierSpec("gleaner.models.environments.reasoning_gym:verify", version="reasoning-gym-1")

    def __init__(self, settings: ReasoningGymEnvironment, seed: int) -> None:
        if settings.max_turns != 1:
            raise ConfigurationError(
                f"environment.max_turns={settings.max_turns}: reasoning_gym has one turn; remove the setting"
            )
        self.settings = settings
        self.seed = seed

    def size(self, split: Split) -> int:
        settings = self.settings
        return split_size(split, settings.size, settings.validation_share, settings.test_share)

    def prompt(self, split: Split, index: int) -> Prompt:
        """
        Raises:
            ConfigurationError: `index` is out of range, or no candidate falls into the split: the generator has too
                few different problems with these options.
        """
        prompt, _ = self._problem(split, index)
        return prompt

    def begin(self, prompt: Prompt, seed: int) -> Episode:
        raise NotImplementedError("reasoning_gym has one turn: its answers go straight to the verifier")

    def topic(self, prompt: Prompt) -> str:
        """The data set that the problem comes from: of a composite its member."""
        return str(prompt.payload.get("topic", self.settings.dataset))

    def answer(self, prompt: Prompt) -> str:
        """The stored answer."""
        return str(prompt.payload["answer"])

    def demonstrations(self, count: int, noise: float, seed: int) -> Sequence[Demonstration]:
        """The stored answers. A noisy one is another problem's answer."""
        draw = random.Random(seed)
        size = self.size("train")
        demonstrations = []
        for place in range(count):
            prompt, answer = self._problem("train", place % size)
            if draw.random() < noise:
                _, answer = self._problem("train", draw.randrange(min(count, size)))
            demonstrations.append(Demonstration(prompt, [{"role": "assistant", "content": answer}]))
        return demonstrations

    def validate(self) -> list[str]:
        """Whether the generator can be made with its options, accepts its own answers, and refuses nonsense."""
        dataset = self.settings.dataset
        members = {dataset, *(each.get("name", "") for each in self.settings.options.get("datasets", []))}
        if members & set(HASH_ORDERED) and not os.environ.get("PYTHONHASHSEED", "").isdecimal():
            return [
                f"environment.dataset={dataset} makes other problems in every process, so a run could not be resumed: "
                "set PYTHONHASHSEED=0 in the environment of every process of the run, or choose another data set"
            ]
        try:
            problems = [
                self._problem(split, index)
                for split in ("train", "validation", "test")
                for index in range(min(PROBLEMS_VALIDATED // 3, self.size(split)))
            ]
        except ConfigurationError as error:
            return [str(error)]
        nonsense = [(prompt, NONSENSE) for prompt, _ in problems]
        with VerifierPool(1, deadline_seconds=60.0) as pool:
            verdicts = judge_texts(self, [*problems, *nonsense], pool)
        accepted = [verdict.success is True for verdict in verdicts[: len(problems)]]
        fooled = [verdict.success is True for verdict in verdicts[len(problems) :]]
        sentences = []
        if not all(accepted):
            first = verdicts[accepted.index(False)]
            reason = first.details.get("reason", f"score {first.reward}")
            sentences.append(
                f"environment.dataset={dataset}: its scorer does not accept {accepted.count(False)} of "
                f"{len(problems)} stored answers ({reason}), so nothing could be learned: choose another data set"
            )
        if any(fooled):
            sentences.append(
                f"environment.dataset={dataset}: its scorer accepts the answer {NONSENSE!r}, so any answer would be "
                "rewarded: choose another data set"
            )
        return sentences

    def _problem(self, split: Split, index: int) -> tuple[Prompt, str]:
        size = self.size(split)
        if not 0 <= index < size:
            raise ConfigurationError(
                f"{split} has {size} problems, not number {index}: raise environment.size"
            )
        settings = self.settings
        for attempt in range(CANDIDATES):
            seed = self._generator_seed(split, attempt // TRIES_TOGETHER, index // PROBLEMS_TOGETHER)
            place = index % PROBLEMS_TOGETHER * TRIES_TOGETHER + attempt % TRIES_TOGETHER
            entry = make_generator(settings.dataset, json.dumps(settings.options, sort_keys=True), seed)[
                place
            ]
            question = str(entry["question"])
            if split_of(question, CONTENT_SHARE["validation"], CONTENT_SHARE["test"]) != split:
                continue
            content = "\n".join(part for part in (question, settings.instruction) if part)
            payload = {
                "dataset": settings.dataset,
                "options": settings.options,
                "seed": seed,
                "index": place,
                "answer": str(entry["answer"]),
                "entry": _as_json(entry),
                "success_at": settings.success_at,
            }
            if settings.dataset == "composite":
                payload["topic"] = entry["metadata"]["source_dataset"]
            prompt = make_prompt(self.name, split, [{"role": "user", "content": content}], payload)
            return prompt, str(entry["answer"])
        raise ConfigurationError(
            f"environment.dataset={settings.dataset} has too few different problems with environment.options="
            f"{settings.options} for a {split} split: widen the options"
        )

    def _generator_seed(self, split: Split, round_: int, block: int) -> int:
        run_seed = self.seed if split == "train" else 0
        digest = hashlib.sha256(f"{run_seed}/{split}/{round_}/{block}".encode()).digest()
        return int.from_bytes(digest[:4], "big") >> 1


def verify(
    payload: dict[str, Any], text: str, transcript: list[Message], environment_result: dict[str, Any]
) -> Outcome:
    """The scorer's value as reward, a success from `success_at` on.

    The answer is the inside of the last <answer>…</answer>, or without one the text without surrounding white space.
    A scorer that fails on the answer but accepts the stored one was given something malformed: reward 0. A scorer
    that fails on its stored answer too is broken, and the episode is unscored.
    """
    made_from = payload["dataset"], json.dumps(payload["options"], sort_keys=True), payload["seed"]
    generator = make_generator(*made_from)
    entry = payload["entry"] if payload["entry"] is not None else _generated(*made_from, payload["index"])
    if str(entry["answer"]) != payload["answer"]:
        raise VerifierContractError(
            f"{payload['dataset']} made another problem from the same seed than when it was asked: use the version of "
            "reasoning-gym that it was sampled with"
        )
    answer = extract_answer(text)
    try:
        score = generator.score_answer(answer, entry)
    except Exception as error:
        if not generator.score_answer(str(entry["answer"]), entry) >= payload["success_at"]:
            raise VerifierContractError(
                f"the scorer of {payload['dataset']} refuses its own answer"
            ) from error
        return Outcome(False, 0.0, {"answer": answer[:200], "malformed": f"{type(error).__name__}: {error}"})
    return Outcome(bool(score >= payload["success_at"]), float(score), {"answer": answer[:200]})


def extract_answer(text: str) -> str:
    """Inside of the last <answer>…</answer>; without one the whole text, stripped."""
    tagged = ANSWER.findall(text)
    return str(tagged[-1] if tagged else text).strip()


@functools.lru_cache(maxsize=64)
def make_generator(dataset: str, options_json: str, seed: int) -> Any:
    """A generator object, cached.

    Raises:
        ConfigurationError: there is no such data set, or it refuses its options.
    """
    import reasoning_gym
    from reasoning_gym.composite import DatasetSpec
    from reasoning_gym.factory import DATASETS

    if dataset not in DATASETS:
        near = difflib.get_close_matches(dataset, DATASETS, n=5, cutoff=0.4) or sorted(DATASETS)
        raise ConfigurationError(
            f"environment.dataset={dataset} is no data set of reasoning-gym: try {', '.join(near)}"
        )
    options = json.loads(options_json)
    fields = [field for field in vars(DATASETS[dataset][1]()) if field not in ("seed", "size")]
    if unknown := sorted(set(options) - set(fields)):
        hint = " (environment.size and run.seed set these)" if {"seed", "size"} & set(unknown) else ""
        raise ConfigurationError(
            f"environment.options: {dataset} has no {', '.join(unknown)}{hint}; its options are {', '.join(fields)}"
        )
    try:
        if dataset == "composite":
            options["datasets"] = [
                DatasetSpec(**{"weight": 1.0, "config": {}} | each) for each in options["datasets"]
            ]
        return reasoning_gym.create_dataset(
            dataset, seed=seed, size=PROBLEMS_TOGETHER * TRIES_TOGETHER, **options
        )
    except Exception as error:
        raise ConfigurationError(
            f"environment.options={options} is refused by {dataset} ({type(error).__name__}: {error}): its options are "
            f"{', '.join(fields)}"
        ) from error


@functools.lru_cache(maxsize=256)
def _generated(dataset: str, options_json: str, seed: int, index: int) -> Any:
    """A problem made again. Cached, since the rollouts of a group come one after the other."""
    return make_generator(dataset, options_json, seed)[index]


def _as_json(entry: dict[str, Any]) -> dict[str, Any] | None:
    """The entry if JSON keeps it as it is, else None: tuples, fractions and dates would come back as something else,
    so the verifier generates such an entry again from its seed."""
    try:
        kept: dict[str, Any] = json.loads(json.dumps(entry, allow_nan=False))
    except (TypeError, ValueError):
        return None
    return kept if kept == entry else None
