"""Visual search: a question about handwritten digits on a photo, and a tool that crops and zooms.

Pages are composed from scikit-learn's handwritten digits (1,797 of 8 x 8 pixels) on its two photographs. A page is cut
into rows and columns; some of its cells hold a digit. Seen whole and scaled down a digit is hard to read; `zoom R C`
(row and column, from 1) or `zoom R C R C` (from one cell to another) returns that part at its own size, and `answer
WORDS` ends the episode. The last turn must answer. One reward at the end.
"""

import functools
import io
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image
from sklearn.datasets import load_digits, load_sample_image

from gleaner.conf.errors import ConfigurationError
from gleaner.conf.schema import Split, VisualSearchEnvironment
from gleaner.models.environments.base import Demonstration, Finding, Observation, Outcome, VerifierSpec
from gleaner.models.environments.prompts import content_digest, make_prompt, split_of, split_size
from gleaner.models.images import image_digest
from gleaner.models.records import Message, Prompt
from gleaner.models.regions import Box

CELL = 32
"""Pixels of a cell's side on the page."""
INK = 24
"""Pixels of a digit's side."""
PHOTOS = ("china.jpg", "flower.jpg")
DIMMED = 0.45
"""Brightness of the photo behind the digits, which are white."""
LAYOUTS = 1000
NO_TOOL = "No such tool. Say: zoom ROW COLUMN, or: answer WORDS."
ZOOM = re.compile(r"zoom (\d+) (\d+)(?: (\d+) (\d+))?")
ANSWER = re.compile(r"answer (.+)")
SHOWN = re.compile(r"Rows? (\d+)(?: to (\d+))?, columns? (\d+)(?: to (\d+))?:.*", re.DOTALL)


