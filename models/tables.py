"""The contracts on disk: Parquet tables of prompts, rollouts and verdicts, typed with pandera on polars.

A table is validated when it is written and when it is read. What a policy or a verifier says freely (messages,
payload, details) is JSON text in one column; token lists are typed list columns. The schema's name and version
are in the Parquet metadata: an older version is migrated step by step, a newer or foreign one is refused.

pandera takes about 1 ms a column, too much for steps of half a second. So the same rules run first as one polars
expression, and pandera is asked only when that says no, to name the rows.
"""

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, Generic, TypeVar, get_args

import pandera.polars as pa
import polars as pl
import pyarrow

from gleaner.conf.errors import ContractError, CorruptArtifactError
from gleaner.conf.schema import Split
from gleaner.models.records import FinishReason, Prompt, Segment, Status, Verdict

Row = TypeVar("Row")
Migration = Callable[[pl.DataFrame], pl.DataFrame]

METADATA_KEY = "gleaner"
FAILURES_SHOWN = 5
"""Rows named in one error."""
LOGPROB_ROUNDING = 1e-5
"""A log-softmax in float32 may end up this far above zero."""


@dataclass(frozen=True)
class Rule:
    """What holds in every row.

    Attributes:
        column: the column to name when it does not.
        holds: a boolean expression, one value a row; null counts as a violation.
        fix: what is wrong and what to do.
    """

    column: str
    holds: pl.Expr
    fix: str


@dataclass(frozen=True)
class Table(Generic[Row]):
    """One contract.

    Attributes:
        columns: name → polars type, in order.
        key: columns that identify a row; together unique.
        nullable: columns that may be null.
        migrations: version n → how to turn a frame of version n into one of n + 1.
    """

    name: str
    version: int
    columns: Mapping[str, Any]
    key: tuple[str, ...]
    rules: tuple[Rule, ...]
    to_frame: Callable[[Sequence[Row]], pl.DataFrame]
    to_rows: Callable[[pl.DataFrame], list[Row]]
    nullable: frozenset[str] = frozenset()
    migrations: Mapping[int, Migration] = field(default_factory=dict)

    @cached_property
    def schema(self) -> pa.DataFrameSchema:
        """The contract for pandera."""
        return pa.DataFrameSchema(
            {name: pa.Column(kind, nullable=name in self.nullable) for name, kind in self.columns.items()},
            checks=[_check(rule) for rule in self.rules],
            unique=list(self.key),
            strict=True,
            ordered=True,
            name=self.name,
        )

    @cached_property
    def holds(self) -> pl.Expr:
        """The contract as one value: no nulls, every rule, unique keys."""
        filled = [pl.col(name).null_count() == 0 for name in self.columns if name not in self.nullable]
        rules = [rule.holds.fill_null(False).all() for rule in self.rules]
        return pl.all_horizontal(*filled, *rules, pl.struct(self.key).n_unique() == pl.len())


def validate(table: Table[Any], frame: pl.DataFrame) -> pl.DataFrame:
    """Return `frame`, or say which rows break the contract.

    Raises:
        ContractError: naming the row (by its key), the column and the fix.
    """
    typed = list(frame.schema.items()) == list(table.columns.items())
    if typed and (frame.is_empty() or frame.select(table.holds).item()):
        return frame
    try:
        table.schema.validate(frame, lazy=True)
    except pa.errors.SchemaErrors as errors:
        raise ContractError(_describe(table, frame, errors.failure_cases)) from None
    raise ContractError(
        f"{table.name}: the rows break the contract in a way that pandera does not see: report it"
    )


def encode(table: Table[Any], frame: pl.DataFrame) -> bytes:
    """Validate, and write as Parquet. Equal frames give equal bytes. Raises as `validate` does."""
    validate(table, frame)
    buffer = io.BytesIO()
    header = json.dumps({"table": table.name, "version": table.version})
    frame.write_parquet(buffer, compression="zstd", statistics=False, metadata={METADATA_KEY: header})
    return buffer.getvalue()


