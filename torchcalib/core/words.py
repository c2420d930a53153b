"""Format numbers and test results for people: in sentences, tables and pages.

`significant` and `decimals` are for tables and write `−` for the minus sign; `fixed` is for sentences and writes `-`.
"""

import math
from collections.abc import Sequence


def in_one_line(
    value: float,
    noise_floor: float = math.nan,
    p_value: float = math.nan,
    low: float = math.nan,
    high: float = math.nan,
    level: float = 0.95,
) -> str:
    """Return a value with its evidence; parts that are NaN are left out.

    Example:
        >>> in_one_line(-0.0109, 0.0034, 0.012, -0.0174, -0.0041)
        '-0.0109 (noise floor 0.0034, 95 % -0.0174 to -0.0041, p = 0.012)'
        >>> in_one_line(0.693147)
        '0.6931'
    """
    places = places_of(value, noise_floor, high)
    clauses = in_clauses(noise_floor, p_value, low, high, places=places, level=level)
    return fixed(value, places) + (f" ({clauses})" if clauses else "")


def in_clauses(
    noise_floor: float,
    p_value: float,
    low: float = math.nan,
    high: float = math.nan,
    *,
    places: int,
    level: float = 0.95,
) -> str:
    """Return text such as `"noise floor 0.0040, 95 % 0.0180-0.0240, p < 0.001"`, without parts that are NaN."""
    clauses = []
    if not math.isnan(noise_floor):
        clauses.append(f"noise floor {fixed(noise_floor, places)}")
    if not (math.isnan(low) or math.isnan(high)):
        ends = fixed(low, places), fixed(high, places)
        between = " to " if ends[0].startswith("-") else "-"  # a hyphen could be read as a minus sign
        clauses.append(f"{100 * level:.10g} % {between.join(ends)}")
    if not math.isnan(p_value):
        clauses.append(f"p {p_words(p_value, equals='= ')}")
    return ", ".join(clauses)


def p_words(p_value: float, equals: str = "") -> str:
    """Return `"< 0.001"`, `"0.012"` or `"0.41"`, with `equals` before a number."""
    if p_value < 0.001:
        return "< 0.001"
    return equals + (f"{p_value:.2g}" if p_value < 0.095 else f"{p_value:.2f}")


def places_of(*numbers: float) -> int:
    """Return the number of decimals: 4, more if all numbers are below 0.01, and 2 from 10 on."""
    largest = max((abs(x) for x in numbers if math.isfinite(x)), default=0.0)
    if largest >= 10:
        return 2
    return min(max(4, 2 - math.floor(math.log10(largest))), 8) if largest > 1e-12 else 4


def fixed(number: float, places: int) -> str:
    """Return a number with this many decimals, and 0 instead of -0."""
    return f"{round(number, places) + 0:.{places}f}" if math.isfinite(number) else f"{number}"


def listed(words: Sequence[str]) -> str:
    """Return `"a, b and c"`."""
    return " and ".join([", ".join(words[:-1])] * (len(words) > 1) + [words[-1]])


def significant(value: float) -> str:
    """Format four significant digits; a value that is not finite in words.

    Example:
        >>> significant(-0.0109003), significant(12345.678), significant(3e-10)
        ('−0.01090', '12,346', '≈ 0')
    """
    if 0 < abs(value) < 1e-6:
        return "≈ 0"
    is_whole = float(value).is_integer() or abs(value) >= 1e3
    return _signed(value, f"{abs(value):,.0f}" if is_whole else f"{abs(value):#.4g}".rstrip("."))


def decimals(value: float, plus: str = "") -> str:
    """Format four decimals, with `plus` in front of a positive value."""
    return _signed(value, f"{abs(value):.4f}", plus)


def count(n: float) -> str:
    """Format a count without decimals; a sum of fractional weights with two."""
    return f"{n:,.0f}" if float(n).is_integer() else f"{n:,.2f}"


def percent(share: float) -> str:
    """Format a share in percent."""
    return "undefined" if math.isnan(share) else f"{share:.2%}"


def edge(value: float) -> str:
    """Format the edge of a bin without trailing zeros."""
    return f"{value:.4f}".rstrip("0").rstrip(".")


def gain(rcl: float) -> str:
    """Format a relative calibration loss in percent; a score that is or becomes infinite in words."""
    if not math.isfinite(rcl):
        return "undefined" if math.isnan(rcl) else "−infinite"
    return _signed(rcl, f"{abs(rcl):.1f}") + "%"


def ends(low: float, high: float, digits: int = 4) -> str:
    """Format the ends of an interval: significant digits, at most six decimals."""
    return " to ".join(f"{round(end, 6) + 0:.{digits}g}" for end in (low, high))  # + 0 turns -0 into 0


def _signed(value: float, digits: str, plus: str = "") -> str:
    if math.isnan(value):
        return "undefined"
    if float(digits.replace(",", "")) == 0:
        return digits
    return ("−" if value < 0 else plus) + ("infinite" if math.isinf(value) else digits)
