"""A policy that sees: images at their places, in the engine, the update and the warm start alike; and bad images."""

import io
import struct
import tempfile
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Qwen2_5_VLConfig

from gleaner.conf.errors import BadImageError, ConfigurationError, ContractError
from gleaner.conf.schema import (
    GrpoMethod,
    SamplingSettings,
    TinyPolicy,
    TinyVlmPolicy,
    TransformersEngine,
    UpdateSettings,
    VisualSearchEnvironment,
    WarmstartSettings,
)
from gleaner.models.chat import Chat
from gleaner.models.engines.base import Turn
from gleaner.models.engines.transformers import TransformersEngine as Engine
from gleaner.models.environments.base import Observation
from gleaner.models.environments.visual_search import VisualSearch, VisualSearchEpisode
from gleaner.models.images import decode_image, image_digest
from gleaner.models.methods.grpo import grpo_signal
from gleaner.models.policy import build_policy, load_policy, save_policy
from gleaner.models.records import Verdict
from gleaner.models.rollout import collect
from gleaner.models.signal import group_rollouts
from gleaner.models.training import Learner
from gleaner.models.vision import check_places, sees
from gleaner.models.warmstart import all_images, labelled, warmstart

WORLD = VisualSearch(VisualSearchEnvironment(), seed=0)
SHAPE = TinyVlmPolicy(hidden=32, vision_hidden=32, vision_layers=1, context=256)
SAMPLING = SamplingSettings(max_new_tokens=6)


class Store(dict):
    def put(self, image):
        self[image_digest(image)] = image
        return image_digest(image)


@pytest.fixture(scope="module")
def policy():
    made = build_policy(SHAPE, WORLD, 0)
    # Random weights never zoom: a few steps teach the words.
    with tempfile.TemporaryDirectory() as scratch:
        warmstart(
            made, WORLD, WarmstartSettings(demonstrations=60, steps=40, batch=16, lr=1e-2), 0, Path(scratch)
        )
    return made


@pytest.fixture
def store(policy):
    found = Store()
    policy.eyes.source = found.__getitem__
    return found


def chat_of(policy):
    return Chat(policy.tokenizer, multi_turn=True, eyes=policy.eyes)


def rollouts_of(policy, store, environment=WORLD, prompts=4, group=3):
    engine = Engine(TransformersEngine(), context_limit=policy.context, policy=policy, version="v")
    return collect(
        engine, chat_of(policy), environment, [environment.prompt("train", i) for i in range(prompts)], group,
        SAMPLING, run_seed=0, step=0, context_limit=policy.context, store_image=store.put,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------- places


def test_every_image_stands_on_its_placeholders_at_every_turn(policy, store):
    segments = rollouts_of(policy, store)
    eyes = policy.eyes
    crops = 0
    for segment in segments:
        ids = [*segment.context_ids, *segment.sampled_ids]
        check_places([ids], [segment.image_places], eyes.image_id, eyes.tokens)
        named = [
            part["digest"]
            for message in segment.transcript
            if not isinstance(message["content"], str)
            for part in message["content"]
            if part["type"] == "image"
        ]
        own = [image["digest"] for image in segment.images if image["start"] >= 0]
        # The last turn's crop is written down, but no turn reads it.
        assert own == named[: len(own)]
        assert len(segment.images) == 1 + len(own)
        assert segment.images[0]["start"] < 0
        crops += len(own)
        assert all(image["length"] == eyes.tokens for image in segment.images)
    assert crops > 0


def test_the_sampler_and_the_update_see_the_same(policy, store):
    segments = rollouts_of(policy, store)
    learner = Learner(policy, UpdateSettings(tokens_per_microbatch=300), eyes=policy.eyes)
    for segment, logprobs in zip(segments, learner.score(segments, temperature=1.0), strict=True):
        np.testing.assert_allclose(logprobs, segment.logprobs, atol=2e-4)


def test_two_pages_under_one_question_are_two_contexts(policy, store):
    """Ids say nothing of what is seen: equal ids with other images must not share a prefill."""
    images = [store.put(WORLD.images(WORLD.prompt("train", i))[0]) for i in (0, 1)]
    parts = [{"type": "image", "digest": images[0]}, {"type": "text", "text": "Where is the 3?"}]
    ids = chat_of(policy).prompt_ids([{"role": "user", "content": parts}])
    place = ids.index(policy.eyes.image_id)
    engine = Engine(TransformersEngine(), context_limit=256, policy=policy, version="v")
    with engine.session(SAMPLING) as session:
        one, two, again = session.sample(
            [Turn(row, ids, 7, [(place, images[which])]) for row, which in enumerate((0, 1, 0))]
        )
    assert one.logprobs == pytest.approx(again.logprobs, abs=1e-5)
    assert one.logprobs != pytest.approx(two.logprobs, abs=1e-5)


def test_a_placeholder_in_the_text_is_text(policy):
    chat = chat_of(policy)
    mark = policy.eyes.placeholder
    messages = [
        {
            "role": "user",
            "content": [{"type": "image", "digest": "d"}, {"type": "text", "text": f"{mark}{mark} what?"}],
        }
    ]
    ids = chat.prompt_ids(messages)
    assert ids.count(policy.eyes.image_id) == policy.eyes.tokens
    assert len(chat.image_places(ids, messages)) == 1


def test_a_placeholder_that_was_sampled_is_a_token_like_any_other(policy, store):
    (segment,) = rollouts_of(policy, store, prompts=1, group=1)
    sampled = list(segment.sampled_ids)
    sampled[0] = policy.eyes.image_id
    odd = replace(segment, sampled_ids=sampled)
    learner = Learner(policy, UpdateSettings(), eyes=policy.eyes)
    (logprobs,) = learner.score([odd], temperature=1.0)
    assert np.isfinite(logprobs).all()


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda places, count: [(places[0][0] + 1, places[0][1])], "shifted by one"),
        (lambda places, count: [places[0], places[0]], "told twice"),
        (lambda places, count: [(10_000, places[0][1])], "beyond the row"),
    ],
)
def test_an_image_off_its_place_is_refused_and_never_shifted(policy, store, change, what):
    (segment,) = rollouts_of(policy, store, prompts=1, group=1)
    places = change(segment.image_places, policy.eyes.tokens)
    with pytest.raises(ContractError, match="cut, dropped or repeated"):
        policy.eyes.embed(torch.tensor([[*segment.context_ids, *segment.sampled_ids]]), [places])