def decode(table: Table[Any], data: bytes, what: str = "the file") -> pl.DataFrame:
    """Read Parquet, migrate to the table's version, and validate.

    Raises:
        CorruptArtifactError: `what` is no Parquet, another table, or of a version that is not known here.
        ContractError: the rows break the schema.
    """
    try:
        metadata = pl.read_parquet_metadata(io.BytesIO(data))
        header = json.loads(metadata[METADATA_KEY])
        name, version = header["table"], int(header["version"])
        frame = pl.read_parquet(io.BytesIO(data))
    except (pl.exceptions.PolarsError, KeyError, ValueError, TypeError) as error:
        raise CorruptArtifactError(
            f"{what} is no {table.name} table ({type(error).__name__}): start the run again, which makes it anew"
        ) from error
    if name != table.name:
        raise CorruptArtifactError(
            f"{what} holds {name}, not {table.name}: pass the reference of a {table.name} table"
        )
    if version > table.version:
        raise CorruptArtifactError(
            f"{what} has version {version} of the {table.name} schema, and this Gleaner knows up to {table.version}: "
            "upgrade Gleaner, or use another store"
        )
    for old in range(version, table.version):
        if old not in table.migrations:
            raise CorruptArtifactError(
                f"{what} has version {version} of the {table.name} schema, and nothing migrates {old} to {old + 1}: "
                "read it with the Gleaner that wrote it, or make it anew"
            )
        frame = table.migrations[old](frame)
    return validate(table, frame)


def _check(rule: Rule) -> pa.Check:
    return pa.Check(
        lambda data: data.lazyframe.select(rule.holds.fill_null(False)), error=f"{rule.column}: {rule.fix}"
    )


def _describe(table: Table[Any], frame: pl.DataFrame, failures: pl.DataFrame) -> str:
    """One sentence a failure, at most FAILURES_SHOWN. With columns missing or unknown, only those: the rules cannot
    be judged then."""
    rules = {f"{rule.column}: {rule.fix}" for rule in table.rules}
    shape = failures.filter(pl.col("check").is_in(list(SHAPE)))
    sentences: list[str] = []
    for failure in (failures if shape.is_empty() else shape).iter_rows(named=True):
        check, row = str(failure["check"]), failure["index"]
        if check in rules:
            what = check
        elif check in SHAPE:
            what = f"{failure['failure_case']}: {SHAPE[check]}"
        elif check == "multiple_fields_uniqueness":
            what = f"{', '.join(table.key)}: the key occurs more than once: keep one of the rows"
        elif check == "not_nullable":
            what = f"{failure['column']}: is null: give it a value"
        else:
            kind = frame.schema.get(failure["column"])
            what = f"{failure['column']}: is {kind}, not {table.columns.get(failure['column'])}: convert it"
        where = "" if row is None else f" row {row}{_key(table, frame, row)},"
        sentence = f"{table.name}:{where} column {what}"
        if sentence not in sentences:
            sentences.append(sentence)
    hidden = len(sentences) - FAILURES_SHOWN
    return "; ".join(sentences[:FAILURES_SHOWN]) + (f"; and {hidden} more" if hidden > 0 else "")


SHAPE = {
    "column_in_dataframe": "is missing: add it",
    "column_in_schema": "is not part of the schema: drop it",
    "column_ordered": "is out of order: select the schema's columns in its order",
}
"""What pandera calls a column that is not where it should be."""


def _key(table: Table[Any], frame: pl.DataFrame, row: int) -> str:
    if not set(table.key) <= set(frame.columns):
        return ""
    values = frame.row(row, named=True)
    return " (" + ", ".join(f"{name} {values[name]}" for name in table.key) + ")"


# ------------------------------------------------------------------------------------------------- columns


ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def json_text(value: Any, where: str) -> str:
    """JSON text of a free column.

    Raises:
        ContractError: the value is no JSON; `where` names the row and the column.
    """
    try:
        return ENCODER.encode(value)
    except (TypeError, ValueError) as error:
        raise ContractError(
            f"{where}: cannot be written as JSON ({error}): use strings, numbers, lists and dicts"
        ) from None


def frame_of(name: str, columns: Mapping[str, Any], values: Mapping[str, Sequence[Any]]) -> pl.DataFrame:
    """A frame of the given types.

    Raises:
        ContractError: a value does not fit its column's type.
    """
    series = []
    for column, kind in columns.items():
        try:
            if isinstance(kind, pl.List):  # by way of arrow, in a quarter of the time that polars takes
                # Cast, not built as that type: the cast refuses 1.5 as an integer, building makes it 1.
                series.append(pl.Series(column, pyarrow.array(values[column]).cast(_arrow_type(kind))))
            else:
                series.append(pl.Series(column, values[column], dtype=kind, strict=True))
        except (
            TypeError,
            OverflowError,
            ValueError,
            pyarrow.ArrowException,
            pl.exceptions.PolarsError,
        ) as error:
            raise ContractError(
                f"{name}: column {column} does not fit {kind} ({error}): correct the values"
            ) from None
    return pl.DataFrame(series)


