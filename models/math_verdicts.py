r"""Is this the right answer to a mathematical question? math-verify, with its known mistakes mended.

Three steps: find the answer in the text, compare what plain rules can decide exactly (numbers, words, equal text),
and leave the rest to math-verify's parser. Nothing here has a time limit of its own, since an alarm works in a main
thread only and cannot interrupt a long integer power: the caller's process is killed at its deadline instead.
math-verify and sympy are imported at the first expression that needs them.

What is mended (each has a row in tests/models/test_math_verdicts.py): answers without `$` (`pi/2`), markdown
(`**73**`), roots over the reals (sqrt(1/n) = 1/sqrt(n)), numbers below 1e-6 that math-verify rounds to equality,
scientific notation, repeating decimals, percent, anagrams of text answers, digits apart (`1 2`), clock times.
"""

import logging
import re
from fractions import Fraction
from typing import Any

from gleaner.conf.errors import VerifierContractError
from gleaner.models.environments.base import Outcome
from gleaner.models.records import Message

STOP_TOKEN = re.compile(r"<\|[a-zA-Z_]+\|>|</s>|<eos>|<end_of_turn>|<｜end▁of▁sentence｜>")
BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
BETWEEN_BOXES = re.compile(r"[\s,;$]*(?:\\text\{\s*)?(?:and|or)?(?:\s*\})?[\s,;$]*")
FINAL_LINE = re.compile(r"####[ \t]*([^\n]*)")
ANSWER_MARK = re.compile(r"(?i)\banswer(?:\s+is(?:\s*:)?|\s*:|\s*=)\s*")
SENTENCE_END = re.compile(r"[.!?](?:\s|$)|\n")
LAST_MATH = re.compile(
    r"\$\$(?P<display>.+?)\$\$|\\\[(?P<bracket>.+?)\\\]|\\\((?P<parenthesis>.+?)\\\)"
    r"|(?<![\\$\w])\$(?P<dollar>[^\s$](?:[^$\n]*[^\s$\\])?)\$(?!\d)"
    r"|(?P<fraction>-?\\[dt]?frac\{[^{}]+\}\{[^{}]+\})"
    r"|(?<![\w.])(?P<number>-?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:(?<=\d)\.\d+|(?<![\d.])\.\d+)?(?<=\d)(?:\s*/\s*\d+)?(?:\s*\\?%)?)",
    re.DOTALL,
)
BOLD = re.compile(r"(?<![\w)])\*\*(?=\S)(.+?)\*\*(?!\w)", re.DOTALL)
PROSE = re.compile(r"[A-Za-z]{2,}\s+[A-Za-z]{2,}")

NOT_UNITS = re.compile(
    r"(?i)\b(?:hundred|thousand|[mbtr]+illion|dozen|hal(?:f|ves)|thirds?|quarters?|(?:four|fif|ten|hundred)ths?|squared"
    r"|cubed|times|plus|minus|pi|sqrt|sin|cos|tan|sec|csc|cot|log|ln|exp|inf|infinity|or|and|to|mod|choose|factorial)\b"
)
SHORT_WORD = re.compile(r"(?i)yes|no|odd|none|one|two|six|ten|red|am|pm|mon|tue|wed|thu|fri|sat|sun")
FUNCTIONS = (
    "arcsin",
    "arccos",
    "arctan",
    "sinh",
    "cosh",
    "tanh",
    "sin",
    "cos",
    "tan",
    "sec",
    "csc",
    "cot",
    "log",
    "ln",
    "exp",
)


def verify(
    payload: dict[str, Any], text: str, transcript: list[Message], environment_result: dict[str, Any]
) -> Outcome:
    """Reward 1 if the answer in `text` equals `payload["answer"]`, else 0.

    Raises:
        VerifierContractError: there is no gold answer to compare with.
    """
    gold = payload.get("answer")
    if not isinstance(gold, str) or not gold.strip():
        raise VerifierContractError("the prompt has no gold answer: give its payload a non-empty `answer`")
    answer = final_answer(text)
    if answer is None:
        return Outcome(False, 0.0, {"answer": None})
    correct = same_answer(gold, answer)
    return Outcome(correct, float(correct), {"answer": answer[:200]})


