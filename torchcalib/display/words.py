"""Number formats for sentences, tables, pages and diagrams.

Sentences and tables have the minus sign `−`, tables of plain text and `in_one_line` the hyphen `-`. Diagrams use the
formats with `short` in their names.
"""

import math
from collections.abc import Iterable, Sequence


def capitalised(text: str) -> str:
    """Return the text with a capital first letter. Unlike `str.capitalize`, keep the other letters."""
    return text[:1].upper() + text[1:]


def in_one_line(
    value: float,
    noise_floor: float = math.nan,
    p_value: float = math.nan,
    low: float = math.nan,
    high: float = math.nan,
    level: float = 0.95,
) -> str:
    """Format a metric value with its noise floor (expectation under perfect calibration), interval and p-value.

    Arguments that are NaN are omitted.

    Example:
        >>> in_one_line(-0.0109, 0.0034, 0.012, -0.0174, -0.0041)
        '-0.0109 (noise floor 0.0034, 95% -0.0174 to -0.0041, p = 0.012)'
        >>> in_one_line(0.693147)
        '0.6931'
    """
    # 2 decimals for absolute values of at least 10, 5 to 8 below 0.01, else 4
    largest = max((abs(x) for x in (value, noise_floor, high) if math.isfinite(x)), default=0.0)
    places = 2 if largest >= 10 else 4
    if 1e-12 < largest < 10:
        places = min(max(4, 2 - math.floor(math.log10(largest))), 8)
    clauses = []
    if not math.isnan(noise_floor):
        clauses.append(f"noise floor {fixed(noise_floor, places)}")
    if not (math.isnan(low) or math.isnan(high)):
        ends = fixed(low, places), fixed(high, places)
        separator = " to " if ends[0].startswith("-") else "-"  # a hyphen before a minus sign is hard to read
        clauses.append(f"{100 * level:.10g}% {separator.join(ends)}")
    if not math.isnan(p_value):
        clauses.append(f"p {p_words(p_value, equals='= ')}")
    return fixed(value, places) + (f" ({', '.join(clauses)})" if clauses else "")


ONE_LOOK = (
    "p-values hold for one look at the data: repeated looks at growing data give more false alarms. SequentialTest "
    "allows repeated looks."
)
"""Sentence beside p-values that people can look at repeatedly."""


def p_words(p_value: float, equals: str = "") -> str:
    """Format a p-value as `"0.012"` with the prefix `equals`, or as `"< 0.001"`."""
    if p_value < 0.001:
        return "< 0.001"
    return equals + (f"{p_value:.2g}" if p_value < 0.095 else f"{p_value:.2f}")


def fixed(number: float, places: int) -> str:
    """Format a number with `places` decimals, and -0 as 0."""
    return f"{round(number, places) + 0:.{places}f}" if math.isfinite(number) else f"{number}"


def rounded(value: float, form: str = ".3g") -> str:
    """Format a number with a format specification of Python, and the minus sign."""
    return f"{value:{form}}".replace("-", "−")


def listed(words: Sequence[str]) -> str:
    """Join words as in `"a, b and c"`."""
    return " and ".join([", ".join(words[:-1])] * (len(words) > 1) + [words[-1]])


def significant(value: float, digits: int = 3) -> str:
    """Format a number with three significant digits, NaN as `"undefined"` and infinity as `"infinite"`.

    Example:
        >>> significant(-0.0109003), significant(12345.678), significant(3e-10)
        ('−0.0109', '12,346', '≈ 0')
    """
    if 0 < abs(value) < 1e-6:
        return "≈ 0"
    is_whole = float(value).is_integer() or abs(value) >= 999.5  # which rounds to 1,000
    return _signed(value, f"{abs(value):,.0f}" if is_whole else f"{abs(value):#.{digits}g}".rstrip("."))


def decimals(value: float, plus: str = "") -> str:
    """Format a number with four decimals, and the prefix `plus` if it is positive."""
    return _signed(value, f"{abs(value):.4f}", plus)


