"""The learning signal: which tokens get which advantage, weight and distillation target.

Every method turns verified groups into this one table; the update consumes it without knowing the method.
Each method's own averaging (sequence mean, token mean, nested means) is folded into the coefficients, so the
update only sums:

    L = sum_t  -pg_coef_t * surrogate(ratio_t, advantage_t)  +  kl_coef_t * k3_t  +  distill_coef_t * D_t

and for a critic's rows  sum_t value_coef_t * (V_t - return_t)^2 / 2  (clipped: `objective.value_loss`).

Arrays of a row cover its learnable tokens (n of them), in double precision: folding costs no accuracy,
whatever precision the update computes in.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pandera.polars as pa
import polars as pl
from pandera.errors import SchemaError

from gleaner.conf.errors import ContractError, CorruptArtifactError, VerifierContractError
from gleaner.models.records import GroupKind, Segment, Verdict

SIGNAL_SCHEMA_VERSION = 2

DistillKind = Literal["none", "sampled", "topk"]
"""none; the sampled-token log-ratio against the teacher (GATS); reverse KL on a stored support (AdviSD,
VISTA)."""

OnUnscored = Literal["drop_group", "retry", "keep_if_at_least"]
SegmentKey = tuple[str, str, int, int]
"""(digest of the Rollouts object, prompt_id, sample, segment)."""

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


# ------------------------------------------------------------------------------------------------- groups


@dataclass(frozen=True)
class Episode:
    """One rollout of a group: its segments in order, and what the verifier said."""

    sample: int
    segments: list[Segment]
    verdict: Verdict

    @property
    def truncated(self) -> bool:
        """The policy ran out of tokens, in any of its turns."""
        return any(segment.finish_reason == "length" for segment in self.segments)

    @property
    def tokens(self) -> int:
        """Tokens that the policy sampled."""
        return sum(len(segment.logprobs) for segment in self.segments)


@dataclass(frozen=True)
class Group:
    """The scored rollouts of one prompt."""

    prompt_id: str
    episodes: list[Episode]

    @cached_property
    def rewards(self) -> Floats:
        """(G,)"""
        return np.array([episode.verdict.reward for episode in self.episodes], dtype=np.float64)

    @cached_property
    def kind(self) -> GroupKind:
        """By the verifier's success, never by a shaped reward."""
        successes = sum(bool(episode.verdict.success) for episode in self.episodes)
        if successes == 0:
            return "all_fail"
        return "all_pass" if successes == len(self.episodes) else "mixed"