def final_answer(text: str) -> str | None:
    r"""The answer that a text settles on; None if it names none.

    In this order: the last \boxed{} (several in a row make a list), the last line that starts with ####, what
    follows the last "answer is", a text that is nothing but a short answer, the last formula or number. What comes
    after a stop token, or before </think>, does not count.
    """
    text = _before_stop_token(text)
    text = text.rpartition("</think>")[2]
    if BOX.search(text) or r"\boxed" in text:
        return _last_boxed(text)
    if lines := FINAL_LINE.findall(text):
        return lines[-1].strip() or None
    if marks := list(ANSWER_MARK.finditer(text)):
        tail = text[marks[-1].end() :].strip()
        end = _sentence_end(tail)
        return _formula_in(tail[:end]) or None
    stripped = text.strip()
    if (
        stripped
        and "\n" not in stripped
        and len(stripped) <= 80
        and not PROSE.search(_without_commands(stripped))
    ):
        return _formula_in(_result(stripped))
    return _last_formula(text)


def same_answer(gold: str, answer: str) -> bool:
    """Whether two answers say the same. Not symmetric: the gold answer decides what is asked for."""
    gold_is_text = r"\text" in gold or r"\mathrm" in gold
    gold, answer = _normalised(gold), _normalised(answer)
    if not gold or not answer:
        return False
    if _squeezed(gold) == _squeezed(answer):
        return True
    gold, gold_unit, answer, unit = *_split_unit(gold), *_split_unit(answer)
    if gold_unit and unit and gold_unit != unit:
        return False
    # One letter may be a variable: it is a unit (3 m) beside a longer unit only, and then another one.
    if (gold_unit and ONE_LETTER.fullmatch(answer)) or (unit and ONE_LETTER.fullmatch(gold)):
        return False
    gold_number, number = _number(gold), _number(answer)
    if gold_number is not None and number is not None:
        return any(_equal_numbers(a, b) for a in gold_number for b in number)
    if gold_is_text and (label := re.fullmatch(r"\(?([A-Za-z])\)?", gold)):
        return re.fullmatch(rf"\(?{label[1]}\)?", answer, re.IGNORECASE) is not None
    if _is_word(gold, gold_is_text) or _is_word(answer, False):
        return gold.casefold().strip(" .") == answer.casefold().strip(" .")
    if re.search(r"\d\s+\d", gold + "|" + answer) or _is_clock(gold) or _is_clock(answer):
        return False
    if ":" in gold and ":" in answer:
        return False
    return _same_expression(_as_latex(gold), _as_latex(answer))


# ------------------------------------------------------------------------------------- finding the answer


def boxed(text: str) -> list[tuple[int, int, str]]:
    r"""(start, end, content) of every outermost closed \boxed{} or \fbox{} in `text`."""
    found = []
    end = 0
    for match in BOX.finditer(text):
        if match.start() < end:
            continue
        depth = 1
        for place in range(match.end(), len(text)):
            if text[place] in "{}" and text[place - 1] != "\\":
                depth += 1 if text[place] == "{" else -1
            if depth == 0:
                end = place + 1
                found.append((match.start(), end, text[match.end() : place].strip()))
                break
    bare = re.finditer(r"\\boxed\s+([^\s${}]+)", text)
    found += [(match.start(), match.end(), match[1].rstrip(".")) for match in bare]
    return sorted(found)


def _last_boxed(text: str) -> str | None:
    boxes = boxed(text)
    if not boxes:
        return None
    start, _, content = boxes[-1]
    parts = [content]
    for earlier_start, earlier_end, earlier in reversed(boxes[:-1]):
        if not BETWEEN_BOXES.fullmatch(text[earlier_end:start]) or "\n\n" in text[earlier_end:start]:
            break
        parts.insert(0, earlier)
        start = earlier_start
    return ", ".join(dict.fromkeys(parts)) or None


def _result(line: str) -> str:
    """What a calculation comes to (`9 * 2 = 18 apples`); an equation between variables stays whole."""
    calculation, _, result = line.rpartition("=")
    if re.search(r"\d", calculation) and not re.search(r"(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])|\\|,", line):
        return result.strip()
    return line


def _before_stop_token(text: str) -> str:
    while match := STOP_TOKEN.search(text):
        if text[: match.start()].strip():
            return text[: match.start()]
        text = text[match.end() :]
    return text


def _sentence_end(text: str) -> int:
    """Where the first sentence ends, not counting points inside formulas and numbers."""
    inside_dollars = False
    for place, letter in enumerate(text):
        if letter == "$":
            inside_dollars = not inside_dollars
        if not inside_dollars and SENTENCE_END.match(text, place):
            return place
    return len(text)


