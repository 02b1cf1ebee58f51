"""Supervised warm start: a policy imitates an environment's expert before it learns from rewards.

Training is TRL's SFTTrainer; what it trains on is built here, from the same pieces that the turn loop uses, so that a
demonstration's tokens are exactly those that the policy will see and sample. The loss is on the assistant's turns
and the tokens that end them, on all of them alike.
"""

import contextlib
import copy
import math
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from peft import PeftModel
from transformers import PrinterCallback
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from gleaner.conf.errors import ConfigurationError
from gleaner.conf.schema import ExperienceSettings, WarmstartSettings
from gleaner.models.chat import Chat, text_only
from gleaner.models.environments.base import Demonstration, Environment, HasFindings, HasImages, HasTopics
from gleaner.models.experience import Experience, align, experience_messages
from gleaner.models.images import image_digest
from gleaner.models.logprobs import chunked_logprobs
from gleaner.models.policy import Policy
from gleaner.models.vision import Eyes, text_backbone

IGNORED = -100
"""Label of a token without loss."""
ACTIVATION_BUDGET = 30_000_000
"""Tokens x layers x hidden units of one forward and backward pass. At about 34 floats each (Korthikanti et al. 2022,
arXiv 2205.05198) that is 4 GB in float32; a larger batch is cut into micro-batches."""
WARM_UP_SHARE = 0.05
OTHER_ATTEMPTS = 2
OTHERS_NOISE = 0.5
TOPIC_DRAWS = (4, 16, 64)
"""Demonstrations drawn for each that is wanted, until every topic has its number."""