class VisualSearch:
    """The environment. What the cells hold is in the payload alone; the prompt has the page as an image.

    The digits of validation and test pages are other handwritings than those of training pages. Training pages follow
    the run's seed; validation and test pages are the same for every seed.
    """

    name = "visual_search"
    version = "1"
    parallel_episodes = 1
    verifier = VerifierSpec(
        "gleaner.models.environments.visual_search:verify", version="visual-search-1", isolated=False
    )

    def __init__(self, settings: VisualSearchEnvironment, seed: int) -> None:
        cells = settings.rows * settings.columns
        if settings.digits > min(cells, 10):
            raise ConfigurationError(
                f"environment.digits={settings.digits}: choose at most {min(cells, 10)}: every digit is another one "
                "and has a cell of its own"
            )
        self.settings = settings
        self.max_turns = settings.max_turns
        self.seed = seed

    def size(self, split: Split) -> int:
        settings = self.settings
        return split_size(split, settings.size, settings.validation_share, settings.test_share)

    def prompt(self, split: Split, index: int) -> Prompt:
        """
        Raises:
            ConfigurationError: `index` is out of range.
        """
        if not 0 <= index < self.size(split):
            raise ConfigurationError(
                f"{split} has {self.size(split)} pages, not number {index}: raise environment.size"
            )
        run_seed = self.seed if split == "train" else 0
        draw = random.Random(f"{run_seed}/{split}/{index}")
        settings = self.settings
        for _ in range(LAYOUTS):
            page = _draw_page(draw, settings, split)
            if split_of(content_digest(page), settings.validation_share, settings.test_share) != split:
                continue
            parts = [
                {"type": "image", "digest": image_digest(page_png(page))},
                {"type": "text", "text": self._task_text(page)},
            ]
            return make_prompt(self.name, split, [{"role": "user", "content": parts}], page)
        raise ConfigurationError(
            f"no page fell into the {split} split: raise environment.{split}_share"
        )  # a share of 0.001 may do this

    def images(self, prompt: Prompt) -> list[bytes]:
        """The page."""
        return [page_png(prompt.payload)]

    def begin(self, prompt: Prompt, seed: int) -> "VisualSearchEpisode":
        return VisualSearchEpisode(prompt.payload, self.max_turns)

    def topic(self, prompt: Prompt) -> str:
        """The kind of question."""
        return str(prompt.payload["question"])

    def answer(self, prompt: Prompt) -> str:
        """The ground truth in words."""
        return str(prompt.payload["answer"])

    def demonstrations(self, count: int, noise: float, seed: int) -> Sequence[Demonstration]:
        """The expert's episodes: it zooms on cells that hold a digit, one after the other, says what each of them is,
        and answers when it knows. `noise` is the share of its zooms that go to any cell. What it could not find it
        guesses."""
        draw = random.Random(seed)
        prompts = (self.prompt("train", index % self.size("train")) for index in range(count))
        return [self._demonstration(prompt, (), noise, draw) for prompt in prompts]

    def findings(self, transcript: Sequence[Message]) -> list[Finding]:
        """The crops that were looked at, with the cells that they cover."""
        turns = [message for message in transcript if message["role"] == "assistant"]
        answers = [message for message in transcript if message["role"] != "assistant"]
        found = []
        for turn, (said, answer) in enumerate(zip(turns, answers, strict=False)):
            if isinstance(answer["content"], str):
                continue
            images = tuple(part["digest"] for part in answer["content"] if part["type"] == "image")
            text = "".join(part["text"] for part in answer["content"] if part["type"] == "text")
            if images and (box := _shown_box(text)):
                action = tool_call(said["content"])
                found.append(Finding(turn, said["content"], action, box, text, images))
        return found

    def demonstrate(self, prompt: Prompt, known: Sequence[Finding], noise: float, seed: int) -> Demonstration:
        """The expert zooms first where another attempt saw what is asked for."""
        return self._demonstration(prompt, known, noise, random.Random(seed))

    def validate(self) -> list[str]:
        """Whether pages can be made, and whether an expert that sees every cell answers them."""
        try:
            prompts = [self.prompt(split, 0) for split in ("train", "validation", "test")]
        except ConfigurationError as error:
            return [str(error)]
        sentences = []
        for prompt in prompts:
            episode = self.begin(prompt, prompt.seed)
            episode.step(f"answer {prompt.payload['answer']}")
            if not verify(prompt.payload, "", [], episode.result()).success:
                sentences.append(f"the gold answer of {prompt.prompt_id} is refused: report this as a bug")
        return sentences

    def _task_text(self, page: dict[str, Any]) -> str:
        return (
            f"{page['rows']} rows, {page['columns']} columns, {self.max_turns - 1} zooms.\n"
            "Tools: zoom ROW COLUMN, answer WORDS.\n"
            f"{_question_text(page)}"
        )

    def _demonstration(
        self, prompt: Prompt, known: Sequence[Finding], noise: float, draw: random.Random
    ) -> Demonstration:
        page = prompt.payload
        episode = VisualSearchEpisode(page, self.max_turns)
        filled = [tuple(cell["at"]) for cell in page["cells"]]
        every = [(r + 1, c + 1) for r in range(page["rows"]) for c in range(page["columns"])]
        heard = {at for at in filled for finding in known if _covers(finding.region, at)}
        seen: set[tuple[int, int]] = set()
        turns: list[Message] = []
        images: dict[str, bytes] = {}
        # In reading order from any of them on: an order that nobody could foresee would teach nothing else as well.
        first = draw.randrange(len(filled))
        order = sorted(filled[first:] + filled[:first], key=lambda at: not _asked_for(page, at, heard))
        saw = ""
        for turn in range(self.max_turns):
            left = [at for at in order if at not in seen]
            final = turn + 1 == self.max_turns
            if final or _is_known(page, seen, heard) or not left:
                action = f"answer {_best_answer(page, seen | heard, draw)}"
            else:
                at = draw.choice(every) if draw.random() < noise else left[0]
                seen.add(at)
                action = f"zoom {at[0]} {at[1]}"
            turns.append({"role": "assistant", "content": saw + action})
            saw = _said_of(page, at) if action.startswith("zoom") else ""
            observation = episode.step(action)
            if observation.done:
                break
            shown = {image_digest(image): image for image in observation.images}
            images |= shown
            parts = [{"type": "image", "digest": digest} for digest in shown]
            content = [*parts, {"type": "text", "text": observation.text}] if parts else observation.text
            turns.append({"role": "user", "content": content})
        return Demonstration(prompt, turns, verify(page, "", [], episode.result()).success, images)


