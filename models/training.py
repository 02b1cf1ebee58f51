"""The update: one learner per slot turns signals into optimizer steps, over accelerate.

A learner knows no method. Each mini-batch of a signal is one AdamW step; its rows run through the model in
micro-batches of a bounded number of tokens, right-padded, and only at the positions that predict learnable
tokens are log-probabilities computed. In float32 on the CPU the same state and the same signal give the same
bits.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from gleaner.conf.errors import ConfigurationError, ContractError, CorruptArtifactError, OutOfMemoryError
from gleaner.conf.schema import UpdateSettings
from gleaner.models.logprobs import chunked_logprobs, chunked_support_logprobs, chunked_top_ids
from gleaner.models.objective import (
    LossOutputs,
    TokenBatch,
    loss_metrics,
    policy_loss,
    value_loss,
    value_sums,
)
from gleaner.models.signal import Floats, Ints, LearningSignal, Objective, SignalRow
from gleaner.models.vision import Eyes, ImagePlace, text_backbone

STATE_SCHEMA_VERSION = 1


class HasModel(Protocol):
    """A policy: anything with a transformers causal language model, LoRA-wrapped or not."""

    @property
    def model(self) -> Any: ...


class HasTokens(Protocol):
    """A segment or a signal row."""

    @property
    def context_ids(self) -> Any: ...
    @property
    def sampled_ids(self) -> Any: ...
    @property
    def loss_mask(self) -> Any: ...
    @property
    def image_places(self) -> Sequence[ImagePlace]: ...


# ------------------------------------------------------------------------------------------ micro-batches


@dataclass(frozen=True)
class _Tokens:
    """A micro-batch's model input: B sequences right-padded to L, and where its N learnable tokens are
    predicted."""

    ids_BL: Tensor
    positions_N: Tensor
    """Index into the flattened (B * L) hidden states."""
    targets_N: Tensor
    row_N: Tensor
    counts: list[int]
    """Learnable tokens of each row."""
    real: int
    """Tokens that are no padding."""
    images_B: list[Sequence[ImagePlace]]
    """Where images stand in each row."""


def _length(row: HasTokens) -> int:
    # The last token predicts nothing, so it is never an input.
    return len(row.context_ids) + len(row.sampled_ids) - 1


def microbatches(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices of rows in micro-batches, sorted by length, such that rows x longest row stays within `budget`
    tokens. A row longer than the budget is a micro-batch of its own."""
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        if batches and (len(batches[-1]) + 1) * lengths[index] <= budget:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def _collate(rows: Sequence[HasTokens], device: torch.device) -> _Tokens:
    width = max(_length(row) for row in rows)
    ids = np.zeros((len(rows), width), dtype=np.int64)
    positions: list[Ints] = []
    targets: list[Ints] = []
    for index, row in enumerate(rows):
        start = len(row.context_ids)
        if not start:
            raise ContractError(
                "a row has no context: the first sampled token needs at least one token before it"
            )
        sampled = np.asarray(row.sampled_ids, dtype=np.int64)
        ids[index, :start] = row.context_ids
        ids[index, start : start + len(sampled) - 1] = sampled[:-1]
        learnable = np.flatnonzero(np.asarray(row.loss_mask))
        positions.append(index * width + start - 1 + learnable)
        targets.append(sampled[learnable])
    counts = [len(part) for part in targets]
    return _Tokens(
        ids_BL=torch.from_numpy(ids).to(device),
        positions_N=torch.from_numpy(np.concatenate(positions)).to(device),
        targets_N=torch.from_numpy(np.concatenate(targets)).to(device),
        row_N=torch.from_numpy(np.repeat(np.arange(len(rows)), counts)).to(device),
        counts=counts,
        real=sum(_length(row) for row in rows),
        images_B=[row.image_places for row in rows],
    )


