"""The table of verdicts: what math-verify, or a plain string comparison, is known to get wrong, and what is right."""

import threading
from collections.abc import Iterator

import pytest

from gleaner.conf.schema import MathEnvironment, RewardSettings, VerificationSettings
from gleaner.models.environments.math import MathQuestions
from gleaner.models.environments.prompts import make_prompt
from gleaner.models.math_verdicts import final_answer, same_answer
from gleaner.models.records import Prompt, Segment, Verdict
from gleaner.models.verification import VerifierPool, judge

RIGHT, WRONG = True, False

VERDICTS = [
    # gold answer, what the policy wrote, verdict
    (r"\frac{\pi}{2}", r"\boxed{pi/2}", RIGHT),
    (r"pi/2", r"The answer is $\dfrac{\pi}{2}$.", RIGHT),
    (r"\dfrac{\pi}{2}", "pi/2", RIGHT),
    (r"\sqrt{1/n}", r"\boxed{1/\sqrt{n}}", RIGHT),
    (r"\frac{1}{\sqrt{n}}", "sqrt(1/n)", RIGHT),
    (r"\sqrt{1/x}", r"-1/\sqrt{x}", WRONG),
    (r"\sqrt{x^2}", "x", WRONG),
    (r"\log(x^2)", r"2\log x", WRONG),
    ("73", "First I had 12, so the answer is **73**", RIGHT),
    ("73", "**73**", RIGHT),
    ("3", "**73**", WRONG),
    # Text that no parser reads: two such texts are equal only if they are the same.
    ("y=@#3", r"\boxed{y=\lambda^{2}+&3}", WRONG),
    (r"x \equiv 1 \pmod 3", r"\boxed{x\equiv 2 \pmod 3}", WRONG),
    (r"x \equiv 1 \pmod 3", r"\boxed{x\equiv 1 \pmod{3}}", RIGHT),
    ("0", r"\boxed{&&}", WRONG),
    ("x^2+y^2=1", r"\boxed{x^2+y^2=2}", WRONG),
    # Order of gold and prediction.
    (r"x\ge 0", r"\boxed{[0,\infty)}", RIGHT),
    (r"[0,\infty)", r"\boxed{x\ge 0}", RIGHT),
    ("5", r"\boxed{x=5}", RIGHT),
    ("x=5", r"\boxed{5}", RIGHT),
    ("x=5", r"\boxed{y=5}", WRONG),
    # Stop tokens, thoughts, several boxes, none.
    ("42", "The answer is 42<|im_end|>", RIGHT),
    ("42", r"\boxed{42}</s>\boxed{7}", RIGHT),
    ("42", "42<|endoftext|>Human: what is 6 x 9?", RIGHT),
    ("42", r"<think>perhaps \boxed{7}</think>So \boxed{42}.", RIGHT),
    ("42", r"<think>perhaps \boxed{42}</think>So \boxed{7}.", WRONG),
    ("42", r"\boxed{7}, no, wait. It is \boxed{42}", RIGHT),
    ("7", r"\boxed{7}, no, wait. It is \boxed{42}", WRONG),
    ("2, 3", r"\boxed{2} and \boxed{3}", RIGHT),
    ("42", r"\boxed{42", WRONG),
    ("42", "I do not know.", WRONG),
    ("42", "", WRONG),
    (r"\text{A}", "I would say it is hard to tell.", WRONG),
    # GSM8K's line.
    ("18", "16 - 3 - 4 = 9 eggs, 9 * 2 = 18\n#### 18", RIGHT),
    ("18", "#### 9\n#### 18", RIGHT),
    ("18", "9 * 2 = 18 apples", RIGHT),
    ("x^2+y^2=1", "x^2+y^2=1", RIGHT),
    ("y=2x+3", "y=2x+3", RIGHT),
    # Numbers.
    ("1,234", r"\boxed{1234}", RIGHT),
    ("1234567", "1,234,567", RIGHT),
    ("12{,}345", r"\boxed{12345}", RIGHT),
    ("1000", "1 000", RIGHT),
    ("3", "1 2", WRONG),
    ("12", "1 2", WRONG),
    (r"3\frac{1}{2}", r"\boxed{3.5}", RIGHT),
    ("7/2", "3 1/2", RIGHT),
    (r"-\frac{1}{2}", r"\boxed{-0.5}", RIGHT),
    ("-3", "3", WRONG),
    ("3", "-3", WRONG),
    ("1/3", "0.333333", RIGHT),
    ("1/3", "0.33", WRONG),
    (r"0.1\overline{6}", r"\frac{1}{6}", RIGHT),
    (r"\pi", "3.141593", RIGHT),
    (r"\pi", "3.14", WRONG),
    ("0.0000001", "0.0000002", WRONG),
    (r"10^{-8}", "0.00000002", WRONG),
    ("1e-7", "0.0000001", RIGHT),
    (r"1.5\times 10^3", "1500", RIGHT),
    ("1000000", "1000001", WRONG),
    (r"2^{10}", "1024", RIGHT),
    # Percent and units.
    (r"50\%", r"\boxed{0.5}", RIGHT),
    ("50", r"\boxed{50\%}", RIGHT),
    ("50", "5%", WRONG),
    ("18", r"\$18.00", RIGHT),
    ("18", "She makes $18 every day.", RIGHT),
    ("18", "18 dollars", RIGHT),
    (r"3\text{ cm}", r"\boxed{3}", RIGHT),
    ("3 cm", r"\boxed{3\text{ m}}", WRONG),
    ("3", "3 million", WRONG),
    (r"90^\circ", r"\boxed{90}", RIGHT),
    # Intervals, pairs and sets.
    ("(1,2)", r"\boxed{[1,2]}", WRONG),
    ("(1,2)", r"\boxed{(2,1)}", WRONG),
    (r"\left( 3, \frac{\pi}{2} \right)", r"\boxed{(3, \pi/2)}", RIGHT),
    (r"(-\infty,2)\cup(3,\infty)", "(-inf, 2) U (3, inf)", RIGHT),
    (r"\{1,2\}", r"\boxed{\{2,1\}}", RIGHT),
    (r"\{1,2\}", r"\boxed{\{1,2,3\}}", WRONG),
    ("2,-3", "x=2 or x=-3", RIGHT),
    (r"\pm 2", r"\boxed{2}", WRONG),
    # Expressions.
    ("x^2+2x+1", r"\boxed{(x+1)^2}", RIGHT),
    ("x^2+2x+1", "(x+1)**2", RIGHT),
    (r"2\sqrt{3}", r"\boxed{\sqrt{12}}", RIGHT),
    (r"2\sqrt3", "2*sqrt(3)", RIGHT),
    ("13", "2**2 + 3**2", RIGHT),
    ("x", "y", WRONG),
    ("i", "-i", WRONG),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\boxed{\begin{pmatrix}1\\3\end{pmatrix}}", WRONG),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}", RIGHT),
    # Words, labels, clocks and ratios.
    (r"\text{Evelyn}", r"\boxed{Evelyn}", RIGHT),
    (r"\text{even}", r"\boxed{neve}", WRONG),
    (r"\text{cat}", r"\boxed{tac}", WRONG),
    (r"\text{(B)}", r"\boxed{B}", RIGHT),
    (r"\text{(B)}", r"\boxed{A}", WRONG),
    ("5:45", "5:45", RIGHT),
    ("10:30", "1/3", WRONG),
    ("3:4", r"\boxed{3/4}", RIGHT),
]


