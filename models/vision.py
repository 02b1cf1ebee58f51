"""How a vision-language policy sees: images to features, and features to their places in a row.

Which image a token stands for is known by where it stands, never by its id. Prompts and observations put a fixed number
of placeholder tokens for each image, and their places are stored beside the ids; a placeholder that a policy samples,
or that a text contains, is text. So no count of ids can be off by one, and an image that is shown twice is two images.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gleaner.conf.errors import ConfigurationError, ContractError
from gleaner.models.images import decode_image

ImagePlace = tuple[int, str]
"""(index of an image's first token within a row, digest of the image)."""

PIXELS_KEPT = 256 * 2**20
"""Bytes of preprocessed images that are kept."""
FAMILIES = ("smolvlm", "idefics3")
"""Of transformers' vision-language models, those whose images are a fixed number of tokens each."""


class Eyes:
    """What a vision-language policy has beside its text model.

    Args:
        model: transformers' SmolVLM or Idefics3 model for conditional generation.
        processor: its image processor.
        text: what stands for an image in a prompt: `tokens` placeholders, and whatever the model wants around them.

    Attributes:
        source: digest → encoded image; set by whoever has a store.
    """

    def __init__(
        self, model: Any, processor: Any, tokenizer: Any, around: tuple[str, str] = ("", "")
    ) -> None:
        self.model = model
        self.processor = processor
        self.image_id: int = model.config.image_token_id
        self.tokens: int = model.model.image_seq_len
        self.placeholder = str(tokenizer.convert_ids_to_tokens(self.image_id))
        self.text = around[0] + self.placeholder * self.tokens + around[1]
        self.source: Callable[[str], bytes] = _no_source
        self._pixels: OrderedDict[str, tuple[Tensor, Tensor]] = OrderedDict()

    def pixels(self, digest: str) -> tuple[Tensor, Tensor]:
        """(3, H, W) pixels as the vision tower takes them, and (H, W) which of them are no padding.

        Raises:
            BadImageError: the stored bytes are no image.
        """
        if digest not in self._pixels:
            picture = decode_image(self.source(digest))
            found = self.processor(picture, do_image_splitting=False, return_tensors="pt")
            pixels = found["pixel_values"][0, 0]
            real = found.get("pixel_attention_mask")
            mask = torch.ones(pixels.shape[1:], dtype=torch.bool) if real is None else real[0, 0].bool()
            self._pixels[digest] = (pixels, mask)
            limit = max(1, PIXELS_KEPT // (pixels.numel() * pixels.element_size()))
            while len(self._pixels) > limit:
                self._pixels.popitem(last=False)
        self._pixels.move_to_end(digest)
        return self._pixels[digest]

    def features(self, digests: Sequence[str]) -> Tensor:
        """(M, S, hidden) what the policy sees in each image, with gradient.

        Raises:
            ContractError: the tower gives another number of tokens than the prompt has placeholders.
        """
        device = next(self.model.parameters()).device
        parts = [self.pixels(digest) for digest in digests]
        pixels_M3HW = torch.stack([pixels for pixels, _ in parts]).to(device)
        mask_MHW = torch.stack([mask for _, mask in parts]).to(device)
        features_MSH: Tensor = self.model.model.get_image_features(
            pixels_M3HW[None], mask_MHW[None], return_dict=True
        ).pooler_output
        if features_MSH.shape[:2] != (len(digests), self.tokens):
            raise ContractError(
                f"{len(digests)} images of {self.tokens} tokens each gave features of shape "
                f"{tuple(features_MSH.shape)}: an image that is all one grey cannot be told from padding"
            )
        return features_MSH

    def embed(
        self,
        ids_BL: Tensor,
        places_B: Sequence[Sequence[ImagePlace]],
        known: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """(B, L, hidden) inputs of the text model: the tokens' embeddings, and at the places of images their features.

        Args:
            known: features by digest that need not be computed again; the rest is, with gradient.

        Raises:
            ContractError: at a place there are not exactly the placeholders of one image, or two images overlap.
        """
        embeds_BLH: Tensor = self.model.get_input_embeddings()(ids_BL)
        where: list[tuple[int, int, str]] = [
            (row, start, digest) for row, places in enumerate(places_B) for start, digest in places
        ]
        if not where:
            return embeds_BLH
        check_places(ids_BL.tolist(), places_B, self.image_id, self.tokens)
        known = dict(known or {})
        missing = [digest for digest in dict.fromkeys(d for _, _, d in where) if digest not in known]
        if missing:
            known |= dict(zip(missing, self.features(missing), strict=True))
        device = ids_BL.device
        rows_N = torch.tensor([row for row, _, _ in where], device=device).repeat_interleave(self.tokens)
        columns_N = torch.tensor(
            [start + offset for _, start, _ in where for offset in range(self.tokens)], device=device
        )
        features_NH = torch.cat([known[digest] for _, _, digest in where]).to(embeds_BLH.dtype)
        return embeds_BLH.index_put((rows_N, columns_N), features_NH)


def check_places(
    ids_B: Sequence[Sequence[int]], places_B: Sequence[Sequence[ImagePlace]], image_id: int, tokens: int
) -> None:
    """Every image stands on its own placeholders, whole.

    Raises:
        ContractError: it does not: a turn was cut, dropped or repeated.
    """
    for row, (ids, places) in enumerate(zip(ids_B, places_B, strict=True)):
        end = 0
        for start, digest in sorted(places):
            if start < end or ids[start : start + tokens] != [image_id] * tokens:
                raise ContractError(
                    f"row {row}: image {digest[:12]} does not stand on {tokens} placeholders of its own at token "
                    f"{start}: its turn was cut, dropped or repeated; sample the rollout again"
                )
            end = start + tokens


def text_backbone(model: Any) -> Any:
    """The module that turns token embeddings into hidden states: the text model of one that also sees."""
    backbone = model.base_model
    return backbone.text_model if hasattr(backbone, "text_model") else backbone


def sees(config: Any) -> bool:
    """Whether a model's configuration has a vision tower.

    Raises:
        ConfigurationError: it has one that is not served here.
    """
    if getattr(config, "vision_config", None) is None:
        return False
    if config.model_type not in FAMILIES:
        raise ConfigurationError(
            f"a policy of model type {config.model_type} sees in a way that is not served here: choose a SmolVLM or "
            "Idefics3 checkpoint (policy.path=HuggingFaceTB/SmolVLM-256M-Instruct), or policy=tiny_vlm"
        )
    return True


def _no_source(digest: str) -> bytes:
    raise ContractError(f"image {digest} was asked for, and this policy was given no store to read it from")
