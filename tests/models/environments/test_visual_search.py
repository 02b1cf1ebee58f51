"""Pages, crops, answers and findings of the visual search."""

import io

import numpy as np
import pytest
from PIL import Image

from gleaner.conf.errors import ConfigurationError
from gleaner.conf.schema import VisualSearchEnvironment
from gleaner.models.environments.base import HasAnswers, HasFindings, HasImages, HasTopics
from gleaner.models.environments.visual_search import (
    CELL,
    VisualSearch,
    page_pixels,
    tool_call,
    verify,
)
from gleaner.models.images import image_digest
from gleaner.models.regions import Box

ALL = ["where", "count", "largest"]


def world(**settings):
    return VisualSearch(VisualSearchEnvironment(**settings), seed=0)


WORLD = world()


def opened(image):
    return np.asarray(Image.open(io.BytesIO(image)))


def played(environment, prompt, *actions):
    episode = environment.begin(prompt, 0)
    return [episode.step(action) for action in actions], episode.result()


def test_it_is_all_that_vista_asks_for():
    for protocol in (HasImages, HasFindings, HasTopics, HasAnswers):
        assert isinstance(WORLD, protocol)
    assert WORLD.validate() == []


def test_a_prompt_names_its_page_and_hides_what_it_holds():
    prompt = WORLD.prompt("train", 3)
    image, text = prompt.messages[0]["content"]
    (page,) = WORLD.images(prompt)
    assert image == {"type": "image", "digest": image_digest(page)}
    assert opened(page).shape == (3 * CELL, 3 * CELL, 3)
    assert str(prompt.payload["cells"]) not in text["text"]
    assert prompt == WORLD.prompt("train", 3)
    assert prompt.prompt_id != WORLD.prompt("train", 4).prompt_id


def test_training_pages_follow_the_seed_and_test_pages_do_not():
    other = VisualSearch(VisualSearchEnvironment(), seed=1)
    assert WORLD.prompt("train", 0) != other.prompt("train", 0)
    assert WORLD.prompt("test", 0) == other.prompt("test", 0)


def test_no_handwriting_of_a_test_page_is_on_a_training_page():
    used = {
        split: {cell["image"] for i in range(40) for cell in WORLD.prompt(split, i).payload["cells"]}
        for split in ("train", "validation", "test")
    }
    assert not used["train"] & (used["validation"] | used["test"])


def test_a_zoom_returns_the_cell_as_it_is_on_the_page():
    prompt = WORLD.prompt("train", 0)
    (shown,), _ = played(WORLD, prompt, "zoom 2 3")
    assert shown.text == "Row 2, column 3:"
    (crop,) = shown.images
    np.testing.assert_array_equal(
        opened(crop), page_pixels(prompt.payload)[CELL : 2 * CELL, 2 * CELL : 3 * CELL]
    )
    (wide,), _ = played(WORLD, prompt, "zoom 1 1 2 3")
    assert wide.text == "Rows 1 to 2, columns 1 to 3:"
    assert opened(wide.images[0]).shape == (2 * CELL, 3 * CELL, 3)


@pytest.mark.parametrize(
    "action", ["zoom 0 1", "zoom 4 1", "zoom 1 4", "zoom 2 2 1 1", "zoom 1 1 9 9", "zoom 99999999999 1"]
)
def test_a_call_outside_of_the_page_is_answered_in_words(action):
    (shown,), result = played(WORLD, WORLD.prompt("train", 0), action)
    assert "outside of the page" in shown.text
    assert not shown.images
    assert not shown.done
    assert result == {"answer": None, "zooms": 0}


@pytest.mark.parametrize("action", ["", "zoom", "zoom a b", "zoom -1 2", "look", "<image>", "answer", "\n\n"])
def test_what_is_no_tool_is_answered_in_words(action):
    (shown,), _ = played(WORLD, WORLD.prompt("train", 0), action)
    assert shown.text.startswith("No such tool")
    assert not shown.done