def group_rollouts(
    segments: Sequence[Segment], verdicts: Sequence[Verdict], on_unscored: OnUnscored, keep_at_least: int
) -> tuple[list[Group], dict[str, float]]:
    """Join segments and verdicts into groups, in the order in which prompts first appear in `segments`.

    An episode is unscored when its verdict is, or when one of its segments ended in an error. Unscored is not
    wrong: `drop_group` leaves its whole group out, `retry` too (verification was tried again before this is
    called), `keep_if_at_least` keeps the scored members where there are `keep_at_least` of them.

    Returns:
        groups, and counts: rollouts/unscored, groups/kept, groups/dropped, rollouts/dropped (scored ones lost
            with their group or not).

    Raises:
        ContractError: an episode without a verdict, a verdict without an episode, or a key that occurs twice.
        VerifierContractError: a scored verdict whose reward is no finite number.
    """
    verdict_of: dict[tuple[str, int], Verdict] = {}
    for verdict in verdicts:
        key = (verdict.prompt_id, verdict.sample)
        if key in verdict_of:
            raise ContractError(f"verdicts hold {key} twice: verify every episode once")
        verdict_of[key] = verdict
        if verdict.status == "scored" and (
            verdict.reward is None or verdict.success is None or not math.isfinite(verdict.reward)
        ):
            raise VerifierContractError(
                f"the verdict of {key} is scored but has reward={verdict.reward}, success={verdict.success}: return a "
                "finite reward and a success flag, or let the verifier raise so that the episode is unscored"
            )

    segments_of: dict[str, dict[int, dict[int, Segment]]] = {}
    for segment in segments:
        episode = segments_of.setdefault(segment.prompt_id, {}).setdefault(segment.sample, {})
        if segment.segment in episode:
            raise ContractError(
                f"rollouts hold ({segment.prompt_id}, {segment.sample}, {segment.segment}) twice: give every rollout "
                "of a prompt its own sample number"
            )
        episode[segment.segment] = segment

    groups: list[Group] = []
    unscored = dropped_groups = dropped_rollouts = seen = 0
    for prompt_id, samples in segments_of.items():
        scored: list[Episode] = []
        for sample, parts in sorted(samples.items()):
            seen += 1
            found = verdict_of.get((prompt_id, sample))
            if found is None:
                raise ContractError(
                    f"({prompt_id}, {sample}) has no verdict: verify every rollout before grouping"
                )
            ordered = [parts[index] for index in sorted(parts)]
            if found.status == "scored" and all(part.finish_reason != "error" for part in ordered):
                scored.append(Episode(sample, ordered, found))
        missing = len(samples) - len(scored)
        unscored += missing
        keep = missing == 0 or (on_unscored == "keep_if_at_least" and len(scored) >= keep_at_least)
        if keep:
            groups.append(Group(prompt_id, scored))
        else:
            dropped_groups += 1
            dropped_rollouts += len(scored)
    if seen != len(verdict_of):
        known = {(prompt_id, sample) for prompt_id, samples in segments_of.items() for sample in samples}
        stray = next(key for key in verdict_of if key not in known)
        raise ContractError(
            f"the verdict of {stray} belongs to no rollout: join verdicts with their own rollouts"
        )
    counts = {
        "rollouts/unscored": float(unscored),
        "rollouts/dropped": float(dropped_rollouts),
        "groups/kept": float(len(groups)),
        "groups/dropped": float(dropped_groups),
    }
    return groups, counts


# ------------------------------------------------------------------------------------------------- signal


@dataclass(frozen=True)
class Objective:
    """How a signal's terms are computed; stored with the signal, so that it can be applied again.

    Attributes:
        ratio: importance ratio per token, or the row's geometric mean on every token (GSPO).
        surrogate: `clip` (PPO), `cispo` (clamped, detached ratio times log-probability), `unclipped`.
        off_policy_delta: drop rows of negative advantage whose sampler is this much likelier than the policy.
        temperature: at which tokens were sampled and the ratio is computed.
        distill_temperature: of both distributions of a `topk` distillation term.
        value_clip: of a critic's regression.
    """

    ratio: Literal["token", "sequence"] = "token"
    surrogate: Literal["clip", "cispo", "unclipped"] = "clip"
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = None
    cispo_max: float = 5.0
    off_policy_delta: float | None = None
    temperature: float = 1.0
    distill_temperature: float = 1.0
    value_clip: float | None = None


