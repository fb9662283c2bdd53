"""What `asking/` reads from frames and bytecode, checked without torch or pytest.

``python -I -S tests/vocabulary/asking_alone.py`` needs nothing but an interpreter: a package `torch` of a few lines
stands for the real one. `test_asking.py` runs it on the interpreter of the tests.
"""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

PACKAGE = Path(__file__).parents[2] / "horizon_plugin_pytorch"
FILES = sorted(file.stem for file in (PACKAGE / "asking").glob("*.py"))  # all names, whichever file they are in

TORCH = """
import functools

class Module:
    def __init__(self):
        self._forward_pre_hooks, self._forward_hooks = {}, {}

    def __call__(self, *args):
        return self._call_impl(*args)

    def _call_impl(self, *args):
        def inner():
            for hook in self._forward_pre_hooks.values():
                hook(self, args)
            out = self.forward(*args)
            for hook in self._forward_hooks.values():
                hook(self, args, out)
            return out

        return inner()

    def apply(self, function):
        function(self)

    def named_modules(self):
        yield from self.children.items()

class Truth:
    def __init__(self, ask):
        self.ask, self.answers = ask, []

    def __bool__(self):
        self.answers.append(self.ask())
        return self.answers[-1] is not False

def no_grad(function):
    @functools.wraps(function)
    def decorate_context(*args):
        return function(*args)

    return decorate_context
"""

MODEL = """
from torch.nn.modules.module import Module, Truth, no_grad

class Net(Module):
    def __init__(self, ask):
        super().__init__()
        self.ask = ask

    def forward(self, x):
        return self.ask()

class Decorated(Net):
    @no_grad
    def forward(self, x):
        return self.ask()

def twice(function):
    def call(self, x):
        return function(self, x)
    return call

class Renamed(Net):
    @twice
    def forward(self, x):
        return self.helper(x)

    def helper(self, x):
        return [self.ask() for _ in range(1)][0]

class Applying(Net):
    def forward(self, x):
        self.apply(lambda module: x.append(self.ask()))
        return x.pop()

class Calling(Net):
    def __init__(self, ask, inner):
        super().__init__(ask)
        self.inner = inner

    def forward(self, x):
        return self.inner(x), self.ask()

def asserts(truth):
    assert truth, "a message"
    assert truth and truth
    assert not truth

def branches(truth):
    if truth:
        assert truth or truth

def two_calls(ask):
    return ask(), ask()

def loop(ask):
    found = []
    for _ in range(100):
        found.append(ask())
    return found

def is_none(x, ask):
    return ask() if x is None else ask()

def is_not_none(x, ask):
    if x is not None:
        pass
    return ask()

def tests_nothing(x, ask):
    return ask() or None
"""

TOOL = """
from torch.nn.modules.module import no_grad

def run(ask):
    return ask()

def hook(found, ask):
    def call(module, args, out=None):
        found.append(ask())
    return call

class Object:
    def __init__(self, found, ask):
        self.found, self.ask = found, ask

    def method(self, module, args, out=None):
        self.found.append(self.ask())

    __call__ = method
"""


