"""What pydantic refused, said as a person would: the setting by its name on the command line, and the fix."""

import difflib
import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

NAMES_ELSEWHERE = {
    "batch_size": "run.prompts_per_step",
    "beta": "method.kl_coef",
    "clip_ratio": "method.clip_low and method.clip_high",
    "clip_ratio_high": "method.clip_high",
    "clip_ratio_low": "method.clip_low",
    "eval_steps": "evaluation.every",
    "epsilon_high": "method.clip_high",
    "gradient_accumulation_steps": "update.tokens_per_microbatch",
    "kl_loss_coef": "method.kl_coef",
    "learning_rate": "update.lr",
    "lora_r": "policy.lora.rank",
    "loss_type": "method=grpo, dapo, dr_grpo, gspo or cispo",
    "max_completion_length": "sampling.max_new_tokens",
    "max_prompt_length": "policy.context",
    "max_response_length": "sampling.max_new_tokens",
    "max_steps": "run.steps",
    "max_tokens": "sampling.max_new_tokens",
    "model": "policy=pretrained policy.path",
    "model_name_or_path": "policy=pretrained policy.path",
    "num_generations": "run.group_size",
    "output_dir": "storage.path",
    "per_device_train_batch_size": "update.tokens_per_microbatch",
    "ppo_mini_batch_size": "update.minibatches",
    "rollout_n": "run.group_size",
    "save_steps": "run.checkpoint_every",
    "scale_rewards": "method.scale",
    "steps_per_generation": "update.minibatches",
    "total_training_steps": "run.steps",
    "train_batch_size": "run.prompts_per_step",
    "use_vllm": "engine=vllm",
    "vllm_gpu_memory_utilization": "engine.gpu_memory_utilization",
    "vllm_importance_sampling_clip_max": "method.importance_cap",
}
"""What TRL and verl call a setting, and what it is called here."""


