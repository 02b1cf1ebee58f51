"""Gleaner and TRL's GRPOTrainer on the same work, in one run: `make bench`.

Both start from the same weights and get the same prompts, group size, token limit, temperature, optimizer, learning
rate, loss (DAPO's token mean, no KL) and reward. The weights ban the stop token, so both sample equally many tokens.
First comes the parity gate: on one frozen batch loss and gradient must agree. Then they take turns, block by block,
so that whatever else the machine does hits both; a ratio is taken per pair of blocks, and its median is given with a
95 % bootstrap interval. Above 1, Gleaner is faster or smaller.

Gleaner's side is its real step: Prefect tasks, verifier processes, the durable store, the journal and the MLflow
spool. TRL's side calls the reward inside its own process and stores nothing.

    python tests/benchmarks/bench.py [--quick] [--out results.json]
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PARITY = 1e-5


@dataclass(frozen=True)
class Work:
    """What a step does. `hidden`, `layers`, `heads`, `vocabulary`: the policy's shape."""

    name: str
    hidden: int
    layers: int
    heads: int
    vocabulary: int = 512
    prompts: int = 8
    group: int = 8
    new_tokens: int = 64
    steps_per_block: int = 3
    blocks: int = 8
    steps_per_task: int = 3

    @property
    def rows(self) -> int:
        return self.prompts * self.group

    @property
    def tokens(self) -> int:
        """Tokens that a step samples."""
        return self.rows * self.new_tokens


TINY = Work("tiny, 0.2 M", hidden=64, layers=2, heads=4)
SMALL = Work("small, 1 M", hidden=128, layers=4, heads=4)
WIDE = Work("wide vocabulary, 2 M", hidden=64, layers=2, heads=4, vocabulary=16_384)
CONTEXT = 512
LEARNING_RATE = 1e-5


# ---------------------------------------------------------------------------------------------- the weights


def write_weights(work: Work, folder: Path) -> None:
    """A random policy that never stops: dimension 0 of its residual stream is the same for every token, too large for
    any layer to turn its sign, and only the stop token's row of the (untied) head reads it, with a large negative
    weight."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from workload import Counting

    from gleaner.conf.schema import TinyPolicy
    from gleaner.models.policy import Policy, build_policy, save_policy

    shape = TinyPolicy(hidden=work.hidden, layers=work.layers, heads=work.heads, context=CONTEXT)
    tiny = build_policy(shape, Counting(), seed=0)
    values = tiny.language_model.config.to_dict() | {"tie_word_embeddings": False}
    values["vocab_size"] = (
        max(work.vocabulary, values["vocab_size"]) if work.vocabulary > 512 else values["vocab_size"]
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**values))
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 10.0
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[tiny.tokenizer.eos_token_id, 0] = -30.0
    save_policy(Policy(model.eval(), tiny.tokenizer, CONTEXT), folder)


def parameters(folder: Path) -> int:
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "np") as weights:
        return sum(int(weights.get_tensor(name).size) for name in weights.keys())  # noqa: SIM118


# ------------------------------------------------------------------------------------------------ the sides


class Gleaner:
    """The flow's own steps, a block at a time. Needs a running flow."""

    def __init__(self, work: Work, weights: Path, scratch: Path, name: str) -> None:
        from gleaner.conf.compose import run_identity
        from gleaner.conf.schema import (
            GleanerSettings,
            GrpoMethod,
            LocalStorage,
            PretrainedPolicy,
            PythonEnvironment,
            RunSettings,
            SamplingSettings,
            TrackingSettings,
            UpdateSettings,
        )
        from gleaner.tasks.context import RunContext
        from gleaner.tasks.preflight import preflight
        from gleaner.tasks.reporting import Reporter
        from gleaner.tasks.starting import start_policy

        self.work = work
        settings = GleanerSettings(
            run=RunSettings(
                name=name,
                steps=10_000,
                prompts_per_step=work.prompts,
                group_size=work.group,
                steps_per_task=work.steps_per_task,
            ),
            environment=PythonEnvironment(path=f"{HERE / 'workload.py'}:Counting"),
            policy=PretrainedPolicy(path=str(weights), context=CONTEXT),
            sampling=SamplingSettings(max_new_tokens=work.new_tokens),
            method=GrpoMethod(epsilon=1e-4),
            update=UpdateSettings(lr=LEARNING_RATE),
            storage=LocalStorage(path=str(scratch / "store")),
            tracking=TrackingSettings(uri=f"sqlite:///{scratch / 'mlflow.db'}"),
        )
        self.context = RunContext.of(name, settings)
        checked = preflight(self.context)
        self.context.journal.header(run_identity(settings))
        self.reporter = Reporter(self.context, checked).__enter__()
        self.start = start_policy(self.context)["version"]

    def block(self, steps: int) -> dict[str, float]:
        """Take so many steps; per step: seconds, and the seconds of each phase."""
        from gleaner.flows.grpo import grpo_step
        from gleaner.flows.loop import PHASES, standing, take_step, take_steps

        started = time.perf_counter()
        first = standing(self.context, self.start).step
        while (progress := standing(self.context, self.start)).step < first + steps:
            until = min(progress.step + self.work.steps_per_task, first + steps)
            if until == progress.step + 1:
                take_step(self.context, grpo_step, progress)
            else:
                take_steps(self.context, grpo_step, self.start, until)
        self.reporter.follow(self.context.journal)
        seconds = (time.perf_counter() - started) / steps
        entries = [entry for _, entry in self.context.journal.entries(first)]
        phases = {
            name: sum(entry["metrics"][f"seconds/{name}"] for entry in entries) / steps for name in PHASES
        }
        assert all(entry["metrics"]["rollout/length_mean"] == self.work.new_tokens for entry in entries)
        assert all(entry["counts"]["scored"] == self.work.rows for entry in entries)
        return {"seconds": seconds, **phases, "orchestration": seconds - sum(phases.values())}

    def close(self) -> None:
        self.reporter.__exit__(None, None, None)


