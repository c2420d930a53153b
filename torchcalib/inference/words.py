"""Text of numbers, p-values and intervals."""

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
