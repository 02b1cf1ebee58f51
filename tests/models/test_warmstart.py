import random
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from gleaner.conf.errors import ConfigurationError
from gleaner.conf.schema import HouseholdEnvironment, LoraSettings, TinyPolicy, WarmstartSettings
from gleaner.models.chat import Chat
from gleaner.models.environments.base import Demonstration, VerifierSpec
from gleaner.models.environments.household import Household
from gleaner.models.policy import build_policy
from gleaner.models.records import Prompt
from gleaner.models.warmstart import IGNORED, AnswerTrainer, _arguments, demonstrations, labelled, warmstart

SETTINGS = WarmstartSettings(demonstrations=40, steps=30, batch=8, lr=1e-2)
TINY = TinyPolicy(hidden=32, layers=1, heads=2, vocabulary=300, context=128)


@dataclass
class Counting:
    """Two turns: name the next number, then the one after it."""

    name: str = "counting"
    version: str = "1"
    max_turns: int = 2
    parallel_episodes: int = 1
    verifier: VerifierSpec = field(default_factory=lambda: VerifierSpec("nowhere:verify", "1"))

    def size(self, split):
        return 90

    def prompt(self, split, index):
        messages = [{"role": "user", "content": f"after {index % 9}"}]
        return Prompt(f"{split}{index}", self.name, split, 0, messages, {})

    def begin(self, prompt, seed):
        raise NotImplementedError

    def demonstrations(self, count, noise, seed):
        def episode(index):
            number = index % 9
            return [
                {"role": "assistant", "content": f"is {number + 1}"},
                {"role": "user", "content": "next"},
                {"role": "assistant", "content": f"is {(number + 2) % 10}"},
            ]

        return [Demonstration(self.prompt("train", index), episode(index)) for index in range(count)]

    def validate(self):
        return []


@pytest.fixture
def policy():
    return build_policy(TINY, Counting(), seed=0)


def weights(policy):
    return {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}


def test_only_the_assistants_turns_carry_loss(policy):
    [demonstration] = Counting().demonstrations(1, 0.0, 0)
    row = labelled(Chat(policy.tokenizer), demonstration)
    assert policy.tokenizer.decode(row["input_ids"]) == (
        "<|user|>after 0<|end|><|assistant|>is 1<|end|><|user|>next<|end|><|assistant|>is 2<|end|>"
    )
    pieces = [("<|user|>after 0<|end|><|assistant|>", False), ("is 1<|end|>", True)]
    pieces += [("<|user|>next<|end|><|assistant|>", False), ("is 2<|end|>", True)]
    expected = []
    for text, learns in pieces:
        ids = policy.tokenizer.encode(text, add_special_tokens=False)
        expected += ids if learns else [IGNORED] * len(ids)
    assert row["labels"] == expected


