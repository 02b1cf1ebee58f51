"""Log-probabilities of chosen tokens, from hidden states, without the whole batch's logits.

The logits of N tokens over a vocabulary of V are the largest tensor of an update (a GB for 2,048 tokens of a
128k vocabulary in float32). Here they exist for `chunk` tokens at a time, forward and backward: the backward
pass computes them again.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def _logits(hidden_NH: Tensor, head_weight_VH: Tensor, bias_V: Tensor | None, temperature: float) -> Tensor:
    """(N, V) logits at `temperature`, in float32 (float64 stays)."""
    logits_NV = torch.nn.functional.linear(hidden_NH, head_weight_VH, bias_V)
    if logits_NV.dtype in (torch.bfloat16, torch.float16):
        logits_NV = logits_NV.float()
    return logits_NV if temperature == 1.0 else logits_NV / temperature


class _TokenLogprobs(torch.autograd.Function):
    """log softmax(hidden @ W.T / temperature)[target], chunk by chunk; probabilities are kept when there is
    one chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        head_weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        temperature: float,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropies, normalizers = [], [], []
        probabilities_NV: Tensor | None = None
        for hidden, targets in zip(torch.split(hidden_NH, chunk), torch.split(targets_N, chunk), strict=True):
            logits_CV = _logits(hidden, head_weight_VH, bias_V, temperature)
            target_logits = logits_CV.gather(1, targets.unsqueeze(1)).squeeze(1)
            lse_C = torch.logsumexp(logits_CV, dim=1)
            probabilities_NV = (logits_CV - lse_C.unsqueeze(1)).exp_()
            # A logit of -inf has probability 0 and adds nothing to the entropy.
            entropies.append(lse_C - torch.nan_to_num(probabilities_NV * logits_CV, nan=0.0).sum(1))
            logprobs.append(target_logits - lse_C)
            normalizers.append(lse_C)
        kept = probabilities_NV if len(hidden_NH) <= chunk else None
        ctx.save_for_backward(hidden_NH, head_weight_VH, bias_V, targets_N, torch.cat(normalizers), kept)
        ctx.temperature, ctx.chunk = temperature, chunk
        entropies_N = torch.cat(entropies)
        ctx.mark_non_differentiable(entropies_N)
        return torch.cat(logprobs), entropies_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_N = grads[0]
        hidden_NH, head_weight_VH, bias_V, targets_N, lse_N, kept = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden_NH) if wants_hidden else None
        grad_weight = torch.zeros_like(head_weight_VH) if wants_weight else None
        grad_bias = torch.zeros_like(bias_V) if wants_bias else None
        for start in range(0, len(hidden_NH), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            hidden, targets, grad = hidden_NH[part], targets_N[part], grad_N[part]
            # d logp / d logits = (onehot(target) - softmax) / temperature
            if kept is None:
                logits_CV = _logits(hidden, head_weight_VH, bias_V, ctx.temperature)
                grad_CV = (logits_CV - lse_N[part].unsqueeze(1)).exp_().mul_(-grad.unsqueeze(1))
            else:
                grad_CV = kept * -grad.unsqueeze(1)
            grad_CV.scatter_add_(1, targets.unsqueeze(1), grad.unsqueeze(1))
            if ctx.temperature != 1.0:
                grad_CV.div_(ctx.temperature)
            grad_CV = grad_CV.to(hidden_NH.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = grad_CV @ head_weight_VH
            if grad_weight is not None:
                grad_weight.addmm_(grad_CV.t(), hidden)
            if grad_bias is not None:
                grad_bias.add_(grad_CV.sum(0))
        return grad_hidden, grad_weight, grad_bias, None, None, None


def chunked_logprobs(
    hidden_NH: Tensor,
    head_weight_VH: Tensor,
    targets_N: Tensor,
    temperature: float = 1.0,
    chunk: int = 2048,
    bias_V: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target token under softmax(logits / temperature), and the distribution's
    entropy.

    Args:
        hidden_NH: final hidden states, at the positions that predict the targets.
        head_weight_VH: weight of the output head.
        targets_N: int64 token ids.
        chunk: tokens whose logits exist at a time.

    Returns:
        logprobs_N (differentiable; float32, or float64 for float64 inputs) and entropy_N (nats, detached).
    """
    if not len(hidden_NH):
        dtype = torch.float64 if hidden_NH.dtype == torch.float64 else torch.float32
        return hidden_NH.sum(1).to(dtype), hidden_NH.new_zeros(0, dtype=dtype)
    apply: Any = _TokenLogprobs.apply
    logprobs_N, entropy_N = apply(hidden_NH, head_weight_VH, bias_V, targets_N, temperature, chunk)
    return logprobs_N, entropy_N


def chunked_support_logprobs(
    hidden_NH: Tensor,
    head_weight_VH: Tensor,
    support_ids_NK: Tensor,
    temperature: float = 1.0,
    chunk: int = 2048,
    bias_V: Tensor | None = None,
) -> Tensor:
    """Log-probabilities on a given support, renormalised on it: log_softmax of the K logits at `temperature`.

    Returns:
        logprobs_NK, differentiable; exp of a row sums to 1. Used by the top-K distillation term.
    """

    def of_chunk(hidden_CH: Tensor, ids_CK: Tensor) -> Tensor:
        logits_CV = _logits(hidden_CH, head_weight_VH, bias_V, temperature)
        return torch.log_softmax(logits_CV.gather(1, ids_CK), dim=1)

    parts = [
        checkpoint(of_chunk, hidden, ids, use_reentrant=False, preserve_rng_state=False)
        for hidden, ids in zip(torch.split(hidden_NH, chunk), torch.split(support_ids_NK, chunk), strict=True)
    ]
    return torch.cat(parts)


@torch.no_grad()
def chunked_top_ids(
    hidden_NH: Tensor, head_weight_VH: Tensor, count: int, chunk: int = 2048, bias_V: Tensor | None = None
) -> Tensor:
    """(N, K) ids of the likeliest tokens, likeliest first; K is `count`, or the vocabulary where that is smaller."""
    kept = min(count, len(head_weight_VH))
    parts = [
        _logits(hidden_CH, head_weight_VH, bias_V, 1.0).topk(kept, dim=1).indices
        for hidden_CH in torch.split(hidden_NH, chunk)
    ]
    return torch.cat(parts) if parts else torch.zeros((0, kept), dtype=torch.int64, device=hidden_NH.device)