def load(name: str, file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def setup(folder: Path) -> tuple[Any, Any, Any]:
    modules = folder / "torch" / "nn" / "modules"
    modules.mkdir(parents=True)
    for package in (folder / "torch", folder / "torch" / "nn", modules):
        (package / "__init__.py").write_text("")
    (modules / "module.py").write_text(TORCH)
    (folder / "model.py").write_text(MODEL)
    (folder / "my_company_tools.py").write_text(TOOL)
    shutil.copytree(PACKAGE / "asking", folder / "horizon_plugin_pytorch" / "asking")  # alone: the package needs torch
    sys.path.insert(0, str(folder))
    files = (importlib.import_module(f"horizon_plugin_pytorch.asking.{name}") for name in FILES)
    asking = SimpleNamespace(**{name: value for file in files for name, value in vars(file).items()})
    return asking, load("model", folder / "model.py"), load("my_company_tools", folder / "my_company_tools.py")


def check_the_model_asks(asking: Any, model: Any, tool: Any) -> None:
    def ask() -> bool:
        return asking.model_asks(1)

    for name in ("Net", "Decorated", "Renamed", "Applying"):
        assert getattr(model, name)(ask)([]) is True, name
    net = model.Net(ask)
    net.forward = lambda x: ask()  # set on the module itself
    assert net([]) is True
    assert tool.run(ask) is True and tool.run(lambda: asking.model_asks(1, has_call=True)) is False


def check_a_tool_asks(asking: Any, model: Any, tool: Any) -> None:
    found: list[bool] = []

    def ask() -> bool:
        return asking.model_asks(1)

    def hooks() -> list[Any]:
        obj = tool.Object(found, ask)
        return [tool.hook(found, ask), obj, obj.method, tool.no_grad(tool.hook(found, ask))]

    for cls in (model.Net, model.Decorated, model.Renamed):
        for hook in hooks():
            for kind in ("_forward_pre_hooks", "_forward_hooks"):
                net = cls(ask)
                getattr(net, kind)[3] = hook
                assert net([]) is True and found.pop() is False, (cls, hook, kind)
                net.__dict__[asking.OWN_HOOKS] = frozenset({3})
                assert net([]) is True and found.pop() is True, (cls, hook, kind)


def check_as_tool(asking: Any, model: Any, tool: Any) -> None:
    def ask() -> bool:
        return asking.model_asks(1)

    decorated = asking.as_tool()(lambda: tool.run(ask))
    assert decorated() is False and decorated() is False

    def with_stack() -> bool:
        with ExitStack() as stack:
            stack.enter_context(asking.as_tool())
            return tool.run(ask)

    assert with_stack() is False
    with asking.as_tool():
        assert tool.run(ask) is False
        assert model.Net(ask)([]) is True  # the model runs inside the tool
        assert model.Net(lambda: tool.run(decorated))([]) is False  # and a tool inside the model
        assert model.Calling(ask, model.Net(decorated))([]) == (False, True)
        other: list[bool] = []
        thread = threading.Thread(target=lambda: other.append(tool.run(ask)))
        thread.start()
        thread.join()
        assert other == [True]
        try:
            with asking.as_tool():
                raise ValueError
        except ValueError:
            assert tool.run(ask) is False
    assert tool.run(ask) is True


def check_call_sites(asking: Any, model: Any, tool: Any) -> None:
    def site() -> Any:
        return asking.calls_to_here()

    def ask() -> Any:
        return [place for place in site()[0] if place[0].startswith("model.")]

    first, second = model.two_calls(ask)
    assert [place[0] for place in first] == ["model.two_calls"] and first[0][1] != second[0][1]
    assert first[0][2] == second[0][2]
    for _ in range(50):  # the interpreter specialises what runs often
        assert model.two_calls(ask) == (first, second)
    assert all(place == model.loop(ask)[0] for place in model.loop(ask))
    line = MODEL.splitlines().index("    return ask(), ask()") + 1
    assert model.two_calls(lambda: asking.calls_to_here()[1])[0].startswith("asking_alone.py:")
    assert model.two_calls(asking.user_line) == (f"model.py:{line}",) * 2
    assert f'model.py", line {line}, in two_calls' in model.two_calls(asking.user_frames)[0].splitlines()[-1]


def check_bytecode(asking: Any, model: Any, tool: Any) -> None:
    ask = asking.user_tests_none
    assert model.is_none(None, ask) and model.is_none(1, ask) and model.is_not_none(1, ask)
    assert not model.tests_nothing(1, ask)
    truth = model.Truth(asking.asserted_answer)
    model.asserts(truth)
    assert truth.answers == [True, True, True, False]
    truth = model.Truth(asking.asserted_answer)
    model.branches(truth)
    assert truth.answers == [None, None]
    assert asking.names_in(model.Renamed.helper) >= {"range", "ask"}
    assert {"inner", "ask"} <= asking.names_in(model.Calling.forward)
    line = MODEL.splitlines().index("def two_calls(ask):") + 1
    assert asking.definition_line(model.two_calls) == f"model.py:{line}" and asking.definition_line(len) == ""
    assert asking.is_user_function(model.two_calls) and not asking.is_user_function(len)
    assert asking.is_library_function(tool.no_grad) and not asking.is_library_function(model.two_calls)


def check_lines(asking: Any, model: Any, tool: Any) -> None:
    def fail() -> None:
        raise ValueError

    line = ""
    try:
        model.two_calls(fail)
    except ValueError as error:
        line = asking.error_line(error)
    assert line.startswith("asking_alone.py:")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.two_calls(lambda: warnings.warn("", stacklevel=asking.levels_to_user()))
    assert len(caught) == 2


def check_interrupted_calls(asking: Any, model: Any, tool: Any) -> None:
    calls: list[Any] = []

    def ask() -> bool:
        calls.append(asking.CallInProgress())
        return calls[-1].is_over()

    def interrupt() -> None:
        calls.append(asking.CallInProgress())
        raise KeyboardInterrupt

    assert model.Net(ask)([]) is False and calls[-1].is_over()
    with suppress(KeyboardInterrupt):
        model.Net(interrupt)([])
    assert calls[-1].is_over()


CHECKS: list[Callable[[Any, Any, Any], None]] = [
    check_the_model_asks,
    check_a_tool_asks,
    check_as_tool,
    check_call_sites,
    check_bytecode,
    check_lines,
    check_interrupted_calls,
]

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        given = setup(Path(folder))
        for check in CHECKS:
            check(*given)
    print(f"{len(CHECKS)} checks of asking/ on Python {sys.version.split()[0]}")