@dataclass(frozen=True, eq=False)
class SignalRow:
    """The signal of one segment. Arrays cover its n learnable tokens.

    Attributes:
        rollouts: digest of the Rollouts object that holds the segment.
        context_ids, sampled_ids, loss_mask: the segment's tokens, joined in when the signal is read.
        own_context: context_ids are the method's own (a critic's privileged context) and are stored with the
            row.
        sampler_logprobs: (n,) of the distribution that was sampled from, joined in from the segment; None for
            a peer's rows, whose log-probabilities say nothing of this policy.
        origin: whose rollout it is: the learner's own, or a peer's (GRAFT; re-tokenised, so a Rollouts object
            of its own).
        pg_source, distill_source: what each term's gradient comes from: reward, peer, advisor, critic;
            teacher, advisor, experience.
        slot: what learns (policy, peer, critic).
        minibatch: index of the optimizer step that takes the row.
        pg_coef, advantage: (n,) policy-gradient weight and advantage.
        old_logprobs: (n,) denominator of the ratio.
        kl_coef, reference_logprobs: (n,) weight of the k3 term, and the reference's log-probabilities.
        distill_coef: (n,), None where the row distils nothing.
        teacher_logprobs: (n,) for `sampled`.
        support_tokens, support_ids, support_logprobs: for `topk`, (m,) indices of the tokens with a
            coefficient, and their supports (m, K).
        value_coef, returns, old_values: (n,) a critic's weights and targets, and its values before the update.
        image_places: where the segment's images stand in context and sampled tokens, joined in like them.
    """

    rollouts: str
    prompt_id: str
    sample: int
    segment: int
    context_ids: Ints
    sampled_ids: Ints
    loss_mask: Ints
    pg_coef: Floats
    advantage: Floats
    old_logprobs: Floats
    origin: Literal["self", "peer"] = "self"
    own_context: bool = False
    sampler_logprobs: Floats | None = None
    pg_source: str = "reward"
    slot: str = "policy"
    minibatch: int = 0
    kl_coef: Floats | None = None
    reference_logprobs: Floats | None = None
    distill_kind: DistillKind = "none"
    distill_source: str | None = None
    distill_coef: Floats | None = None
    teacher_logprobs: Floats | None = None
    support_tokens: Ints | None = None
    support_ids: Ints | None = None
    support_logprobs: Floats | None = None
    value_coef: Floats | None = None
    returns: Floats | None = None
    old_values: Floats | None = None
    image_places: Sequence[tuple[int, str]] = ()

    @property
    def key(self) -> SegmentKey:
        return (self.rollouts, self.prompt_id, self.sample, self.segment)

    @cached_property
    def pg_weight(self) -> Floats:
        """(n,) |pg_coef * advantage|: zero where the policy-gradient term has no gradient, whatever the
        ratio."""
        return np.abs(self.pg_coef * self.advantage)

    @cached_property
    def distill_weight(self) -> Floats:
        """(n,) size of the distillation term's gradient on the token's log-probability, at the old policy
        (`sampled`); its coefficient (`topk`)."""
        if self.distill_coef is None:
            return np.zeros(len(self.pg_coef))
        if self.distill_kind == "sampled" and self.teacher_logprobs is not None:
            gap = np.where(self.distill_coef != 0, self.teacher_logprobs - self.old_logprobs, 0.0)
            return np.abs(self.distill_coef * gap)
        return np.abs(self.distill_coef)

    @cached_property
    def active(self) -> bool:
        """Some term of the row can have a gradient; the update never runs the others through the model."""
        moved = bool(self.pg_weight.any())
        moved |= self.kl_coef is not None and bool(self.kl_coef.any())
        moved |= self.distill_coef is not None and bool(self.distill_coef.any())
        return moved or (self.value_coef is not None and bool(self.value_coef.any()))


def row_of(
    segment: Segment,
    rollouts: str,
    pg_coef: float | Floats,
    advantage: float | Floats,
    old_logprobs: Floats | None = None,
    **fields: Any,
) -> SignalRow:
    """A row over a segment: scalars are repeated over its n learnable tokens, and old log-probabilities are
    the sampler's unless given. `fields` are any other fields of `SignalRow`.

    Raises:
        ContractError: the segment's log-probabilities do not match its loss mask, or it has no context.
    """
    loss_mask = np.asarray(segment.loss_mask, dtype=np.int64)
    sampler = np.asarray(segment.logprobs, dtype=np.float64)
    where = f"segment ({segment.prompt_id}, {segment.sample}, {segment.segment})"
    if len(sampler) != loss_mask.sum():
        raise ContractError(
            f"{where} has {len(sampler)} log-probabilities for {loss_mask.sum()} learnable tokens: store one for each "
            "token whose loss_mask is 1"
        )
    context = fields.pop("context_ids", None)
    row = SignalRow(
        rollouts=rollouts,
        prompt_id=segment.prompt_id,
        sample=segment.sample,
        segment=segment.segment,
        context_ids=np.asarray(segment.context_ids if context is None else context, dtype=np.int64),
        own_context=context is not None,
        sampled_ids=np.asarray(segment.sampled_ids, dtype=np.int64),
        loss_mask=loss_mask,
        pg_coef=np.full(len(sampler), pg_coef) if np.isscalar(pg_coef) else np.asarray(pg_coef),
        advantage=np.full(len(sampler), advantage) if np.isscalar(advantage) else np.asarray(advantage),
        old_logprobs=sampler if old_logprobs is None else np.asarray(old_logprobs, dtype=np.float64),
        sampler_logprobs=None if fields.get("origin") == "peer" else sampler,
        image_places=() if context is not None else segment.image_places,
        **fields,
    )
    if not len(row.context_ids):
        raise ContractError(
            f"{where} has no context: the first sampled token needs at least one token before it"
        )
    for name in ("pg_coef", "advantage", "old_logprobs", *_FLOAT_COLUMNS):
        values = getattr(row, name)
        if values is not None and len(values) != len(sampler):
            raise ContractError(
                f"{where}: {name} has {len(values)} values for {len(sampler)} learnable tokens: give one each"
            )
    return row


