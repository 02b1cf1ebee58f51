import dataclasses
import io
import json
import math
import time

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gleaner.conf.errors import ContractError, CorruptArtifactError
from gleaner.models.records import Prompt, Segment, Verdict
from gleaner.models.tables import (
    PROMPTS,
    ROLLOUTS,
    VERDICTS,
    Table,
    decode,
    encode,
    frame_from_prompts,
    frame_from_rollouts,
    frame_from_verdicts,
    prompts_from_frame,
    rollouts_from_frame,
    validate,
    verdicts_from_frame,
)


def prompt(number=0, **changes):
    fields = {
        "prompt_id": f"{number:064x}",
        "environment": "math",
        "split": "train",
        "seed": number,
        "messages": [{"role": "user", "content": f"What is {number} + {number}?"}],
        "payload": {"answer": str(2 * number)},
    }
    return Prompt(**(fields | changes))


def segment(number=0, sample=0, tokens=3, **changes):
    """Two context tokens, then `tokens` sampled ones whose second is an observation."""
    mask = [0 if i == 1 else 1 for i in range(tokens)]
    fields = {
        "prompt_id": f"{number:064x}",
        "sample": sample,
        "segment": 0,
        "context_ids": [5, 6],
        "sampled_ids": list(range(10, 10 + tokens)),
        "loss_mask": mask,
        "logprobs": [-0.1 * (i + 1) for i in range(sum(mask))],
        "policy_version": "version-1",
        "sampling_digest": "digest",
        "seed": 7,
        "finish_reason": "stop",
        "text": "4",
        "transcript": [{"role": "assistant", "content": "4"}],
        "environment_result": {},
        "images": [],
    }
    return Segment(**(fields | changes))


def verdict(number=0, sample=0, **changes):
    fields = {
        "prompt_id": f"{number:064x}",
        "sample": sample,
        "status": "scored",
        "success": True,
        "reward": 1.0,
        "details": {"parsed": "4"},
        "verifier_version": "1",
    }
    return Verdict(**(fields | changes))


UNSCORED = {"status": "timeout", "success": None, "reward": None}


def test_rows_come_back_as_they_were_written():
    prompts = [prompt(i) for i in range(3)]
    segments = [
        segment(),
        segment(sample=1, tokens=0, finish_reason="error"),
        segment(1, tokens=1, context_ids=[], logprobs=[0.0]),
        segment(1, sample=1, text="ü \x00 😀", environment_result={"won": True, "score": 0.1}),
        segment(1, sample=2, images=[{"object": "ab" * 32, "span": [0, 4]}], seed=2**63 - 1),
    ]
    verdicts = [verdict(), verdict(sample=1, **UNSCORED), verdict(1, success=False, reward=-0.5, details={})]
    assert prompts_from_frame(decode(PROMPTS, encode(PROMPTS, frame_from_prompts(prompts)))) == prompts
    assert rollouts_from_frame(decode(ROLLOUTS, encode(ROLLOUTS, frame_from_rollouts(segments)))) == segments
    assert verdicts_from_frame(decode(VERDICTS, encode(VERDICTS, frame_from_verdicts(verdicts)))) == verdicts


@pytest.mark.parametrize("table", [PROMPTS, ROLLOUTS, VERDICTS], ids=lambda t: t.name)
def test_a_table_without_rows_keeps_its_types(table):
    found = decode(table, encode(table, table.to_frame([])))
    assert dict(found.schema) == dict(table.columns)
    assert table.to_rows(found) == []


@given(st.lists(st.floats(max_value=0, allow_nan=False, allow_infinity=False, width=64), max_size=5))
@settings(max_examples=50, deadline=None)
def test_log_probabilities_come_back_bit_for_bit(logprobs):
    row = segment(sampled_ids=[1] * len(logprobs), loss_mask=[1] * len(logprobs), logprobs=logprobs)
    [found] = rollouts_from_frame(decode(ROLLOUTS, encode(ROLLOUTS, frame_from_rollouts([row]))))
    assert [x.hex() for x in found.logprobs] == [x.hex() for x in logprobs]


def test_equal_rows_give_equal_bytes():
    rows = [segment(i, tokens=20) for i in range(50)]
    assert encode(ROLLOUTS, frame_from_rollouts(rows)) == encode(ROLLOUTS, frame_from_rollouts(list(rows)))