def make_trl(work: Work, weights: Path, scratch: Path, steps: int) -> Any:
    """TRL's trainer on the prompts that Gleaner draws, in their order."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer
    from workload import Counting, reward_of

    from gleaner.tasks.sampling import _permutation

    environment = Counting()
    order = _permutation(0, 0, environment.size("train"))[: steps * work.prompts]
    prompts = [environment.prompt("train", int(index)).messages for index in order]

    def reward(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
        return [reward_of(completion[0]["content"]) for completion in completions]

    arguments = GRPOConfig(
        output_dir=str(scratch / "trl"),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=work.rows,
        gradient_accumulation_steps=1,
        num_generations=work.group,
        max_completion_length=work.new_tokens,
        temperature=1.0,
        max_steps=steps,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        weight_decay=0.01,
        max_grad_norm=1.0,
        loss_type="dapo",
        epsilon=0.2,
        epsilon_high=0.28,
        beta=0.0,
        gradient_checkpointing=False,
        shuffle_dataset=False,
        disable_dropout=True,
        report_to=[],
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(weights, dtype="float32"),
        processing_class=AutoTokenizer.from_pretrained(weights),
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
    )


# ----------------------------------------------------------------------------------------------- whole steps


def compare_steps(work: Work, weights: Path, scratch: Path) -> dict[str, list[dict[str, float]]]:
    """Blocks of both in turn, inside TRL's own loop: after each of its blocks Gleaner takes one. The first of each
    warms up and is dropped."""
    from prefect import flow
    from transformers import TrainerCallback

    blocks: dict[str, list[dict[str, float]]] = {"trl": [], "gleaner": []}
    steps = work.steps_per_block * (work.blocks + 1)

    @flow(name="bench", persist_result=False)
    def bench() -> None:
        ours = Gleaner(work, weights, scratch, "bench")
        trainer = make_trl(work, weights, scratch, steps)
        generating = 0.0
        generate = trainer._generate

        def timed_generate(prompts: list[Any]) -> Any:
            nonlocal generating
            started = time.perf_counter()
            generated = generate(prompts)
            generating += time.perf_counter() - started
            assert all(len(ids) == work.new_tokens for ids in generated[1])
            return generated

        trainer._generate = timed_generate

        class TakeTurns(TrainerCallback):
            started = 0.0

            def on_train_begin(self, *_: Any, **__: Any) -> None:
                self.started = time.perf_counter()

            def on_step_end(self, args: Any, state: Any, control: Any, **__: Any) -> None:
                nonlocal generating
                if state.global_step % work.steps_per_block:
                    return
                seconds = (time.perf_counter() - self.started) / work.steps_per_block
                blocks["trl"].append({"seconds": seconds, "sample": generating / work.steps_per_block})
                blocks["gleaner"].append(ours.block(work.steps_per_block))
                generating = 0.0
                self.started = time.perf_counter()

        trainer.add_callback(TakeTurns())
        trainer.train()
        ours.close()

    bench()
    return {side: measured[1:] for side, measured in blocks.items()}


# --------------------------------------------------------------------------------------------- frozen batch


class FrozenBatch:
    """One batch for both updates: unequal lengths, truncated rows, and `dead` groups whose rewards are equal."""

    def __init__(self, work: Work, weights: Path, scratch: Path, dead: int) -> None:
        import numpy as np
        from workload import Counting

        from gleaner.conf.schema import GrpoMethod, UpdateSettings
        from gleaner.models.chat import Chat
        from gleaner.models.methods.grpo import grpo_signal
        from gleaner.models.policy import load_policy
        from gleaner.models.records import Segment, Verdict
        from gleaner.models.signal import group_rollouts
        from gleaner.models.training import Learner

        random = np.random.default_rng(0)
        environment, policy = Counting(), load_policy(weights)
        self.learner = Learner(policy, UpdateSettings(lr=LEARNING_RATE))
        chat, vocabulary = Chat(policy.tokenizer), int(policy.language_model.config.vocab_size)
        segments, verdicts = [], []
        for row in range(work.rows):
            group, sample = divmod(row, work.group)
            prompt = environment.prompt("train", group)
            length = int(random.integers(work.new_tokens // 8, work.new_tokens + 1))
            reward = 0.0 if group < dead else float(random.random())
            segments.append(
                Segment(
                    prompt_id=prompt.prompt_id,
                    sample=sample,
                    segment=0,
                    context_ids=chat.prompt_ids(prompt.messages),
                    sampled_ids=random.integers(5, vocabulary, length).tolist(),
                    loss_mask=[1] * length,
                    logprobs=[0.0] * length,
                    policy_version="v",
                    sampling_digest="s",
                    seed=0,
                    finish_reason="length" if length == work.new_tokens else "stop",
                    text="",
                    transcript=[],
                    environment_result={},
                    images=[],
                )
            )
            verdicts.append(Verdict(prompt.prompt_id, sample, "scored", reward > 0.5, reward, {}, "1"))
        # Sampled by these very weights, so that the ratio is 1 for both.
        scored = self.learner.score(segments, temperature=1.0)
        self.segments = [replace(s, logprobs=row.tolist()) for s, row in zip(segments, scored, strict=True)]
        groups, _ = group_rollouts(self.segments, verdicts, "drop_group", 2)
        self.signal, _ = grpo_signal(
            groups,
            GrpoMethod(epsilon=1e-4),
            rollouts="r",
            minibatches=1,
            max_new_tokens=work.new_tokens,
            temperature=1.0,
        )
        self.tokens = sum(len(s.sampled_ids) for s in self.segments)
        self.trainer = make_trl(work, weights, scratch, steps=1)
        self.trainer.create_optimizer()
        self.trainer.current_gradient_accumulation_steps = 1
        self.inputs = self._trl_inputs()

    def _trl_inputs(self) -> dict[str, Any]:
        """What TRL's trainer would make of the batch: prompts left-padded, completions right-padded."""
        import torch

        advantage = {(row.prompt_id, row.sample): float(row.advantage[0]) for row in self.signal.rows}
        contexts = [s.context_ids for s in self.segments]
        sampled = [s.sampled_ids for s in self.segments]
        width, length = max(map(len, contexts)), max(map(len, sampled))
        return {
            "prompt_ids": torch.tensor([[0] * (width - len(ids)) + ids for ids in contexts]),
            "prompt_mask": torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in contexts]),
            "completion_ids": torch.tensor([ids + [0] * (length - len(ids)) for ids in sampled]),
            "completion_mask": torch.tensor([[1] * len(ids) + [0] * (length - len(ids)) for ids in sampled]),
            "advantages": torch.tensor([advantage[s.prompt_id, s.sample] for s in self.segments]),
            "num_items_in_batch": torch.tensor(self.tokens),
        }

    def padding(self) -> dict[str, float]:
        """Share of the positions that go through the model and mean nothing."""
        rows, width = self.inputs["prompt_ids"].shape
        length = self.inputs["completion_ids"].shape[1]
        real = int(self.inputs["prompt_mask"].sum()) + self.tokens
        return {
            "trl": 1 - real / (rows * (width + length)),
            "gleaner": self.learner.apply(self.signal)["update/padding"],
        }

    def trl_backward(self) -> float:
        model = self.trainer.model
        model.train()
        loss = self.trainer._compute_loss(model, self.inputs)
        self.trainer.accelerator.backward(loss)
        return float(loss.detach())

    def trl_update(self) -> None:
        self.trl_backward()
        self.trainer.accelerator.clip_grad_norm_(self.trainer.model.parameters(), 1.0)
        self.trainer.optimizer.step()
        self.trainer.optimizer.zero_grad()

    def gleaner_update(self) -> None:
        self.learner.apply(self.signal)

    def parity(self) -> dict[str, float]:
        """Relative differences of the loss and of the whole gradient, before either takes a step."""
        gradient: dict[str, Any] = {}
        step, clip = self.learner.optimizer.step, self.learner.settings

        def keep_gradient() -> None:
            gradient.update({name: p.grad.clone() for name, p in self.learner.model.named_parameters()})

        self.learner.settings = clip.model_copy(update={"max_grad_norm": 1e9})
        self.learner.optimizer.step = keep_gradient  # type: ignore[method-assign]
        loss = self.learner.apply(self.signal)["update/loss"]
        self.learner.optimizer.step, self.learner.settings = step, clip  # type: ignore[method-assign]
        trl_loss = self.trl_backward()
        expected = {name: p.grad.clone() for name, p in self.trainer.model.named_parameters()}
        self.trainer.optimizer.zero_grad()
        norm = sum(float(g.double().square().sum()) for g in expected.values()) ** 0.5
        error = (
            sum(float((gradient[name] - g).double().square().sum()) for name, g in expected.items()) ** 0.5
        )
        return {"loss": abs(loss - trl_loss) / max(abs(trl_loss), 1e-3), "gradient": error / norm}


