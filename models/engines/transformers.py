"""Sampling and scoring with transformers' own modules, and a key-value cache of our own.

transformers' `generate` pads a batch to its longest row, keeps finished rows until the last one ends, prefills the
shared prompt of a group once per member and encodes the whole history again at every turn. Here

- distinct contexts are prefilled once, and their keys and values are copied to the rows that share them;
- rows live in *slots* of one preallocated cache, each at its own length; decoding runs over the first n slots, and
  finished rows swap places with the last running ones;
- a finished row keeps its slot, so its next turn feeds only the tokens that are new.

The model runs unchanged: it calls the attention function registered here, which transformers hands the keyword
arguments of `forward`, and so the step at hand (the way vLLM's transformers backend works). The trainer's module is
shared without a copy; between our calls its attention is its own.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from gleaner.conf.errors import ConfigurationError, ContractError, StaleWeightsError
from gleaner.conf.schema import SamplingSettings
from gleaner.conf.schema import TransformersEngine as TransformersEngineSettings
from gleaner.models.chat import Chat
from gleaner.models.engines.base import Completion, Scored, Turn
from gleaner.models.policy import Policy, load_policy

ATTENTION = "gleaner_slots"
CAPACITY_STEP = 64
"""The cache grows by half its length, in multiples of this."""
COMPACT_AT = 16
"""Finished rows leave the batch once they are one in so many."""
LOGIT_ELEMENTS = 1 << 24
"""Logits that exist at a time while scoring: 64 MiB in float32."""


# ------------------------------------------------------------------------------------------------ attention


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

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: int | None
    ) -> Tensor:
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
        self.index: Tensor | None = None
        self.masks: dict[tuple[int, int | None], Tensor] = {}

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: int | None
    ) -> Tensor:
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
        mask = self._mask(groups, window, q.dtype)
        if new == 1 and q.device.type == "cpu":
            # At one query a row, two batched products beat the fused kernel, which is built for long queries.
            scores = torch.matmul(grouped, keys.transpose(-1, -2))
            scores.mul_(scale if scale is not None else size**-0.5).add_(mask)
            out = torch.matmul(torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype), values)
        else:
            out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale)
        return out.view(rows, heads, new, size).transpose(1, 2)

    def _write_index(self, kv_heads: int) -> Tensor:
        """(N x kv heads x S,) rows of the cache seen as (slots x kv heads x capacity, head size)."""
        rows = len(self.positions_NS)
        lane = torch.arange(
            self.first * kv_heads, (self.first + rows) * kv_heads, device=self.positions_NS.device
        )
        start = (lane * self.cache.capacity).view(rows, kv_heads, 1)
        return (start + self.positions_NS[:, None]).view(-1)

    def _mask(self, groups: int, window: int | None, dtype: torch.dtype) -> Tensor:
        """(N, 1, groups x S, length) additive mask."""
        mask = self.masks.get((groups, window))
        if mask is None:
            columns = torch.arange(self.length, device=self.positions_NS.device)
            hidden = columns > self.positions_NS[:, :, None]
            if window is not None:
                hidden |= columns <= self.positions_NS[:, :, None] - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(
                hidden, -torch.inf
            )
            if mask.shape[1] > 1:
                mask = mask.repeat(1, groups, 1)
            mask = self.masks[groups, window] = mask[:, None]
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
    return gleaner_step.attend(module.layer_idx, query, key, value, scaling, sliding_window), None


AttentionInterface.register(ATTENTION, slot_attention)


# -------------------------------------------------------------------------------------------------- decoder


class Decoder:
    """A policy's module, called for hidden states and logits through slot attention."""

    def __init__(self, policy: Policy) -> None:
        self.model: Any = policy.language_model
        self.backbone: Any = self.model.base_model
        head: Any = self.model.get_output_embeddings
        self.head: Any = head()
        self.config: Any = self.model.config.get_text_config()
        self.device = next(self.model.parameters()).device
        self.layers: int = self.config.num_hidden_layers
        kinds = set(getattr(self.config, "layer_types", None) or ["full_attention"])
        if not self.model._supports_attention_backend or not kinds <= {"full_attention", "sliding_attention"}:
            raise ConfigurationError(
                f"{type(self.model).__name__} has layers that the transformers engine cannot cache "
                f"({', '.join(sorted(kinds))}): set engine=vllm, or choose a decoder such as Qwen2, Qwen3 or Llama"
            )
        # Models of softcapped or scaled logits do more than apply their head.
        self.softcap: float | None = getattr(self.config, "final_logit_softcapping", None)

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Evaluation mode and slot attention, for as long as we sample or score."""
        theirs = self.config._attn_implementation
        training = self.model.training
        self.config._attn_implementation = ATTENTION
        if training:
            self.model.eval()
        try:
            with torch.inference_mode():
                yield
        finally:
            self.config._attn_implementation = theirs
            if training:
                self.model.train()

    def hidden(self, ids_BS: Tensor, positions_BS: Tensor, step: Prefill | Extend) -> Tensor:
        """(B, S, hidden) last hidden states; attention goes through `step`."""
        states: Tensor = self.backbone(
            input_ids=ids_BS, position_ids=positions_BS, use_cache=False, gleaner_step=step
        ).last_hidden_state
        return states

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """(N, V) float32 logits."""
        logits: Tensor = self.head(hidden_NH).float()
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits

    def plain_logits(self, ids_S: Sequence[int]) -> Tensor:
        """(S, V) logits of the model's own forward pass, with its own attention."""
        training = self.model.training
        self.model.eval()
        try:
            with torch.inference_mode():
                ids = torch.tensor([list(ids_S)], device=self.device)
                logits: Tensor = self.model(input_ids=ids, use_cache=False).logits[0].float()
                return logits
        finally:
            self.model.train(training)