def warmstart(
    policy: Policy, environment: Environment, settings: WarmstartSettings, seed: int, folder: Path
) -> dict[str, float]:
    """Fine-tune `policy` in place on expert demonstrations.

    AdamW (betas 0.9 and 0.98, no weight decay), gradient norm 1, the learning rate falling linearly after a short
    warm-up: this project's choice. The same seed gives the same weights on one machine.

    Args:
        folder: scratch folder of the trainer; nothing is kept in it.

    Returns:
        loss_first, loss_last (nats per assistant token: the first step, the mean of the last twentieth of the steps),
        demonstrations, skipped (those longer than the policy's context).

    Raises:
        ConfigurationError: the environment has no demonstrations, none fits the context, or training diverged.
    """
    chat = Chat(policy.tokenizer, multi_turn=environment.max_turns > 1, eyes=policy.eyes)
    shown = informed(environment, demonstrations(environment, settings, seed), settings, chat, seed)
    rows = [labelled(chat, each) for each in shown]
    if policy.eyes is not None:
        policy.eyes.source = all_images(environment, shown).__getitem__
    fitting = [row for row in rows if len(row["input_ids"]) <= policy.context]
    if not fitting:
        shortest = min((len(row["input_ids"]) for row in rows), default=0)
        raise ConfigurationError(
            f"no demonstration fits policy.context={policy.context} (the shortest of {len(rows)} has {shortest} "
            "tokens): raise policy.context, or lower environment.max_turns"
        )
    interval = max(1, settings.steps // 20)
    with _restored(policy), contextlib.redirect_stdout(None):
        trainer = AnswerTrainer(
            model=policy.model,
            args=_arguments(
                policy, settings, seed, folder, max(len(row["input_ids"]) for row in fitting), interval
            ),
            train_dataset=Dataset.from_list(fitting),
            processing_class=policy.tokenizer,
            data_collator=Collator(int(policy.tokenizer.pad_token_id)),
            eyes=policy.eyes,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    first, last = logged[0], logged[-1]
    weights_are_finite = all(bool(weight.isfinite().all()) for weight in policy.model.parameters())
    if not (math.isfinite(last["loss"]) and weights_are_finite):
        raise ConfigurationError(f"the warm start diverged at warmstart.lr={settings.lr}: lower it")
    return {
        "loss_first": float(first["loss"]),
        "loss_last": float(last["loss"]),
        "demonstrations": float(len(fitting)),
        "skipped": float(len(rows) - len(fitting)),
    }


def demonstrations(
    environment: Environment, settings: WarmstartSettings, seed: int
) -> Sequence[Demonstration]:
    """The environment's demonstrations; with `topics`, the first so many of each.

    Raises:
        ConfigurationError: the environment knows no topics, or one of them never comes up.
    """
    topics = settings.topics
    if not topics:
        return environment.demonstrations(settings.demonstrations, settings.noise, seed)
    if not isinstance(environment, HasTopics):
        raise ConfigurationError(
            f"{environment.name} has no topics: set warmstart.topics=null, or give the environment a method "
            "topic(prompt)"
        )
    wanted = sum(topics.values())
    for times in TOPIC_DRAWS:
        by_topic: dict[str, list[Demonstration]] = defaultdict(list)
        for each in environment.demonstrations(wanted * times, settings.noise, seed):
            by_topic[environment.topic(each.prompt)].append(each)
        if all(len(by_topic[topic]) >= count for topic, count in topics.items()):
            return [each for topic, count in topics.items() for each in by_topic[topic][:count]]
    short = next(topic for topic, count in topics.items() if len(by_topic[topic]) < count)
    found = ", ".join(f"{topic} {len(each)}" for topic, each in sorted(by_topic.items()) if each)
    raise ConfigurationError(
        f"warmstart.topics asks for {topics[short]} demonstrations of {short}, but of {wanted * times} drawn "
        f"ones {found} are: choose among these, or lower the number"
    )


def informed(
    environment: Environment,
    shown: Sequence[Demonstration],
    settings: WarmstartSettings,
    chat: Chat,
    seed: int,
) -> Sequence[Demonstration]:
    """The demonstrations, `settings.informed` of them made anew by an expert that reads what two other attempts found,
    worded as VISTA's teacher will read it.

    The other attempts act at random half of the time, so that they find what an expert would not look for.

    Raises:
        ConfigurationError: the environment's turns find nothing out.
    """
    if not settings.informed:
        return shown
    if not isinstance(environment, HasFindings):
        raise ConfigurationError(
            f"{environment.name} does not say what its turns find out: set warmstart.informed=0, or choose household "
            "or visual_search"
        )
    reading = ExperienceSettings()
    draw = random.Random(seed)
    found: list[Demonstration] = []
    for each in shown:
        if draw.random() >= settings.informed:
            found.append(each)
            continue
        others = [
            environment.demonstrate(each.prompt, (), OTHERS_NOISE, draw.getrandbits(32))
            for _ in range(OTHER_ATTEMPTS)
        ]
        pool = [
            Experience(sample, finding, other.success)
            for sample, other in enumerate(others)
            for finding in environment.findings(other.turns)
        ]
        question = "\n".join(str(text_only(message)["content"]) for message in each.prompt.messages)
        entries = align(pool, OTHER_ATTEMPTS, 0, (), question, "", environment.max_turns, reading)
        known = [entry.experience.finding for entry in entries]
        told = experience_messages(each.prompt.messages, entries, chat, reading.tokens)
        again = environment.demonstrate(each.prompt, known, settings.noise, draw.getrandbits(32))
        shown_images = {digest: image for other in (again, *others) for digest, image in other.images.items()}
        found.append(replace(again, prompt=replace(each.prompt, messages=told), images=shown_images))
    return found


def all_images(environment: Environment, shown: Sequence[Demonstration]) -> dict[str, bytes]:
    """digest → encoded image, of all that the demonstrations show."""
    images = {digest: image for each in shown for digest, image in each.images.items()}
    if isinstance(environment, HasImages):
        for each in shown:
            images |= {image_digest(image): image for image in environment.images(each.prompt)}
    return images


class Collator:
    """Rows padded on the right; where their images stand goes along as it is."""

    def __init__(self, pad: int) -> None:
        self.pad = pad

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        width = max(len(row["input_ids"]) for row in rows)

        def padded(name: str, value: int) -> torch.Tensor:
            return torch.tensor([row[name] + [value] * (width - len(row[name])) for row in rows])

        return {
            "input_ids": padded("input_ids", self.pad),
            "labels": padded("labels", IGNORED),
            "images": [list(zip(row["image_starts"], row["image_digests"], strict=True)) for row in rows],
        }


class AnswerTrainer(SFTTrainer):
    """SFTTrainer whose output head sees labelled positions alone.

    TRL does the same on a GPU; on a CPU it scores every position, most of which carry no loss. There is no attention
    mask: padding is on the right, where no real token looks.

    Args:
        eyes: of a policy that sees.
    """

    def __init__(self, *arguments: Any, eyes: Eyes | None = None, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.eyes = eyes

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """Mean negative log-likelihood of the labelled tokens, over all micro-batches of an optimizer step."""
        causal: Any = model.get_base_model() if isinstance(model, PeftModel) else model
        ids_BT, images_B = inputs["input_ids"], inputs.get("images")
        embeds_BTH = (
            causal.get_input_embeddings()(ids_BT)
            if self.eyes is None
            else self.eyes.embed(ids_BT, images_B or [[]] * len(ids_BT))
        )
        hidden_BTH = text_backbone(causal)(inputs_embeds=embeds_BTH, use_cache=False).last_hidden_state
        targets_BT = inputs["labels"][:, 1:]
        has_loss_BT = targets_BT != IGNORED
        head = causal.get_output_embeddings()
        logprobs_N, _ = chunked_logprobs(
            hidden_BTH[:, :-1][has_loss_BT], head.weight, targets_BT[has_loss_BT], bias_V=head.bias
        )
        return -logprobs_N.sum() / (len(logprobs_N) if num_items_in_batch is None else num_items_in_batch)


def labelled(chat: Chat, demonstration: Demonstration) -> dict[str, Any]:
    """Token ids of a demonstration, labels that are IGNORED outside of the assistant's turns, and where images stand.

    The pieces are the turn loop's own: the prompt up to the generation prompt, each answer with its end token, each
    observation up to the next generation prompt.
    """
    ids = chat.prompt_ids(demonstration.prompt.messages)
    labels = [IGNORED] * len(ids)
    images = chat.image_places(ids, demonstration.prompt.messages)
    said: list[dict[str, Any]] = []
    for message in demonstration.turns:
        if message["role"] != "assistant":
            said.append(message)
            continue
        if said:
            observation = chat.observation_ids(said, after_stop=True)
            images += [(len(ids) + start, digest) for start, digest in chat.image_places(observation, said)]
            ids += observation
            labels += [IGNORED] * len(observation)
            said = []
        content = str(text_only(message)["content"])
        answer = chat.answer_ids(content, ended=True)
        ids += answer
        labels += answer
    return {
        "input_ids": ids,
        "labels": labels,
        "image_starts": [start for start, _ in images],
        "image_digests": [digest for _, digest in images],
    }


def _arguments(
    policy: Policy, settings: WarmstartSettings, seed: int, folder: Path, longest: int, interval: int
) -> SFTConfig:
    config = policy.language_model.config.get_text_config()
    tokens = ACTIVATION_BUDGET // (config.num_hidden_layers * config.hidden_size)
    rows = max(
        n
        for n in range(1, settings.batch + 1)
        if settings.batch % n == 0 and (n == 1 or n * longest <= tokens)
    )
    return SFTConfig(
        output_dir=str(folder),
        max_steps=settings.steps,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=settings.batch // rows,
        learning_rate=settings.lr,
        lr_scheduler_type="linear",
        warmup_steps=math.ceil(WARM_UP_SHARE * settings.steps),
        adam_beta1=0.9,
        adam_beta2=0.98,
        weight_decay=0.0,
        max_grad_norm=1.0,
        seed=seed,
        use_cpu=policy.language_model.device.type == "cpu",
        bf16=False,
        gradient_checkpointing=False,
        max_length=None,
        pad_to_multiple_of=None,
        dataset_kwargs={"skip_prepare_dataset": True},
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        logging_steps=interval,
        logging_first_step=True,
        logging_nan_inf_filter=False,  # else a NaN is logged as the mean of the losses before it
        disable_tqdm=True,
        report_to="none",
        save_strategy="no",
    )


@contextlib.contextmanager
def _restored(policy: Policy) -> Iterator[None]:
    """Undo what the trainer leaves behind: a patched forward, an altered configuration, training mode, seeded
    generators."""
    model: Any = policy.language_model
    generation, altered = copy.deepcopy(model.generation_config), _altered(model.config)
    own_forward = model.__dict__.get("forward")
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        if own_forward is None:
            model.__dict__.pop("forward", None)
        else:
            model.forward = own_forward
        model.generation_config = generation
        for name, value in altered.items():
            setattr(model.config, name, value)
        policy.model.zero_grad(set_to_none=True)
        policy.model.eval()


def _altered(config: Any) -> dict[str, Any]:
    """What the trainer sets in a model's configuration."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id", "use_cache")
    return {name: getattr(config, name) for name in names if hasattr(config, name)}