def _loss_inputs(
    rows: Sequence[SignalRow], tokens: _Tokens, device: torch.device, dtype: torch.dtype
) -> tuple[TokenBatch, Tensor | None, Tensor | None]:
    """The loss's inputs, and for the top-K term the tokens (M,) and ids (M, K) of the supports."""

    def floats(values: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(values).to(device=device, dtype=dtype)

    def column(name: str, default: float) -> Tensor:
        parts = [
            np.full(count, default) if (values := getattr(row, name)) is None else values
            for row, count in zip(rows, tokens.counts, strict=True)
        ]
        return floats(np.concatenate(parts))

    pulled = any(row.kl_coef is not None and row.kl_coef.any() for row in rows)
    sampled = [row.distill_kind == "sampled" and row.distill_coef is not None for row in rows]
    sampled_coef = None
    if any(sampled):
        parts = [
            row.distill_coef if taught and row.distill_coef is not None else np.zeros(count)
            for row, taught, count in zip(rows, sampled, tokens.counts, strict=True)
        ]
        sampled_coef = floats(np.concatenate(parts))

    support_tokens: list[Ints] = []
    support_ids: list[Ints] = []
    support_logprobs: list[Floats] = []
    support_coef: list[Floats] = []
    for row, offset in zip(rows, np.cumsum([0, *tokens.counts[:-1]]), strict=True):
        if row.distill_kind != "topk" or row.distill_coef is None or not row.distill_coef.any():
            continue
        if row.support_tokens is None or row.support_ids is None or row.support_logprobs is None:
            raise ContractError(
                f"row {row.key} distils on supports but stores none: give support_tokens, support_ids and "
                "support_logprobs"
            )
        support_tokens.append(row.support_tokens + offset)
        support_ids.append(row.support_ids)
        support_logprobs.append(row.support_logprobs)
        support_coef.append(row.distill_coef[row.support_tokens])
    if len({ids.shape[1] for ids in support_ids}) > 1:
        raise ContractError("supports of one signal differ in size: score every row with the same K")
    taught_topk = bool(support_tokens)

    batch = TokenBatch(
        row_N=tokens.row_N,
        rows=len(rows),
        pg_coef_N=column("pg_coef", 0.0),
        advantage_N=column("advantage", 0.0),
        old_logprobs_N=column("old_logprobs", 0.0),
        sampler_logprobs_N=column("sampler_logprobs", np.nan),
        kl_coef_N=column("kl_coef", 0.0) if pulled else None,
        reference_logprobs_N=column("reference_logprobs", np.nan) if pulled else None,
        sampled_coef_N=sampled_coef,
        teacher_logprobs_N=column("teacher_logprobs", np.nan) if sampled_coef is not None else None,
        support_coef_M=floats(np.concatenate(support_coef)) if taught_topk else None,
        support_logprobs_MK=floats(np.concatenate(support_logprobs)) if taught_topk else None,
    )
    if not taught_topk:
        return batch, None, None
    return (
        batch,
        torch.from_numpy(np.concatenate(support_tokens)).to(device),
        torch.from_numpy(np.concatenate(support_ids)).to(device),
    )


# ------------------------------------------------------------------------------------------------ model


class _Scorer(nn.Module):
    """Log-probabilities at chosen positions, as one module, so that a distributed wrapper sees a single
    forward."""

    def __init__(self, model: Any, chunk: int, eyes: Eyes | None) -> None:
        super().__init__()
        self.model = model
        self.chunk = chunk
        self.eyes = eyes

    def forward(
        self,
        tokens: _Tokens,
        temperature: float,
        support_tokens_M: Tensor | None = None,
        support_ids_MK: Tensor | None = None,
        support_temperature: float = 1.0,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """logprobs_N, entropy_N and, with supports, renormalised log-probabilities (M, K)."""
        hidden_NH = self.hidden(tokens)
        weight_VH, bias_V = self.head()
        logprobs_N, entropy_N = chunked_logprobs(
            hidden_NH, weight_VH, tokens.targets_N, temperature, self.chunk, bias_V
        )
        if support_tokens_M is None or support_ids_MK is None:
            return logprobs_N, entropy_N, None
        support_MK = chunked_support_logprobs(
            hidden_NH[support_tokens_M], weight_VH, support_ids_MK, support_temperature, self.chunk, bias_V
        )
        return logprobs_N, entropy_N, support_MK

    def hidden(self, tokens: _Tokens) -> Tensor:
        """(N, H) final hidden states where learnable tokens are predicted."""
        hidden_BLH = _hidden(self.model, self.eyes, tokens)
        return hidden_BLH.flatten(0, 1).index_select(0, tokens.positions_N)

    def head(self) -> tuple[Tensor, Tensor | None]:
        head = _causal(self.model).get_output_embeddings()
        return head.weight, getattr(head, "bias", None)


class _Valuer(nn.Module):
    """A critic: a linear head on the final hidden states, where the policy's learnable tokens are predicted."""

    def __init__(self, model: Any, eyes: Eyes | None) -> None:
        super().__init__()
        self.model = model
        self.eyes = eyes
        embedding = _causal(model).get_input_embeddings().weight
        # Its usual random weights would be drawn from the generator whose state checkpoints hold.
        self.head = nn.utils.skip_init(  # type: ignore[no-untyped-call]
            nn.Linear, embedding.shape[1], 1, dtype=embedding.dtype
        )
        # A critic that knows nothing says 0 everywhere, and its first gradient moves the head alone.
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        output = _causal(model).get_output_embeddings()
        if output is not None and output.weight is not embedding:
            output.requires_grad_(False)

    def forward(self, tokens: _Tokens) -> Tensor:
        """values_N: V_t at the last token of the state in which the t-th learnable token was sampled."""
        hidden_BLH = _hidden(self.model, self.eyes, tokens)
        return self.head(hidden_BLH.flatten(0, 1).index_select(0, tokens.positions_N)).squeeze(1)


def _hidden(model: Any, eyes: Eyes | None, tokens: _Tokens) -> Tensor:
    """(B, L, H). No attention mask: padding is on the right, where a causal model's real tokens never look."""
    backbone = text_backbone(_causal(model))
    if eyes is None or not any(tokens.images_B):
        return backbone(input_ids=tokens.ids_BL, use_cache=False).last_hidden_state
    embeds_BLH = eyes.embed(tokens.ids_BL, tokens.images_B)
    return backbone(inputs_embeds=embeds_BLH, use_cache=False).last_hidden_state


def _causal(model: Any) -> Any:
    """The causal language model inside a LoRA wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _silence_dropout(model: Any) -> None:
    """A replayed update must see the forward pass that the first one saw."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0


def _refuse_unusual_head(scorer: _Scorer) -> None:
    """The learner computes logits itself, as a linear map of the final hidden states: check that the model
    does too.

    Raises:
        ConfigurationError: it does something else (soft-capped or scaled logits, an adapter on the head).
    """
    causal = _causal(scorer.model)
    head = causal.get_output_embeddings()
    fix = "train another model, or keep LoRA's target_modules off the output head"
    if head is None or not hasattr(head, "weight") or hasattr(head, "lora_A"):
        raise ConfigurationError(f"{type(causal).__name__} has no plain linear output head: {fix}")
    ids_BL = torch.arange(4, device=head.weight.device).remainder(head.weight.shape[0]).unsqueeze(0)
    with torch.no_grad():
        expected = causal(input_ids=ids_BL, use_cache=False).logits.float()
        hidden_BLH = text_backbone(causal)(input_ids=ids_BL, use_cache=False).last_hidden_state
        logits = nn.functional.linear(hidden_BLH, *scorer.head()).float()
    if not torch.allclose(expected, logits, rtol=1e-2, atol=1e-2 * float(expected.abs().max() + 1e-6)):
        raise ConfigurationError(
            f"{type(causal).__name__} scales or caps its logits after the output head, which the update does not "
            f"reproduce: {fix}"
        )


# ---------------------------------------------------------------------------------------------- learner


@dataclass(frozen=True, eq=False)
class Distribution:
    """At each of a row's n learnable tokens: its log-probability and the distribution's entropy (n,), and
    log-probabilities renormalised on the given support (n, K)."""

    logprobs: Floats
    entropy: Floats
    support: Floats


class Learner:
    """What learns in one slot: weights, AdamW, and (where a KL term needs it) the start weights as a
    reference.

    AdamW decays every trainable parameter. Only trainable parameters are in the optimizer and in the state,
    so a LoRA policy's state is its adapter.
    """

    def __init__(
        self,
        policy: HasModel,
        settings: UpdateSettings,
        *,
        slot: str = "policy",
        keep_reference: bool = False,
        values: bool = False,
        eyes: Eyes | None = None,
        accelerator: Accelerator | None = None,
    ) -> None:
        """Take the policy's model over: it is moved to the accelerator's device and trained in place.

        Args:
            values: learn values instead of log-probabilities: a critic, whose new head starts at zero. Such a learner
                has `judge` in place of `score`.
            eyes: the policy's, if it sees.
            keep_reference: remember the weights as they are now, for `score(..., reference=True)`. On a
                resume build the learner from the run's first version, then `load_state`.
        """
        self.slot = slot
        self.settings = settings
        self.accelerator = accelerator or Accelerator()
        self.model = policy.model
        _silence_dropout(self.model)
        if settings.gradient_checkpointing:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.model.eval().to(self.accelerator.device)
        self.values = values
        module = (
            _Valuer(self.model, eyes).to(self.accelerator.device)
            if values
            else _Scorer(self.model, settings.logprob_chunk, eyes)
        )
        if isinstance(module, _Scorer):
            _refuse_unusual_head(module)
        self._module: Any = self.accelerator.prepare(module)
        self._parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        if isinstance(module, _Valuer):
            self._parameters |= {f"value_head.{name}": p for name, p in module.head.named_parameters()}
        if not self._parameters:
            raise ConfigurationError("the policy has no trainable parameter: unfreeze it, or set policy.lora")
        self._dtype = (
            torch.float64 if next(iter(self._parameters.values())).dtype == torch.float64 else torch.float32
        )
        self.optimizer = torch.optim.AdamW(
            self._parameters.values(),
            lr=settings.lr,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self._reference: dict[str, Tensor] | None = None
        if keep_reference:
            self._reference = {name: p.detach().clone() for name, p in self._parameters.items()}

    # -------------------------------------------------------------------------------------------- update

    def apply(self, signal: LearningSignal) -> dict[str, float]:
        """One optimizer step for each of the slot's mini-batches, in their order.

        Rows that cannot have a gradient never enter the forward pass. A mini-batch without any such row, or
        whose gradient is exactly zero, takes no step at all (no weight decay, no momentum): `update/empty`
        counts it. One whose gradient is not finite takes none either: `update/skipped`. Both leave weights
        and optimizer untouched.

        Returns:
            update/loss and update/grad_norm (means over steps), the means of `loss_metrics`, update/rows,
            update/rows_without_gradient, update/padding (share of the forward's tokens),
            update/forward_tokens, update/steps, update/skipped, update/empty, seconds/forward,
            seconds/backward, seconds/optimizer.

        Raises:
            OutOfMemoryError: the accelerator ran out of memory; weights may have moved, so start from a
                stored version.
        """
        rows = [row for row in signal.rows if row.slot == self.slot]
        steps: dict[int, list[SignalRow]] = {}
        for row in rows:
            steps.setdefault(row.minibatch, []).extend([row] if row.active else [])
        report = _Report()
        self._module.train(self.settings.gradient_checkpointing)
        try:
            for index in sorted(steps):
                self._step(signal.objective, steps[index], report)
        except torch.OutOfMemoryError as error:
            self.optimizer.zero_grad(set_to_none=True)
            raise OutOfMemoryError(
                f"the update ran out of memory at update.tokens_per_microbatch={self.settings.tokens_per_microbatch}: "
                "lower it, lower update.logprob_chunk, or set update.gradient_checkpointing=true"
            ) from error
        finally:
            self._module.eval()
        return report.metrics(len(rows), sum(len(active) for active in steps.values()))

    def _step(self, objective: Objective, rows: Sequence[SignalRow], report: "_Report") -> None:
        if not rows:
            report.empty += 1
            return
        loss = self._accumulate_gradient(objective, rows, report)
        started = time.perf_counter()
        norm = float(self.accelerator.clip_grad_norm_(self._parameters.values(), self.settings.max_grad_norm))
        if not np.isfinite(norm):
            report.skipped += 1
        elif norm == 0.0:
            report.empty += 1
        else:
            self.optimizer.step()
            report.losses.append(loss)
            report.norms.append(norm)
        self.optimizer.zero_grad(set_to_none=True)
        report.seconds["optimizer"] += time.perf_counter() - started

    def _accumulate_gradient(
        self, objective: Objective, rows: Sequence[SignalRow], report: "_Report"
    ) -> float:
        """Add the mini-batch's gradient to the parameters; returns its loss."""
        batches = microbatches([_length(row) for row in rows], self.settings.tokens_per_microbatch)
        world = self.accelerator.num_processes
        # Every process runs the same number of micro-batches; one that has none left repeats the first, at
        # weight 0.
        share = batches[self.accelerator.process_index :: world]
        weights = [float(world)] * len(share)
        while len(share) * world < len(batches):
            share, weights = [*share, batches[0]], [*weights, 0.0]
        loss = torch.zeros((), dtype=self._dtype, device=self.accelerator.device)
        totals: dict[str, Tensor] = {}
        for position, (batch, weight) in enumerate(zip(share, weights, strict=True)):
            members = [rows[index] for index in batch]
            started = time.perf_counter()
            tokens = _collate(members, self.accelerator.device)
            with self._synchronise(last=position == len(share) - 1):
                outputs = (self._value_outputs if self.values else self._policy_outputs)(
                    objective, members, tokens
                )
                forwarded = time.perf_counter()
                self.accelerator.backward(outputs.loss * weight if weight != 1.0 else outputs.loss)
            report.seconds["forward"] += forwarded - started
            report.seconds["backward"] += time.perf_counter() - forwarded
            report.forward_tokens += tokens.ids_BL.numel()
            report.real_tokens += tokens.real
            if weight:
                loss += outputs.loss.detach()
                for name, value in outputs.sums.items():
                    totals[name] = totals[name] + value if name in totals else value
        if world > 1:
            names = sorted(totals)
            summed = self.accelerator.reduce(
                torch.stack([loss, *(totals[name].to(loss) for name in names)]), reduction="sum"
            )
            loss, totals = summed[0], dict(zip(names, summed[1:], strict=True))
        report.sums.append({name: float(value) for name, value in totals.items()})
        return float(loss)

    def _policy_outputs(
        self, objective: Objective, rows: Sequence[SignalRow], tokens: _Tokens
    ) -> LossOutputs:
        inputs, support_tokens, support_ids = _loss_inputs(rows, tokens, self.accelerator.device, self._dtype)
        logprobs_N, entropy_N, support_MK = self._module(
            tokens, objective.temperature, support_tokens, support_ids, objective.distill_temperature
        )
        return policy_loss(objective, inputs, logprobs_N, entropy_N, support_MK)

    def _value_outputs(self, objective: Objective, rows: Sequence[SignalRow], tokens: _Tokens) -> LossOutputs:
        def column(name: str) -> Tensor:
            parts = [getattr(row, name) for row in rows]
            if any(part is None for part in parts):
                raise ContractError(f"a critic's row has no {name}: give value_coef, returns and old_values")
            return torch.from_numpy(np.concatenate(parts)).to(self.accelerator.device, self._dtype)

        coef_N, returns_N, old_N = column("value_coef"), column("returns"), column("old_values")
        values_N = self._module(tokens).to(self._dtype)
        loss = value_loss(values_N, returns_N, old_N, coef_N, objective.value_clip)
        return LossOutputs(loss, value_sums(values_N.detach(), returns_N, coef_N))

    def _synchronise(self, last: bool) -> AbstractContextManager[Any]:
        """Gradients travel between processes once a mini-batch, with its last backward pass."""
        if last or self.accelerator.num_processes == 1:
            return nullcontext()
        return self.accelerator.no_sync(self._module)

    # -------------------------------------------------------------------------------------------- score

    @torch.no_grad()
    def score(
        self, rows: Sequence[HasTokens], *, temperature: float, reference: bool = False
    ) -> list[Floats]:
        """Log-probabilities (n,) of the learnable tokens of segments or signal rows, in order.

        Args:
            temperature: at which the tokens were sampled.
            reference: under the start weights instead of the current ones (`keep_reference`).
        """
        if not reference:
            return self._by_row(rows, lambda tokens, _: self._module(tokens, temperature)[0])
        if self._reference is None:
            raise ConfigurationError("no reference is kept: build the learner with keep_reference=True")
        scorer = self.accelerator.unwrap_model(self._module)
        start = {f"model.{name}": value for name, value in self._reference.items()}
        return self._by_row(
            rows, lambda tokens, _: torch.func.functional_call(scorer, start, (tokens, temperature))[0]
        )

    @torch.no_grad()
    def likeliest(self, rows: Sequence[HasTokens], count: int) -> list[Ints]:
        """Ids (n, K) of the tokens that the policy finds likeliest in place of each learnable one, best first; K is
        `count`, or the whole vocabulary where that is smaller."""
        scorer = self.accelerator.unwrap_model(self._module)

        def forward(tokens: _Tokens, _members: Sequence[int]) -> Tensor:
            weight_VH, bias_V = scorer.head()
            hidden_NH = scorer.hidden(tokens)
            return chunked_top_ids(hidden_NH, weight_VH, count, self.settings.logprob_chunk, bias_V)

        return [part.astype(np.int64) for part in self._by_row(rows, forward)]

    @torch.no_grad()
    def distributions(
        self,
        rows: Sequence[HasTokens],
        supports: Sequence[Ints],
        *,
        temperature: float,
        support_temperature: float,
    ) -> list[Distribution]:
        """What the policy thinks in each state in which a learnable token was sampled.

        Args:
            supports: (n, K) ids for each row.
            temperature: of `logprobs` and `entropy`.
            support_temperature: of `support`.
        """

        def forward(tokens: _Tokens, members: Sequence[int]) -> Tensor:
            ids_NK = torch.from_numpy(np.concatenate([supports[index] for index in members]))
            every_N = torch.arange(len(ids_NK), device=tokens.ids_BL.device)
            logprobs_N, entropy_N, support_NK = self._module(
                tokens, temperature, every_N, ids_NK.to(tokens.ids_BL.device), support_temperature
            )
            return torch.cat([logprobs_N[:, None], entropy_N[:, None], support_NK], dim=1)

        return [Distribution(part[:, 0], part[:, 1], part[:, 2:]) for part in self._by_row(rows, forward)]

    @torch.no_grad()
    def judge(self, rows: Sequence[HasTokens]) -> list[Floats]:
        """Values (n,) of the states in which each row's learnable tokens were sampled, in order; a critic's
        counterpart of `score`."""
        return self._by_row(rows, lambda tokens, _: self._module(tokens))

    def _by_row(
        self, rows: Sequence[HasTokens], forward: Callable[[_Tokens, Sequence[int]], Tensor]
    ) -> list[Floats]:
        """What `forward` says of every learnable token, (n, …) for each row in order; empty where a row has none.

        Args:
            forward: of a micro-batch and the indices of its rows.
        """
        found: list[Floats] = [np.zeros(0)] * len(rows)
        wanted = [index for index, row in enumerate(rows) if np.any(row.loss_mask)]
        lengths = [_length(rows[index]) for index in wanted]
        for batch in microbatches(lengths, self.settings.tokens_per_microbatch):
            members = [wanted[index] for index in batch]
            tokens = _collate([rows[index] for index in members], self.accelerator.device)
            parts = forward(tokens, members).double().cpu().numpy()
            for index, part in zip(members, np.split(parts, np.cumsum(tokens.counts)[:-1]), strict=True):
                found[index] = part
        return found

    # -------------------------------------------------------------------------------------------- state

    def state_tensors(self) -> dict[str, Tensor]:
        """Trainable weights, AdamW moments and step counts, and random number generators; views of live
        tensors, so write them before the next `apply`."""
        tensors = {f"weights.{name}": p.detach() for name, p in self._parameters.items()}
        for name, parameter in self._parameters.items():
            for part, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"optimizer.{part}.{name}"] = value
        tensors["rng.cpu"] = torch.get_rng_state()
        if self.accelerator.device.type == "cuda":
            tensors["rng.cuda"] = torch.cuda.get_rng_state(self.accelerator.device)
        return tensors

    def state_json(self) -> dict[str, Any]:
        """What belongs with `state_tensors` and is no tensor."""
        return {"schema": "learner", "schema_version": STATE_SCHEMA_VERSION, "slot": self.slot}

    def load_state(self, tensors: Mapping[str, Tensor], description: Mapping[str, Any]) -> None:
        """Continue from a stored state, bit for bit.

        Raises:
            CorruptArtifactError: another schema version, slot, set of parameters or shape. Nothing is loaded
                then.
        """
        expected = self.state_json()
        for name in ("schema", "schema_version", "slot"):
            if description.get(name) != expected[name]:
                raise CorruptArtifactError(
                    f"stored state has {name}={description.get(name)!r}, this learner {expected[name]!r}: load "
                    "the state that the same release wrote for this slot"
                )
        stored = {
            name.removeprefix("weights."): t for name, t in tensors.items() if name.startswith("weights.")
        }
        for name in sorted(stored.keys() ^ self._parameters.keys()):
            raise CorruptArtifactError(
                f"parameter {name} is in the state or in the policy, not in both: same policy?"
            )
        for name, parameter in self._parameters.items():
            if stored[name].shape != parameter.shape or stored[name].dtype != parameter.dtype:
                raise CorruptArtifactError(
                    f"{name} is stored as {tuple(stored[name].shape)} {stored[name].dtype}, the policy has "
                    f"{tuple(parameter.shape)} {parameter.dtype}: build the policy that the state belongs to"
                )
        self.optimizer.state.clear()
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(stored[name])
                moments = {
                    part: tensors[f"optimizer.{part}.{name}"].to(parameter.device, copy=True)
                    for part in ("step", "exp_avg", "exp_avg_sq")
                    if f"optimizer.{part}.{name}" in tensors
                }
                if moments:
                    self.optimizer.state[parameter] = moments
        torch.set_rng_state(tensors["rng.cpu"].cpu())
        if "rng.cuda" in tensors and self.accelerator.device.type == "cuda":
            torch.cuda.set_rng_state(tensors["rng.cuda"].cpu(), self.accelerator.device)


class _Report:
    """What one `apply` measured."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.sums: list[dict[str, float]] = []
        self.seconds = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}
        self.forward_tokens = self.real_tokens = self.skipped = self.empty = 0

    def metrics(self, rows: int, active: int) -> dict[str, float]:
        metrics = {f"update/{name}": value for name, value in loss_metrics(self.sums).items()}
        metrics |= {f"seconds/{name}": value for name, value in self.seconds.items()}
        return metrics | {
            "update/loss": float(np.mean(self.losses)) if self.losses else 0.0,
            "update/grad_norm": float(np.mean(self.norms)) if self.norms else 0.0,
            "update/rows": float(active),
            "update/rows_without_gradient": float(rows - active),
            "update/forward_tokens": float(self.forward_tokens),
            "update/padding": 1 - self.real_tokens / self.forward_tokens if self.forward_tokens else 0.0,
            "update/steps": float(len(self.losses)),
            "update/skipped": float(self.skipped),
            "update/empty": float(self.empty),
        }