def verify(
    payload: dict[str, Any], text: str, transcript: list[Message], environment_result: dict[str, Any]
) -> Outcome:
    """Whether the answer is the page's. No answer is a wrong one."""
    given = environment_result.get("answer")
    right = given is not None and given.split() == str(payload["answer"]).split()
    return Outcome(right, float(right), {"answer": given, "zooms": environment_result.get("zooms")})


# ------------------------------------------------------------------------------------------------ the episode


@dataclass
class VisualSearchEpisode:
    """An episode on a page, rebuilt from the payload alone."""

    page: dict[str, Any]
    turns: int
    taken: int = 0
    zooms: int = 0
    given: str | None = field(default=None)

    def step(self, action: str) -> Observation:
        self.taken += 1
        call = tool_call(action)
        if match := ANSWER.fullmatch(call):
            self.given = match[1]
            return Observation("", done=True, result=self.result())
        match = ZOOM.fullmatch(call)
        if match is None:
            return Observation(NO_TOOL)
        top, left, bottom, right = (int(value or 0) for value in match.groups())
        bottom, right = bottom or top, right or left
        rows, columns = self.page["rows"], self.page["columns"]
        if not (1 <= top <= bottom <= rows and 1 <= left <= right <= columns):
            return Observation(f"That is outside of the page: rows are 1 to {rows}, columns 1 to {columns}.")
        self.zooms += 1
        box = ((left - 1) * CELL, (top - 1) * CELL, right * CELL, bottom * CELL)
        crop = Image.fromarray(page_pixels(self.page)).crop(box)
        last = " No zoom is left: answer." if self.taken + 1 >= self.turns else ""
        return Observation(
            _span("Row", top, bottom) + ", " + _span("column", left, right) + ":" + last, (png(crop),)
        )

    def result(self) -> dict[str, Any]:
        return {"answer": self.given, "zooms": self.zooms}

    def close(self) -> None:
        """Nothing to free."""


def tool_call(said: str) -> str:
    """The last line of what was said, in lower case and without a full stop: thoughts may stand before it."""
    lines = [line for line in said.lower().splitlines() if line.strip()]
    return " ".join(lines[-1].split()).removesuffix(".") if lines else ""


def _span(name: str, first: int, last: int) -> str:
    return f"{name} {first}" if first == last else f"{name}s {first} to {last}"


def _shown_box(text: str) -> Box | None:
    match = SHOWN.fullmatch(text)
    if match is None:
        return None
    top, bottom, left, right = (int(value) if value else None for value in match.groups())
    assert top is not None
    assert left is not None
    return Box("page", left - 1, top - 1, right or left, bottom or top)


def _covers(region: object, at: tuple[int, int]) -> bool:
    return (
        isinstance(region, Box)
        and region.top < at[0] <= region.bottom
        and region.left < at[1] <= region.right
    )


# ----------------------------------------------------------------------------------------------- the question


def _draw_page(draw: random.Random, settings: VisualSearchEnvironment, split: Split) -> dict[str, Any]:
    """Cells with their digits, the photo, the question. The payload of a prompt."""
    every = [(r + 1, c + 1) for r in range(settings.rows) for c in range(settings.columns)]
    places = sorted(draw.sample(every, settings.digits))
    digits = draw.sample(range(10), settings.digits)
    written = _handwritings(split)
    cells = [
        {
            "at": list(at),
            "digit": digit,
            "image": draw.choice(written[digit]),
            "shift": [draw.randint(0, CELL - INK), draw.randint(0, CELL - INK)],
        }
        for at, digit in zip(places, digits, strict=True)
    ]
    photo = draw.randrange(len(PHOTOS))
    height, width = _photo(photo).shape[:2]
    page = {
        "rows": settings.rows,
        "columns": settings.columns,
        "cells": cells,
        "photo": photo,
        "corner": [
            draw.randint(0, height - settings.rows * CELL),
            draw.randint(0, width - settings.columns * CELL),
        ],
        "question": draw.choice(settings.questions),
        "digit": draw.choice(digits),
        "bound": draw.randint(2, 7),
    }
    return {**page, "answer": _true_answer(page)}