def test_a_dropped_or_doubled_image_of_a_message_is_noticed(policy):
    chat = chat_of(policy)
    image = {"type": "image", "digest": "d"}
    one = [{"role": "user", "content": [image, {"type": "text", "text": "Look."}]}]
    two = [{"role": "user", "content": [image, image, {"type": "text", "text": "Look."}]}]
    assert len(chat.image_places(chat.prompt_ids(two), two)) == 2
    for ids, messages in ((chat.prompt_ids(one), two), (chat.prompt_ids(two), one)):
        with pytest.raises(ContractError, match="placeholders"):
            chat.image_places(ids, messages)


def test_the_features_of_an_image_are_the_towers_own(policy, store):
    digest = store.put(WORLD.images(WORLD.prompt("train", 0))[0])
    features = policy.eyes.features([digest, digest])
    assert features.shape == (2, policy.eyes.tokens, 32)
    ids = torch.full((1, policy.eyes.tokens + 2), policy.eyes.image_id)
    embeds = policy.eyes.embed(ids, [[(1, digest)]])
    torch.testing.assert_close(embeds[0, 1:-1], features[0])
    own = policy.model.get_input_embeddings()(ids)
    torch.testing.assert_close(embeds[0, [0, -1]], own[0, [0, -1]])
    # and the whole model, called by its own forward pass, agrees
    pixels, mask = policy.eyes.pixels(digest)
    whole = [20, 21, *[policy.eyes.image_id] * policy.eyes.tokens, 22, 23]
    with torch.no_grad():
        theirs = policy.model(
            input_ids=torch.tensor([whole]),
            pixel_values=pixels[None, None],
            pixel_attention_mask=mask[None, None],
        ).logits
        hidden = policy.model.model.text_model(
            inputs_embeds=policy.eyes.embed(torch.tensor([whole]), [[(2, digest)]])
        ).last_hidden_state
        torch.testing.assert_close(policy.model.lm_head(hidden), theirs, atol=1e-4, rtol=1e-4)


def test_a_step_moves_the_tower_and_the_text_model(policy, store):
    segments = rollouts_of(policy, store)
    verdicts = [
        Verdict(s.prompt_id, s.sample, "scored", s.sample == 0, float(s.sample == 0), {}, "1")
        for s in segments
    ]
    signal, _ = grpo_signal(
        group_rollouts(segments, verdicts, "drop_group", 2)[0], GrpoMethod(), rollouts="r", minibatches=1,
        max_new_tokens=18, temperature=1.0,
    )  # fmt: skip
    fresh = build_policy(SHAPE, WORLD, 0)
    fresh.eyes.source = store.__getitem__
    fresh.model.load_state_dict(policy.model.state_dict())
    learner = Learner(fresh, UpdateSettings(lr=1e-3), eyes=fresh.eyes)
    metrics = learner.apply(signal)
    assert metrics["update/approx_kl"] < 1e-4  # the update read what the sampler read
    moved = {
        name.split(".")[1]
        for (name, new), old in zip(fresh.model.named_parameters(), policy.model.parameters(), strict=True)
        if not torch.equal(new, old)
    }
    assert {"vision_model", "connector", "text_model"} <= moved


