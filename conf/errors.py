"""The error vocabulary, shared by every layer.

Two questions matter when something fails: may it be tried again, and what should the reader do. The class
answers the first, the message answers the second: every message ends with the fix.
A bad rollout is none of these: it is data (a verdict whose status is `timeout` or `error`).
"""


class GleanerError(Exception):
    """Base of every error that Gleaner raises on purpose."""

    retryable = False


class ConfigurationError(GleanerError):
    """The configuration, or a file that it names, is wrong. Raised before GPU time is spent; never retried."""


class ContractError(GleanerError):
    """A table broke its schema. The message names the row, the column and the fix; never retried."""


class CorruptArtifactError(GleanerError):
    """Stored bytes do not match their digest or their schema version. Never trained on, never retried."""


class BadImageError(GleanerError):
    """Bytes that are no whole image, or one that no policy can be shown. Within a rollout it is data: the rollout ends
    unscored."""


class VerifierContractError(GleanerError):
    """A verifier answered with something that is no verdict (NaN, out of range, wrong type)."""


class StaleWeightsError(GleanerError):
    """The canary disagreed: an engine answers from other weights than the trainer's."""


class JournalConflictError(GleanerError):
    """Two different histories claim the same step of one run."""


class TransientError(GleanerError):
    """Worth another try: a lost worker, a 5xx, a timeout, a connection reset."""

    retryable = True


class StoreUnavailableError(TransientError):
    """The object store did not answer in time."""


class OutOfMemoryError(TransientError):
    """The accelerator ran out of memory; the caller shrinks the batch before the next try."""
