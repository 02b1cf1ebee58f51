"""What a policy is trained on. Adding an environment is one file here and one preset in conf/environment."""

import inspect

from gleaner.conf.errors import ConfigurationError
from gleaner.conf.schema import (
    AlfworldEnvironment,
    AnyEnvironment,
    HouseholdEnvironment,
    MathEnvironment,
    OpenEnvEnvironment,
    PythonEnvironment,
    ReasoningGymEnvironment,
    ScienceworldEnvironment,
    TextworldExpressEnvironment,
    VisualSearchEnvironment,
)
from gleaner.models.environments.base import Environment
from gleaner.models.plugins import load_object

MEMBERS = (
    "name",
    "version",
    "max_turns",
    "parallel_episodes",
    "verifier",
    "size",
    "prompt",
    "begin",
    "demonstrations",
    "validate",
)


def make_environment(settings: AnyEnvironment, seed: int) -> Environment:
    """The environment that the settings name. Cheap: files are read and problems are made when first asked for.

    `seed` is the run's: it draws training problems where an environment makes them itself. A class of a user's own
    gets `environment.options` as keyword arguments, and `seed` if it has such a parameter.

    Raises:
        ConfigurationError: the settings make no environment; the message names the fix.
    """
    # Imported here: a worker that verifies mathematics must not pay for the others.
    if isinstance(settings, MathEnvironment):
        from gleaner.models.environments.math import MathQuestions

        return MathQuestions(settings)
    if isinstance(settings, ReasoningGymEnvironment):
        from gleaner.models.environments.reasoning_gym import ReasoningGymProblems

        return ReasoningGymProblems(settings, seed)
    if isinstance(settings, HouseholdEnvironment):
        from gleaner.models.environments.household import Household

        return Household(settings, seed)
    if isinstance(settings, AlfworldEnvironment):
        from gleaner.models.environments.alfworld import Alfworld

        return Alfworld(settings)
    if isinstance(settings, OpenEnvEnvironment):
        from gleaner.models.environments.openenv import OpenEnv

        return OpenEnv(settings, seed)
    if isinstance(settings, TextworldExpressEnvironment):
        from gleaner.models.environments.textworld_express import TextworldExpress

        return TextworldExpress(settings)
    if isinstance(settings, ScienceworldEnvironment):
        from gleaner.models.environments.scienceworld import Scienceworld

        return Scienceworld(settings)
    if isinstance(settings, VisualSearchEnvironment):
        from gleaner.models.environments.visual_search import VisualSearch

        return VisualSearch(settings, seed)
    return _user_environment(settings, seed)


def _user_environment(settings: PythonEnvironment, seed: int) -> Environment:
    made_by = load_object(settings.path)
    if not callable(made_by):
        raise ConfigurationError(f"environment.path={settings.path} is no class: name one")
    options = dict(settings.options)
    if "seed" in inspect.signature(made_by).parameters:
        options.setdefault("seed", seed)
    try:
        environment = made_by(**options)
    except TypeError as error:
        raise ConfigurationError(
            f"environment.options={settings.options} does not suit {settings.path}{inspect.signature(made_by)} "
            f"({error}): correct the options"
        ) from error
    missing = [member for member in MEMBERS if not hasattr(environment, member)]
    if missing:
        raise ConfigurationError(
            f"{settings.path} lacks {', '.join(missing)}: an environment has all members of "
            "gleaner.models.environments.base.Environment"
        )
    if settings.max_turns not in (1, environment.max_turns):
        raise ConfigurationError(
            f"environment.max_turns={settings.max_turns}, but {settings.path} has {environment.max_turns} turns: leave "
            "the setting out, and set the turns in environment.options if the class takes them"
        )
    made: Environment = environment
    return made
