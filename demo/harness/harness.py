#!/usr/bin/env python3
"""A small agent harness: the tools an agent works with, as subcommands.

    harness grep PATTERN [DIR]            lines that match, as path:line:text
    harness read FILE [--lines A:B]       a file with line numbers
    harness edit FILE OLD NEW             replaces the one place where OLD stands
    harness test [PATH…] [--junit FILE]   runs the tests, prints one JSON object

Standard library only. Exit codes: 0 done, 1 no match or tests that fail, 2 usage
or what cannot be done.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as xml

SKIP = {".git", "__pycache__", ".pytest_cache", "node_modules"}
MOST_MATCHES = 500


def grep(args):
    pattern = re.compile(args.pattern)
    found = 0
    for directory, names, files in os.walk(args.directory):
        names[:] = sorted(n for n in names if n not in SKIP)
        for name in sorted(files):
            path = os.path.join(directory, name)
            try:
                with open(path, encoding="utf-8") as f:
                    for number, line in enumerate(f, 1):
                        if pattern.search(line):
                            print(f"{os.path.relpath(path, args.directory)}:{number}:{line.rstrip()}")
                            found += 1
                            if found == MOST_MATCHES:
                                print(f"more than {MOST_MATCHES} matches, narrow the pattern", file=sys.stderr)
                                return 0
            except (UnicodeDecodeError, OSError):
                continue  # not text, or not ours to read
    return 0 if found else 1


def read(args):
    first, last = 1, None
    if args.lines:
        a, _, b = args.lines.partition(":")
        first, last = int(a or 1), int(b) if b else None
    with open(args.file, encoding="utf-8", errors="replace") as f:
        for number, line in enumerate(f, 1):
            if last is not None and number > last:
                break
            if number >= first:
                print(f"{number:6d}  {line.rstrip()}")
    return 0


def edit(args):
    with open(args.file, encoding="utf-8", newline="") as f:
        text = f.read()
    places = text.count(args.old)
    if places != 1:
        print(f"{args.file}: the old text stands there {places} times, want once", file=sys.stderr)
        return 2
    new = args.file + ".harness"
    with open(new, "w", encoding="utf-8", newline="") as f:
        f.write(text.replace(args.old, args.new))
    os.chmod(new, os.stat(args.file).st_mode & 0o7777)
    os.replace(new, args.file)
    return 0


def test(args):
    junit = args.junit or "/tmp/junit.xml"
    os.makedirs(os.path.dirname(junit) or ".", exist_ok=True)
    run = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "junit_family=xunit1",
                          f"--junitxml={junit}", *args.paths], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if run.returncode not in (0, 1):
        print(run.stdout, file=sys.stderr)
        return 2
    passed, failed, errors = 0, [], {}
    for case in xml.parse(junit).iter("testcase"):
        file = case.get("file") or ""
        inside = case.get("classname", "")[len(file) - 3 + 1:]  # what follows the module: the class
        name = "::".join(p for p in (file, inside.replace(".", "::"), case.get("name")) if p)
        broken = [e for e in case if e.tag in ("failure", "error")]
        if broken:
            failed.append(name)
            errors[name] = (broken[0].get("message") or "").split("\n")[0][:200]
        elif not any(e.tag == "skipped" for e in case):
            passed += 1
    print(json.dumps({"passed": passed, "failed": failed, "errors": errors}))
    return 1 if failed else 0


def main():
    parser = argparse.ArgumentParser(prog="harness", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(required=True)
    p = commands.add_parser("grep")
    p.add_argument("pattern")
    p.add_argument("directory", nargs="?", default=".")
    p.set_defaults(run=grep)
    p = commands.add_parser("read")
    p.add_argument("file")
    p.add_argument("--lines", help="A:B, counted from 1")
    p.set_defaults(run=read)
    p = commands.add_parser("edit")
    p.add_argument("file")
    p.add_argument("old")
    p.add_argument("new")
    p.set_defaults(run=edit)
    p = commands.add_parser("test")
    p.add_argument("paths", nargs="*")
    p.add_argument("--junit")
    p.set_defaults(run=test)
    args = parser.parse_args()
    try:
        return args.run(args)
    except (OSError, re.error, ValueError) as e:
        print(f"harness: {e}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