BROKEN_ROLLOUTS = {
    "logprobs shorter than the mask's ones": ({"logprobs": [-0.1]}, "logprobs", "another length"),
    "mask shorter than the ids": ({"loss_mask": [1, 0], "logprobs": [-0.1]}, "loss_mask", "another length"),
    "a mask of twos": ({"loss_mask": [2, 0, 0]}, "loss_mask", "mark sampled tokens 1"),
    "minus infinity": ({"logprobs": [-math.inf, -0.1]}, "logprobs", "not finite"),
    "not a number": ({"logprobs": [-0.1, math.nan]}, "logprobs", "not finite"),
    "a probability": ({"logprobs": [0.9, 0.2]}, "logprobs", "above 0"),
    "a missing log-probability": ({"logprobs": [None, -0.1]}, "logprobs", "not finite"),
    "a negative token": ({"sampled_ids": [1, -2, 3]}, "sampled_ids", "negative id"),
    "a missing token": ({"context_ids": [1, None]}, "context_ids", "null"),
    "an unknown finish reason": (
        {"finish_reason": "eos"},
        "finish_reason",
        "stop, length, environment, error",
    ),
    "no version": ({"policy_version": ""}, "policy_version", "empty"),
    "a null text": ({"text": None}, "text", "null"),
    "a negative sample": ({"sample": -1}, "sample", "negative"),
}


@pytest.mark.parametrize("name", BROKEN_ROLLOUTS)
def test_a_broken_rollout_is_named_by_row_column_and_fix(name):
    changes, column, fix = BROKEN_ROLLOUTS[name]
    rows = [segment(sample=i) for i in range(4)]
    rows[2] = dataclasses.replace(rows[2], **changes)
    with pytest.raises(ContractError) as error:
        encode(ROLLOUTS, frame_from_rollouts(rows))
    message = str(error.value)
    assert "row 2" in message
    assert f"sample {rows[2].sample}" in message
    assert f"column {column}: " in message
    assert fix in message


BROKEN_VERDICTS = {
    "scored without a reward": ({"reward": None}, "reward", "unscored is not wrong"),
    "scored without success": ({"success": None}, "success", "unscored is not wrong"),
    "a timeout with a reward": ({"status": "timeout", "success": None}, "reward", "unscored one null"),
    "a timeout that is wrong": (
        {"status": "timeout", "success": False, "reward": None},
        "success",
        "unscored one null",
    ),
    "a NaN reward": ({"reward": math.nan}, "reward", "not finite"),
    "an infinite reward": ({"reward": math.inf}, "reward", "not finite"),
    "an unknown status": (UNSCORED | {"status": "failed"}, "status", "scored, timeout, error"),
}


@pytest.mark.parametrize("name", BROKEN_VERDICTS)
def test_a_broken_verdict_is_named_by_row_column_and_fix(name):
    changes, column, fix = BROKEN_VERDICTS[name]
    with pytest.raises(ContractError, match=f"row 1 .*sample 1.* column {column}: .*{fix}"):
        encode(VERDICTS, frame_from_verdicts([verdict(), verdict(sample=1, **changes), verdict(sample=2)]))


def test_a_prompt_without_messages_is_refused():
    with pytest.raises(ContractError, match=r"row 0 .*column messages: has no message"):
        encode(PROMPTS, frame_from_prompts([prompt(messages=[])]))


def test_a_key_that_occurs_twice_is_refused():
    with pytest.raises(
        ContractError, match=r"row [02] .*sample 0.*prompt_id, sample, segment: the key occurs more"
    ):
        encode(ROLLOUTS, frame_from_rollouts([segment(), segment(sample=1), segment()]))


def test_columns_of_another_type_missing_or_extra_are_named():
    frame = frame_from_verdicts([verdict()])
    with pytest.raises(ContractError, match="column reward: is Float32, not Float64"):
        validate(VERDICTS, frame.with_columns(pl.col("reward").cast(pl.Float32)))
    with pytest.raises(ContractError, match="column reward: is missing"):
        validate(VERDICTS, frame.drop("reward"))
    with pytest.raises(ContractError, match="column more: is not part of the schema"):
        validate(VERDICTS, frame.with_columns(more=pl.lit(1)))
    with pytest.raises(ContractError, match="out of order"):
        validate(VERDICTS, frame.select(*reversed(frame.columns)))


def test_what_is_no_json_or_overflows_is_a_contract_error():
    with pytest.raises(ContractError, match=r"sample 3, column details: cannot be written as JSON"):
        frame_from_verdicts([verdict(sample=3, details={"x": {1, 2}})])
    with pytest.raises(ContractError, match="column details"):
        frame_from_verdicts([verdict(details={"x": math.nan})])
    with pytest.raises(ContractError, match="column seed does not fit"):
        frame_from_rollouts([segment(seed=2**64)])
    with pytest.raises(ContractError, match="column text does not fit"):
        frame_from_rollouts([segment(text="half a pair \ud83d")])
    with pytest.raises(ContractError, match="column sampled_ids does not fit"):
        frame_from_rollouts([segment(sampled_ids=[1.5, 2, 3])])


def test_many_failures_are_counted_not_listed():
    with pytest.raises(ContractError, match="and 15 more"):
        encode(VERDICTS, frame_from_verdicts([verdict(sample=i, reward=None) for i in range(20)]))