def test_labels_equal_those_of_trls_assistant_only_loss(policy):
    demonstrations = Counting().demonstrations(12, 0.0, 0)
    rows = [labelled(Chat(policy.tokenizer), each) for each in demonstrations]
    conversations = [{"messages": [*each.prompt.messages, *each.turns]} for each in demonstrations]
    encoded = policy.tokenizer.apply_chat_template(
        [each["messages"] for each in conversations],
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    for row, ids, mask in zip(rows, encoded["input_ids"], encoded["assistant_masks"], strict=True):
        assert row["input_ids"] == ids
        assert row["labels"] == [
            token if learns else IGNORED for token, learns in zip(ids, mask, strict=True)
        ]


def test_loss_and_gradient_equal_trls(policy, tmp_path):
    demonstrations = Counting().demonstrations(8, 0.0, 0)
    demonstrations[3].turns.pop()  # a shorter row, so that there is padding
    demonstrations[3].turns.pop()
    rows = [labelled(Chat(policy.tokenizer), each) for each in demonstrations]
    arguments = _arguments(policy, SETTINGS, 0, tmp_path, 40, 1)
    assert isinstance(arguments, SFTConfig)
    losses, gradients = [], []
    for trainer_class in (AnswerTrainer, SFTTrainer):
        trainer = trainer_class(
            model=policy.model,
            args=arguments,
            train_dataset=Dataset.from_list(rows),
            processing_class=policy.tokenizer,
        )
        batch = trainer.data_collator(rows)
        assert (batch["attention_mask"] == 0).any()
        policy.model.zero_grad()
        loss = trainer.compute_loss(policy.model, dict(batch))
        loss.backward()
        losses.append(loss.item())
        gradients.append(torch.cat([p.grad.flatten() for p in policy.model.parameters()]))
        del policy.model.forward
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert (gradients[0] - gradients[1]).norm() < 1e-5 * gradients[1].norm()


def test_the_loss_falls_and_answers_become_likely(tmp_path):
    policy = build_policy(TinyPolicy(vocabulary=300, context=128), Counting(), seed=0)
    settings = WarmstartSettings(demonstrations=40, steps=300, batch=16, lr=5e-3)
    metrics = warmstart(policy, Counting(), settings, 0, tmp_path)
    assert metrics["loss_first"] == pytest.approx(np.log(len(policy.tokenizer)), rel=0.1)
    assert metrics["loss_last"] < 0.1
    assert (metrics["demonstrations"], metrics["skipped"]) == (40, 0)
    chat = Chat(policy.tokenizer)
    context = torch.tensor([chat.prompt_ids([{"role": "user", "content": "after 4"}])])
    answer = policy.model.generate(context, do_sample=False, max_new_tokens=8)[0, context.shape[1] :]
    assert chat.decode(answer.tolist()) == "is 5"


def test_one_seed_gives_one_set_of_weights(tmp_path):
    def trained(seed):
        policy = build_policy(TINY, Counting(), seed=0)
        warmstart(policy, Counting(), SETTINGS, seed, tmp_path)
        return weights(policy)

    first, again, other = trained(1), trained(1), trained(2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_nothing_but_the_weights_changes(policy, tmp_path):
    before = weights(policy)
    generation, config = policy.model.generation_config.to_dict(), policy.model.config.to_dict()
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    expected = torch.rand(1), random.random(), np.random.rand()
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    warmstart(policy, Counting(), SETTINGS, 0, tmp_path)

    assert (torch.rand(1), random.random(), np.random.rand()) == expected
    assert not all(torch.equal(before[name], after) for name, after in policy.model.state_dict().items())
    assert "forward" not in policy.model.__dict__
    assert not policy.model.training
    assert all(parameter.grad is None for parameter in policy.model.parameters())
    assert policy.model.generation_config.to_dict() == generation
    assert policy.model.config.to_dict() == config
    assert not list(tmp_path.rglob("*.safetensors"))


def test_micro_batches_give_the_same_weights(tmp_path, monkeypatch):
    def trained():
        policy = build_policy(TINY, Counting(), seed=0)
        warmstart(policy, Counting(), SETTINGS, 0, tmp_path)
        return weights(policy)

    whole = trained()
    monkeypatch.setattr(
        "gleaner.models.warmstart.ACTIVATION_BUDGET", 32 * 24 * 3
    )  # two or three rows at a time
    assert (
        _arguments(
            build_policy(TINY, Counting(), 0), SETTINGS, 0, tmp_path, 24, 1
        ).gradient_accumulation_steps
        == 4
    )
    parts = trained()
    for name, tensor in whole.items():
        torch.testing.assert_close(parts[name], tensor, rtol=0, atol=2e-3)


def test_adapters_learn_and_the_base_stays(tmp_path):
    policy = build_policy(TINY.model_copy(update={"lora": LoraSettings(rank=4)}), Counting(), seed=0)
    before = weights(policy)
    metrics = warmstart(policy, Counting(), SETTINGS, 0, tmp_path)
    changed = {
        name for name, tensor in policy.model.state_dict().items() if not torch.equal(before[name], tensor)
    }
    assert changed
    assert all("lora_" in name for name in changed)
    assert metrics["loss_last"] < metrics["loss_first"]


def test_demonstrations_beyond_the_context_are_left_out(tmp_path):
    class Mixed(Counting):
        def demonstrations(self, count, noise, seed):
            long = Demonstration(self.prompt("train", 0), [{"role": "assistant", "content": "is 1 " * 200}])
            return [*super().demonstrations(count - 1, noise, seed), long]

    policy = build_policy(TINY, Mixed(), seed=0)
    metrics = warmstart(policy, Mixed(), SETTINGS, 0, tmp_path)
    assert (metrics["demonstrations"], metrics["skipped"]) == (39, 1)
    with pytest.raises(
        ConfigurationError, match=r"no demonstration fits policy\.context=128 .* raise policy\.context"
    ):
        warmstart(policy, Mixed(), WarmstartSettings(demonstrations=1), 0, tmp_path)


def test_divergence_is_refused_with_the_fix(policy, tmp_path):
    with pytest.raises(ConfigurationError, match=r"warmstart\.lr=.*: lower it"):
        warmstart(policy, Counting(), SETTINGS.model_copy(update={"lr": 1e30}), 0, tmp_path)


@pytest.mark.slow
def test_smollm2_imitates_an_expert(tmp_path):
    from gleaner.conf.schema import PretrainedPolicy

    policy = build_policy(PretrainedPolicy(context=256), Counting(), seed=0)
    [demonstration] = Counting().demonstrations(1, 0.0, 0)
    row = labelled(Chat(policy.tokenizer), demonstration)
    learns = [token for token, label in zip(row["input_ids"], row["labels"], strict=True) if label != IGNORED]
    assert policy.tokenizer.decode(learns) == "is 1<|im_end|>is 2<|im_end|>"
    settings = WarmstartSettings(demonstrations=9, steps=8, batch=4, lr=1e-4)
    metrics = warmstart(policy, Counting(), settings, 0, tmp_path)
    assert metrics["loss_last"] < 0.7 * metrics["loss_first"]


# ------------------------------------------------------------------------------------------------------ topics


def test_a_warm_start_takes_so_many_demonstrations_of_each_topic():
    household = Household(HouseholdEnvironment(), 0)
    chosen = demonstrations(household, WarmstartSettings(topics={"egg": 5, "pan": 2}), 0)
    assert [household.topic(each.prompt) for each in chosen] == ["egg"] * 5 + ["pan"] * 2
    assert len({each.prompt.prompt_id for each in chosen}) == 7
    again = demonstrations(household, WarmstartSettings(topics={"egg": 5, "pan": 2}), 0)
    assert [each.turns for each in again] == [each.turns for each in chosen]


def test_a_topic_that_never_comes_up_is_refused_with_those_that_do():
    household = Household(HouseholdEnvironment(), 0)
    with pytest.raises(ConfigurationError, match=r"demonstrations of elephant.*apple \d+, book"):
        demonstrations(household, WarmstartSettings(topics={"elephant": 1}), 0)


def test_an_environment_without_topics_says_so():
    with pytest.raises(ConfigurationError, match="counting has no topics"):
        demonstrations(Counting(), WarmstartSettings(topics={"egg": 1}), 0)
