"""Text to words."""

import re
from collections import Counter

WORD = re.compile(r"[^\W\d_]+", re.UNICODE)


def words(text):
    """All words of a text, in lower case."""
    return [w.lower() for w in WORD.findall(text)]


def top(text, n=3):
    """The n most frequent words with their counts; ties in order of the alphabet."""
    counts = Counter(words(text))
    return sorted(counts.items(), key=lambda kv: (-kv[1], kv[0]))[:n]