@dataclass(frozen=True)
class LearningSignal:
    """Rows of one update, and how their terms are computed."""

    objective: Objective
    rows: list[SignalRow]


# ---------------------------------------------------------------------------------------------- on disk

_FLOAT_COLUMNS = (
    "kl_coef",
    "reference_logprobs",
    "distill_coef",
    "teacher_logprobs",
    "value_coef",
    "returns",
    "old_values",
)
_ALWAYS = ("pg_coef", "advantage", "old_logprobs")
_FLOATS = pl.List(pl.Float64)
_INTS = pl.List(pl.Int32)

_REQUIRED: dict[str, pl.DataType] = {
    "rollouts": pl.String(),
    "prompt_id": pl.String(),
    "sample": pl.Int64(),
    "segment": pl.Int64(),
    "origin": pl.String(),
    "pg_source": pl.String(),
    "slot": pl.String(),
    "minibatch": pl.Int64(),
    "distill_kind": pl.String(),
    **dict.fromkeys(_ALWAYS, _FLOATS),
}
_OPTIONAL: dict[str, pl.DataType] = {
    "distill_source": pl.String(),
    "own_context_ids": _INTS,
    **dict.fromkeys(_FLOAT_COLUMNS, _FLOATS),
    "support_tokens": _INTS,
    "support_ids": _INTS,
    "support_logprobs": _FLOATS,
}

# pandera checks names and types here; values are checked below in one pass. Its own checks, a query a column, would
# take 13 ms of every step.
SIGNAL_SCHEMA = pa.DataFrameSchema(
    {name: pa.Column(dtype, nullable=True) for name, dtype in (_REQUIRED | _OPTIONAL).items()},
    strict=True,
    ordered=True,
)
"""A row is a signal row. Supports are flat (m * K values for m support_tokens)."""

_BROKEN_WHERE: dict[str, pl.Expr] = {
    **{f"{name} is missing": pl.col(name).is_null() for name in _REQUIRED},
    **{f"{name} is negative": pl.col(name) < 0 for name in ("sample", "segment", "minibatch")},
    "origin is neither self nor peer": ~pl.col("origin").is_in(["self", "peer"]),
    "distill_kind is none of none, sampled, topk": ~pl.col("distill_kind").is_in(["none", "sampled", "topk"]),
}


def _list_series(name: str, values: Sequence[npt.NDArray[Any] | None], inner: pl.DataType) -> pl.Series:
    """A list column, built from one flat array: a Series object for every row would take most of a short step."""
    present = [index for index, value in enumerate(values) if value is not None]
    arrays = [value.reshape(-1) for value in values if value is not None]
    if not all(len(array) for array in arrays):
        parts = [None if value is None else pl.Series(value.reshape(-1), dtype=inner) for value in values]
        return pl.Series(name, parts, dtype=pl.List(inner))
    if not arrays:
        return pl.Series(name, [None] * len(values), dtype=pl.List(inner))
    flat = pl.DataFrame(
        {
            "row": np.repeat(present, [len(array) for array in arrays]),
            name: pl.Series(np.concatenate(arrays), dtype=inner),
        }
    )
    lists = flat.group_by("row", maintain_order=True).agg(name)
    if len(present) == len(values):
        return lists[name]
    return pl.DataFrame({"row": np.arange(len(values))}).join(
        lists, on="row", how="left", maintain_order="left"
    )[name]


