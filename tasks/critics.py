"""A critic beside a policy: what it reads of each rollout, its values, and whether it can read at all."""

import time
from dataclasses import dataclass

import numpy as np
import torch
from scipy import stats

from gleaner.conf.errors import ConfigurationError
from gleaner.conf.schema import PippoMethod
from gleaner.models import tables
from gleaner.models.chat import Chat
from gleaner.models.critic import (
    REFERENCES,
    CriticContext,
    Judged,
    context_metrics,
    critic_contexts,
    squared_errors_by_prompt,
)
from gleaner.models.environments.base import HasAnswers
from gleaner.models.methods.grpo import EpisodeSegmentKey
from gleaner.models.methods.pippo import pippo_signal
from gleaner.models.policy import tokenizer_digest
from gleaner.models.records import Prompt
from gleaner.models.rollout import hashed
from gleaner.models.signal import Floats, Group
from gleaner.tasks.context import RunContext
from gleaner.tasks.faults import fault_point
from gleaner.tasks.keys import cache_key, code_version
from gleaner.tasks.phase import Made, phase
from gleaner.tasks.residents import CRITIC, resident
from gleaner.tasks.sampling import load_rollouts
from gleaner.tasks.scoring import Scores, load_scores
from gleaner.tasks.signals import Batch, Signal, load_groups, signal_made, signal_record
from gleaner.tasks.store import Record
from gleaner.tasks.tokenizers import tokenizer_of

PROMPTS_MEASURED = 64
FRAME_TOKENS = 128
"""Room for the words around two references and an answer, in the tokens of a vocabulary that knows none of them."""


@dataclass(frozen=True)
class Values:
    """Digest of the tensors with every rollout's values and the critic's contexts, what reading cost, the metrics of
    the contexts, and the values' squared error by prompt."""

    tensors: str
    forward_tokens: int
    seconds: float
    metrics: dict[str, float]
    errors: dict[str, float]

    @property
    def cost(self) -> Scores:
        """As a part of the step's forward tokens."""
        return Scores("critic", self.tensors, self.forward_tokens, self.seconds)


@dataclass(frozen=True, eq=False)
class _Row:
    """A rollout as the critic reads it."""

    context_ids: list[int]
    sampled_ids: list[int]
    loss_mask: list[int]
    image_places: tuple[tuple[int, str], ...] = ()


def method_of(context: RunContext) -> PippoMethod:
    method = context.settings.method
    assert isinstance(method, PippoMethod), "a critic belongs to method.kind=pippo"
    return method


def critic_context(context: RunContext) -> RunContext:
    """The run as its critic sees it: with its own weights and learning rate."""
    settings, critic = context.settings, method_of(context).critic
    changed: dict[str, object] = {
        "update": settings.update.model_copy(update={"lr": critic.lr, "minibatches": critic.minibatches})
    }
    if critic.policy is not None:
        changed |= {"policy": critic.policy, "warmstart": critic.warmstart}
    return RunContext.of(context.run_id, settings.model_copy(update=changed))


def check_critic(context: RunContext) -> list[str]:
    """What forbids training with this critic, each with its fix."""
    settings, critic = context.settings, method_of(context).critic
    policy = critic.policy or settings.policy
    try:
        own, theirs = tokenizer_of(context, settings.policy), tokenizer_of(context, policy)
    except ConfigurationError as error:
        return [str(error)]
    if tokenizer_digest(own) != tokenizer_digest(theirs):
        return [
            "the critic's tokenizer is not the policy's, so it cannot read its tokens: choose a critic of the same "
            "family (for tiny ones: method.critic.policy.vocabulary equal to policy.vocabulary)"
        ]
    if critic.context == "none":
        return []
    if critic.context == "answer" and not isinstance(context.environment, HasAnswers):
        return [
            f"method.critic.context=answer needs ground-truth answers, and {context.environment.name} has none in "
            "words: choose contrast, success or failure"
        ]
    needed = _needed_context(context)
    if needed <= policy.context:
        return []
    raised = (
        f"raise method.critic.policy.context to {needed}"
        if critic.policy is not None
        else f"set method.critic.policy to a copy of policy with context={needed}"
    )
    return [
        f"a critic that reads references of {critic.reference_tokens} tokens beside a rollout needs a context of "
        f"{needed}, and has {policy.context}: {raised}, or lower method.critic.reference_tokens"
    ]


