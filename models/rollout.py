"""The turn loop: prompts in, segments out, one or many turns.

A batch of rollouts advances turn by turn. Each turn is one call of the engine for all rows that still run, and each
observation is appended as token ids that carry no loss. An episode whose environment fails becomes a segment whose
finish reason is `error`: a bad rollout is data, and never ends the batch.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from gleaner.conf.errors import BadImageError, ConfigurationError, ContractError
from gleaner.conf.schema import SamplingSettings
from gleaner.models.chat import Chat, image_digests, text_only
from gleaner.models.engines.base import Completion, Engine, Turn
from gleaner.models.environments.base import Environment, Episode, HasImages, Observation
from gleaner.models.images import decode_image
from gleaner.models.records import FinishReason, Message, Prompt, Segment, placed
from gleaner.models.vision import ImagePlace

Item = TypeVar("Item")
Result = TypeVar("Result")


def rollout_seed(run_seed: int, step: int, prompt_id: str, sample: int) -> int:
    """Seed of one rollout, 63 bits: nothing else in the batch, and no other run, step or sample, shares it."""
    return hashed(f"{run_seed}/{step}/{prompt_id}/{sample}")


def sampling_digest(sampling: SamplingSettings) -> str:
    """Digest of what shapes the sampled distribution and its cut: the shard's size is none of it."""
    shape = sampling.model_dump_json(exclude={"rows_per_shard"})
    return hashlib.sha256(shape.encode()).hexdigest()


