"""The page of rollouts: everything of a group is on it, and nothing that was said can be more than text."""

import base64

from gleaner.models.records import Segment, Verdict
from gleaner.models.rollout_page import ShownGroup, rollout_page

PNG = b"\x89PNG fake"


def segment(sample, transcript):
    return Segment("p" * 64, sample, 0, [1], [2], [1], [0.0], "v", "d", 0, "stop", "", transcript, {}, [])


def verdict(sample, success, status="scored"):
    scored = status == "scored"
    return Verdict(
        "p" * 64, sample, status, success if scored else None, float(success) if scored else None, {}, "1"
    )


def page_of(rollouts, messages=({"role": "user", "content": "Where is the 7?"},)):
    return rollout_page("run: step 3", [ShownGroup("p" * 64, messages, rollouts)], {"d1": PNG}.__getitem__)


def test_a_group_shows_prompt_images_turns_and_verdicts_side_by_side():
    crop = {
        "role": "user",
        "content": [{"type": "image", "digest": "d1"}, {"type": "text", "text": "Row 1:"}],
    }
    said = [{"role": "assistant", "content": "zoom 1 2"}, crop]
    page = page_of(
        [
            (segment(0, said), verdict(0, True)),
            (segment(1, []), verdict(1, False)),
            (segment(2, []), verdict(2, False, "timeout")),
        ],
        [{"role": "user", "content": [{"type": "image", "digest": "d1"}, {"type": "text", "text": "Where is the 7?"}]}],
    )  # fmt: skip
    assert page.count(base64.b64encode(PNG).decode()) == 2
    for words in (
        "Where is the 7?",
        "zoom 1 2",
        "Row 1:",
        "1 of 3 succeeded",
        "0: success, reward 1",
        "2: timeout",
    ):
        assert words in page
    assert page.count('class="rollout success"') == 1
    assert page.count('class="rollout failure"') == 1
    assert page.count('class="rollout unscored"') == 1


def test_what_a_policy_says_is_text_and_never_markup():
    page = page_of(
        [(segment(0, [{"role": "assistant", "content": "<script>alert(1)</script>{{ 7*7 }}"}]), None)]
    )
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "{{ 7*7 }}" in page