def _needed_context(context: RunContext) -> int:
    """Tokens that always suffice: a rollout that were cut or read alone because of its own length would bias the
    baseline."""
    settings, environment = context.settings, context.environment
    beside = REFERENCES * method_of(context).critic.reference_tokens + FRAME_TOKENS
    if environment.max_turns > 1:
        return settings.policy.context + beside
    chat = Chat(tokenizer_of(context, settings.policy), multi_turn=False)
    prompts = [
        environment.prompt("train", index)
        for index in range(min(PROMPTS_MEASURED, environment.size("train")))
    ]
    longest = max(len(chat.prompt_ids(prompt.messages)) for prompt in prompts)
    if isinstance(environment, HasAnswers):
        longest += max(len(chat.answer_ids(environment.answer(prompt), ended=False)) for prompt in prompts)
    return longest + settings.sampling.max_new_tokens + beside


# ------------------------------------------------------------------------------------------------- values


@phase(gpu=True)
def judge(
    context: RunContext, version: str, batch: Batch, step: int, mismatched: bool = False
) -> Made[Values]:
    """Values of every scored rollout's tokens under the critic `version`, beside references chosen from its siblings.

    Args:
        context: the run's own, not the critic's.
        mismatched: with the references of the batch's next prompt instead: the preflight's control.
    """
    store, settings = context.store, context.settings
    code = code_version("gleaner.models.training", "gleaner.models.critic", "gleaner.models.chat")
    key = cache_key(
        "values",
        code,
        critic=version,
        reading=method_of(context).critic.model_dump(
            include={"context", "labels", "dedupe", "reference_tokens"}
        ),
        shards=list(batch.shards),
        verdicts=[part.table for part in batch.verdicts],
        verification=[settings.verification.on_unscored, settings.verification.keep_at_least],
        seed=settings.run.seed,
        step=step,
        mismatched=mismatched,
    )

    def make() -> Record:
        groups, _ = load_groups(context, batch)
        contexts = _contexts(context, batch, groups, step, mismatched)
        holder = resident(critic_context(context), CRITIC)
        holder.bring_to(version)
        segments = [episode.segments[0] for group in groups for episode in group.episodes]
        keys = [(s.prompt_id, s.sample, s.segment) for s in segments]
        rows = [
            _Row(contexts[key].ids, segment.sampled_ids, segment.loss_mask)
            for key, segment in zip(keys, segments, strict=True)
        ]
        started = time.perf_counter()
        judged = holder.learner.judge(rows)
        seconds = time.perf_counter() - started
        tensors = {
            "values": torch.from_numpy(np.concatenate([*judged, np.zeros(0)])),
            "ids": torch.tensor([i for row in rows for i in row.context_ids], dtype=torch.int64),
            "lengths": torch.tensor([len(row.context_ids) for row in rows], dtype=torch.int64),
        }
        verdicts = [episode.verdict for group in groups for episode in group.episodes]
        errors = squared_errors_by_prompt(
            [
                Judged(verdict.prompt_id, found, float(verdict.reward or 0.0), bool(verdict.success))
                for verdict, found in zip(verdicts, judged, strict=True)
            ]
        )
        facts = {
            "tokens": sum(len(row.context_ids) + len(row.sampled_ids) for row in rows),
            "seconds": seconds,
            "metrics": context_metrics(contexts) if contexts else {},
            "errors": errors,
        }
        return Record({"values": store.put_tensors(tensors)}, facts, code)

    record, hit = store.memoise(key, make)
    facts = record.facts
    made = Values(
        record.objects["values"],
        int(facts["tokens"]),
        float(facts["seconds"]),
        facts["metrics"],
        facts["errors"],
    )
    return Made(made, hit)


def _contexts(
    context: RunContext, batch: Batch, groups: list[Group], step: int, mismatched: bool
) -> dict[EpisodeSegmentKey, CriticContext]:
    settings, environment = context.settings, context.environment
    holder = resident(critic_context(context), CRITIC)
    prompts: dict[str, Prompt] = {
        prompt.prompt_id: prompt
        for part in batch.rollouts
        for prompt in context.store.get_rows(tables.PROMPTS, part.prompts)
    }

    def answer_of(group: Group) -> str | None:
        return environment.answer(prompts[group.prompt_id]) if isinstance(environment, HasAnswers) else None

    found: dict[EpisodeSegmentKey, CriticContext] = {}
    for place, group in enumerate(groups):

        def generator(sample: int, prompt_id: str = group.prompt_id) -> np.random.Generator:
            seed = hashed(f"references/{settings.run.seed}/{step}/{prompt_id}/{sample}")
            return np.random.Generator(np.random.Philox(key=seed))

        lender = groups[(place + 1) % len(groups)] if mismatched else None
        found |= critic_contexts(
            group,
            prompts[group.prompt_id].messages,
            answer_of(group),
            method_of(context).critic,
            holder.chat,
            generator,
            lender,
            answer_of(lender) if lender is not None else None,
        )
    return found


