"""Counting words."""

from .stats import mean, median
from .text import top, words

__all__ = ["mean", "median", "top", "words"]