ANY_VERDICT = st.builds(
    verdict,
    number=st.integers(0, 2),
    sample=st.integers(-1, 3),
    status=st.sampled_from(["scored", "timeout", "error", "wrong"]),
    success=st.sampled_from([None, True, False]),
    reward=st.sampled_from([None, 0.0, 1.0, math.nan, math.inf]),
    verifier_version=st.sampled_from(["", "1"]),
)


@given(st.lists(ANY_VERDICT, min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_the_fast_gate_and_pandera_agree(verdicts):
    import pandera.errors

    frame = frame_from_verdicts(verdicts)
    try:
        VERDICTS.schema.validate(frame, lazy=True)
        accepted = True
    except pandera.errors.SchemaErrors:
        accepted = False
    assert frame.select(VERDICTS.holds).item() is accepted


# ------------------------------------------------------------------------------------------ schema versions


def notes_table(version, columns, migrations=None):
    return Table(
        name="notes",
        version=version,
        columns=columns,
        key=("note_id",),
        rules=(),
        to_frame=lambda rows: pl.DataFrame(rows, schema=columns),
        to_rows=lambda frame: frame.rows(named=True),
        migrations=migrations or {},
    )


V1 = {"note_id": pl.String(), "score": pl.Float64()}
V2 = {"note_id": pl.String(), "reward": pl.Float64()}
V3 = {"note_id": pl.String(), "reward": pl.Float64(), "author": pl.String()}
MIGRATIONS = {
    1: lambda frame: frame.rename({"score": "reward"}),
    2: lambda frame: frame.with_columns(author=pl.lit("unknown")),
}


def test_old_versions_are_migrated_step_by_step():
    rows = [{"note_id": "a", "score": 0.5}]
    old = encode(notes_table(1, V1), pl.DataFrame(rows, schema=V1))
    now = notes_table(3, V3, MIGRATIONS)
    assert now.to_rows(decode(now, old)) == [{"note_id": "a", "reward": 0.5, "author": "unknown"}]
    middle = encode(notes_table(2, V2), pl.DataFrame([{"note_id": "b", "reward": 1.0}], schema=V2))
    assert decode(now, middle)["author"].to_list() == ["unknown"]


def test_a_migration_that_leaves_the_old_shape_is_refused():
    old = encode(notes_table(1, V1), pl.DataFrame([{"note_id": "a", "score": 0.5}], schema=V1))
    with pytest.raises(ContractError, match="column reward: is missing"):
        decode(notes_table(2, V2, {1: lambda frame: frame}), old)


def test_a_newer_version_is_refused_with_the_fix():
    newer = encode(
        notes_table(3, V3), pl.DataFrame([{"note_id": "a", "reward": 1.0, "author": "b"}], schema=V3)
    )
    with pytest.raises(
        CorruptArtifactError, match=r"version 3 of the notes schema, .* up to 2: upgrade Gleaner"
    ):
        decode(notes_table(2, V2), newer)


def test_a_version_that_nothing_migrates_is_refused():
    old = encode(notes_table(1, V1), pl.DataFrame([{"note_id": "a", "score": 0.5}], schema=V1))
    with pytest.raises(CorruptArtifactError, match="nothing migrates 1 to 2"):
        decode(notes_table(2, V2), old)


def test_foreign_bytes_are_refused():
    verdicts = encode(VERDICTS, frame_from_verdicts([verdict()]))
    with pytest.raises(CorruptArtifactError, match="holds verdicts, not rollouts"):
        decode(ROLLOUTS, verdicts)
    for damaged in (b"", b"PAR1", verdicts[:-20], verdicts[:40], b"no parquet at all" * 10):
        with pytest.raises(CorruptArtifactError, match="no verdicts table"):
            decode(VERDICTS, damaged)
    plain = io.BytesIO()
    frame_from_verdicts([verdict()]).write_parquet(plain)
    with pytest.raises(CorruptArtifactError, match="no verdicts table"):
        decode(VERDICTS, plain.getvalue())


def test_a_file_that_breaks_the_schema_is_refused_when_read():
    frame = frame_from_verdicts([verdict()]).with_columns(reward=pl.lit(None, pl.Float64))
    buffer = io.BytesIO()
    frame.write_parquet(buffer, metadata={"gleaner": json.dumps({"table": "verdicts", "version": 1})})
    with pytest.raises(ContractError, match="column reward"):
        decode(VERDICTS, buffer.getvalue())


def test_a_step_of_a_tiny_policy_is_written_in_milliseconds():
    """128 rollouts of 100 tokens took 20 ms here to turn into a frame, validate and write. The bound leaves room for
    a busy machine; it catches a validation that runs pandera on the common path (16 ms more)."""
    rows = [segment(i // 8, i % 8, tokens=100) for i in range(128)]
    encode(ROLLOUTS, frame_from_rollouts(rows))
    seconds = []
    for _ in range(7):
        start = time.perf_counter()
        encode(ROLLOUTS, frame_from_rollouts(rows))
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.06