def progress(words: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {words}", file=sys.stderr, flush=True)


def compare_updates(batch: FrozenBatch, repeats: int) -> dict[str, list[float]]:
    """Seconds of one update, in turn."""

    def timed(update: Callable[[], None]) -> float:
        started = time.perf_counter()
        update()
        return time.perf_counter() - started

    seconds: dict[str, list[float]] = {"trl": [], "gleaner": []}
    for _ in range(repeats + 2):
        seconds["trl"].append(timed(batch.trl_update))
        seconds["gleaner"].append(timed(batch.gleaner_update))
    return {side: measured[2:] for side, measured in seconds.items()}


# --------------------------------------------------------------------------------------------------- memory


def peak_growth(run: Callable[[], None]) -> float:
    """MiB by which the process grows at most while `run` runs, beyond what it holds after a first, smaller peak is
    forgotten. The kernel's own high-water mark: allocations outside of Python count."""
    import psutil

    Path("/proc/self/clear_refs").write_text("5")
    before = psutil.Process().memory_info().rss
    run()
    status = Path("/proc/self/status").read_text()
    peak = int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024
    return max(0.0, (peak - before) / 2**20)


def measure_memory(side: str, what: str, work: Work, weights: Path, scratch: Path) -> float:
    """In a process of its own: the peak of three steps, or of three updates on the frozen batch, from a cold start."""
    if what == "update":
        batch = FrozenBatch(work, weights, scratch, dead=0)
        update = batch.trl_update if side == "trl" else batch.gleaner_update
        return peak_growth(lambda: [update() for _ in range(3)] and None)
    if side == "trl":
        trainer = make_trl(work, weights, scratch, steps=3)
        return peak_growth(lambda: trainer.train() and None)
    from prefect import flow

    @flow(name="bench-memory", persist_result=False)
    def steps() -> float:
        ours = Gleaner(work, weights, scratch, "bench-memory")
        grown = peak_growth(lambda: ours.block(3) and None)
        ours.close()
        return grown

    return steps()


def memory_of(side: str, what: str, work: Work, weights: Path) -> float:
    command = [sys.executable, __file__, "--memory", side, what, work.name, str(weights)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"the memory of {side} ({what}) could not be measured:\n{done.stderr[-3000:]}")
    return float(done.stdout.strip().splitlines()[-1])


# -------------------------------------------------------------------------------------------- orchestration


def orchestration(target: float, steps: int, weights: Path, scratch: Path) -> dict[str, float]:
    """Share of a step of about `target` seconds that is neither sampling, verifying, scoring nor updating.

    The number of prompts follows what was measured until the step is within a tenth of the target.
    """
    from prefect import flow

    per_task = max(1, round(10 / target))  # tasks of about ten seconds
    work = replace(SMALL, steps_per_task=per_task)

    @flow(name="bench-orchestration", persist_result=False)
    def measure() -> dict[str, float]:
        prompts = work.prompts
        for attempt in range(4):
            sized = replace(work, prompts=prompts)
            ours = Gleaner(sized, weights, scratch, f"orchestration-{target}-{attempt}")
            ours.block(per_task)
            measured = ours.block(max(steps, per_task))
            ours.close()
            closer = max(2, round(prompts * target / measured["seconds"]))
            if closer == prompts or abs(measured["seconds"] / target - 1) <= 0.1:
                break
            prompts = closer
        return measured | {"steps_per_task": float(per_task), "prompts": float(sized.prompts)}

    measured = measure()
    return measured | {"target": target, "share": measured["orchestration"] / measured["seconds"]}


# --------------------------------------------------------------------------------------------------- report


def ratio(trl: list[float], gleaner: list[float]) -> dict[str, float]:
    """Median of the ratios of neighbours, and its 95 % percentile bootstrap interval."""
    import numpy as np
    from scipy import stats

    ratios = np.array(trl) / np.array(gleaner)
    low = high = float("nan")
    if len(ratios) > 1:
        random = np.random.default_rng(0)
        found = stats.bootstrap((ratios,), np.median, n_resamples=5000, method="percentile", rng=random)
        low, high = map(float, found.confidence_interval)
    return {
        "ratio": float(np.median(ratios)),
        "low": low,
        "high": high,
        "trl": float(np.median(trl)),
        "gleaner": float(np.median(gleaner)),
        "pairs": len(ratios),
    }


def machine() -> dict[str, Any]:
    from importlib.metadata import version

    import psutil
    import torch

    cpu = platform.processor()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), cpu)
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load": os.getloadavg(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("torch", "transformers", "trl", "prefect", "gleaner")},
    }