def load_values(
    context: RunContext, groups: list[Group], values: Values
) -> tuple[dict[EpisodeSegmentKey, Floats], dict[EpisodeSegmentKey, list[int]]]:
    """Values of each rollout's learnable tokens, and the ids of the context that the critic read."""
    tensors = context.store.get_tensors(values.tensors)[0]
    segments = [episode.segments[0] for group in groups for episode in group.episodes]
    keys = [(s.prompt_id, s.sample, s.segment) for s in segments]
    value_parts = np.split(
        tensors["values"].numpy(), np.cumsum([sum(segment.loss_mask) for segment in segments])[:-1]
    )
    id_parts = np.split(tensors["ids"].numpy(), np.cumsum(tensors["lengths"].numpy())[:-1])
    return (
        dict(zip(keys, value_parts, strict=True)),
        {key: part.tolist() for key, part in zip(keys, id_parts, strict=True)},
    )


@phase()
def check_reading(context: RunContext, own: Values, mismatched: Values, step: int) -> Made[dict[str, float]]:
    """Whether values are better beside a rollout's own references than beside another prompt's: the mean over prompts
    of the squared error's difference, with its 95 % t interval.

    Raises:
        ConfigurationError: the interval is not above zero.
    """
    differences = np.array([mismatched.errors[prompt] - error for prompt, error in own.errors.items()])
    mean, low = float(differences.mean()) if len(differences) else 0.0, -np.inf
    if len(differences) > 1 and differences.std() > 0:
        low = float(stats.t.interval(0.95, len(differences) - 1, mean, stats.sem(differences))[0])
    if not low > 0:
        raise ConfigurationError(
            f"after {step} warm-up steps the critic does not read its references: with its own its squared error is "
            f"{mean:+.4f} better than with another prompt's, with an interval that begins at {low:+.4f} over "
            f"{len(differences)} prompts. Raise method.critic.warmup_steps, method.critic.lr or run.prompts_per_step, "
            "or train it all the same with method.critic.require_reading=false"
        )
    return Made({"critic/reading_gain": mean, "critic/reading_gain_low": low}, hit=False)


# ------------------------------------------------------------------------------------------------- the signal


@phase()
def make_pippo_signal(
    context: RunContext,
    batch: Batch,
    step: int,
    values: Values,
    train_policy: bool,
    old: Scores | None,
    reference: Scores | None,
) -> Made[Signal]:
    """Advantages against the critic's values, the critic's own targets, and the ledger."""
    settings, store, method = context.settings, context.store, method_of(context)
    code = code_version("gleaner.models.methods.pippo", "gleaner.models.critic", "gleaner.models.signal")
    key = cache_key(
        "signal",
        code,
        method=method,
        verification=[settings.verification.on_unscored, settings.verification.keep_at_least],
        shards=list(batch.shards),
        verdicts=[part.table for part in batch.verdicts],
        scores=[scores.tensors if scores is not None else None for scores in (old, reference)],
        values=values.tensors,
        train_policy=train_policy,
        minibatches=settings.update.minibatches,
        sampling=[settings.sampling.max_new_tokens, settings.sampling.temperature],
        max_turns=context.environment.max_turns,
    )

    def make() -> Record:
        fault_point("signal", step, "before")
        groups, counts = load_groups(context, batch)
        found, ids = load_values(context, groups, values)
        shard_of = {
            segment.prompt_id: shard for shard in batch.shards for segment in load_rollouts(context, [shard])
        }
        started = time.perf_counter()
        signal, metrics = pippo_signal(
            groups,
            method,
            values=found,
            contexts=ids,
            train_policy=train_policy,
            rollouts=shard_of,
            minibatches=settings.update.minibatches,
            max_new_tokens=settings.sampling.max_new_tokens * context.environment.max_turns,
            temperature=settings.sampling.temperature,
            old_logprobs=load_scores(context, batch.shards, old) if old else None,
            reference_logprobs=load_scores(context, batch.shards, reference) if reference else None,
        )
        return signal_record(store, signal, groups, {**metrics, **counts, **values.metrics}, started, code)

    return signal_made(*store.memoise(key, make))
