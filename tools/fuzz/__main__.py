"""Break inputs and run the commands that read them; list what is violated.

    python -m tools.fuzz --seed 1 --cases 1000 [--class run_file ...] [--verbose]

A violation is a traceback, a hang, a crash, code that ran, nonsense that was accepted, or a message
that does not name the file. Each is printed with the seed of its case, which makes it again:

    python -m tools.fuzz --again deepspeed_json:17
"""

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from tools.fuzz.cases import CLASSES
from tools.fuzz.commands import Server
from tools.fuzz.judge import try_case
from tools.fuzz.readers import READERS
from tools.fuzz.setting import prepare


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--class", nargs="+", dest="classes", choices=CLASSES, default=[*CLASSES])
    parser.add_argument("--whole", action="store_true",
                        help="first run every command that reads a class on whole inputs")
    parser.add_argument("--again", nargs="+", default=[], metavar="CLASS:SEED")
    parser.add_argument("--verbose", action="store_true", help="print every case, and all output")
    options = parser.parse_args()
    cases = [(text.split(":")[0], int(text.split(":")[1])) for text in options.again] or [
        (options.classes[number % len(options.classes)], options.seed + number)
        for number in range(options.cases)]
    bad = 0
    with tempfile.TemporaryDirectory() as root, Server() as server:
        setting = prepare(Path(root) / "whole", server)
        for number, command in enumerate(
                command for kind in READERS.values() for command in kind if options.whole):
            place = str(setting.copy(Path(root) / f"whole-{number}"))
            outcome = server.run(replace(command, directory=place))
            if outcome.code:  # a case of it would say nothing of its input
                bad += 1
                print(f"on whole inputs: {command}\n{outcome.errors[-3000:]}", flush=True)
        for name, seed in cases:
            result = try_case(name, seed, setting, server, Path(root) / "case")
            bad += bool(result.violation)
            if result.violation or options.verbose:
                print(result, flush=True)
            if options.verbose or options.again:
                print(result.outcome.output[-3000:], result.outcome.errors[-6000:])
    print(f"{len(cases)} cases, {bad} violations")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
