"""Makes Triton's interpreter exact for bfloat16; import before any kernel, in a process that has not loaded triton.

The interpreter keeps bfloat16 as its bits in uint16. Left alone it multiplies those bits as integers in `tl.dot`, cuts
off instead of rounding to nearest even when it stores float32 as bfloat16, and, with NumPy from 2.4 on, refuses loops
over a runtime value. Arithmetic directly on bfloat16 is refused: kernels convert to float32 first.

Most of its time goes into what tells nothing here. At every call of a function by another it replaces the whole language
by what interprets it: here once a launch. Sums of integers are computed again with 64 bits, to say that 32 are too few: here
they wrap around, as on a card. It makes the type of every tuple, of shapes above all, and a table of NumPy's types at every
use of one: here a tuple has a type when it is asked for, and the table is made once.
"""

from __future__ import annotations

import inspect
import os
import sys
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any

if os.environ.get("TRITON_INTERPRET") != "1" and "triton" in sys.modules:
    raise RuntimeError("triton is loaded already, for a GPU: interpret in a fresh process")
os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

Builder, Handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
_plain_cast, _plain_dot, _plain_binary = Builder.cast_impl, Builder.create_dot, Builder.binary_op
_plain_tensor_patch, _plain_patch = interpreter._patch_lang_tensor, interpreter._patch_lang
_plain_np_dtype = interpreter._get_np_dtype


def widen(handle: Any) -> np.ndarray:
    """Values of a handle as float32 if it holds 16-bit floats, as they are otherwise."""
    if handle.dtype.scalar == tl.bfloat16:
        return np.left_shift(handle.data.astype(np.uint32), 16).view(np.float32)
    return handle.data.astype(np.float32) if handle.dtype.scalar == tl.float16 else handle.data


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Bits of float32 values rounded to the nearest bfloat16, ties to even; NaN stays NaN."""
    bits = np.atleast_1d(values.astype(np.float32)).view(np.uint32).reshape(np.shape(values))
    upper, lower = bits >> 16, bits & 0xFFFF
    up = (lower > 0x8000) | ((lower == 0x8000) & (upper & 1 == 1))
    return np.where(np.isnan(values), 0x7FC0, upper + up).astype(np.uint16)


def _cast(self: Any, source: Any, target: Any) -> Any:
    before, after = source.dtype.scalar, target.scalar
    if after == tl.bfloat16 != before:
        return Handle(to_bfloat16(widen(source)), after)
    if before == tl.bfloat16 != after:
        return Handle(widen(source).astype(_np_dtype(target)), after)
    return _plain_cast(self, source, target)


def _convert(self: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
    return _cast(self, source, target)


def _dot(self: Any, a: Any, b: Any, total: Any, precision: Any, imprecise: Any) -> Any:
    # tensor cores multiply 16-bit floats exactly and add in float32
    return Handle(np.matmul(widen(a), widen(b), dtype=np.float32) + total.data, total.dtype.scalar)


def _binary(self: Any, left: Any, right: Any, operation: Any) -> Any:
    if left.dtype.scalar == tl.bfloat16:
        raise TypeError("arithmetic on bfloat16: convert to float32 first")
    return _plain_binary(self, left, right, operation)


def _patch_tensor(tensor: Any, scope: Any) -> None:
    _plain_tensor_patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


@lru_cache
def _builtins(package: Any) -> list[tuple[str, Any]]:
    return [(name, member) for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]


def _is_replaced(package: Any) -> bool:
    name, member = _builtins(package)[0]
    return getattr(package, name) is not member


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    if not _is_replaced(package):
        for name, member in _builtins(package):
            interpreter._patch_attr(package, name, member, builder, scope)


@lru_cache
def _languages(function: Any) -> list[Any]:
    return [value for value in function.__globals__.values() if value is tl or value is tl.core]


def _patch_lang(function: Any) -> Any:
    if all(map(_is_replaced, (tl.tensor, *_languages(function)))):
        return interpreter._LangPatchScope()
    return _plain_patch(function)


@lru_cache
def _np_dtype_of(scalar: Any) -> Any:
    return _plain_np_dtype(scalar)


def _np_dtype(of: Any) -> Any:
    scalar = of.scalar
    return np.dtype(np.uint64) if isinstance(scalar, tl.pointer_type) else _np_dtype_of(scalar)


def _make_tuple(self: Any, values: Any, type: Any = None) -> None:
    self.values = [*values]
    if type is not None:
        self.type = type if isinstance(type, tl.tuple_type) else tl.tuple_type(type)


def _type_of(self: Any) -> Any:
    return tl.core._type_for_tuple_values(self.values)


def _with_element(self: Any, element: Any) -> Any:
    made = object.__new__(tl.block_type)  # the shape has been found to be one
    made.element_ty, made.shape, made.numel = element, self.shape, self.numel
    made.name = f"<{self.shape}, {element}>"
    return made


for package in (tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base):
    _builtins(package)  # before anything is replaced
Builder.cast_impl, Builder.create_fp_to_fp = _cast, _convert
Builder.create_dot, Builder.binary_op = _dot, _binary
interpreter._patch_lang_tensor, interpreter._patch_lang = _patch_tensor, _patch_lang
interpreter._patch_builtin, interpreter._get_np_dtype = _patch_builtin, _np_dtype
interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
tl.block_type.with_element_ty = _with_element
tl.tuple.__init__, tl.tuple.type = _make_tuple, cached_property(_type_of)
tl.tuple.type.__set_name__(tl.tuple, "type")