def hashed(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


@dataclass
class Rollout:
    """One rollout in progress; becomes a segment."""

    prompt: Prompt
    sample: int
    seed: int
    context_ids: list[int]
    ids: list[int]
    """Context and everything after it."""
    loss_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    transcript: list[Message] = field(default_factory=list)
    images: list[dict[str, Any]] = field(default_factory=list)
    text: str = ""
    episode: Episode | None = None
    result: dict[str, Any] = field(default_factory=dict)
    finish_reason: FinishReason | None = None

    def places(self, chat: Chat) -> list[ImagePlace]:
        """Where the images stand that the policy saw so far."""
        return placed(self.images, len(self.context_ids)) if chat.eyes is not None else []

    def fail(self, error: Exception) -> None:
        self.finish_reason = "error"
        self.result["error"] = f"{type(error).__name__}: {error}"


def collect(
    engine: Engine,
    chat: Chat,
    environment: Environment,
    prompts: Sequence[Prompt],
    group_size: int,
    sampling: SamplingSettings,
    *,
    run_seed: int,
    step: int,
    context_limit: int,
    first_sample: int = 0,
    store_image: Callable[[bytes], str] | None = None,
) -> list[Segment]:
    """Sample `group_size` rollouts of every prompt, as one shard.

    An episode ends with `environment` when the environment says so or its `max_turns` are used up (its own `result()`
    says whether that was a success), with `length` when the context is full, with `error` when the environment raised.
    A single-turn rollout ends with `stop` or `length`. A turn cut off at `max_new_tokens` still acts: the environment
    answers it, and the turn is closed by an end token that carries no loss.

    Args:
        first_sample: number of the first rollout of each group (refills go on counting).
        context_limit: tokens of prompt and episode together.
        store_image: keeps an encoded image and returns its digest.

    Returns:
        Segments, prompt after prompt, `group_size` each.

    Raises:
        ConfigurationError: a prompt fills the context; an environment of many turns meets a template that rewrites
            history, or one with images a policy that sees none.
    """
    if environment.max_turns > 1 and not chat.multi_turn:
        raise ConfigurationError(
            "this environment has several turns, and the chat was built for one: build it with multi_turn=True, which "
            "checks that the template keeps history as it is"
        )
    if store_image is not None and isinstance(environment, HasImages):
        for prompt in prompts:
            show(environment, prompt, chat, store_image)
    rollouts = begin_rollouts(chat, prompts, group_size, first_sample, run_seed, step, context_limit)
    with stepping(environment) as each, closing(rollouts), engine.session(sampling) as session:
        if environment.max_turns > 1:
            each(lambda rollout: begin(environment, rollout), rollouts)
        for turn in range(environment.max_turns):
            running = [
                (row, rollout) for row, rollout in enumerate(rollouts) if rollout.finish_reason is None
            ]
            if not running:
                break
            requests = [
                Turn(row, rollout.ids, hashed(f"{rollout.seed}/{turn}"), rollout.places(chat))
                for row, rollout in running
            ]
            for (_, rollout), completion in zip(running, session.sample(requests), strict=True):
                take(rollout, completion, chat)
                if environment.max_turns == 1:
                    rollout.finish_reason = completion.finish_reason
            acting = [rollout for _, rollout in running if rollout.finish_reason is None]
            for rollout, observation in zip(acting, each(act, acting), strict=True):
                if observation is not None:
                    observe(
                        rollout,
                        observation,
                        chat,
                        store_image,
                        turn + 1 == environment.max_turns,
                        context_limit,
                    )
            each(close, [rollout for rollout in acting if rollout.finish_reason is not None])
    digest = sampling_digest(sampling)
    return [as_segment(rollout, engine.version or "", digest) for rollout in rollouts]


def show(environment: HasImages, prompt: Prompt, chat: Chat, store_image: Callable[[bytes], str]) -> None:
    """Store the images that a prompt names.

    Raises:
        ConfigurationError: the policy sees none.
        ContractError: they are not the images that the prompt names.
        BadImageError: one of them is no image.
    """
    if chat.eyes is None:
        raise ConfigurationError(
            f"environment {prompt.environment} asks about images, and the policy sees none: choose policy=tiny_vlm, or "
            "a vision-language model (policy.path)"
        )
    images = environment.images(prompt)
    for image in images:
        decode_image(image)
    if [store_image(image) for image in images] != image_digests(prompt.messages):
        raise ContractError(
            f"prompt {prompt.prompt_id} does not name the images that its environment shows: name each by the digest "
            "of its bytes (gleaner.models.images.image_digest)"
        )


def image_spans(places: Sequence[ImagePlace], offset: int, chat: Chat) -> list[dict[str, Any]]:
    """What a segment remembers of images at these places, `offset` tokens after its first sampled token."""
    length = chat.eyes.tokens if chat.eyes is not None else 0
    return [{"digest": digest, "start": start + offset, "length": length} for start, digest in places]


def begin_rollouts(
    chat: Chat,
    prompts: Sequence[Prompt],
    group_size: int,
    first_sample: int,
    run_seed: int,
    step: int,
    context_limit: int,
) -> list[Rollout]:
    rollouts = []
    for prompt in prompts:
        context = chat.prompt_ids(prompt.messages)
        if len(context) >= context_limit:
            raise ConfigurationError(
                f"prompt {prompt.prompt_id} has {len(context)} tokens, which fills the context of {context_limit}: "
                "raise policy.context, or leave out long prompts"
            )
        spans = image_spans(chat.image_places(context, prompt.messages), -len(context), chat)
        for sample in range(first_sample, first_sample + group_size):
            seed = rollout_seed(run_seed, step, prompt.prompt_id, sample)
            rollouts.append(Rollout(prompt, sample, seed, context, list(context), images=list(spans)))
    return rollouts


@contextmanager
def stepping(
    environment: Environment,
) -> Iterator[Callable[[Callable[[Item], Result], Sequence[Item]], list[Result]]]:
    """A map over episodes: in threads where the environment allows it, else one after the other right here."""
    if environment.max_turns > 1 and environment.parallel_episodes > 1:
        with ThreadPoolExecutor(environment.parallel_episodes, thread_name_prefix="episode") as pool:
            yield lambda function, items: list(pool.map(function, items))
    else:
        yield lambda function, items: [function(item) for item in items]


@contextmanager
def closing(rollouts: Iterable[Rollout]) -> Iterator[None]:
    """Close every episode exactly once, whatever happened before."""
    try:
        yield
    finally:
        for rollout in rollouts:
            close(rollout)


def close(rollout: Rollout) -> None:
    """Free the episode, unless that was done."""
    episode, rollout.episode = rollout.episode, None
    try:
        if episode is not None:
            episode.close()
    except Exception as error:
        rollout.result["close_error"] = f"{type(error).__name__}: {error}"


def begin(environment: Environment, rollout: Rollout) -> None:
    try:
        rollout.episode = environment.begin(rollout.prompt, rollout.seed)
    except Exception as error:
        rollout.fail(error)


def take(rollout: Rollout, completion: Completion, chat: Chat) -> None:
    """Append a sampled turn."""
    rollout.ids += completion.ids
    rollout.loss_mask += [1] * len(completion.ids)
    rollout.logprobs += completion.logprobs
    rollout.text = chat.decode(completion.ids)
    rollout.transcript.append({"role": "assistant", "content": rollout.text})


def act(rollout: Rollout) -> Observation | None:
    """Step the episode; None if it failed."""
    assert rollout.episode is not None
    try:
        return rollout.episode.step(rollout.text)
    except Exception as error:
        rollout.fail(error)
        return None


def observe(
    rollout: Rollout,
    observation: Observation,
    chat: Chat,
    store_image: Callable[[bytes], str] | None,
    last_turn: bool,
    context_limit: int,
) -> None:
    """Append what the environment said, or end the episode."""
    if observation.images and (store_image is None or chat.eyes is None):
        raise ConfigurationError(
            f"environment {rollout.prompt.environment} shows images, and the policy sees none: choose policy=tiny_vlm "
            "or a vision-language model (policy.path), or an environment of text"
        )
    content: str | list[dict[str, Any]] = observation.text
    place = len(rollout.ids) - len(rollout.context_ids)
    if observation.images and store_image is not None:
        try:
            for image in observation.images:
                decode_image(image)
        except BadImageError as error:
            rollout.fail(error)
            return
        parts = [{"type": "image", "digest": store_image(image)} for image in observation.images]
        content = [*parts, {"type": "text", "text": observation.text}]
    rollout.transcript.append({"role": "user", "content": content})
    if observation.done:
        rollout.finish_reason, rollout.result = "environment", dict(observation.result)
        return
    if last_turn:
        end_early(rollout, "environment")
        return
    new = chat.observation_ids([rollout.transcript[-1]], after_stop=rollout.ids[-1] in chat.stop_ids)
    if len(rollout.ids) + len(new) >= context_limit:
        end_early(rollout, "length")
        return
    rollout.images += image_spans(chat.image_places(new, [rollout.transcript[-1]]), place, chat)
    rollout.ids += new
    rollout.loss_mask += [0] * len(new)


def end_early(rollout: Rollout, reason: FinishReason) -> None:
    assert rollout.episode is not None
    try:
        rollout.result = dict(rollout.episode.result())
        rollout.finish_reason = reason
    except Exception as error:
        rollout.fail(error)


def retokenised(segment: Segment, prompt: Prompt, chat: Chat, source_stops: frozenset[int]) -> Segment | None:
    """A rollout of another policy in this chat's tokens, as if the policy had sampled it.

    That is its visible text, an end token where the source ended its turn by itself, and observations in this chat's
    template.

    The source's log-probabilities belong to other tokens: the mean of them stands on every learnable token, so that
    a mean over the row is the source's.

    Args:
        source_stops: ids that end a turn of the source.

    Returns:
        None for a rollout without a sampled token, or one whose history was rewritten (several segments).
    """
    if not segment.logprobs or segment.segment > 0:
        return None
    ended = _turns_that_ended(segment, source_stops)
    ids: list[int] = []
    mask: list[int] = []
    closed = True
    turns = 0
    said: list[Message] = []
    for message in segment.transcript:
        if message["role"] != "assistant":
            said.append(message)
            continue
        if said:
            observation = chat.observation_ids(said, after_stop=closed)
            ids += observation
            mask += [0] * len(observation)
            said = []
        closed = ended[turns]
        turns += 1
        answer = chat.answer_ids(str(text_only(message)["content"]), closed)
        ids += answer
        mask += [1] * len(answer)
    if not any(mask):
        return None
    mean = sum(segment.logprobs) / len(segment.logprobs)
    return replace(
        segment,
        context_ids=chat.prompt_ids(prompt.messages),
        sampled_ids=ids,
        loss_mask=mask,
        logprobs=[mean] * sum(mask),
    )


def _turns_that_ended(segment: Segment, stops: frozenset[int]) -> list[bool]:
    """For each sampled turn, whether its last token ended it."""
    places = zip(segment.sampled_ids, segment.loss_mask, [*segment.loss_mask[1:], 0], strict=True)
    # Two turns always have an observation between them, so a turn's last token is followed by one without loss.
    return [token in stops for token, sampled, next_sampled in places if sampled and not next_sampled]


def as_segment(rollout: Rollout, version: str, digest: str) -> Segment:
    assert rollout.finish_reason is not None
    return Segment(
        prompt_id=rollout.prompt.prompt_id,
        sample=rollout.sample,
        segment=0,
        context_ids=rollout.context_ids,
        sampled_ids=rollout.ids[len(rollout.context_ids) :],
        loss_mask=rollout.loss_mask,
        logprobs=rollout.logprobs,
        policy_version=version,
        sampling_digest=digest,
        seed=rollout.seed,
        finish_reason=rollout.finish_reason,
        text=rollout.text,
        transcript=rollout.transcript,
        environment_result=rollout.result,
        images=rollout.images,
    )