def _formula_in(phrase: str) -> str:
    """The formula of a phrase if it has exactly one between dollars or the like, else the phrase."""
    plain = _without_bold(phrase).replace("`", "").strip(" \t_*")
    formulas = [m for m in LAST_MATH.finditer(plain) if not m["number"] and not m["fraction"]]
    if len(formulas) == 1 and not plain.startswith(r"\boxed"):
        outside = plain[: formulas[0].start()] + plain[formulas[0].end() :]
        if not re.search(r"\d", outside):
            return next(group for group in formulas[0].groups() if group)
    if PROSE.search(_without_commands(plain)) and not formulas and (number := _last_formula(plain)):
        return number
    return plain


def _last_formula(text: str) -> str | None:
    found = [
        next(group for group in m.groups() if group) for m in LAST_MATH.finditer(_without_bold(text)) if m[0]
    ]
    return found[-1].strip() if found else None


def _without_bold(text: str) -> str:
    """Without markdown's bold, but with the powers of x**2."""
    return BOLD.sub(r"\1", text)


def _without_commands(text: str) -> str:
    return re.sub(r"\\[A-Za-z]+", " ", text)


# --------------------------------------------------------------------------------- normal form of an answer


def _normalised(answer: str) -> str:
    text = _before_stop_token(answer)
    for letter, latex in (
        ("−", "-"), ("–", "-"), ("×", r"\times "), ("·", r"\cdot "), ("π", r"\pi "), ("∞", r"\infty "), ("≤", r"\le "),
        ("≥", r"\ge "), ("∪", r"\cup "), ("°", ""), ("\u00a0", " "), ("\u202f", " "), ("²", "^2"), ("³", "^3"),
        ("½", r"\frac{1}{2}"), ("¼", r"\frac{1}{4}"), ("¾", r"\frac{3}{4}"),
    ):  # fmt: skip
        text = text.replace(letter, latex)
    text = text.replace(r"\$", "").replace("$", "").replace("€", "").replace("£", "")
    text = re.sub(r"\\[()\[\]]", "", text)
    text = _without_bold(text)
    text = re.sub(r"\\(?:left|right|displaystyle|limits|bigl?|bigr?|Bigl?|Bigr?)(?![A-Za-z])\.?", "", text)
    text = re.sub(r"\\[!,;: ]|~|\\q?quad(?![A-Za-z])", " ", text)
    text = re.sub(r"\\[dtc]frac", r"\\frac", text)
    text = re.sub(r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{", text)
    text = re.sub(r"\\sqrt\s*(\d)", r"\\sqrt{\1}", text)
    text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?|\\degree(?![A-Za-z])", "", text)
    text = re.sub(
        r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}", r" \1 ", text
    )
    text = text.replace("{,}", ",").replace(r"\%", "%").replace("percent", "%")
    text = re.sub(r"\s+", " ", text).strip().strip("`").strip()
    while text.endswith((".", ",", ";")):
        text = text[:-1].rstrip()
    if re.fullmatch(r"-?\d{1,3}(?:[, ]\d{3})+(?:\.\d+)?(?:\s*[%A-Za-z].*)?", text):
        text = re.sub(r"(?<=\d)[, ](?=\d{3})", "", text)
    return text


def _squeezed(text: str) -> str:
    """For comparison as text: without spaces (but `1 2` is not `12`), case, and braces around one letter."""
    text = re.sub(r"(?<!\\)\{(\w)\}", r" \1", text)
    return text.replace(" ", "").casefold() if not re.search(r"\d \d", text) else text.casefold()


UNIT = re.compile(
    r"(?P<value>-?(?:\d[\d.,/]*|\\frac\{\d+\}\{\d+\}|\.\d+)) *(?P<unit>(?:[A-Za-z]{2,}\.?|per|/)"
    r"(?:[ /]+[A-Za-z]+\.?)*)(?:\s*\^\s*\{?[23]\}?)?"
)


ONE_LETTER = re.compile(r"[-\d.,/]+ [A-Za-z]")


def _split_unit(text: str) -> tuple[str, str]:
    """A number and its unit of measure in the singular; the text and "" if it is anything else."""
    text = re.sub(r"^(?:USD|EUR|Rs\.?) *(?=\d)", "", text)
    match = UNIT.fullmatch(text)
    if match is None or NOT_UNITS.search(match["unit"]):
        return text, ""
    words = [
        word.removesuffix("es") if word.endswith("ches") else word.rstrip("s")
        for word in match["unit"].lower().split()
    ]
    return match["value"].rstrip(".,"), " ".join(words)


# ------------------------------------------------------------------------------------- exact comparisons


NUMBER = re.compile(
    r"(?P<sign>[-+]?) *(?:(?P<whole>\d+) *\\frac\{(?P<top>\d+)\}\{(?P<bottom>\d+)\}"
    r"|(?P<mixed>\d+) (?P<mixed_top>\d+)/(?P<mixed_bottom>\d+)"
    r"|(?P<lone_sign>-?)\\frac\{(?P<a>-?\d+)\}\{(?P<b>-?\d+)\}"
    r"|(?P<c>\d+(?:\.\d+)?) */ *(?P<d>\d+(?:\.\d+)?)"
    r"|(?P<integer>\d*)\.(?P<fixed>\d*)\\overline\{(?P<repeat>\d+)\}"
    r"|(?P<decimal>\d+\.?\d*|\.\d+)"
    r"(?: *[eE] *(?P<e>[-+]?\d+)| *(?:\\times|\\cdot|\*|x) *10 *(?:\^|\*\*) *\{?(?P<exponent>[-+]?\d+)\}?)?)"
    r"(?P<percent> *%)?"
)


def _number(text: str) -> tuple[Fraction, ...] | None:
    """The values that a plain number may stand for: two with a percent sign, since questions ask for either."""
    match = NUMBER.fullmatch(text.strip())
    if match is None:
        return None
    part = match.groupdict()
    try:
        if part["whole"]:
            value = int(part["whole"]) + Fraction(int(part["top"]), int(part["bottom"]))
        elif part["mixed"]:
            value = int(part["mixed"]) + Fraction(int(part["mixed_top"]), int(part["mixed_bottom"]))
        elif part["a"]:
            value = Fraction(int(part["a"]), int(part["b"]))
        elif part["c"]:
            value = Fraction(part["c"]) / Fraction(part["d"])
        elif part["repeat"]:
            scale, nines = 10 ** len(part["fixed"]), 10 ** len(part["repeat"]) - 1
            head = Fraction(int((part["integer"] or "0") + part["fixed"]), scale)
            value = head + Fraction(int(part["repeat"]), scale * nines)
        else:
            exponent = int(part["e"] or part["exponent"] or 0)
            if abs(exponent) > 400 or len(part["decimal"]) > 4000:
                return None
            value = Fraction(part["decimal"]) * Fraction(10) ** exponent
    except (ZeroDivisionError, ValueError):
        return None
    value = -value if "-" in (part["sign"] or "") + (part["lone_sign"] or "") else value
    return (value, value / 100) if part["percent"] else (value,)


def _equal_numbers(gold: Fraction, answer: Fraction) -> bool:
    """Equal, or a decimal that gives a fraction without a finite decimal to six digits (0.333333 for 1/3)."""
    if gold == answer:
        return True
    if _has_finite_decimal(gold) == _has_finite_decimal(answer):
        return False
    return abs(gold - answer) <= abs(gold) / 10**6


def _has_finite_decimal(value: Fraction) -> bool:
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest == 1


def _is_word(text: str, marked_as_text: bool) -> bool:
    if not re.fullmatch(r"[A-Za-z][A-Za-z' .\-]*", text) or text.lower() in (
        *FUNCTIONS,
        "pi",
        "infinity",
        "inf",
    ):
        return False
    letters = re.sub(r"[^A-Za-z]", "", text)
    return (
        len(letters) >= 4 or SHORT_WORD.fullmatch(text) is not None or (marked_as_text and len(letters) >= 2)
    )


def _is_clock(text: str) -> bool:
    return re.match(r"\d{1,2}:\d{2}(?!\d)", text) is not None


# ------------------------------------------------------------------------------------- left to math-verify


def _as_latex(text: str) -> str:
    """Plain-text mathematics (`sqrt(2)/2`, `x**2`, `pi/2`) as the LaTeX that math-verify reads."""
    text = text.replace("**", "^")
    text = re.sub(r"(?<=[\w)}]) *\* *(?=[\w(\\{])", r" \\cdot ", text)
    text = re.sub(r"<=", r"\\le ", re.sub(r">=", r"\\ge ", text))
    text = re.sub(r"(?<![\\A-Za-z])(?:infinity|inf|oo)(?![A-Za-z])", r"\\infty ", text)
    text = re.sub(r"(?<![\\A-Za-z])pi(?![A-Za-z])", r"\\pi ", text)
    text = re.sub(rf"(?<![\\A-Za-z])({'|'.join(FUNCTIONS)})(?![A-Za-z])", r"\\\1 ", text)
    text = re.sub(r"(?<=[)\]]) *U *(?=[(\[])", r"\\cup ", text)
    text = re.sub(r"\s*(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])\s*", ", ", text)
    text = re.sub(r",\s*,", ",", text)
    for command, opening in (
        (r"\sqrt", re.compile(r"(?:(?<![\\A-Za-z])sqrt|√|\\sqrt) *\(")),
        ("^", re.compile(r"\^ *\(")),
    ):
        while match := opening.search(text):
            end = _closing(text, match.end())
            if end is None:
                break
            text = f"{text[: match.start()]}{command}{{{text[match.end() : end]}}}{text[end + 1 :]}"
    return re.sub(r"√ *(\w+)", r"\\sqrt{\1}", text)


def _closing(text: str, start: int) -> int | None:
    depth = 1
    for place in range(start, len(text)):
        depth += (text[place] == "(") - (text[place] == ")")
        if depth == 0:
            return place
    return None


def _same_expression(gold: str, answer: str) -> bool:
    from math_verify import verify as verify_parsed
    from sympy import Basic

    for name in ("math_verify.parser", "math_verify.grader", "math_verify.utils"):
        logging.getLogger(name).setLevel(logging.ERROR)
    golds, answers = _parsed(gold), _parsed(answer)
    gold_value = next((parsed for parsed in golds if isinstance(parsed, Basic)), None)
    value = next((parsed for parsed in answers if isinstance(parsed, Basic)), None)
    if gold_value is not None and value is not None and _is_number(gold_value) and _is_number(value):
        return _equal_values(gold_value, value)
    if verify_parsed(golds, answers, allow_set_relation_comp=True, timeout_seconds=None):
        return True
    return gold_value is not None and value is not None and _equal_where_real(gold_value, value)


def _parsed(latex: str) -> list[Any]:
    from math_verify import LatexExtractionConfig, parse

    return parse(f"${latex}$", [LatexExtractionConfig()], parsing_timeout=None)


def _is_number(value: Any) -> bool:
    from sympy import Expr

    return isinstance(value, Expr) and bool(value.is_number)


def _equal_values(gold: Any, answer: Any) -> bool:
    """Numbers to 30 digits, or to six where one is written as a decimal."""
    from sympy import Float

    if gold == answer:
        return True
    difference = abs((gold - answer).evalf(40))
    size = abs(gold.evalf(40))
    if not (difference.is_number and size.is_number and size.is_finite and difference.is_finite):
        return False
    approximate = gold.has(Float) or answer.has(Float)
    return bool(difference <= size * (Float("1e-6") if approximate else Float("1e-30")))


def _equal_where_real(gold: Any, answer: Any) -> bool:
    """Expressions in the same variables that are real, and equal, at the same points; 16 points, 4 of them real.

    Equality over the reals is what a question means: sqrt(1/n) and 1/sqrt(n) differ for negative n alone, where
    neither is real. A point where one is real and the other is not decides against (log x^2 and 2 log x).
    """
    from sympy import Expr, Rational

    if not isinstance(gold, Expr) or not isinstance(answer, Expr) or not gold.free_symbols:
        return False
    names = sorted(symbol.name for symbol in gold.free_symbols)
    if names != sorted(symbol.name for symbol in answer.free_symbols):
        return False
    real_points = 0
    for point in range(16):
        sign = 1 if point % 2 == 0 else -1
        values = {
            name: sign * Rational(7 * point + 3 * place + 5, 11 + 2 * place)
            for place, name in enumerate(names)
        }
        a, b = (
            expression.subs({symbol: values[symbol.name] for symbol in expression.free_symbols}).evalf(30)
            for expression in (gold, answer)
        )
        if bool(a.is_real) != bool(b.is_real):
            return False
        if a.is_real and b.is_real:
            if abs(a - b) > abs(a) * Rational(1, 10**20):
                return False
            real_points += 1
    return real_points >= 4
