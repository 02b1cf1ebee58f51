"""Monte-Carlo values: what the policy really earns from the middle of its own rollouts.

A critic's value is compared with the mean reward of continuations that the same policy samples after the same prefix.
That mean is itself noisy, and the noise is known: with m continuations its variance is estimated by their variance
over m, and is taken off the squared error.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from gleaner.conf.schema import SamplingSettings
from gleaner.models.chat import Chat
from gleaner.models.engines.base import Engine, Turn
from gleaner.models.records import Segment
from gleaner.models.rollout import hashed
from gleaner.models.signal import Floats


@dataclass(frozen=True)
class Probe:
    """A place in a rollout: before its `token`-th sampled token."""

    segment: Segment
    token: int


def probes(segment: Segment, count: int) -> list[Probe]:
    """`count` places spread evenly over a rollout of one turn, from its start on; fewer in a shorter one."""
    tokens = len(segment.sampled_ids)
    places = dict.fromkeys(tokens * index // count for index in range(count))
    return [Probe(segment, place) for place in places if place < tokens]


def continued(
    engine: Engine, chat: Chat, places: Sequence[Probe], count: int, sampling: SamplingSettings, seed: int
) -> list[Segment]:
    """`count` rollouts of one turn after each prefix, place after place. Within a prompt they are numbered from 0 on.

    A continuation has the tokens that its rollout had left.
    """
    segments: list[Segment] = []
    numbers: dict[str, int] = {}
    for place in places:
        segment, prefix = place.segment, place.segment.sampled_ids[: place.token]
        left = sampling.model_copy(update={"max_new_tokens": sampling.max_new_tokens - place.token})
        context = [*segment.context_ids, *prefix]
        with engine.session(left) as session:
            turns = [
                Turn(row, context, hashed(f"{seed}/{segment.seed}/{place.token}/{row}"))
                for row in range(count)
            ]
            for completion in session.sample(turns):
                ids = [*prefix, *completion.ids]
                text = chat.decode(ids)
                number = numbers.get(segment.prompt_id, 0)
                numbers[segment.prompt_id] = number + 1
                segments.append(
                    replace(
                        segment,
                        sample=number,
                        sampled_ids=ids,
                        loss_mask=[0] * len(prefix) + [1] * len(completion.ids),
                        logprobs=completion.logprobs,
                        finish_reason=completion.finish_reason,
                        text=text,
                        transcript=[{"role": "assistant", "content": text}],
                        environment_result={},
                    )
                )
    return segments


def against_truth(values_N: Floats, rewards_NM: Floats) -> dict[str, float]:
    """How far values are from the Monte-Carlo ones.

    Args:
        rewards_NM: of M >= 2 continuations at each place.

    Returns:
        mc/error: mean squared error with the Monte-Carlo noise taken off (it may be slightly negative); mc/error_mean:
        the same of the best constant; mc/explained: 1 - error / error_mean, absent where truth does not vary;
        mc/correlation (Pearson), likewise; mc/bias: mean of value minus truth; mc/places.
    """
    truth_N = rewards_NM.mean(axis=1)
    noise = float((rewards_NM.var(axis=1, ddof=1) / rewards_NM.shape[1]).mean())
    error = float(((values_N - truth_N) ** 2).mean()) - noise
    constant = float(((truth_N - truth_N.mean()) ** 2).mean()) - noise
    found = {
        "mc/error": error,
        "mc/error_mean": constant,
        "mc/bias": float((values_N - truth_N).mean()),
        "mc/places": float(len(values_N)),
    }
    if constant > 0:
        found["mc/explained"] = 1.0 - error / constant
    if np.ptp(truth_N) > 0 and np.ptp(values_N) > 0:
        found["mc/correlation"] = float(np.corrcoef(values_N, truth_N)[0, 1])
    return found
