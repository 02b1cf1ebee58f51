"""Sampling and scoring with transformers' own modules, and a key-value cache of our own.

transformers' `generate` pads a batch to its longest row, keeps finished rows until the last one ends, prefills the
shared prompt of a group once per member and encodes the whole history again at every turn. Here

- distinct contexts are prefilled once, and their keys and values are copied to the rows that share them;
- rows live in *slots* of one preallocated cache, each at its own length; decoding runs over the first n slots, and
  finished rows swap places with the last running ones;
- a finished row keeps its slot, so its next turn feeds only the tokens that are new.

Llama's family runs through `fused.py`. Any other model runs unchanged: it calls the attention function of `slots.py`,
which transformers hands the keyword arguments of `forward`, and so the step at hand (the way vLLM's transformers
backend works); between our calls its attention is its own.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gleaner.conf.errors import ConfigurationError, ContractError, StaleWeightsError
from gleaner.conf.schema import SamplingSettings
from gleaner.conf.schema import TransformersEngine as TransformersEngineSettings
from gleaner.models.chat import Chat
from gleaner.models.engines.base import Completion, Scored, Turn
from gleaner.models.engines.fused import FusedForward
from gleaner.models.engines.slots import ATTENTION, Extend, Prefill, SlotCache
from gleaner.models.policy import Policy, load_policy
from gleaner.models.vision import ImagePlace, text_backbone

COMPACT_AT = 16
"""Finished rows leave the batch once they are one in so many."""
LOGIT_ELEMENTS = 1 << 24
"""Logits that exist at a time while scoring: 64 MiB in float32."""


# -------------------------------------------------------------------------------------------------- decoder


class Decoder:
    """A policy's module, called for hidden states and logits through slot attention."""

    def __init__(self, policy: Policy) -> None:
        self.model: Any = policy.language_model
        self.backbone: Any = text_backbone(self.model)
        self.eyes = policy.eyes
        self.seen: dict[str, Tensor] = {}
        """Features of images under the present weights."""
        head: Any = self.model.get_output_embeddings
        self.head: Any = head()
        self.config: Any = self.backbone.config
        self.device = next(self.model.parameters()).device
        self.layers: int = self.config.num_hidden_layers
        kinds = set(getattr(self.config, "layer_types", None) or ["full_attention"])
        if not self.model._supports_attention_backend or not kinds <= {"full_attention", "sliding_attention"}:
            raise ConfigurationError(
                f"{type(self.model).__name__} has layers that the transformers engine cannot cache "
                f"({', '.join(sorted(kinds))}): set engine=vllm, or choose a decoder such as Qwen2, Qwen3 or Llama"
            )
        self.fused = FusedForward(self.backbone) if FusedForward.fits(self.backbone) else None
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
                if self.fused is not None:
                    self.fused.refresh()
                yield
        finally:
            self.config._attn_implementation = theirs
            if training:
                self.model.train()

    def hidden(
        self,
        ids_BS: Tensor,
        positions_BS: Tensor,
        step: Prefill | Extend,
        images_B: Sequence[Sequence[ImagePlace]] | None = None,
    ) -> Tensor:
        """(B, S, hidden) last hidden states; attention goes through `step`.

        Args:
            images_B: where images stand in each row of `ids_BS`.
        """
        embeds_BSH = self._embed(ids_BS, images_B)
        if self.fused is not None:
            return self.fused.hidden(embeds_BSH, positions_BS, step)
        states: Tensor = self.backbone(
            inputs_embeds=embeds_BSH, position_ids=positions_BS, use_cache=False, gleaner_step=step
        ).last_hidden_state
        return states

    def _embed(self, ids_BS: Tensor, images_B: Sequence[Sequence[ImagePlace]] | None) -> Tensor:
        if images_B is None or not any(images_B):
            embeds_BSH: Tensor = self.model.get_input_embeddings()(ids_BS)
            return embeds_BSH
        if self.eyes is None:
            raise ContractError("a turn shows images to a policy that sees none: choose policy=tiny_vlm")
        digests = dict.fromkeys(digest for places in images_B for _, digest in places)
        new = [digest for digest in digests if digest not in self.seen]
        if new:
            self.seen |= dict(zip(new, self.eyes.features(new), strict=True))
        return self.eyes.embed(ids_BS, images_B, self.seen)

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
        self.decoder.seen.clear()
        if self.decoder.fused is not None:
            self.decoder.fused.forget()
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
        self._stop_ids = Chat(policy.tokenizer, multi_turn=False, eyes=policy.eyes).stop_ids
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


