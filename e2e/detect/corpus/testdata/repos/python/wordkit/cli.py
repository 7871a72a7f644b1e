"""wordkit FILE: the most frequent words."""

import sys

from .text import top


def main(argv=None):
    args = sys.argv[1:] if argv is None else argv
    for path in args:
        with open(path, encoding="utf-8") as f:
            for word, count in top(f.read(), 5):
                print(f"{count:6d} {word}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