def _arrays(column: pl.Series) -> list[npt.NDArray[Any] | None]:
    """The inverse of `_list_series`: views into one flat array."""
    if column.null_count() == len(column):
        return [None] * len(column)
    lengths = column.list.len().fill_null(0).to_numpy()
    flat = column.filter(lengths > 0).explode().to_numpy()
    parts = np.split(flat, np.cumsum(lengths)[:-1])
    return [None if missing else part for missing, part in zip(column.is_null(), parts, strict=True)]


def signal_to_frame(signal: LearningSignal) -> tuple[pl.DataFrame, dict[str, Any]]:
    """The signal as a table and its header (JSON: schema version and objective).

    The segments' tokens and the sampler's log-probabilities stay in the Rollouts objects that rows refer to.

    Raises:
        ContractError: the table breaks its schema.
    """
    rows = signal.rows
    columns: list[pl.Series] = []
    for name, column in SIGNAL_SCHEMA.columns.items():
        if name == "own_context_ids":
            values = [row.context_ids if row.own_context else None for row in rows]
            columns.append(_list_series(name, values, pl.Int32()))
        elif name in _ALWAYS or name in _FLOAT_COLUMNS or name == "support_logprobs":
            columns.append(_list_series(name, [getattr(row, name) for row in rows], pl.Float64()))
        elif name in ("support_tokens", "support_ids"):
            columns.append(_list_series(name, [getattr(row, name) for row in rows], pl.Int32()))
        else:
            columns.append(pl.Series(name, [getattr(row, name) for row in rows], dtype=column.dtype.type))
    header = {
        "schema": "signal",
        "schema_version": SIGNAL_SCHEMA_VERSION,
        "objective": asdict(signal.objective),
    }
    return _validated(pl.DataFrame(columns)), header


def _validated(frame: pl.DataFrame) -> pl.DataFrame:
    fix = "build rows with row_of() and tables with signal_to_frame()"
    expected = [(name, column.dtype.type) for name, column in SIGNAL_SCHEMA.columns.items()]
    try:
        # pandera takes 10 ms to say that every type fits; it is asked where one does not, for its words.
        if list(frame.schema.items()) != expected:
            SIGNAL_SCHEMA.validate(frame)
    except SchemaError as error:
        raise ContractError(f"the signal table breaks its schema: {error}; {fix}") from error
    broken = frame.select(rule.arg_true().first().alias(name) for name, rule in _BROKEN_WHERE.items()).row(
        0, named=True
    )
    for problem, row in broken.items():
        if row is not None:
            raise ContractError(f"the signal table breaks its schema: {problem} in row {row}; {fix}")
    return frame


def signal_from_frame(
    frame: pl.DataFrame, header: Mapping[str, Any], segments_by_key: Mapping[SegmentKey, Segment]
) -> LearningSignal:
    """Join a stored signal with the segments that its rows refer to.

    Raises:
        CorruptArtifactError: another schema version, a segment that is missing, or arrays that do not fit it.
    """
    if header.get("schema") != "signal" or header.get("schema_version") != SIGNAL_SCHEMA_VERSION:
        raise CorruptArtifactError(
            f"a signal of schema version {header.get('schema_version')} cannot be applied by this code, which reads "
            f"version {SIGNAL_SCHEMA_VERSION}: migrate the store, or use the release that wrote it"
        )
    frame = _validated(frame)
    lists = {name: _arrays(frame[name]) for name, dtype in frame.schema.items() if isinstance(dtype, pl.List)}
    rows: list[SignalRow] = []
    scalars = frame.select(
        "rollouts", "prompt_id", "sample", "segment", "origin", "pg_source", "slot", "minibatch", "distill_kind",
        "distill_source",
    )  # fmt: skip
    for index, fields in enumerate(scalars.iter_rows(named=True)):
        key = (fields.pop("rollouts"), fields.pop("prompt_id"), fields.pop("sample"), fields.pop("segment"))
        segment = segments_by_key.get(key)
        if segment is None:
            raise CorruptArtifactError(
                f"signal row {index} refers to {key}, which the rollouts do not hold: load them"
            )
        arrays: dict[str, Any] = {
            name: values[index] for name, values in lists.items() if values[index] is not None
        }
        own_context = arrays.pop("own_context_ids", None)
        if "support_tokens" in arrays:
            count = len(arrays["support_tokens"])
            for name in ("support_ids", "support_logprobs"):
                arrays[name] = arrays[name].reshape(count, -1)
        for name in ("support_tokens", "support_ids"):
            if name in arrays:
                arrays[name] = arrays[name].astype(np.int64)
        try:
            rows.append(row_of(segment, key[0], context_ids=own_context, **fields, **arrays))
        except ContractError as error:
            raise CorruptArtifactError(f"signal row {index} does not fit its segment: {error}") from error
    return LearningSignal(Objective(**header["objective"]), rows)


