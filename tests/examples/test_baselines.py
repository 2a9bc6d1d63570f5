"""Bits per byte without a model."""

import math

from baselines import gzip_bits_per_byte, unigram_bits_per_byte


def test_unigram_of_two_letters():
    # a: 4 of 260 counts, one of them for being possible; z: 1 of 260.
    bits = unigram_bits_per_byte([b"aab", b"a"], [b"a", b"z"])
    assert math.isclose(bits, -(math.log2(4 / 260) + math.log2(1 / 260)) / 2)


def test_gzip_of_repetition_is_small():
    assert gzip_bits_per_byte([b"abc" * 1000, b"abc" * 1000]) < 0.1