def test_thoughts_may_stand_before_a_call():
    assert tool_call("It is small.\nI look closer.\nZoom  1 2.") == "zoom 1 2"


def test_the_last_zoom_says_so():
    shown, _ = played(WORLD, WORLD.prompt("train", 0), "zoom 1 1", "zoom 1 2")
    assert [each.text for each in shown] == ["Row 1, column 1:", "Row 1, column 2: No zoom is left: answer."]


@pytest.mark.parametrize("question", ALL)
def test_answers_are_what_the_cells_say(question):
    environment = world(questions=[question])
    for index in range(10):
        page = environment.prompt("train", index).payload
        digits = {tuple(cell["at"]): cell["digit"] for cell in page["cells"]}
        assert len(set(digits.values())) == 5
        if question == "where":
            row, column = map(int, page["answer"].split())
            assert digits[row, column] == page["digit"]
        elif question == "count":
            assert int(page["answer"]) == sum(digit > page["bound"] for digit in digits.values())
        else:
            assert int(page["answer"]) == max(digits.values())


def test_only_the_right_answer_wins_and_none_is_wrong():
    prompt = WORLD.prompt("train", 0)
    gold = prompt.payload["answer"]
    for said, won in ((f"answer {gold}", True), (f"answer  {gold}.", True), ("answer 9 9", False)):
        (shown,), result = played(WORLD, prompt, said)
        assert shown.done
        assert verify(prompt.payload, said, [], result).success is won
    _, result = played(WORLD, prompt, "zoom 1 1", "zoom 1 2", "zoom 1 3")
    assert verify(prompt.payload, "", [], result).success is False


@pytest.mark.parametrize("question", ALL)
def test_an_expert_with_time_for_every_cell_succeeds(question):
    environment = world(questions=[question], max_turns=6)
    shown = environment.demonstrations(20, 0.0, 0)
    assert all(each.success for each in shown)
    for each in shown:
        named = [
            p["digest"]
            for m in each.turns
            if not isinstance(m["content"], str)
            for p in m["content"]
            if p["type"] == "image"
        ]
        assert set(named) == set(each.images)


def test_with_two_zooms_for_five_digits_the_expert_often_guesses():
    share = np.mean([each.success for each in WORLD.demonstrations(300, 0.0, 0)])
    assert 0.45 < share < 0.75  # two of five, and a third of the rest


def test_what_another_attempt_found_is_looked_at_first():
    for index in range(10):
        prompt = WORLD.prompt("train", index)
        row, column = map(int, prompt.payload["answer"].split())
        shown, _ = played(WORLD, prompt, f"zoom {row} {column}")
        transcript = [
            {"role": "assistant", "content": f"Hm.\nzoom {row} {column}"},
            {
                "role": "user",
                "content": [{"type": "image", "digest": "d"}, {"type": "text", "text": shown[0].text}],
            },
        ]
        known = WORLD.findings(transcript)
        assert [(f.action, f.region, f.images) for f in known] == [
            (f"zoom {row} {column}", Box("page", column - 1, row - 1, column, row), ("d",))
        ]
        told = WORLD.demonstrate(prompt, known, 0.0, 0)
        assert told.turns[0]["content"] == f"zoom {row} {column}"
        assert told.turns[2]["content"] == f"It is a {prompt.payload['digit']}.\nanswer {row} {column}"
        assert told.success


def test_answers_and_refused_calls_are_no_findings():
    transcript = [
        {"role": "assistant", "content": "zoom 9 9"},
        {"role": "user", "content": "That is outside of the page: rows are 1 to 3, columns 1 to 3."},
        {"role": "assistant", "content": "answer 1 2"},
        {"role": "user", "content": ""},
    ]
    assert WORLD.findings(transcript) == []


def test_more_digits_than_cells_are_refused():
    with pytest.raises(ConfigurationError, match="choose at most 4"):
        world(rows=2, columns=2, digits=5)
