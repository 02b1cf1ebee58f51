"""Attention over slots: rows of one preallocated key-value cache, each at a length of its own.

Two things happen to a row. Its context is encoded against itself (`Prefill`), once for all rows that share it; and
new tokens are encoded against what its slot holds (`Extend`): one a step while decoding, a whole observation between
turns.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from gleaner.conf.errors import ConfigurationError

ATTENTION = "gleaner_slots"
"""Name under which transformers' modules find `slot_attention`."""
CAPACITY_STEP = 64
"""The cache grows by half its length, in multiples of this."""


class SlotCache:
    """Keys and values of every layer, for rows that each have a length of their own.

    Attributes:
        store: (2 x layers, slots, kv heads, capacity, head size); allocated at the first write. Slot s holds one row's
            tokens at columns 0 .. length - 1; what lies beyond is masked, and finite (it starts as
            zeros), since 0 x NaN is NaN.
    """

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self.slots = 0
        self.capacity = 0
        self.store: Tensor | None = None

    def reserve(self, slots: int, capacity: int) -> None:
        """Make room for so many slots and columns; what is stored stays."""
        if slots <= self.slots and capacity <= self.capacity:
            return
        if capacity > self.capacity:
            capacity = max(capacity, self.capacity + self.capacity // 2)
            capacity = -(-capacity // CAPACITY_STEP) * CAPACITY_STEP
        old, self.slots, self.capacity = self.store, max(slots, self.slots), max(capacity, self.capacity)
        if old is not None:
            self.store = old.new_zeros(old.shape[0], self.slots, old.shape[2], self.capacity, old.shape[4])
            self.store[:, : old.shape[1], :, : old.shape[3]] = old

    def like(self, key: Tensor) -> Tensor:
        """The store, allocated for keys of this shape (rows, kv heads, length, head size) if need be."""
        if self.store is None:
            self.store = key.new_zeros(2 * self.layers, self.slots, key.shape[1], self.capacity, key.shape[3])
        return self.store

    def move(self, source: Sequence[int], target: Sequence[int], length: int) -> None:
        """Copy the first `length` columns of slots; a permutation of slots is a valid move."""
        if self.store is not None and len(source):
            index = torch.tensor([source, target], device=self.store.device)
            self.store[:, index[1], :, :length] = self.store[:, index[0], :, :length]


class Prefill:
    """Attention of fresh contexts to themselves; with a cache, their keys and values are stored.

    Args:
        first: slot of the first row; rows of this pass take consecutive slots.
        source_N: for each of those slots the batch row (distinct context) that it copies.
    """

    def __init__(
        self, cache: SlotCache | None = None, first: int = 0, source_N: Tensor | None = None
    ) -> None:
        self.cache, self.first, self.source_N = cache, first, source_N

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        """q (B, heads, S, D), k and v (B, kv heads, S, D) -> (B, S, heads, D)."""
        length = q.shape[2]
        if self.cache is not None and self.source_N is not None:
            store = self.cache.like(k)
            rows = slice(self.first, self.first + len(self.source_N))
            store[2 * layer, rows, :, :length] = k.index_select(0, self.source_N)
            store[2 * layer + 1, rows, :, :length] = v.index_select(0, self.source_N)
        mask = None
        if window is not None and length > window:
            columns = torch.arange(length, device=q.device)
            distance = columns[:, None] - columns[None, :]
            mask = (distance >= 0) & (distance < window)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out.transpose(1, 2)


class Extend:
    """Attention of S new tokens of the slots first .. first + n - 1 to everything before them and to themselves.

    Args:
        positions_NS: position of each new token in its row; padding runs on past a row's last token, and what it
            writes there is overwritten before anything attends to it.
        length: columns that may be attended to: the largest position + 1.
    """

    def __init__(self, cache: SlotCache, first: int, positions_NS: Tensor, length: int) -> None:
        self.cache, self.first, self.positions_NS, self.length = cache, first, positions_NS, length
        self.capacity = cache.capacity
        self.index: Tensor | None = None
        self.masks: dict[tuple[int, int, int | None], Tensor] = {}

    def advance(self) -> None:
        """The same rows one token later."""
        self.positions_NS = self.positions_NS + 1
        self.length += 1
        self.masks.clear()
        self.cache.reserve(self.first + len(self.positions_NS), self.length)
        if self.index is not None and self.capacity == self.cache.capacity:
            self.index = self.index + 1
        else:
            self.index, self.capacity = None, self.cache.capacity

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        """q (N, heads, S, D), k and v (N, kv heads, S, D) -> (N, S, heads, D)."""
        rows, heads, new, size = q.shape
        kv_heads = k.shape[1]
        groups = heads // kv_heads
        store = self.cache.like(k)
        keys, values = store[2 * layer], store[2 * layer + 1]
        if self.index is None:
            self.index = self._write_index(kv_heads)
        keys.view(-1, size).index_copy_(0, self.index, k.reshape(-1, size))
        values.view(-1, size).index_copy_(0, self.index, v.reshape(-1, size))
        slots = slice(self.first, self.first + rows)
        keys, values = keys[slots, :, : self.length], values[slots, :, : self.length]
        # The heads that share a key head stand beside its queries, so keys are read once and never repeated.
        grouped = q.reshape(rows, kv_heads, groups * new, size)
        mask = self._mask(kv_heads, groups, window, q.dtype)
        if new == 1 and self._two_products(q):
            # At one query a row, two batched products beat the fused kernel, which is built for long queries.
            scores = torch.baddbmm(
                mask, grouped.flatten(0, 1), keys.flatten(0, 1).transpose(1, 2), beta=1, alpha=scale
            )
            out = torch.bmm(torch.softmax(scores, -1), values.flatten(0, 1))
        else:
            out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale)
        return out.view(rows, heads, new, size).transpose(1, 2)

    @staticmethod
    def _two_products(tensor: Tensor) -> bool:
        return tensor.device.type == "cpu" and tensor.dtype == torch.float32

    def _write_index(self, kv_heads: int) -> Tensor:
        """(N x kv heads x S,) rows of the cache seen as (slots x kv heads x capacity, head size)."""
        rows = len(self.positions_NS)
        lane = torch.arange(
            self.first * kv_heads, (self.first + rows) * kv_heads, device=self.positions_NS.device
        )
        start = (lane * self.cache.capacity).view(rows, kv_heads, 1)
        return (start + self.positions_NS[:, None]).view(-1)

    def _mask(self, kv_heads: int, groups: int, window: int | None, dtype: torch.dtype) -> Tensor:
        """Additive mask: (N x kv heads, 1, length) for one new token on the CPU, else (N, 1, groups x S, length)."""
        mask = self.masks.get((kv_heads, groups, window))
        if mask is None:
            columns = torch.arange(self.length, device=self.positions_NS.device)
            hidden = columns > self.positions_NS[:, :, None]
            if window is not None:
                hidden |= columns <= self.positions_NS[:, :, None] - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(
                hidden, -torch.inf
            )
            if mask.shape[1] == 1 and self._two_products(mask):
                mask = mask.repeat_interleave(kv_heads, 0) if kv_heads > 1 else mask
            else:
                mask = (mask.repeat(1, groups, 1) if mask.shape[1] > 1 else mask)[:, None]
            self.masks[kv_heads, groups, window] = mask
        return mask


def slot_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    gleaner_step: Prefill | Extend | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers' modules call during our forward passes."""
    if gleaner_step is None or softcap is not None or s_aux is not None:
        raise ConfigurationError(
            f"{type(module).__name__} needs attention that the transformers engine does not have (soft caps, sinks, or "
            "arguments that do not reach it): set engine=vllm"
        )
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    return gleaner_step.attend(module.layer_idx, query, key, value, scale, sliding_window), None


AttentionInterface.register(ATTENTION, slot_attention)