@cache
def _arrow_type(kind: pl.DataType) -> pyarrow.DataType:
    return pl.Series([], dtype=kind).to_arrow().type


def non_empty(column: str) -> Rule:
    return Rule(column, pl.col(column).str.len_bytes() > 0, "is empty: give it a value")


def at_least_zero(column: str) -> Rule:
    return Rule(column, pl.col(column) >= 0, "is negative: count from 0")


def one_of(column: str, values: Sequence[str]) -> Rule:
    return Rule(
        column, pl.col(column).is_in(list(values)), f"is none of {', '.join(values)}: use one of them"
    )


def token_ids(column: str) -> Rule:
    ids = pl.col(column)
    return Rule(
        column,
        (ids.list.min().fill_null(0) >= 0) & (ids.list.drop_nulls().list.len() == ids.list.len()),
        "holds a null or negative id: store the token ids as they were sampled",
    )


def json_list(column: str) -> Rule:
    return Rule(column, pl.col(column).str.starts_with("["), "is no JSON list: write it with json.dumps")


def json_object(column: str) -> Rule:
    return Rule(column, pl.col(column).str.starts_with("{"), "is no JSON object: write it with json.dumps")


# ------------------------------------------------------------------------------------------------- prompts

PROMPT_COLUMNS: dict[str, Any] = {
    "prompt_id": pl.String(),
    "environment": pl.String(),
    "split": pl.String(),
    "seed": pl.Int64(),
    "messages": pl.String(),
    "payload": pl.String(),
}


def frame_from_prompts(prompts: Sequence[Prompt]) -> pl.DataFrame:
    """
    Raises:
        ContractError: a value does not fit its column.
    """
    values: dict[str, Sequence[Any]] = {name: [getattr(p, name) for p in prompts] for name in PROMPT_COLUMNS}
    for name in ("messages", "payload"):
        values[name] = [
            json_text(getattr(p, name), f"prompts: prompt_id {p.prompt_id}, column {name}") for p in prompts
        ]
    return frame_of("prompts", PROMPT_COLUMNS, values)


def prompts_from_frame(frame: pl.DataFrame) -> list[Prompt]:
    return [
        Prompt(**(row | {"messages": json.loads(row["messages"]), "payload": json.loads(row["payload"])}))
        for row in frame.iter_rows(named=True)
    ]


PROMPTS: Table[Prompt] = Table(
    name="prompts",
    version=1,
    columns=PROMPT_COLUMNS,
    key=("prompt_id",),
    rules=(
        non_empty("prompt_id"),
        non_empty("environment"),
        one_of("split", get_args(Split)),
        json_list("messages"),
        Rule(
            "messages", pl.col("messages") != "[]", "has no message: a prompt shows the policy at least one"
        ),
        json_object("payload"),
    ),
    to_frame=frame_from_prompts,
    to_rows=prompts_from_frame,
)

# ------------------------------------------------------------------------------------------------ rollouts

ROLLOUT_COLUMNS: dict[str, Any] = {
    "prompt_id": pl.String(),
    "sample": pl.Int64(),
    "segment": pl.Int64(),
    "context_ids": pl.List(pl.Int32()),
    "sampled_ids": pl.List(pl.Int32()),
    "loss_mask": pl.List(pl.Int8()),
    # Double precision, so that what any engine sampled comes back bit for bit; zstd takes back most of the space.
    "logprobs": pl.List(pl.Float64()),
    "policy_version": pl.String(),
    "sampling_digest": pl.String(),
    "seed": pl.Int64(),
    "finish_reason": pl.String(),
    "text": pl.String(),
    "transcript": pl.String(),
    "environment_result": pl.String(),
    "images": pl.String(),
}
ROLLOUT_JSON = ("transcript", "environment_result", "images")


def frame_from_rollouts(segments: Sequence[Segment]) -> pl.DataFrame:
    """
    Raises:
        ContractError: a value does not fit its column.
    """
    values: dict[str, Sequence[Any]] = {
        name: [getattr(s, name) for s in segments] for name in ROLLOUT_COLUMNS
    }
    for name in ROLLOUT_JSON:
        values[name] = [
            json_text(
                getattr(s, name),
                f"rollouts: prompt_id {s.prompt_id}, sample {s.sample}, segment {s.segment}, column {name}",
            )
            for s in segments
        ]
    return frame_of("rollouts", ROLLOUT_COLUMNS, values)