def what_is_read(turn: Turn) -> tuple[tuple[int, ...], tuple[ImagePlace, ...]]:
    """A turn's context, ids and images: what a prefill may be shared by."""
    return tuple(turn.context_ids), tuple(turn.images)


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
        first_seen: dict[tuple[tuple[int, ...], tuple[ImagePlace, ...]], int] = {}
        for turn in fresh:
            first_seen.setdefault(what_is_read(turn), len(first_seen))
        fresh.sort(key=lambda turn: (len(turn.context_ids), first_seen[what_is_read(turn)]))
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
        images: list[Sequence[ImagePlace]] = []
        copies: list[int] = []
        for place, turn in enumerate(fresh):
            # Two pages under the same question are two contexts.
            if not place or what_is_read(turn) != what_is_read(fresh[place - 1]):
                contexts.append(list(turn.context_ids))
                images.append(turn.images)
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
            hidden_USH = decoder.hidden(
                ids_US, positions_US, Prefill(self.cache, first, source_N), [images[i] for i in chunk]
            )
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
            images = [
                [
                    (place - starts[slot], digest)
                    for place, digest in running[self.row_at[slot]].images
                    if place >= starts[slot]
                ]
                for slot in chunk
            ]
            hidden_NSH = decoder.hidden(
                ids_NS, positions_NS, Extend(self.cache, chunk[0], positions_NS, length), images
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
        uniforms_TN = torch.from_numpy(turn_uniforms([running[row].seed for row in rows], most)).to(device)
        ids_out = np.empty((most, len(rows)), dtype=np.int64)
        logprobs_out = torch.empty(most, len(rows), device=device)
        counts = np.zeros(len(rows), dtype=np.int64)
        lanes = np.arange(len(rows))
        lanes_N = torch.from_numpy(lanes).to(device)
        positions_N = torch.from_numpy(starts).to(device)
        extend: Extend | None = None
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
                # A finished row runs along for a while, but never past the context's end.
                many = (len(lanes) - len(alive)) * COMPACT_AT >= len(lanes)
                if many or int(starts[lanes].max()) + step + 1 >= self.engine.context_limit:
                    keep = self._compact(~ended, int(starts.max()) + step)
                    lanes = lanes[keep]
                    keep_N = torch.from_numpy(keep).to(device)
                    lanes_N, positions_N = torch.from_numpy(lanes).to(device), positions_N[keep_N]
                    tokens_N = tokens_N[keep_N]
                    extend = None
            if extend is None:
                length = int(starts[lanes].max()) + step + 1
                self.cache.reserve(len(lanes), length)
                extend = Extend(self.cache, 0, positions_N[:, None] + step, length)
            else:
                extend.advance()
            hidden_NSH = decoder.hidden(tokens_N[:, None], extend.positions_NS, extend)
            logits_NV = decoder.logits(hidden_NSH[:, 0])
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


def turn_uniforms(seeds: Sequence[int], count: int) -> npt.NDArray[np.float32]:
    """(count, seeds) uniforms in [0, 1 - 2^-24]: row t of a seed's column depends on nothing but that seed and t.

    One Philox generator is keyed anew for every seed: a generator of its own costs ten times as much.
    """
    bits = np.random.Philox(key=0)
    generator, state = np.random.Generator(bits), bits.state
    table = np.empty((len(seeds), count), dtype=np.float32)
    for column, seed in enumerate(seeds):
        state["state"]["key"][:] = (seed & 0xFFFFFFFFFFFFFFFF, seed >> 64)
        bits.state = state
        generator.random(dtype=np.float32, out=table[column])
    return np.ascontiguousarray(table.T)


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
