"""A tiny policy's tokenizer, trained once for all runs of a store: it reads hundreds of an environment's texts, and
where these come from a slow engine that takes minutes."""

import functools
import tempfile
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from gleaner.conf.schema import AnyPolicy, PretrainedPolicy, TinyShape, TinyVlmPolicy
from gleaner.models.policy import load_tokenizer, train_tokenizer
from gleaner.tasks.context import RunContext
from gleaner.tasks.keys import cache_key, code_version
from gleaner.tasks.store import Record


def tokenizer_of(context: RunContext, policy: AnyPolicy) -> PreTrainedTokenizerBase:
    """The tokenizer that a policy has on the run's environment, whatever the run's seed.

    Raises:
        ConfigurationError: a pretrained one cannot be loaded.
    """
    if isinstance(policy, TinyShape):
        return _tiny(context, policy.vocabulary, isinstance(policy, TinyVlmPolicy))
    return load_tokenizer(policy)


@functools.lru_cache(maxsize=4)
def _tiny(context: RunContext, vocabulary: int, images: bool) -> PreTrainedTokenizerBase:
    code = code_version("gleaner.models.policy")
    key = cache_key(
        "tokenizer", code, environment=context.environment_digest, vocabulary=vocabulary, images=images
    )

    def make() -> Record:
        with tempfile.TemporaryDirectory() as scratch:
            train_tokenizer(context.shared_environment, vocabulary, images).save_pretrained(scratch)
            return Record(context.store.put_folder(Path(scratch)), {}, code)

    record, _ = context.store.memoise(key, make)
    with tempfile.TemporaryDirectory() as scratch:
        context.store.fetch_folder(record.objects, Path(scratch))
        return load_tokenizer(PretrainedPolicy(path=scratch))