def rollouts_from_frame(frame: pl.DataFrame) -> list[Segment]:
    columns = {name: frame[name].to_list() for name in ROLLOUT_COLUMNS}
    for name in ROLLOUT_JSON:
        columns[name] = [json.loads(text) for text in columns[name]]
    return [Segment(*values) for values in zip(*columns.values(), strict=True)]


ROLLOUTS: Table[Segment] = Table(
    name="rollouts",
    version=1,
    columns=ROLLOUT_COLUMNS,
    key=("prompt_id", "sample", "segment"),
    rules=(
        non_empty("prompt_id"),
        at_least_zero("sample"),
        at_least_zero("segment"),
        token_ids("context_ids"),
        token_ids("sampled_ids"),
        Rule(
            "loss_mask",
            pl.col("loss_mask").list.len() == pl.col("sampled_ids").list.len(),
            "has another length than sampled_ids: give every sampled or observed token one 0 or 1",
        ),
        Rule(
            "loss_mask",
            (pl.col("loss_mask").list.min().fill_null(0) >= 0)
            & (pl.col("loss_mask").list.max().fill_null(0) <= 1)
            & (pl.col("loss_mask").list.drop_nulls().list.len() == pl.col("loss_mask").list.len()),
            "holds something else than 0 and 1: mark sampled tokens 1 and observations 0",
        ),
        Rule(
            "logprobs",
            pl.col("logprobs").list.len() == pl.col("loss_mask").list.sum(),
            "has another length than loss_mask has ones: store one log-probability a learnable token",
        ),
        Rule(
            "logprobs",
            pl.col("logprobs").list.eval(pl.element().is_finite().fill_null(False)).list.all(),
            "is not finite: a sampled token has a probability above 0; check the engine's temperature and dtype",
        ),
        Rule(
            "logprobs",
            pl.col("logprobs").list.max().fill_null(0) <= LOGPROB_ROUNDING,
            "is above 0: store log-probabilities of the sampling distribution, not probabilities or logits",
        ),
        non_empty("policy_version"),
        one_of("finish_reason", get_args(FinishReason)),
        json_list("transcript"),
        json_object("environment_result"),
        json_list("images"),
    ),
    to_frame=frame_from_rollouts,
    to_rows=rollouts_from_frame,
)

# ------------------------------------------------------------------------------------------------ verdicts

VERDICT_COLUMNS: dict[str, Any] = {
    "prompt_id": pl.String(),
    "sample": pl.Int64(),
    "status": pl.String(),
    "success": pl.Boolean(),
    "reward": pl.Float64(),
    "details": pl.String(),
    "verifier_version": pl.String(),
}


def frame_from_verdicts(verdicts: Sequence[Verdict]) -> pl.DataFrame:
    """
    Raises:
        ContractError: a value does not fit its column.
    """
    values: dict[str, Sequence[Any]] = {
        name: [getattr(v, name) for v in verdicts] for name in VERDICT_COLUMNS
    }
    values["details"] = [
        json_text(v.details, f"verdicts: prompt_id {v.prompt_id}, sample {v.sample}, column details")
        for v in verdicts
    ]
    return frame_of("verdicts", VERDICT_COLUMNS, values)


def verdicts_from_frame(frame: pl.DataFrame) -> list[Verdict]:
    return [Verdict(**(row | {"details": json.loads(row["details"])})) for row in frame.iter_rows(named=True)]


SCORED = pl.col("status") == "scored"

VERDICTS: Table[Verdict] = Table(
    name="verdicts",
    version=1,
    columns=VERDICT_COLUMNS,
    key=("prompt_id", "sample"),
    rules=(
        non_empty("prompt_id"),
        at_least_zero("sample"),
        one_of("status", get_args(Status)),
        Rule(
            "success",
            pl.col("success").is_not_null() == SCORED,
            "does not fit status: a scored verdict has true or false, an unscored one null (unscored is not wrong)",
        ),
        Rule(
            "reward",
            pl.col("reward").is_not_null() == SCORED,
            "does not fit status: a scored verdict has a reward, an unscored one null (unscored is not wrong)",
        ),
        Rule(
            "reward",
            pl.col("reward").is_finite() | pl.col("reward").is_null(),
            "is not finite: a verifier that answers NaN or infinity gives status error and no reward",
        ),
        json_object("details"),
        non_empty("verifier_version"),
    ),
    to_frame=frame_from_verdicts,
    to_rows=verdicts_from_frame,
    nullable=frozenset({"success", "reward"}),
)

VERSIONS = {table.name: table.version for table in (PROMPTS, ROLLOUTS, VERDICTS)}
