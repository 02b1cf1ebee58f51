"""Engines sample and score tokens: transformers in this process, or vLLM."""

from pathlib import Path

from gleaner.conf.errors import ConfigurationError
from gleaner.conf.schema import AnyEngine
from gleaner.conf.schema import TransformersEngine as TransformersEngineSettings
from gleaner.models.engines.base import Engine
from gleaner.models.policy import Policy


def make_engine(
    settings: AnyEngine,
    *,
    context_limit: int,
    policy: Policy | None = None,
    folder: Path | None = None,
    version: str | None = None,
) -> Engine:
    """The engine that the settings name, on a live policy or on an exported folder.

    Args:
        context_limit: tokens of prompt and episode together, at most.
        policy: the trainer's live policy, shared without a copy (transformers only).
        folder: an exported policy with its `version`, loaded now.
    """
    engine: Engine
    if isinstance(settings, TransformersEngineSettings):
        from gleaner.models.engines.transformers import TransformersEngine

        if policy is not None and folder is not None:
            raise ConfigurationError("an engine takes a live policy or a folder: give one of them")
        engine = TransformersEngine(settings, context_limit=context_limit, policy=policy, version=version)
    else:
        from gleaner.models.engines.vllm import VllmEngine

        if folder is None:
            raise ConfigurationError(
                "the vLLM engine starts from a folder: export the policy with save_policy first"
            )
        engine = VllmEngine(settings, context_limit=context_limit)
    if folder is not None:
        engine.load(folder, version or folder.name)
    return engine
