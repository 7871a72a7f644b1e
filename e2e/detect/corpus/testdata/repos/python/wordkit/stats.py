"""Numbers about numbers."""


def mean(values):
    """The arithmetic mean; ValueError of nothing."""
    if not values:
        raise ValueError("mean of nothing")
    return sum(values) / len(values)


def median(values):
    """The median; ValueError of nothing."""
    if not values:
        raise ValueError("median of nothing")
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