def count(n: float) -> str:
    """Format a whole number without decimals, and a sum of fractional weights with two decimals."""
    is_whole = math.isclose(n, float(f"{n:.0f}"), rel_tol=1e-9)  # also if sums of parts differ in rounding errors
    return f"{n:,.0f}" if is_whole else f"{n:,.2f}"


def percent(share: float) -> str:
    """Format a fraction as a percentage with three significant digits, and NaN as `"undefined"`."""
    if math.isnan(share):
        return "undefined"
    value = round(100 * share, 9)  # equal text for sums that differ in rounding errors only
    # Three digits also for whole percentages, so that all percentages of a column are similar.
    return f"{value:#.3g}".rstrip(".") + "%" if 1e-6 <= value < 100 else f"{significant(value)}%"


def edges_in_words(edges: Iterable[float], places: int = 4) -> dict[float, str]:
    """Format bin edges in [0, 1] with enough digits that different edges have different texts.

    An edge has at least `places` decimals, and two significant digits of its distance to 0 or 1. Trailing zeros are
    omitted. Only 0 and 1 are formatted as "0" and "1".

    Example:
        >>> edges_in_words([0, 1 / 15, 0.99993, 1])
        {0: '0', 0.06666666666666667: '0.0667', 0.99993: '0.99993', 1: '1'}
    """
    different = dict.fromkeys(edges)
    texts: dict[float, str] = {}
    for digits in range(2, 18):
        texts = {value: _edge(value, digits, places + digits - 2) for value in different}
        if len(set(texts.values())) == len(texts):
            break
    return texts


def _edge(value: float, digits: int, places: int) -> str:
    """Format an edge with `digits` significant digits of its distance to 0 or 1, and at least `places` decimals."""
    distance = min(value, 1 - value)
    if distance <= 0 or math.isnan(distance):
        return f"{value:.0f}"
    if value < 1e-4:
        return f"{value:.{digits - 1}e}".replace("e-0", "e-").replace("e-", "e−")
    places = max(places, digits - 1 - math.floor(math.log10(distance)))
    return f"{value:.{places}f}".rstrip("0").rstrip(".")


def short_probability(probability: float) -> str:
    """Format a probability with two significant digits of its distance to 0 or 1: 0.25, 2.4e−6, 0.99987."""
    return _edge(probability, 2, 0).replace(".0e", "e")


def short_percent(share: float) -> str:
    """Format a fraction as a percentage in at most four characters. Only exact 0 and 1 become 0% and 100%."""
    if 0 < share < 0.01:
        return "<1%"
    return ">99%" if 0.99 < share < 1 else f"{share:.0%}"


def short_count(n: float) -> str:
    """Format a count in at most four characters: 876, 4.5k, 42k, 5.1M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if n >= size:
            return f"{n / size:.{1 if n < 9.95 * size else 0}f}{unit}"
    return f"{n:.3g}"


def gain(rcl: float) -> str:
    """Format a relative calibration loss (RCL) in percent; NaN as `"undefined"`, and −infinity as `"−infinite"`."""
    if not math.isfinite(rcl):
        return "undefined" if math.isnan(rcl) else "−infinite"
    if rcl >= 99.95:
        return ">99.9%"
    return _signed(rcl, f"{abs(rcl):.1f}") + "%"


def ends(low: float, high: float) -> str:
    """Format an interval as `"0.018 to 0.024"`, with three significant digits and at most six decimals."""
    shown = (f"{round(end, 6) + 0:.3g}" for end in (low, high))  # + 0 converts -0 to 0
    return " to ".join(end.replace("inf", "infinity").replace("-", "−") for end in shown)


def _signed(value: float, digits: str, plus: str = "") -> str:
    if math.isnan(value):
        return "undefined"
    if float(digits.replace(",", "")) == 0:
        return digits
    return ("−" if value < 0 else plus) + ("infinite" if math.isinf(value) else digits)


def printable(text: str) -> str:
    """Replace non-printable characters by "?", because text from a file could control the terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def printable_lines(text: str) -> str:
    """Return a text of several lines, each of which is `printable`."""
    return "\n".join(map(printable, text.split("\n")))
