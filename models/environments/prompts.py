"""Identity of prompts, and splits that stay disjoint and stable."""

import hashlib
import json
from typing import Any

from gleaner.conf.schema import Split
from gleaner.models.records import Message, Prompt


def make_prompt(environment: str, split: Split, messages: list[Message], payload: dict[str, Any]) -> Prompt:
    """A prompt whose id is the digest of environment, messages and payload, and whose seed follows from the id."""
    prompt_id = content_digest([environment, messages, payload])
    return Prompt(prompt_id, environment, split, int(prompt_id[:8], 16) >> 1, messages, payload)


def content_digest(value: Any) -> str:
    """sha256 (hex) of a JSON value; the order of keys does not matter."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def split_size(split: Split, size: int, validation_share: float, test_share: float) -> int:
    """Prompts of a split of an environment that makes `size` of them; none is left empty."""
    counts = {
        name: max(1, round(size * share))
        for name, share in (("validation", validation_share), ("test", test_share))
    }
    return size - sum(counts.values()) if split == "train" else counts[split]


def split_of(content: str, validation_share: float, test_share: float) -> Split:
    """The split that a content belongs to, whatever else is in the data set (this project's choice).

    The digest of the content is read as a place in [0, 1): below `test_share` test, then validation, then train. So
    splits are disjoint by content, and a line that is added to a file moves no other.
    """
    place = int(hashlib.sha256(content.encode()).hexdigest()[:12], 16) / 16**12
    if place < test_share:
        return "test"
    return "validation" if place < test_share + validation_share else "train"
