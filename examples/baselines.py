"""What a text costs without a model: the figures that a model has to beat, in bits per byte."""

import gzip
import math
from collections import Counter
from collections.abc import Sequence


def gzip_bits_per_byte(held_out: Sequence[bytes]) -> float:
    """Size of the held-out text under gzip at its best."""
    text = b"".join(held_out)
    return 8 * len(gzip.compress(text, 9)) / len(text)


def unigram_bits_per_byte(train: Sequence[bytes], held_out: Sequence[bytes]) -> float:
    """Cross-entropy of the held-out bytes under the training text's byte frequencies.

    Every byte is counted once more than it occurs, so that none is impossible.
    """
    counts = Counter(b"".join(train))
    total = sum(counts.values()) + 256
    text = b"".join(held_out)
    return -sum(math.log2((counts[byte] + 1) / total) for byte in text) / len(text)