@dataclass(frozen=True)
class Setting:
    """A setting's place: its dotted name, the settings class that holds it, and that class's kind in a union."""

    name: str
    owner: type[BaseModel]
    kind: str | None

    @property
    def leaf(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def group(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def description(self) -> str:
        field = self.owner.model_fields.get(self.leaf)
        return " ".join(field.description.split()) if field and field.description else ""


def explain(error: ValidationError, root: type[BaseModel]) -> str:
    """One sentence for each setting that was refused; a list if there are several."""
    reasons: dict[str, list[str]] = {}
    for detail in error.errors(include_url=False):
        setting = _locate(root, detail["loc"])
        start, reason = _sentence(root, setting, detail)
        known = reasons.setdefault(start, [])
        if reason not in known:
            known.append(reason)
    sentences = [start + " or ".join(alternatives) for start, alternatives in reasons.items()]
    if len(sentences) == 1:
        return sentences[0]
    return f"{len(sentences)} settings are wrong:\n" + "\n".join(f"  - {sentence}" for sentence in sentences)


def _sentence(root: type[BaseModel], setting: Setting, detail: Mapping[str, Any]) -> tuple[str, str]:
    """The sentence in two parts: equal first parts belong to one setting, whose second parts are alternatives."""
    kind, given = detail["type"], detail["input"]
    if kind == "value_error":
        return detail["msg"].removeprefix("Value error, "), ""
    if kind == "extra_forbidden":
        return _unknown(root, setting, given), ""
    if kind == "missing":
        return f"{setting.name} has no value: set {setting.name}=VALUE. {setting.description}".rstrip(), ""
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        known = ", ".join(str(tag) for tag in _kinds(setting.owner, setting.leaf))
        wrong = f"={given['kind']}" if isinstance(given, Mapping) and "kind" in given else " is missing"
        return f"{setting.name}.kind{wrong}: choose {setting.name}=NAME with one of {known}", ""
    if kind in ("model_type", "model_attributes_type", "dataclass_type"):
        members = _models(setting.owner.model_fields[setting.leaf].annotation)
        example = next(iter(members[0].model_fields))
        return (
            f"{setting.name}={given} is refused: it is a group of settings, so set {setting.name}.{example}=VALUE",
            "",
        )
    reason = re.sub(r"^\w+ should ", "", detail["msg"])
    if kind == "string_pattern_mismatch":
        reason = f"{reason} ({setting.description})"
    if kind == "list_type":
        reason = f"{reason}, written whole: {setting.name}=[...]"
    return f"{setting.name}={given} is refused: it must ", reason


def _unknown(root: type[BaseModel], setting: Setting, given: Any) -> str:
    wanted = setting.name
    while isinstance(given, Mapping) and len(given) == 1:
        key, given = next(iter(given.items()))
        wanted = f"{wanted}.{key}"
    settings = list(all_settings(root))
    others = sorted({other.kind for other in settings if other.name == wanted and other.kind is not None})
    if others:
        choice = " or ".join(f"{setting.group}={other}" for other in others)
        return f"{wanted} is no setting of {setting.group}.kind={setting.kind}: remove it, or choose {choice}"
    leaf = wanted.rpartition(".")[2]
    siblings = [f"{setting.group}.{name}".lstrip(".") for name in setting.owner.model_fields]
    suggestions = (
        _closest(wanted, siblings, 0.8)
        or [name for word, name in NAMES_ELSEWHERE.items() if word == leaf]
        or _shallowest({other.name for other in settings if other.leaf == leaf})
        or _closest(wanted, siblings, 0.6)
        or _closest(wanted, [other.name for other in settings], 0.75)
    )
    if suggestions:
        return f"{wanted} is no setting: did you mean {' or '.join(suggestions)}?"
    return f"{wanted} is no setting: choose from {', '.join(siblings)}"


def _shallowest(names: set[str]) -> list[str]:
    """The names with the fewest parts: a setting of the run comes to mind before one of a method's peer."""
    depth = min((name.count(".") for name in names), default=0)
    return sorted(name for name in names if name.count(".") == depth)


def _closest(wanted: str, names: list[str], cutoff: float) -> list[str]:
    """The name whose last part is most like the wanted one's, if any comes close."""
    by_leaf = {name.rpartition(".")[2]: name for name in reversed(names)}
    close = difflib.get_close_matches(wanted.rpartition(".")[2], by_leaf, n=1, cutoff=cutoff)
    return [by_leaf[leaf] for leaf in close]


def _locate(root: type[BaseModel], location: tuple[int | str, ...]) -> Setting:
    """Follow pydantic's location, which names union members and branches between the settings' own names."""
    names: list[str] = []
    owner, kind = root, None
    current: Any = root
    for item in location:
        models = _models(current)
        tagged = [model for model in models if _kind(model) == item]
        if len(models) > 1 and tagged:
            current, kind = tagged[0], str(item)
        elif len(models) == 1:
            owner = models[0]
            kind = _kind(owner)
            names.append(str(item))
            field = owner.model_fields.get(str(item))
            current = field.annotation if field else Any
        elif isinstance(item, int) or get_origin(current) is dict:
            names.append(str(item))
            current = get_args(current)[-1] if get_args(current) else Any
    return Setting(".".join(names), owner, kind)


def all_settings(root: type[BaseModel], prefix: str = "") -> Iterator[Setting]:
    """Every setting under a root, in the schema's order; those of union members once for each kind."""
    for name, field in root.model_fields.items():
        yield Setting(prefix + name, root, _kind(root))
        for model in _models(field.annotation):
            yield from all_settings(model, f"{prefix}{name}.")


def _models(annotation: Any) -> list[type[BaseModel]]:
    """The settings classes that a field may hold itself; those inside lists and dicts are not meant."""
    if get_origin(annotation) is Annotated:
        return _models(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [model for member in get_args(annotation) for model in _models(member)]
    return [annotation] if isinstance(annotation, type) and issubclass(annotation, BaseModel) else []


def _kind(model: type[BaseModel]) -> str | None:
    return model.model_fields["kind"].default if "kind" in model.model_fields else None


def _kinds(owner: type[BaseModel], name: str) -> list[str | None]:
    return [_kind(model) for model in _models(owner.model_fields[name].annotation)]