ENVIRONMENT = MathQuestions(MathEnvironment())


@pytest.fixture(scope="module")
def pool() -> Iterator[VerifierPool]:
    with VerifierPool(workers=1, deadline_seconds=30.0) as pool:
        yield pool


def episode(gold: str, text: str, sample: int) -> tuple[Prompt, Segment]:
    prompt = make_prompt("math", "train", [{"role": "user", "content": "?"}], {"answer": gold})
    segment = Segment(
        prompt.prompt_id, sample, 0, [1], [2], [1], [0.0], "v", "s", 0, "stop", text, [], {}, []
    )
    return prompt, segment


def verdicts_of(rows: list[tuple[str, str]], pool: VerifierPool) -> list[Verdict]:
    episodes = [episode(gold, text, sample) for sample, (gold, text) in enumerate(rows)]
    prompts, segments = [prompt for prompt, _ in episodes], [segment for _, segment in episodes]
    return judge(ENVIRONMENT, prompts, segments, VerificationSettings(), [RewardSettings()], pool)


def assert_table(verdicts: list[Verdict]) -> None:
    got = [(gold, text, verdict.success) for (gold, text, _), verdict in zip(VERDICTS, verdicts, strict=True)]
    assert got == VERDICTS
    assert all(verdict.status == "scored" for verdict in verdicts)
    assert all(
        verdict.reward == float(right) for (_, _, right), verdict in zip(VERDICTS, verdicts, strict=True)
    )