def test_a_saved_policy_sees_what_it_saw(policy, store, tmp_path):
    save_policy(policy, tmp_path / "policy")
    loaded = load_policy(tmp_path / "policy")
    assert loaded.eyes is not None
    loaded.eyes.source = store.__getitem__
    segments = rollouts_of(policy, store, prompts=2)
    both = [
        Learner(one, UpdateSettings(), eyes=one.eyes).score(segments, temperature=1.0)
        for one in (policy, loaded)
    ]
    for mine, theirs in zip(*both, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_demonstrations_are_tokens_that_the_turn_loop_would_make(policy, store):
    (shown,) = WORLD.demonstrations(1, 0.0, 0)
    row = labelled(chat_of(policy), shown)
    places = list(zip(row["image_starts"], row["image_digests"], strict=True))
    check_places([row["input_ids"]], [places], policy.eyes.image_id, policy.eyes.tokens)
    assert {digest for _, digest in places} <= all_images(WORLD, [shown]).keys()
    assert len(places) == 1 + sum(m["role"] == "user" for m in shown.turns)


def test_a_policy_of_text_is_refused_where_prompts_show_images():
    text = build_policy(TinyPolicy(hidden=32, context=256), WORLD, 0)
    engine = Engine(TransformersEngine(), context_limit=256, policy=text, version="v")
    with pytest.raises(ConfigurationError, match="policy=tiny_vlm"):
        collect(
            engine, Chat(text.tokenizer, multi_turn=True), WORLD, [WORLD.prompt("train", 0)], 2, SAMPLING, run_seed=0,
            step=0, context_limit=256, store_image=Store().put,
        )  # fmt: skip


def test_a_model_that_sees_otherwise_is_refused_by_name():
    with pytest.raises(ConfigurationError, match="qwen2_5_vl sees in a way that is not served here"):
        sees(Qwen2_5_VLConfig())


# --------------------------------------------------------------------------------------------- bad images


def png(width=8, height=8, mode="RGB"):
    buffer = io.BytesIO()
    Image.new(mode, (width, height)).save(buffer, format="PNG")
    return buffer.getvalue()


def bomb():
    """A PNG of 60,000 x 60,000 pixels in a few hundred bytes."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


BAD = {
    "truncated": (png(200, 200)[:-60], "no whole PNG"),
    "a bomb": (bomb(), "larger than|no whole PNG"),
    "no image": (b"hello", "no whole PNG"),
    "empty": (b"", "no whole PNG"),
    "a line": (png(1000, 2), "is a line"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_image_is_refused_with_what_is_wrong(name):
    data, words = BAD[name]
    with pytest.raises(BadImageError, match=words):
        decode_image(data)


@pytest.mark.parametrize("mode", ["L", "RGBA", "1", "P", "I;16"])
def test_pictures_of_any_mode_become_rgb(mode):
    assert decode_image(png(mode=mode)).mode == "RGB"


@pytest.mark.parametrize("name", BAD)
def test_a_bad_image_ends_its_rollout_unscored_and_no_other(policy, store, name):
    class Broken(VisualSearch):
        def begin(self, prompt, seed):
            episode = VisualSearchEpisode(prompt.payload, self.max_turns)
            if prompt.prompt_id == self.prompt("train", 0).prompt_id:
                episode.step = lambda action: Observation("Here:", images=(BAD[name][0],))
            return episode

    segments = rollouts_of(policy, store, Broken(VisualSearchEnvironment(), 0), prompts=2)
    finished = {s.prompt_id: s.finish_reason for s in segments}
    first, second = (WORLD.prompt("train", i).prompt_id for i in (0, 1))
    assert finished[first] == "error"
    assert "BadImageError" in segments[0].environment_result["error"]
    assert finished[second] == "environment"


def test_a_small_or_wide_picture_is_scaled(policy, store):
    for data in (png(1, 1), png(5, 90), png(640, 480)):
        pixels, mask = policy.eyes.pixels(store.put(data))
        assert pixels.shape == (3, 48, 48)
        assert mask.any()
