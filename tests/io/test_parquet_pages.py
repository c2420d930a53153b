"""Headers of the pages of parquet files: hostile headers are refused, or are read as by pyarrow."""

import pytest

pa = pytest.importorskip("pyarrow")

from torchcalib.io.parquet_pages import Chunk, pages_of  # noqa: E402


def varint(n):
    return bytes([n]) if n < 128 else bytes([n & 127 | 128]) + varint(n >> 7)


def number(step, n):
    """Return a field with a 32-bit number. Its own number follows the previous one by `step`."""
    return bytes([step << 4 | 5]) + varint(2 * n)


KIND, SIZE, EMPTY = number(1, 0), number(1, 100), number(1, 0)
PAGE = KIND + SIZE + EMPTY
STRUCT = b"\x2c"  # field 5, if field 3 precedes


def pages(header):
    return list(pages_of(pa.BufferReader(header), Chunk(0, len(header), 4, False)))


def test_sizes_and_numbers_of_values_of_pages():
    first = PAGE + STRUCT + number(1, 7) + b"\x00\x00"
    statistics = b"\x4c\x18\x03abc\x16\x02\x00"  # a structure with text and a 64-bit number
    dictionary = PAGE + b"\x00"
    assert pages(first) == [(100, 7)]
    assert pages(dictionary + first) == [(100, 0), (100, 7)]
    assert pages(PAGE + STRUCT + number(1, 7) + statistics + b"\x00\x00") == [(100, 7)]


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (PAGE + b"\x19\xf3" + varint(2**60) + b"\x00", "got too few bytes"),  # a list of 2^60 bytes
        (PAGE + b"\x19\xf7" + varint(2**60) + b"\x00", "got too few bytes"),  # a list of 2^60 numbers of 8 bytes
        (PAGE + b"\x18" + varint(2**60), "got too few bytes"),
        (PAGE + b"\x05" + varint(2 * 2) + varint(2 * 2**30) + b"\x00", "increasing numbers, got 3, 2"),
        (PAGE + b"\x05" + varint(2 * (2**16 + 2)) + varint(2 * 2**30) + b"\x00", "increasing numbers, got 3, 65538"),
        (KIND + b"\x16" + varint(2 * 100) + EMPTY + b"\x00", "must declare its size"),  # a 64-bit number
        (PAGE + STRUCT + b"\x00\x00", "must declare its size"),
        (PAGE + b"\x1c" * 20 + b"\x00" * 21, "nested structures"),
        (PAGE[:-1], "got too few bytes"),
        (KIND + SIZE + number(1, 2**31) + b"\x00", "must have 32 bits"),  # readers use the lower 32 bits
        (KIND + SIZE + number(1, 9) + b"\x00", "got a longer page"),
        ((PAGE + b"\x00") * 3000, "pages must not be empty"),
    ],
)
def test_headers_that_pyarrow_would_read_differently_are_refused(header, words):
    with pytest.raises(ValueError, match=words):
        pages(header)


def test_the_larger_number_of_values_counts():
    """A page has one header of either version, and the other one could hide its values."""
    version_2 = b"\x3c" + number(1, 0) + b"\x00"
    assert pages(PAGE + STRUCT + number(1, 10**9) + b"\x00" + version_2 + b"\x00") == [(100, 10**9)]