# --------------------------------------------------------------------------------------------------- engine


class TransformersEngine:
    """An `Engine` on the trainer's own module, or on an exported folder.

    Args:
        context_limit: tokens of a row at most; a turn that reaches it finishes with `length`.
        policy: a live policy to share, without a copy. After its weights changed call `adopt`.

    Raises:
        ConfigurationError: the model's attention cannot be served from here.
    """

    def __init__(
        self,
        settings: TransformersEngineSettings,
        *,
        context_limit: int,
        policy: Policy | None = None,
        version: str | None = None,
    ) -> None:
        self.settings = settings
        self.context_limit = context_limit
        self.version: str | None = None
        self.epoch = 0
        self._decoder: Decoder | None = None
        self._stop_ids: frozenset[int] = frozenset()
        if policy is not None:
            self._take(policy)
            try:
                self._check_canary()
            except StaleWeightsError as error:
                raise ConfigurationError(
                    f"{type(policy.language_model).__name__} computes something that the transformers engine does not "
                    f"reproduce ({error}): set engine=vllm"
                ) from error
            self.version = version

    @property
    def decoder(self) -> Decoder:
        if self._decoder is None:
            raise ContractError("the engine has no weights yet: call load(folder, version) first")
        return self._decoder

    @property
    def exact(self) -> bool:
        """True in float32: there the cached path equals the trainer's forward pass to 1e-4."""
        return next(self.decoder.model.parameters()).dtype in (torch.float32, torch.float64)

    def load(self, folder: Path, version: str) -> None:
        """Take an exported folder's weights; a live module is let go, not overwritten.

        Raises:
            StaleWeightsError: the cached path scores a fixed sequence differently than the folder's own model.
        """
        device = self._decoder.device if self._decoder is not None else torch.device("cpu")
        policy = load_policy(folder)
        policy.model.to(device)  # type: ignore[arg-type]
        self._take(policy)
        self.adopt(version)

    def adopt(self, version: str) -> None:
        """The shared module's weights changed in place: forget every cached prefix and check the canary.

        Raises:
            StaleWeightsError: the cached path scores a fixed sequence differently than the module's forward pass.
        """
        self.epoch += 1
        self.version = None
        self._check_canary()
        self.version = version

    @contextmanager
    def session(self, sampling: SamplingSettings) -> Iterator["TransformersSession"]:
        """Start a batch of rollouts; its cache is freed when it ends."""
        yield TransformersSession(self, sampling)

    def score(
        self,
        context_ids: Sequence[Sequence[int]],
        ids: Sequence[Sequence[int]],
        *,
        temperature: float = 1.0,
        support: int = 0,
    ) -> list[Scored]:
        """Log-probabilities of `ids` after `context_ids`; with `support`, also of the K likeliest tokens.

        Rows are sorted by length and packed into passes of at most `tokens_per_forward`; logits exist only where a
        token is scored, and only so many at a time.
        """
        if not all(len(context) for context in context_ids):
            raise ContractError(
                "a row to score has no context: its first token has no probability; give one token or more"
            )
        totals = [len(context) + len(row) for context, row in zip(context_ids, ids, strict=True)]
        order = sorted((i for i in range(len(ids)) if len(ids[i])), key=lambda i: totals[i])
        scored = [Scored([], [] if support else None, [] if support else None) for _ in ids]
        with self.decoder.ready():
            for chunk in chunks(order, [totals[i] - 1 for i in order], self.settings.tokens_per_forward):
                rows = [[*context_ids[i], *ids[i]] for i in chunk]
                hidden_NH = self._needed_hidden([row[:-1] for row in rows], [len(ids[i]) for i in chunk])
                targets_N = torch.tensor(
                    [token for i in chunk for token in ids[i]], device=self.decoder.device
                )
                values = self._score_hidden(hidden_NH, targets_N, temperature, support)
                for i, part in zip(chunk, cut(values, [len(ids[i]) for i in chunk]), strict=True):
                    scored[i] = part
        return scored

    def _needed_hidden(self, rows: list[list[int]], needed: list[int]) -> Tensor:
        """(N, hidden) states of the last `needed` positions of each row, row after row."""
        device = self.decoder.device
        ids_BS, positions_BS = padded(rows, device)
        hidden_BSH = self.decoder.hidden(ids_BS, positions_BS, Prefill())
        width = ids_BS.shape[1]
        flat = [b * width + t for b, row in enumerate(rows) for t in range(len(row) - needed[b], len(row))]
        return hidden_BSH.reshape(-1, hidden_BSH.shape[-1]).index_select(0, torch.tensor(flat, device=device))

    def _score_hidden(self, hidden_NH: Tensor, targets_N: Tensor, temperature: float, support: int) -> Scored:
        step = max(1, LOGIT_ELEMENTS // self.decoder.config.vocab_size)
        logprobs: list[float] = []
        top_ids: list[list[int]] = []
        top_logprobs: list[list[float]] = []
        for start in range(0, len(targets_N), step):
            hidden, targets = hidden_NH[start : start + step], targets_N[start : start + step]
            table_NV = torch.log_softmax(self.decoder.logits(hidden) / temperature, dim=-1)
            logprobs += table_NV.gather(1, targets[:, None])[:, 0].tolist()
            if support:
                top = table_NV.topk(support, dim=-1)
                top_ids += top.indices.tolist()
                top_logprobs += top.values.tolist()
        return Scored(logprobs, top_ids if support else None, top_logprobs if support else None)

    def _take(self, policy: Policy) -> None:
        self._decoder = Decoder(policy)
        self._stop_ids = Chat(policy.tokenizer, multi_turn=False).stop_ids
        self.epoch += 1

    def stop_table(self) -> npt.NDArray[np.bool_]:
        """(V,) True for the ids that end a turn."""
        table = np.zeros(self.decoder.config.vocab_size, dtype=bool)
        table[list(self._stop_ids)] = True
        return table

    def _check_canary(self) -> None:
        """Score one sequence by the model's own forward pass and by prefill, extension and decoding."""
        decoder = self.decoder
        vocabulary = decoder.config.vocab_size
        ids = [(7 * i + 3) % vocabulary for i in range(10)]
        wanted = torch.log_softmax(decoder.plain_logits(ids), -1)
        with decoder.ready():
            cache = SlotCache(decoder.layers)
            cache.reserve(2, len(ids))
            row = torch.tensor([ids], device=decoder.device)
            positions = torch.arange(len(ids), device=decoder.device)[None]
            zero = torch.zeros(2, dtype=torch.long, device=decoder.device)
            parts = [decoder.hidden(row[:, :4], positions[:, :4], Prefill(cache, 0, zero))[0]]
            for start, stop in ((4, 8), (8, 9), (9, 10)):
                # Slot 1 holds the group's copy: it is what a shared prefill gave, and must continue alike.
                step = Extend(cache, 1, positions[:, start:stop], stop)
                parts.append(decoder.hidden(row[:, start:stop], positions[:, start:stop], step)[0])
            got = torch.log_softmax(decoder.logits(torch.cat(parts)), -1)
        error = (got - wanted).masked_fill(wanted < -20, 0).abs().max().item()
        tolerance = 1e-3 if self.exact else 0.25
        if not error <= tolerance:
            raise StaleWeightsError(
                f"the engine's log-probabilities are off by {error:.3g} on a fixed sequence (tolerance {tolerance:g}): "
                "restart the run, so that the engine loads the weights anew"
            )


# -------------------------------------------------------------------------------------------------- session


class TransformersSession:
    """Rows in progress. A row's slot keeps the keys and values of `stored[row]` between its turns."""

    def __init__(self, engine: TransformersEngine, sampling: SamplingSettings) -> None:
        self.engine, self.sampling, self.epoch = engine, sampling, engine.epoch
        self.cache = SlotCache(engine.decoder.layers)
        self.row_at: list[int] = []
        """Row of each slot."""
        self.stored: dict[int, list[int]] = {}
        """Ids of each row whose keys and values are cached: all but the last one sampled."""
        self.stop_V = engine.stop_table()

    def sample(self, turns: Sequence[Turn]) -> list[Completion]:
        """One turn for each request, in order."""
        if self.epoch != self.engine.epoch:
            raise ContractError("the engine's weights changed during a session: open a new session")
        limit = self.engine.context_limit
        budgets = {
            turn.row: min(self.sampling.max_new_tokens, limit - len(turn.context_ids)) for turn in turns
        }
        if len(budgets) != len(turns):
            raise ContractError("two turns name one row: give each rollout of a session a row of its own")
        if not all(len(turn.context_ids) for turn in turns):
            raise ContractError("a turn has an empty context: give at least one token")
        running = {turn.row: turn for turn in turns if budgets[turn.row] > 0}
        sampled: dict[int, tuple[list[int], list[float]]] = {turn.row: ([], []) for turn in turns}
        if running:
            with self.engine.decoder.ready():
                logits_NV = self._feed(running)
                sampled |= self._decode(running, budgets, logits_NV)
        completions = []
        for turn in turns:
            ids, logprobs = sampled[turn.row]
            stopped = bool(ids) and bool(self.stop_V[ids[-1]])
            completions.append(Completion(ids, logprobs, "stop" if stopped else "length"))
        return completions

    # ------------------------------------------------------------------------------ feeding new context

    def _feed(self, running: dict[int, Turn]) -> Tensor:
        """Encode what is new of every context; the running rows then fill the first slots. Returns (N, V) logits."""
        known = [turn for turn in running.values() if turn.row in self.stored]
        fresh = [turn for turn in running.values() if turn.row not in self.stored]
        for turn in known:
            stored = self.stored[turn.row]
            if len(turn.context_ids) <= len(stored) or list(turn.context_ids[: len(stored)]) != stored:
                raise ContractError(
                    f"the context of row {turn.row} does not continue its last turn: history may only grow; open a new "
                    "session for a rewritten context"
                )
        # Equal contexts are neighbours, and neighbours are of similar length.
        first_seen: dict[tuple[int, ...], int] = {}
        for turn in fresh:
            first_seen.setdefault(tuple(turn.context_ids), len(first_seen))
        fresh.sort(key=lambda turn: (len(turn.context_ids), first_seen[tuple(turn.context_ids)]))
        longest = max(len(turn.context_ids) for turn in running.values())
        self._arrange({turn.row for turn in known}, [turn.row for turn in fresh], longest)
        parts = []
        if known:
            parts.append(self._extend(running, len(known)))
        if fresh:
            parts.append(self._prefill(fresh, len(known)))
        return self.engine.decoder.logits(torch.cat(parts))

    def _arrange(self, known: set[int], fresh: list[int], length: int) -> None:
        """Slots: first the known running rows, then the fresh ones, then everybody else."""
        old = {row: slot for slot, row in enumerate(self.row_at)}
        head, taken = len(known), len(known) + len(fresh)
        self.cache.reserve(len(old) + len(fresh), length)
        # Only rows in the wrong region move: known rows into the holes of the head, others out of everybody's way.
        target = {row: slot for row, slot in old.items() if (slot < head if row in known else slot >= taken)}
        settled = set(target.values())
        holes = (slot for slot in range(head) if slot not in settled)
        free = (slot for slot in range(taken, len(old) + len(fresh)) if slot not in settled)
        moved = [row for row in old if row not in target]
        for row in moved:
            target[row] = next(holes if row in known else free)
        columns = max((len(self.stored[row]) for row in moved), default=0)
        self.cache.move([old[row] for row in moved], [target[row] for row in moved], columns)
        target |= {row: head + i for i, row in enumerate(fresh)}
        self.row_at = sorted(target, key=target.__getitem__)

    def _prefill(self, fresh: list[Turn], first: int) -> Tensor:
        """Encode each distinct context once. Returns (fresh, hidden) states of the last tokens, in slot order."""
        decoder = self.engine.decoder
        contexts: list[list[int]] = []
        copies: list[int] = []
        for turn in fresh:
            context = list(turn.context_ids)
            if not contexts or contexts[-1] != context:
                contexts.append(context)
                copies.append(0)
            copies[-1] += 1
        last: list[Tensor] = []
        order = list(range(len(contexts)))
        for chunk in chunks(
            order, [len(context) for context in contexts], self.engine.settings.tokens_per_forward
        ):
            ids_US, positions_US = padded([contexts[i] for i in chunk], decoder.device)
            source = [u for u, i in enumerate(chunk) for _ in range(copies[i])]
            source_N = torch.tensor(source, device=decoder.device)
            hidden_USH = decoder.hidden(ids_US, positions_US, Prefill(self.cache, first, source_N))
            ends = torch.tensor([len(contexts[i]) - 1 for i in chunk], device=decoder.device)
            last.append(
                hidden_USH[torch.arange(len(chunk), device=decoder.device), ends].index_select(0, source_N)
            )
            first += len(source)
        return torch.cat(last)

    def _extend(self, running: dict[int, Turn], count: int) -> Tensor:
        """Encode the new tokens of the first `count` slots' rows. Returns (count, hidden) states of the last ones."""
        decoder = self.engine.decoder
        starts = [len(self.stored[row]) for row in self.row_at[:count]]
        new = [list(running[row].context_ids[starts[slot] :]) for slot, row in enumerate(self.row_at[:count])]
        last: list[Tensor] = []
        slots = list(range(count))
        for chunk in chunks(slots, [len(ids) for ids in new], self.engine.settings.tokens_per_forward):
            ids_NS, offsets_NS = padded([new[slot] for slot in chunk], decoder.device)
            positions_NS = (
                torch.tensor([starts[slot] for slot in chunk], device=decoder.device)[:, None] + offsets_NS
            )
            length = max(starts[slot] for slot in chunk) + ids_NS.shape[1]
            self.cache.reserve(count, length)
            hidden_NSH = decoder.hidden(
                ids_NS, positions_NS, Extend(self.cache, chunk[0], positions_NS, length)
            )
            ends = torch.tensor([len(new[slot]) - 1 for slot in chunk], device=decoder.device)
            last.append(hidden_NSH[torch.arange(len(chunk), device=decoder.device), ends])
        return torch.cat(last)

    # ------------------------------------------------------------------------------------------ decoding

    def _decode(
        self, running: dict[int, Turn], budgets: dict[int, int], logits_NV: Tensor
    ) -> dict[int, tuple[list[int], list[float]]]:
        """Sample every running row to its stop token or budget. `lanes` numbers the rows as they start, by slot."""
        decoder = self.engine.decoder
        device = decoder.device
        rows = self.row_at[: len(running)]
        budget = np.array([budgets[row] for row in rows])
        starts = np.array([len(running[row].context_ids) for row in rows])
        most = int(budget.max())
        uniforms = np.stack([turn_uniforms(running[row].seed, most) for row in rows], axis=1)
        uniforms_TN = torch.from_numpy(uniforms).to(device)
        ids_out = np.empty((most, len(rows)), dtype=np.int64)
        logprobs_out = torch.empty(most, len(rows), device=device)
        counts = np.zeros(len(rows), dtype=np.int64)
        lanes = np.arange(len(rows))
        lanes_N = torch.from_numpy(lanes).to(device)
        positions_N = torch.from_numpy(starts).to(device)
        for step in range(most):
            tokens_N, logprobs_N = draw(logits_NV, uniforms_TN[step].index_select(0, lanes_N), self.sampling)
            tokens = tokens_N.cpu().numpy()
            ids_out[step, lanes] = tokens
            logprobs_out[step].index_copy_(0, lanes_N, logprobs_N)
            ended = (counts[lanes] > 0) | self.stop_V[tokens] | (step + 1 >= budget[lanes])
            if ended.any():
                newly = lanes[ended & (counts[lanes] == 0)]
                counts[newly] = step + 1
                alive = np.flatnonzero(~ended)
                if not len(alive):
                    break
                if (len(lanes) - len(alive)) * COMPACT_AT >= len(lanes):
                    keep = self._compact(~ended, int(starts.max()) + step)
                    lanes = lanes[keep]
                    keep_N = torch.from_numpy(keep).to(device)
                    lanes_N, positions_N = torch.from_numpy(lanes).to(device), positions_N[keep_N]
                    tokens_N = tokens_N[keep_N]
            length = int(starts[lanes].max()) + step + 1
            self.cache.reserve(len(lanes), length)
            extend = Extend(self.cache, 0, positions_N[:, None], length)
            logits_NV = decoder.logits(decoder.hidden(tokens_N[:, None], positions_N[:, None], extend)[:, 0])
            positions_N = positions_N + 1
        logprobs = logprobs_out.cpu().numpy()
        result = {}
        for lane, row in enumerate(rows):
            ids = ids_out[: counts[lane], lane].tolist()
            values = logprobs[: counts[lane], lane].tolist()
            if not np.isfinite(values).all():
                raise ContractError(
                    f"weights {self.engine.version} give log-probabilities that are not finite: go back to an earlier "
                    "checkpoint and lower update.lr"
                )
            self.stored[row] = [*running[row].context_ids, *ids[:-1]]
            result[row] = (ids, values)
        return result

    def _compact(self, alive: npt.NDArray[np.bool_], length: int) -> npt.NDArray[np.int64]:
        """Swap finished rows with running ones behind them. Returns the old places of those that stay, in order."""
        count = int(alive.sum())
        keep = np.arange(count)
        holes = np.flatnonzero(~alive[:count])
        movers = np.flatnonzero(alive[count:]) + count
        keep[holes] = movers
        both, swapped = [*holes.tolist(), *movers.tolist()], [*movers.tolist(), *holes.tolist()]
        self.cache.move(both, swapped, length)
        for hole, mover in zip(holes.tolist(), movers.tolist(), strict=True):
            self.row_at[hole], self.row_at[mover] = self.row_at[mover], self.row_at[hole]
        return keep


# -------------------------------------------------------------------------------------------------- helpers


def draw(logits_NV: Tensor, uniforms_N: Tensor, sampling: SamplingSettings) -> tuple[Tensor, Tensor]:
    """One token a row by inverting the cumulative distribution, and its log-probability under that distribution.

    Args:
        logits_NV: float32; overwritten.
        uniforms_N: float32 in [0, 1 - 2^-24], one a row, so that a row's token depends on nothing else in the batch.

    Returns:
        tokens (N,) and log-probabilities (N,) after temperature, top-k and top-p.
    """
    if sampling.temperature != 1:
        logits_NV = logits_NV / sampling.temperature
    if sampling.top_k or sampling.top_p < 1:
        logits_NV = truncate(logits_NV, sampling.top_k, sampling.top_p)
    shifted_NV = logits_NV - logits_NV.amax(-1, keepdim=True)
    cumulative_NV = shifted_NV.exp().cumsum(-1)
    total_N1 = cumulative_NV[:, -1:]
    tokens_N1 = torch.searchsorted(cumulative_NV, uniforms_N[:, None] * total_N1, right=True)
    tokens_N1.clamp_(max=logits_NV.shape[-1] - 1)
    logprobs_N1 = shifted_NV.gather(1, tokens_N1) - total_N1.log()
    return tokens_N1[:, 0], logprobs_N1[:, 0]


def truncate(logits_NV: Tensor, top_k: int, top_p: float) -> Tensor:
    """-inf outside of the k likeliest tokens, then outside of the smallest set of probability `top_p` or more."""
    ranked_NV, order_NV = logits_NV.sort(-1, descending=True)
    if top_k:
        ranked_NV[:, top_k:] = -torch.inf
    probability_NV = ranked_NV.softmax(-1)
    before_NV = probability_NV.cumsum(-1) - probability_NV
    ranked_NV[:, 1:].masked_fill_(before_NV[:, 1:] >= top_p, -torch.inf)
    return torch.empty_like(logits_NV).scatter_(-1, order_NV, ranked_NV)


def turn_uniforms(seed: int, count: int) -> npt.NDArray[np.float32]:
    """(count,) uniforms in [0, 1 - 2^-24] of a counter-based generator: they depend on the seed alone."""
    return np.random.Generator(np.random.Philox(key=seed)).random(count, dtype=np.float32)


def padded(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """(B, S) ids padded on the right with 0, and positions 0 .. S - 1 of every row."""
    width = max(len(row) for row in rows)
    table = np.zeros((len(rows), width), dtype=np.int64)
    for i, row in enumerate(rows):
        table[i, : len(row)] = row
    return torch.from_numpy(table).to(device), torch.arange(width, device=device).expand(len(rows), -1)


def chunks(items: Sequence[int], lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Consecutive items whose count x longest length is at most `budget`; one item may exceed it."""
    start, longest = 0, 0
    for stop, length in enumerate(lengths):
        longest = max(longest, length)
        if stop > start and (stop + 1 - start) * longest > budget:
            yield list(items[start:stop])
            start, longest = stop, length
    if start < len(items):
        yield list(items[start:])


def cut(scored: Scored, counts: Sequence[int]) -> Iterator[Scored]:
    """Cut the scores of rows laid end to end."""
    start = 0
    for count in counts:
        part = slice(start, start + count)
        yield Scored(
            scored.logprobs[part],
            scored.support_ids[part] if scored.support_ids is not None else None,
            scored.support_logprobs[part] if scored.support_logprobs is not None else None,
        )
        start += count
