from wordkit import top, words


def test_words():
    assert words("One, two; ONE") == ["one", "two", "one"]


def test_top():
    assert top("b a b c a b", 2) == [("b", 3), ("a", 2)]
