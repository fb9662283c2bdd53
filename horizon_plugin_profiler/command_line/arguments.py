"""What can be typed: the parser of the command line."""

from __future__ import annotations

import argparse

from horizon_plugin_pytorch.analysis.profile.profiler import MODES
from horizon_plugin_pytorch.analysis.profile.tasks import TASKS
from horizon_plugin_pytorch.march import March
from horizon_plugin_pytorch.statistics.metrics import METRICS

PROGRAM = "python -m horizon_plugin_profiler"
_EXAMPLES = f"""examples:
  {PROGRAM} check   my_project.models:make_qat --input 1x3x224x224 --march nash-e
  {PROGRAM} profile nets/resnet.py:float_and_qat --input images.npy --out report
  {PROGRAM} show    report/profiler.json
  {PROGRAM} compare monday/profiler.json tuesday/profiler.json --thresholds limits.toml
  {PROGRAM} memory  nets/resnet.py:make --input 8x3x224x224
  {PROGRAM} nodes   report quantized.onnx

A model is module:function or file.py:function; the function takes nothing and gives a model, or a pair
(float model, quantized model).

exit codes: 0 fine; 1 a limit of the threshold file is broken; 2 wrong usage, or the model cannot be loaded or run;
3 a defect of this tool."""
_INPUT = (
    "[NAME=]SHAPE[:DTYPE[:LOW:HIGH]], as 1x3x224x224 or ids=1x128:int64:0:30000, or [NAME=]FILE (.npy, .npz, .pt); "
    "once for each argument of the forward"
)


def parser_of() -> argparse.ArgumentParser:
    """The parser with all commands."""
    parser = argparse.ArgumentParser(
        PROGRAM,
        description="Check, measure, profile and compare models on their way to integers.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    _check(commands)
    _memory(commands)
    _profile(commands)
    _compare(commands)
    _show(commands, "show", "print what a report says, and where its page is")
    _show(commands, "open", "the same, and open the page in a browser")
    _nodes(commands)
    return parser


def _command(commands: argparse._SubParsersAction, name: str, text: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False)
    parser.add_argument("--thresholds", metavar="FILE", help="limits (TOML, or JSON): exit with 1 if one is broken")
    parser.add_argument("--json", action="store_true", help="print the result as JSON; all else goes to stderr")
    return parser


def _takes_model(parser: argparse.ArgumentParser, is_required: bool = True) -> None:
    parser.add_argument("--input", action="append", default=[], metavar="SPEC", required=is_required, help=_INPUT)
    parser.add_argument("--seed", type=int, default=0, help="of random inputs (default: %(default)s)")
    parser.add_argument("--march", choices=[m.value for m in March], help="the chip, if the model's code does not say")


def _check(commands: argparse._SubParsersAction) -> None:
    parser = _command(commands, "check", "look for what is not fused, not called, or has formats to look at")
    parser.add_argument("model", help="module:function; of a pair, the second model is checked")
    _takes_model(parser)
    parser.add_argument("--checkpoint", metavar="FILE", help="a state dict to load first")
    parser.add_argument("--out", metavar="FOLDER", help="write the tables there (model_check_result.txt)")


def _memory(commands: argparse._SubParsersAction) -> None:
    parser = _command(commands, "memory", "measure what each operator allocates, forward and backward")
    parser.add_argument("model", help="module:function; of a pair, the second model is measured")
    _takes_model(parser)
    parser.add_argument("--loss", metavar="MODULE:FUNCTION", help="of the model's output; the sum of it if not given")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    parser.add_argument("--out", default=".", metavar="FOLDER", help="of mem_info.html (default: the current one)")
    parser.add_argument("--top", type=int, default=10, metavar="N", help="rows to print (default: %(default)s)")


def _profile(commands: argparse._SubParsersAction) -> None:
    parser = _command(commands, "profile", "compare two stages of a model operator by operator, and write the page")
    parser.add_argument("model", help="module:function of a pair (float model, quantized model), or of the first one")
    parser.add_argument("second", nargs="?", help="module:function of the second model, if the first gives no pair")
    _takes_model(parser)
    _compares(parser, "profiler")
    parser.add_argument("--checkpoint", metavar="FILE", help="a state dict to load into the second model first")


def _compares(parser: argparse.ArgumentParser, folder: str) -> None:
    parser.add_argument("--batch", type=int, metavar="N", help="cut the inputs into batches of N; all of them are used")
    parser.add_argument("--mode", choices=list(MODES), help="what is compared; found out if not given")
    parser.add_argument("--out", default=folder, metavar="FOLDER", help="for all files (default: %(default)s)")
    parser.add_argument("--similarity", choices=list(METRICS), default="Cosine", help="(default: %(default)s)")
    parser.add_argument("--task", choices=[task for task in TASKS if task], default="", help="sets what error is fine")
    parser.add_argument("--metric", metavar="MODULE:FUNCTION", help="gives the task's metric of a model, a number")
    parser.add_argument("--lower-is-better", action="store_true", help="for the metric")
    parser.add_argument("--top", type=int, default=10, metavar="N", help="operators to print (default: %(default)s)")


def _compare(commands: argparse._SubParsersAction) -> None:
    parser = _command(commands, "compare", "put runs side by side: reports, or checkpoints of one model")
    parser.add_argument("runs", nargs="+", help="two or more profiler.json; or module:function with --checkpoint")
    parser.add_argument(
        "--checkpoint", action="append", default=[], metavar="FILE",
        help="a state dict of the quantized model; at least twice",
    )  # fmt: skip
    _takes_model(parser, is_required=False)
    _compares(parser, "compare")


def _show(commands: argparse._SubParsersAction, name: str, text: str) -> None:
    parser = _command(commands, name, text)
    parser.add_argument("report", help="profiler.json, or the folder that it is in")
    parser.add_argument("--top", type=int, default=10, metavar="N", help="operators to print (default: %(default)s)")


def _nodes(commands: argparse._SubParsersAction) -> None:
    text = "write what a report says as node data of Model Explorer, for an exported ONNX file"
    parser = commands.add_parser("nodes", help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False)
    parser.add_argument("report", help="profiler.json, or the folder that it is in")
    parser.add_argument("file", help="ONNX, exported of one of the two models of the report")
    parser.add_argument("--out", metavar="FOLDER", help="for the files (default: the folder of the ONNX file)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON; all else goes to stderr")
