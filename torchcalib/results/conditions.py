"""Conditions on the values of a report, such as `p(ece) < 0.01 and ece > 0.02`, for checks in tests and pipelines.

Importing this module does not import torch.
"""

import ast
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from torchcalib.display.words import significant
from torchcalib.io.errors import shown

if TYPE_CHECKING:
    from torchcalib.results.lines import Line
    from torchcalib.results.report import Report

ALPHA, MAX_ECE = 0.01, 0.02
"""Default level of the p-value and largest accepted ECE of a check. A check fails if both are exceeded."""

DEFAULT = f"p(ece) < {ALPHA} and ece > {MAX_ECE}"
"""Default condition of failure."""

_MAX_LENGTH = 1000  # characters of a condition; the parser of Python limits the depth
_FUNCTIONS: dict[str, Callable[["Line"], float | None]] = {
    "": lambda line: line.value,
    "p": lambda line: line.p_value,
    "floor": lambda line: line.noise_floor,
    "low": lambda line: None if line.interval is None else line.interval.low,
    "high": lambda line: None if line.interval is None else line.interval.high,
}
"""Functions of a line of a report. The name alone, without a function, is the value."""

_COMPARISONS: dict[type[ast.cmpop], Callable[[float, float], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_TESTED_OVER_BINS = ("ece", "esce", "mce", "rmsce")  # errors whose p-value a report without intervals contains
_RULE = "compare report values, p(key), floor(key), low(key), high(key) and numbers, joined by and, or, not"


class Term(NamedTuple):
    """A value of a report: a function of the line with a key; `function` is empty for its value."""

    function: str
    key: str

    def __str__(self) -> str:
        return f"{self.function}({self.key})" if self.function else self.key


class Outcome(NamedTuple):
    """Whether a condition holds for a report, and the values that it compares, by their text."""

    holds: bool
    values: dict[str, float]

    def __str__(self) -> str:
        return ", ".join(f"{term} = {significant(value)}" for term, value in self.values.items())


class ConditionError(ValueError):
    """Error for a condition with syntax that is not allowed; `part` is the first such part."""

    def __init__(self, part: str) -> None:
        super().__init__(f"`fail_if` must {_RULE}, got {shown(part)}. Write for example {DEFAULT!r}.")


@dataclass(frozen=True)
class Condition:
    """Condition on the values of a report, which contains only what `parse` accepts. No code is executed.

    Attributes:
        text: the condition.
        tree: the same as a tree of Python.
        terms: values of the report that it compares.
    """

    text: str
    tree: ast.expr
    terms: tuple[Term, ...]

    @classmethod
    def parse(cls, text: str) -> "Condition":
        """Parse a condition such as `DEFAULT`.

        It consists of comparisons, which `and`, `or`, `not` and parentheses join. Operands are numbers, keys of a
        report such as `ece` or `ece/top_label`, and `p`, `floor`, `low` and `high` of a key: p-value, noise floor, and
        ends of the interval. Other syntax raises a `ConditionError`.
        """
        try:
            if len(text) > _MAX_LENGTH:
                raise ConditionError(text)
            tree = ast.parse(text.strip(), mode="eval").body
            terms: dict[Term, float] = {}
            _holds(tree, lambda term: terms.setdefault(term, math.nan))
        except ConditionError:
            raise
        except (SyntaxError, ValueError, RecursionError, MemoryError):  # raised by `ast.parse`
            raise ConditionError(text) from None
        return cls(text.strip(), tree, tuple(terms))

    @property
    def needs_intervals(self) -> bool:
        """Whether a report with the values of the condition must be computed with intervals."""
        return not all(
            term.function == "" or (term.function in ("p", "floor") and term.key.partition("/")[0] in _TESTED_OVER_BINS)
            for term in self.terms
        )

    def outcome(self, report: "Report") -> Outcome:
        """Evaluate the condition for a report. Raise ValueError if the report lacks a value, or it is NaN."""
        values = {term: _value(term, report) for term in self.terms}
        return Outcome(_holds(self.tree, values.__getitem__), {str(term): value for term, value in values.items()})


def _value(term: Term, report: "Report") -> float:
    """Return a value of a report. Without this value, or for NaN, a comparison would be false without a reason."""
    line = report.line(term.key)
    if line is None:
        known = dict.fromkeys(key.partition("/")[0] for key in report)
        raise ValueError(f"`fail_if` must name values of the report, got `{term.key}`. Use {', '.join(known)}.")
    value = _FUNCTIONS[term.function](line)
    if value is None or math.isnan(value):
        found = "no such value" if value is None else "an undefined value"
        raise ValueError(f"`{term}` must be defined for this data, got {found}. Compare another value.")
    return value


def _holds(node: ast.expr, value_of: Callable[[Term], float]) -> bool:
    """Evaluate a condition. All operands are evaluated, also after the first that decides, so that all are checked."""
    match node:
        case ast.BoolOp(op=op, values=operands):
            parts = [_holds(operand, value_of) for operand in operands]
            return all(parts) if isinstance(op, ast.And) else any(parts)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not _holds(operand, value_of)
        case ast.Compare(left=left, ops=operators, comparators=others) if {*map(type, operators)} <= {*_COMPARISONS}:
            numbers = [_number(operand, value_of) for operand in (left, *others)]
            if not any(isinstance(part, ast.Name) for part in ast.walk(node)):  # always true, or always false
                raise ConditionError(ast.unparse(node))
            compare = [_COMPARISONS[type(each)] for each in operators]
            return all(holds(a, b) for holds, (a, b) in zip(compare, pairwise(numbers), strict=True))
    raise ConditionError(ast.unparse(node))


def _number(node: ast.expr, value_of: Callable[[Term], float]) -> float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.Call(func=ast.Name(id=function), args=[argument], keywords=[]) if function in _FUNCTIONS:
            return value_of(Term(function, _key(argument)))
    return value_of(Term("", _key(node)))


def _key(node: ast.expr) -> str:
    """Return a key such as `ece` or `ece/top_label`, which the parser reads as a division."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.BinOp(left=ast.Name(id=name), op=ast.Div(), right=ast.Name(id=mode)):
            return f"{name}/{mode}"
    raise ConditionError(ast.unparse(node))
