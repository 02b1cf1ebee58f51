"""Learning signals on disk: a Parquet table whose metadata carries the objective."""

import io
import json
from collections import OrderedDict

import polars as pl

from gleaner.models import tables
from gleaner.models.records import Segment
from gleaner.models.signal import LearningSignal, SegmentKey, signal_from_frame, signal_to_frame
from gleaner.tasks.store import ObjectStore

HEADER = "gleaner_signal"
RECENT_SIGNALS = 2

_recent: OrderedDict[str, LearningSignal] = OrderedDict()
"""Signals that this process just stored: the update that follows needs no second reading."""


def store_signal(store: ObjectStore, signal: LearningSignal) -> str:
    """Store a signal as Parquet, its objective in the metadata; returns its digest."""
    frame, header = signal_to_frame(signal)
    buffer = io.BytesIO()
    frame.write_parquet(buffer, compression="zstd", metadata={HEADER: json.dumps(header, sort_keys=True)})
    ref = store.put_bytes(buffer.getvalue())
    _recent[ref] = signal
    while len(_recent) > RECENT_SIGNALS:
        _recent.popitem(last=False)
    return ref


def load_signal(store: ObjectStore, ref: str) -> LearningSignal:
    """A stored signal, joined with the segments that it refers to."""
    if ref in _recent:
        return _recent[ref]
    data = store.get_bytes(ref)
    header = json.loads(pl.read_parquet_metadata(io.BytesIO(data))[HEADER])
    frame = pl.read_parquet(io.BytesIO(data))
    segments: dict[SegmentKey, Segment] = {}
    for shard in frame["rollouts"].unique(maintain_order=True).to_list():
        for segment in store.get_rows(tables.ROLLOUTS, shard):
            segments[(shard, segment.prompt_id, segment.sample, segment.segment)] = segment
    return signal_from_frame(frame, header, segments)
