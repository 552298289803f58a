"""Sampling parameters as options: their texts are read from where the fields are declared."""

from __future__ import annotations

import ast
import functools
import inspect
import sys

import msgspec

from penstock.config.options import Option, describe
from penstock.protocol.sampling import SamplingParams


@functools.cache
def sampling_options() -> tuple[Option, ...]:
    """Every field of `SamplingParams`, in order, with the docstring beneath it as its help."""
    texts = _field_docstrings(SamplingParams)
    return tuple(
        describe(field.name, texts[field.name], field.default, field.type)
        for field in msgspec.structs.fields(SamplingParams)
    )


def _field_docstrings(declaring_class: type) -> dict[str, str]:
    """The string that follows each annotated field in the class's source, on one line.

    ``{NAME}`` in it stands for a constant of the class's module.
    """
    constants = vars(sys.modules[declaring_class.__module__])
    (class_node,) = ast.parse(inspect.getsource(declaring_class)).body
    assert isinstance(class_node, ast.ClassDef)
    texts = {}
    for statement, follower in zip(class_node.body, class_node.body[1:], strict=False):
        match statement, follower:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                texts[name] = " ".join(text.split()).format_map(constants)
    return texts
