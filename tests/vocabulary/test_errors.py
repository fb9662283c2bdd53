"""Errors: one family, and places in the user's code."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os

import pytest
import torch

from horizon_plugin_pytorch import errors
from horizon_plugin_pytorch.asking.owners import is_user_code
from horizon_plugin_pytorch.asking.stack import user_line
from horizon_plugin_pytorch.errors import HorizonError, at, source_line

PACKAGE = os.path.dirname(errors.__file__)
TORCH = os.path.dirname(torch.__file__)
CLASSES = [c for _, c in inspect.getmembers(errors, inspect.isclass) if c.__module__ == errors.__name__]


@pytest.mark.parametrize("cls", CLASSES)
def test_every_error_is_of_the_family_and_of_a_builtin_kind(cls: type) -> None:
    if issubclass(cls, Warning):
        assert issubclass(cls, UserWarning)
    else:
        assert issubclass(cls, HorizonError)
        builtin = (RuntimeError, ValueError, NotImplementedError)
        assert cls is HorizonError or issubclass(cls, builtin)
    assert cls.__doc__


@pytest.mark.parametrize(
    ("file", "is_user"),
    [("/home/me/torch/model.py", True), ("/home/me/horizon_plugin_pytorch/train.py", True), ("model.py", True),
     (f"{TORCH}/nn/modules/conv.py", False), (f"{PACKAGE}/nn/qat/conv2d.py", False), ("<eval_with_key>.12", False),
     (inspect.__file__, False), (pytest.__file__, True)],
)  # fmt: skip
def test_user_code_is_what_is_not_of_python_torch_or_this_package(file: str, is_user: bool) -> None:
    assert is_user_code(file) is is_user


def test_a_line_of_the_standard_library_is_not_the_users() -> None:
    asked: list[str] = []
    with contextlib.ExitStack() as stack:
        stack.push(lambda *error: None)
        stack.callback(functools.partial(_ask, asked))  # contextlib.py calls it
    assert asked and asked[0].startswith("test_errors.py:")


_ask = eval("lambda asked: asked.append(user_line())", {"user_line": user_line})  # code of nobody's file
_ask.__code__ = _ask.__code__.replace(co_filename=f"{TORCH}/x.py")


def test_the_innermost_user_line_is_found() -> None:
    trace = "\n".join(
        f'  File "{file}", line {line}, in forward\n    x'
        for file, line in [
            ("/a/train.py", 3),
            ("/a/torch/model.py", 41),
            (f"{TORCH}/nn/functional.py", 9),
            (f"{PACKAGE}/x.py", 2),
        ]
    )
    assert source_line(trace) == "model.py:41"
    for nothing in (None, "", "no frames", f'File "{TORCH}/x.py", line 1'):
        assert source_line(nothing) == ""


def test_places_read_as_in_the_style_guide() -> None:
    assert at("backbone.block1", "model.py:41") == "at `backbone.block1` (model.py:41)"
    assert at("backbone") == "at `backbone`"
    assert at("") == "in the top module"
