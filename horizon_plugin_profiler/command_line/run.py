"""Read the command line, run a command, print what it found, and say by the exit code how it went."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from horizon_plugin_profiler.command_line import commands, reports
from horizon_plugin_profiler.command_line.arguments import parser_of
from horizon_plugin_profiler.command_line.commands import Result
from horizon_plugin_profiler.command_line.outcomes import BROKEN, DEFECT, FINE, INTERRUPTED, NOT_DONE
from horizon_plugin_pytorch.asking.owners import is_user_code
from horizon_plugin_pytorch.asking.stack import user_traceback
from horizon_plugin_pytorch.errors import HorizonError

_COMMANDS: dict[str, Callable[[Any], Result]] = {
    "check": commands.check,
    "memory": commands.memory,
    "profile": reports.profile,
    "compare": reports.compare,
    "show": commands.show,
    "open": commands.show,
    "nodes": commands.nodes,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: None is what was typed.

    Returns:
        The exit code: 0 fine, 1 a limit is broken, 2 wrong usage or a model that cannot be loaded or run, 3 a defect.

    >>> main(["check", "no_such_module:make", "--input", "1x3"])
    2
    """
    parser = parser_of()
    try:
        options = parser.parse_args(arguments)
    except SystemExit as end:  # argparse has printed why
        return end.code if isinstance(end.code, int) else NOT_DONE
    if options.command is None:
        parser.print_help()
        return NOT_DONE
    try:
        # What the tools and the user's code print is beside the point: stdout has the result, and with --json only it.
        with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
            warnings.showwarning = _show_warning
            result = _COMMANDS[options.command](options)
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return INTERRUPTED
    except HorizonError as error:
        return _tell_failure(error, options.json)
    except Exception:
        traceback.print_exc()
        print("This is a defect of horizon_plugin_profiler; please report it with the lines above.", file=sys.stderr)
        return DEFECT
    return _tell(result, options.json)


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """A warning with its line if that is a line of the user's, who has not called the tools."""
    place = f"{filename}:{lineno}: " if is_user_code(filename) and not filename.startswith("<") else ""
    print(f"{place}{category.__name__}: {message}", file=sys.stderr)


def _tell(result: Result, is_json: bool) -> int:
    code = BROKEN if result.broken else FINE
    if is_json:
        limits = [vars(limit) | {"text": str(limit)} for limit in result.broken]
        data = {**result.data, "broken": limits, "exit_code": code}
        _print(json.dumps(_plain(data), ensure_ascii=False, indent=1, allow_nan=False))
    else:
        lines = [f"  {limit}" for limit in result.broken]
        _print("\n".join([result.text, *([f"{len(lines)} limit(s) broken:", *lines] if lines else [])]))
    return code


def _tell_failure(error: HorizonError, is_json: bool) -> int:
    lines = "" if error.__cause__ is None else user_traceback(error.__cause__)
    if lines:
        print(f"In your code:\n{lines}", end="", file=sys.stderr)
    print(f"error: {error}", file=sys.stderr)
    if is_json:
        _print(json.dumps({"error": str(error), "exit_code": NOT_DONE}, ensure_ascii=False))
    return NOT_DONE


def _print(text: str) -> None:
    """Print, whatever the terminal's encoding; whoever reads may have gone, as `head` does."""
    encoding = sys.stdout.encoding or "utf-8"
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains once more at its end


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinities: they are strings."""
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    return value
