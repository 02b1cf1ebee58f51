"""The forward pass of Llama's family, in half as many operations.

Decoding a small model is bound by the number of operations, not by their size. Here the query, key and value
projections are one product, so are the MLP's gate and up projections, rotations come from a table, and norms are one
operation. Adapters are added to the weights. The weights are copies, taken again as soon as a parameter has changed;
the engine's canary compares the result with the model's own forward pass.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gleaner.models.engines.slots import Extend, Prefill

FAMILIES = {"llama", "qwen2", "qwen3"}
STATIC_ROTATIONS = {"default", "linear", "llama3", "yarn"}
"""Rotations that depend on the position alone, not on the length of the batch."""
COPY_LIMIT = 1 << 31
"""Bytes of copied weights at most; a larger model is bound by its products and runs through its own modules."""


@dataclass
class Layer:
    """One layer's weights: (weight, bias) of products, weights of norms."""

    norm: Tensor
    qkv: tuple[Tensor, Tensor | None]
    query_norm: Tensor | None
    key_norm: Tensor | None
    out: tuple[Tensor, Tensor | None]
    mlp_norm: Tensor
    gate_up: tuple[Tensor, Tensor | None]
    down: tuple[Tensor, Tensor | None]
    scale: float
    window: int | None


class FusedForward:
    """Hidden states of a Llama, Qwen2 or Qwen3 model through slot attention.

    Args:
        model: the transformers model without its output head; its parameters stay its own.
    """

    def __init__(self, model: Any) -> None:
        self.backbone = model
        self.parameters = list(model.parameters())
        config = model.config
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads
        self.size: int = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.epsilon: float = config.rms_norm_eps
        self.positions = 0
        self.seen: list[int] = []
        self.layers: list[Layer] = []

    @staticmethod
    def fits(model: Any) -> bool:
        """Whether this forward pass is the model's own, and its copied weights are affordable."""
        config = model.config
        rotation = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
        size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        return (
            config.model_type in FAMILIES
            and rotation in STATIC_ROTATIONS
            and config.hidden_act == "silu"
            and size <= COPY_LIMIT
        )

    def refresh(self) -> None:
        """Copy the weights again if any parameter was written to since the last copy."""
        seen = [parameter._version for parameter in self.parameters]
        if seen == self.seen:
            return
        self.layers = [self._layer(layer) for layer in self.backbone.layers]
        self.seen = seen

    def forget(self) -> None:
        """Copy all weights again at the next refresh, also those written to behind autograd's back (`.data`)."""
        self.seen = []

    def hidden(self, embeds_BSH: Tensor, positions_BS: Tensor, step: Prefill | Extend) -> Tensor:
        """(B, S, hidden) last hidden states."""
        rows, length, _ = embeds_BSH.shape
        self._reach(step.length if isinstance(step, Extend) else length)
        split, half = self.heads + self.kv_heads, self.size // 2
        states = embeds_BSH
        width = (states.shape[-1],)
        cos = F.embedding(positions_BS, self.cos)[:, :, None]
        sin = F.embedding(positions_BS, self.sin)[:, :, None]
        for index, layer in enumerate(self.layers):
            normed = F.rms_norm(states, width, layer.norm, self.epsilon)
            qkv = F.linear(normed, *layer.qkv).view(rows, length, -1, self.size)
            qk = qkv[:, :, :split]
            if layer.query_norm is not None and layer.key_norm is not None:
                q = F.rms_norm(qk[:, :, : self.heads], (self.size,), layer.query_norm, self.epsilon)
                k = F.rms_norm(qk[:, :, self.heads :], (self.size,), layer.key_norm, self.epsilon)
                qk = torch.cat((q, k), 2)
            turned = torch.cat((-qk[..., half:], qk[..., :half]), -1)
            qk = (qk * cos).addcmul_(turned, sin).transpose(1, 2)
            out = step.attend(
                index,
                qk[:, : self.heads],
                qk[:, self.heads :],
                qkv[:, :, split:].transpose(1, 2),
                layer.scale,
                layer.window,
            )
            states = states + F.linear(out.reshape(rows, length, -1), *layer.out)
            normed = F.rms_norm(states, width, layer.mlp_norm, self.epsilon)
            gate, up = F.linear(normed, *layer.gate_up).chunk(2, -1)
            states = states + F.linear(F.silu(gate).mul_(up), *layer.down)
        return F.rms_norm(states, width, self.backbone.norm.weight, self.epsilon)

    def _reach(self, positions: int) -> None:
        """Have the rotations of so many positions in the table."""
        if positions > self.positions:
            self.positions = max(positions, 2 * self.positions, 1024)
            at = torch.arange(self.positions, device=self.parameters[0].device)
            cos, sin = self.backbone.rotary_emb(self.parameters[0], at[None])
            self.cos, self.sin = cos[0], sin[0]

    def _layer(self, layer: Any) -> Layer:
        attention, mlp = layer.self_attn, layer.mlp
        query_norm, key_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        return Layer(
            norm=layer.input_layernorm.weight,
            qkv=joined(attention.q_proj, attention.k_proj, attention.v_proj),
            query_norm=query_norm.weight if query_norm is not None else None,
            key_norm=key_norm.weight if key_norm is not None else None,
            out=joined(attention.o_proj),
            mlp_norm=layer.post_attention_layernorm.weight,
            gate_up=joined(mlp.gate_proj, mlp.up_proj),
            down=joined(mlp.down_proj),
            scale=attention.scaling,
            window=getattr(attention, "sliding_window", None),
        )


def joined(*modules: Any) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of linear modules side by side, with their adapters added."""
    weights = [effective_weight(module) for module in modules]
    biases = [module.bias for module in modules]
    if len(modules) == 1:
        return weights[0], biases[0]
    present = [bias for bias in biases if bias is not None]
    return torch.cat(weights), torch.cat(present) if present else None


def effective_weight(module: Any) -> Tensor:
    """A linear module's weight, plus what its adapters add."""
    weight: Tensor = module.weight
    if hasattr(module, "get_delta_weight"):
        for adapter in module.active_adapters:
            weight = weight + module.get_delta_weight(adapter)
    return weight
