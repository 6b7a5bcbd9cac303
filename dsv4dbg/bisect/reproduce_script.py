"""Runs one call of a kernel that is at fault. README.md says what the fault is.

    python reproduce.py                                     exit code 1 while the fault exists
    python reproduce.py --implementation fixed.py:kernel    the same call with another kernel: 0 if it is right

The call is made in a child process, which may crash or hang. Exit code 0: right; 1: wrong; 2: it could not run.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
START = 300  # seconds in which the child must be ready to run


def run(arguments: argparse.Namespace, timeout: float) -> tuple[str, Any]:
    """The child's last word: what was wrong, or how it ended without a result."""
    from dsv4dbg.bisect.faults import classify
    from dsv4dbg.kernels.child import Child

    words = (str(HERE), arguments.device, arguments.implementation)
    # without the safe path, a package of the same name in the current directory would come first
    child = Child("dsv4dbg.bisect.case", {"PYTHONSAFEPATH": "1"}, (), words)
    ranges: Any = None
    try:
        while child.connection.poll(START if ranges is None else timeout):
            kind, what = child.connection.recv()
            if kind == "device":
                print(f"device: {what}")
                ranges = ()
            elif kind == "ranges":
                ranges = what
            elif kind == "raised":
                return "fault", classify(raised=what[0], text=what[1], words=child.last_words, ranges=ranges or ()).text
            else:
                return kind, what
        if ranges is None:
            return "unusable", f"the child process was not ready within {START} s"
        return "fault", classify(hang=timeout, words=child.last_words).text
    except (EOFError, OSError):
        code = child.reap()
        text = classify(exitcode=code, words=child.last_words, ranges=ranges or ()).text
        return ("unusable", f"before the call: {text}") if ranges is None else ("fault", text)
    finally:
        child.close(kill=True)


def main() -> int:
    sys.path.insert(0, str(HERE / "vendored"))
    sys.path += [str(HERE / "implementation"), str(HERE / "placeholders")]
    case = json.loads((HERE / "case.json").read_text(encoding="utf-8"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="", help="cpu, cuda or cuda:N (default: cuda where there is one)")
    parser.add_argument("--implementation", default="", metavar="FILE:FUNCTION", help="run this function instead")
    parser.add_argument("--timeout", type=float, default=case["timeout"], help="seconds that a run may take")
    arguments = parser.parse_args()
    if arguments.implementation:
        path, _, name = arguments.implementation.rpartition(":")
        arguments.implementation = f"{Path(path).resolve()}:{name}"
    print(f"{case['op']} at {case['site']}: {arguments.implementation or case['implementation']}")
    kind, what = run(arguments, arguments.timeout)
    if kind == "unusable":
        print(f"could not run: {what}", file=sys.stderr)
        return 2
    sentences = what if isinstance(what, list) else [what]
    print("\n".join(f"wrong: {sentence}" for sentence in sentences) or "right")
    return 1 if sentences else 0


if __name__ == "__main__":
    sys.exit(main())