def measure_all(quick: bool, scratch: Path) -> dict[str, Any]:
    works = [replace(work, blocks=3) if quick else work for work in (TINY, SMALL)]
    results: dict[str, Any] = {"machine": machine(), "ratios": {}, "facts": {}}
    facts = results["facts"]

    def note(name: str, measured: dict[str, float]) -> None:
        results["ratios"][name] = measured
        progress(f"{name}: {measured['ratio']:.2f} ({measured['low']:.2f} to {measured['high']:.2f})")

    folders = {}
    for work in [*works, WIDE]:
        folders[work.name] = scratch / work.name.split(",")[0].replace(" ", "_")
        write_weights(work, folders[work.name])
        facts[f"parameters, {work.name}"] = parameters(folders[work.name])
    for work in works:
        weights, own = folders[work.name], scratch / f"run-{work.hidden}"
        batch = FrozenBatch(work, weights, own, dead=2)
        facts[f"parity, {work.name}"] = agreed = batch.parity()
        if not max(agreed.values()) <= PARITY:
            sys.exit(
                f"no parity with TRL on one frozen batch of {work.name}, so speed means nothing: {agreed}"
            )
        live = FrozenBatch(work, weights, own, dead=0)
        facts[f"padding, {work.name}"] = live.padding()
        for label, frozen in (
            ("trained tokens/s", live),
            (
                "trained tokens/s, half the groups dead",
                FrozenBatch(work, weights, own, dead=work.prompts // 2),
            ),
        ):
            updates = compare_updates(frozen, 10 if quick else 30)
            measured = ratio(updates["trl"], updates["gleaner"])
            rates = {side: frozen.tokens / measured[side] for side in ("trl", "gleaner")}
            note(f"{label}, {work.name}", measured | rates)
        blocks = compare_steps(work, weights, own)
        seconds = {side: [block["seconds"] for block in blocks[side]] for side in blocks}
        note(f"seconds per step, {work.name}", ratio(seconds["trl"], seconds["gleaner"]))
        sampling = {side: [block["sample"] for block in blocks[side]] for side in blocks}
        measured = ratio(sampling["trl"], sampling["gleaner"])
        rates = {side: work.tokens / measured[side] for side in ("trl", "gleaner")}
        note(f"generated tokens/s, {work.name}", measured | rates)
        facts[f"phases, {work.name}"] = {
            name: sum(block[name] for block in blocks["gleaner"]) / len(blocks["gleaner"])
            for name in blocks["gleaner"][0]
        }
    for what, work in (("step", SMALL), ("update", SMALL), ("update", WIDE)):
        grown = {
            side: [memory_of(side, what, work, folders[work.name]) for _ in range(2 if quick else 3)]
            for side in ("trl", "gleaner")
        }
        note(f"peak MiB of three {what}s, {work.name}", ratio(**grown))
    for target in (0.5, 5.0):
        facts[f"orchestration of a {target} s step"] = orchestration(
            target, 4 if quick else 10, folders[SMALL.name], scratch / f"orchestration-{target}"
        )
    return results


def show(results: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(title="Gleaner beside TRL's GRPOTrainer; above 1 Gleaner is faster or smaller")
    for column in ("measure", "TRL", "Gleaner", "ratio", "95 % interval", "pairs"):
        table.add_column(column, justify="left" if column == "measure" else "right")
    for name, found in results["ratios"].items():
        figures = [
            f"{found[side]:,.0f}" if found[side] >= 100 else f"{found[side]:.3g}"
            for side in ("trl", "gleaner")
        ]
        table.add_row(
            name,
            *figures,
            f"{found['ratio']:.2f}",
            f"{found['low']:.2f} to {found['high']:.2f}",
            f"{found['pairs']}",
        )
    console.print(table)
    for name, fact in results["facts"].items():
        words = (
            ", ".join(f"{key} {value:.3g}" for key, value in fact.items())
            if isinstance(fact, dict)
            else f"{fact:,}"
        )
        console.print(f"{name}: {words}", highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a third of the pairs")
    parser.add_argument("--out", type=Path, default=Path(".gleaner/bench.json"))
    parser.add_argument("--memory", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()

    from gleaner.flows.runtime import prepare_process
    from gleaner.flows.services import prefect_server

    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        os.environ.setdefault("PREFECT_LOGGING_LEVEL", "WARNING")
        prepare_process(scratch)
        out = arguments.out.resolve()
        os.chdir(scratch)
        with prefect_server(scratch / "prefect-server.log"):
            if arguments.memory:
                side, what, name, weights = arguments.memory
                work = next(work for work in (TINY, SMALL, WIDE) if work.name == name)
                print(measure_memory(side, what, work, Path(weights), scratch))
                return
            results = measure_all(arguments.quick, scratch)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=1))
    show(results)
    print(f"written to {out}")


if __name__ == "__main__":
    main()