def _question_text(page: dict[str, Any]) -> str:
    if page["question"] == "where":
        return f"Where is the {page['digit']}? Answer its row and column."
    if page["question"] == "count":
        return f"How many digits are above {page['bound']}?"
    return "Which digit is the largest?"


def _true_answer(page: dict[str, Any]) -> str:
    if page["question"] == "where":
        row, column = next(cell["at"] for cell in page["cells"] if cell["digit"] == page["digit"])
        return f"{row} {column}"
    digits = [cell["digit"] for cell in page["cells"]]
    if page["question"] == "count":
        return str(sum(digit > page["bound"] for digit in digits))
    return str(max(digits))


def _said_of(page: dict[str, Any], at: tuple[int, int]) -> str:
    """What the expert says of a crop before it goes on."""
    digit = next((cell["digit"] for cell in page["cells"] if tuple(cell["at"]) == at), None)
    return "It is empty.\n" if digit is None else f"It is a {digit}.\n"


def _asked_for(page: dict[str, Any], at: tuple[int, int], heard: set[tuple[int, int]]) -> bool:
    """Whether a cell is what the expert should look at first: the one asked for, if another attempt saw it; for the
    other questions what nobody has seen yet."""
    if page["question"] != "where":
        return at not in heard
    return at in heard and _true_answer(page) == f"{at[0]} {at[1]}"


def _is_known(page: dict[str, Any], seen: set[tuple[int, int]], heard: set[tuple[int, int]]) -> bool:
    """Whether the expert has seen enough to answer. It looks for itself where a place is asked for."""
    filled = {tuple(cell["at"]): cell["digit"] for cell in page["cells"]}
    if page["question"] == "where":
        return any(filled.get(at) == page["digit"] for at in seen)
    return filled.keys() <= seen | heard


def _best_answer(page: dict[str, Any], seen: set[tuple[int, int]], draw: random.Random) -> str:
    """What the cells that were seen say, or a guess among those that were not."""
    filled = {tuple(cell["at"]): cell["digit"] for cell in page["cells"]}
    known = [filled[at] for at in seen if at in filled]
    if page["question"] == "where":
        found = [at for at in seen if filled.get(at) == page["digit"]]
        row, column = found[0] if found else draw.choice(sorted(filled.keys() - seen) or sorted(filled))
        return f"{row} {column}"
    if page["question"] == "count":
        return str(sum(digit > page["bound"] for digit in known))
    return str(max(known, default=draw.randrange(10)))


# ------------------------------------------------------------------------------------------------- the picture


@functools.cache
def _digits() -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    found: Any = load_digits()
    return found.images / 16.0, found.target


@functools.cache
def _handwritings(split: Split) -> dict[int, list[int]]:
    """Digit → which images show it: the first two thirds of the set for training pages, the rest for the others."""
    _, targets = _digits()
    border = 2 * len(targets) // 3
    among = range(border) if split == "train" else range(border, len(targets))
    return {digit: [index for index in among if targets[index] == digit] for digit in range(10)}


@functools.cache
def _photo(index: int) -> npt.NDArray[np.uint8]:
    found: npt.NDArray[np.uint8] = load_sample_image(PHOTOS[index])
    return found


def page_pixels(page: dict[str, Any]) -> npt.NDArray[np.uint8]:
    """(rows * CELL, columns * CELL, 3)"""
    height, width = page["rows"] * CELL, page["columns"] * CELL
    top, left = page["corner"]
    canvas = DIMMED * _photo(page["photo"])[top : top + height, left : left + width].astype(np.float64)
    images, _ = _digits()
    for cell in page["cells"]:
        ink = Image.fromarray(images[cell["image"]].astype(np.float32)).resize(
            (INK, INK), Image.Resampling.BILINEAR
        )
        y = (cell["at"][0] - 1) * CELL + cell["shift"][0]
        x = (cell["at"][1] - 1) * CELL + cell["shift"][1]
        part = canvas[y : y + INK, x : x + INK]
        opacity = np.asarray(ink, dtype=np.float64)[..., None]
        part += opacity * (255.0 - part)
    return np.clip(canvas, 0, 255).round().astype(np.uint8)


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", compress_level=1)
    return buffer.getvalue()


def page_png(page: dict[str, Any]) -> bytes:
    return png(Image.fromarray(page_pixels(page)))