# ---------------------------------------------------------------------------------------------- ledger


@dataclass(frozen=True)
class LedgerEntry:
    """What one source gave to the groups of one kind.

    Attributes:
        rows: signal rows with a gradient from this source.
        tokens: their tokens with a gradient.
        weight: sum of the tokens' absolute weights (coefficient times advantage, or times teacher-minus-old).
    """

    kind: GroupKind
    source: str
    rows: int
    tokens: int
    weight: float


@dataclass(frozen=True)
class Ledger:
    """Who moved the policy: the signal's audit.

    Attributes:
        entries: by group kind and source.
        metrics: signal/recovered (share of all-fail groups with a gradient), signal/all_fail_weight (their
            share of the gradient's weight), signal/tokens (share of the groups' sampled tokens with a
            gradient), and groups/all_fail, groups/mixed, groups/all_pass (shares of groups). Zero where there
            is nothing to share.
    """

    entries: list[LedgerEntry] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)


_KINDS: tuple[GroupKind, ...] = ("all_fail", "mixed", "all_pass")


def audit(signal: LearningSignal, groups: Sequence[Group], slot: str = "policy") -> Ledger:
    """Count the gradient that each kind of group received in `slot`, and from which source.

    A group is the learner's own: a peer's rows count for the kind that their prompt has among `groups`. The
    k3 term is booked under the source `reference`; it pulls back rather than teaches, so it recovers no
    group.
    """
    kind_of = {group.prompt_id: group.kind for group in groups}
    totals: dict[tuple[GroupKind, str], list[float]] = {}
    moved_groups: set[str] = set()
    moved_tokens = 0
    for row in signal.rows:
        if row.slot != slot or row.prompt_id not in kind_of:
            continue
        terms = [(row.pg_source, row.pg_weight)]
        if row.distill_source is not None:
            terms.append((row.distill_source, row.distill_weight))
        teaching = np.zeros(len(row.pg_coef), dtype=bool)
        for _, weight in terms:
            teaching |= weight != 0
        if teaching.any():
            moved_groups.add(row.prompt_id)
            moved_tokens += int(teaching.sum()) if row.origin == "self" else 0
        if row.kl_coef is not None:
            terms.append(("reference", np.abs(row.kl_coef)))
        for source, weight in terms:
            tokens = int(np.count_nonzero(weight))
            if tokens:
                total = totals.setdefault((kind_of[row.prompt_id], source), [0, 0, 0.0])
                total[0] += 1
                total[1] += tokens
                total[2] += float(weight.sum())
    entries = [
        LedgerEntry(kind, source, int(total[0]), int(total[1]), total[2])
        for (kind, source), total in sorted(
            totals.items(), key=lambda item: (_KINDS.index(item[0][0]), item[0][1])
        )
    ]
    kinds = [group.kind for group in groups]
    failed = [group.prompt_id for group in groups if group.kind == "all_fail"]
    weight_of = {
        kind: sum(e.weight for e in entries if e.kind == kind and e.source != "reference") for kind in _KINDS
    }
    sampled = sum(episode.tokens for group in groups for episode in group.episodes)
    metrics = {f"groups/{kind}": _share(kinds.count(kind), len(kinds)) for kind in _KINDS}
    metrics["signal/recovered"] = _share(sum(prompt in moved_groups for prompt in failed), len(failed))
    metrics["signal/all_fail_weight"] = _share(weight_of["all_fail"], sum(weight_of.values()))
    metrics["signal/tokens"] = _share(moved_tokens, sampled)
    return Ledger(entries, metrics)


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