def test_every_row_of_the_table_gets_the_right_verdict_off_the_main_thread(pool: VerifierPool) -> None:
    rows = [(gold, text) for gold, text, _ in VERDICTS]
    answers: list[list[Verdict]] = []
    threads = [threading.Thread(target=lambda: answers.append(verdicts_of(rows, pool))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 2
    for verdicts in answers:
        assert_table(verdicts)


def test_every_row_of_the_table_gets_the_right_verdict_in_a_thread_pool_task(
    pool: VerifierPool, prefect_api: str
) -> None:
    from prefect import flow, task
    from prefect.task_runners import ThreadPoolTaskRunner

    @task
    def verify_rows(rows: list[tuple[str, str]]) -> list[Verdict]:
        assert threading.current_thread() is not threading.main_thread()
        return verdicts_of(rows, pool)

    @flow(task_runner=ThreadPoolTaskRunner(max_workers=4))
    def verify_table() -> list[Verdict]:
        rows = [(gold, text) for gold, text, _ in VERDICTS]
        futures = [verify_rows.submit(rows[start : start + 20]) for start in range(0, len(rows), 20)]
        return [verdict for future in futures for verdict in future.result()]

    assert_table(verify_table())


def test_a_prompt_without_a_gold_answer_is_unscored_not_wrong(pool: VerifierPool) -> None:
    verdicts = verdicts_of([("", r"\boxed{}"), ("  ", "5")], pool)
    assert [verdict.status for verdict in verdicts] == ["error", "error"]
    assert all("no gold answer" in verdict.details["reason"] for verdict in verdicts)
    assert all(verdict.reward is None for verdict in verdicts)


def test_a_power_tower_is_a_timeout_and_the_next_hundred_answers_are_scored() -> None:
    with VerifierPool(workers=1, deadline_seconds=1.0) as pool:
        rows = [
            ("7", r"\boxed{9^{9^{9^{9^{9}}}}+x}"),
            *[(str(n), f"#### {n}") for n in range(100)],
        ]
        verdicts = verdicts_of(rows, pool)
    assert verdicts[0].status == "timeout"
    assert verdicts[0].success is None
    assert [verdict.success for verdict in verdicts[1:]] == [True] * 100


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"so $\boxed{5}$.", "5"),
        (r"\boxed 5", "5"),
        ("The area is $\\frac{1}{2}$ and that is all.", r"\frac{1}{2}"),
        ("It costs $18 per day and $3 more, thus 21 in total", "21"),
        ("The final answer is 3.5. I hope it is correct.", "3.5"),
        ("Answer: 12", "12"),
        ("12 apples", "12 apples"),
        ("no numbers in here at all", None),
        (r"\boxed{}", None),
    ],
)
def test_the_final_answer_of_a_text(text: str, answer: str | None) -> None:
    assert final_answer(text) == answer


def test_an_answer_equals_itself_whatever_it_is() -> None:
    for gold, _, _ in VERDICTS:
        assert same_answer(gold, gold)
