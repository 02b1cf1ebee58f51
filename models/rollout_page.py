"""Groups of rollouts side by side, as one page that needs nothing else: prompts, turns, images and verdicts."""

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment

from gleaner.models.records import Message, Segment, Verdict

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ title }}</title><style>
body { font: 14px/1.45 system-ui, sans-serif; margin: 1.5rem; color: #222; }
.group { margin-bottom: 2.5rem; }
.prompt { border-left: 4px solid #888; padding-left: .8rem; }
.rollouts { display: flex; gap: .8rem; overflow-x: auto; padding: .6rem 0; align-items: flex-start; }
.rollout { flex: 0 0 15rem; border: 1px solid #ccc; border-top: 6px solid #999; border-radius: 4px; padding: .5rem; }
.rollout.success { border-top-color: #2a7; } .rollout.failure { border-top-color: #c43; }
.text { white-space: pre-wrap; overflow-wrap: anywhere; }
.assistant { background: #eef3fb; } .user { background: #f6f6f6; }
.turn { border-radius: 4px; margin: .35rem 0; padding: .3rem .45rem; }
.role { color: #666; font-size: 12px; }
img { width: 9rem; image-rendering: pixelated; display: block; margin: .25rem 0; border: 1px solid #bbb; }
</style></head><body><h1>{{ title }}</h1>
{% macro parts(message) %}{% for part in message %}
{% if part.image %}<img src="{{ part.image }}" alt="{{ part.alt }}">
{% else %}<div class="text">{{ part.text }}</div>{% endif %}
{% endfor %}{% endmacro %}
{% for group in groups %}<section class="group"><h2>{{ group.heading }}</h2>
<div class="prompt">{% for message in group.prompt %}{{ parts(message) }}{% endfor %}</div>
<div class="rollouts">{% for rollout in group.rollouts %}
<article class="rollout {{ rollout.kind }}"><h3>{{ rollout.heading }}</h3>
{% for turn in rollout.turns %}<div class="turn {{ turn.role }}"><div class="role">{{ turn.role }}</div>
{{ parts(turn.parts) }}</div>{% endfor %}</article>{% endfor %}</div></section>
{% endfor %}</body></html>
"""


@dataclass(frozen=True)
class ShownGroup:
    """A prompt, its rollouts and their verdicts (None: not verified)."""

    prompt_id: str
    messages: Sequence[Message]
    rollouts: Sequence[tuple[Segment, Verdict | None]]


def rollout_page(title: str, groups: Sequence[ShownGroup], image_of: Callable[[str], bytes]) -> str:
    """The page as HTML. What a policy or an environment said is shown as text, whatever it holds.

    Args:
        image_of: digest → encoded image.
    """
    template = Environment(autoescape=True, trim_blocks=True).from_string(PAGE)
    return template.render(title=title, groups=[_group(group, image_of) for group in groups])


def _group(group: ShownGroup, image_of: Callable[[str], bytes]) -> dict[str, Any]:
    won = sum(verdict is not None and bool(verdict.success) for _, verdict in group.rollouts)
    return {
        "heading": f"{group.prompt_id[:12]}: {won} of {len(group.rollouts)} succeeded",
        "prompt": [_parts(message, image_of) for message in group.messages],
        "rollouts": [
            {
                "kind": _kind(verdict),
                "heading": f"{segment.sample}: {_words(verdict)}, ended by {segment.finish_reason}",
                "turns": [
                    {"role": message["role"], "parts": _parts(message, image_of)}
                    for message in segment.transcript
                ],
            }
            for segment, verdict in group.rollouts
        ],
    }


def _kind(verdict: Verdict | None) -> str:
    if verdict is None or verdict.status != "scored":
        return "unscored"
    return "success" if verdict.success else "failure"


def _words(verdict: Verdict | None) -> str:
    if verdict is None or verdict.status != "scored":
        return "unscored" if verdict is None else verdict.status
    return f"{'success' if verdict.success else 'failure'}, reward {verdict.reward:g}"


def _parts(message: Mapping[str, Any], image_of: Callable[[str], bytes]) -> list[dict[str, str]]:
    content = message["content"]
    if isinstance(content, str):
        return [{"text": content}]
    return [
        {"image": _inline(image_of(part["digest"])), "alt": f"image {part['digest'][:12]}"}
        if part["type"] == "image"
        else {"text": part["text"]}
        for part in content
    ]


def _inline(image: bytes) -> str:
    kind = "jpeg" if image.startswith(b"\xff\xd8") else "png"
    return f"data:image/{kind};base64,{base64.b64encode(image).decode()}"
