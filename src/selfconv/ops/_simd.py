"""A vector of numbers as a Numba type, with the few operations the CPU kernels need.

Numba leaves it to LLVM to find vector loops, and LLVM finds few in kernels like ours: pointers that may
alias, short inner loops, an ``exp`` that is a library call. So the kernels say what they mean: a value of
type ``Vector`` is ``PARTS`` registers' worth of lanes, each operation below is the LLVM instruction of the
same name on all of them, and LLVM is left with what it is good at (registers, addresses, the machine's
own vector width). Several registers side by side hide the latency of the multiply-adds and share each
broadcast filter value.

``gather``/``scatter`` read and write the parts at ``PARTS`` offsets of their own, so that a vector may
span several rows of a map; ``load``/``store`` treat the lanes as one run.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, overload, register_model

PART_BYTES = 32  # one AVX register; other machines split or pair it
PARTS = 4
OFFSETS = types.UniTuple(types.intp, PARTS)
INT32 = ir.IntType(32)


class Vector(types.Type):
    """``PARTS`` parts of ``part`` lanes each."""

    def __init__(self, dtype: types.Float) -> None:
        self.dtype = dtype
        self.part = PART_BYTES * 8 // dtype.bitwidth
        self.lanes = PARTS * self.part
        super().__init__(f"Vector({dtype} x {self.lanes})")


@register_model(Vector)
class VectorModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Vector) -> None:
        super().__init__(dmm, fe_type, _llvm(fe_type))


def _llvm(t: Vector, lanes: int | None = None) -> ir.VectorType:
    element = ir.FloatType() if t.dtype == types.float32 else ir.DoubleType()
    return ir.VectorType(element, lanes or t.lanes)


def _constant(t: Vector, value: float) -> ir.Constant:
    return ir.Constant(_llvm(t), [value] * t.lanes)


def _shuffle(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, lanes: list[int]) -> ir.Value:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(INT32, len(lanes)), lanes))


def _undefined(t: ir.Type) -> ir.Constant:
    return ir.Constant(t, ir.Undefined)


def _splat(builder: ir.IRBuilder, scalar: ir.Value, lanes: int) -> ir.Value:
    t = ir.VectorType(scalar.type, lanes)
    first = builder.insert_element(_undefined(t), scalar, INT32(0))
    return _shuffle(builder, first, _undefined(t), [0] * lanes)


def _concatenate(builder: ir.IRBuilder, vectors: list[ir.Value]) -> ir.Value:
    while len(vectors) > 1:
        n = vectors[0].type.count
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [_shuffle(builder, a, b, list(range(2 * n))) for a, b in pairs]
    return vectors[0]


def _parts(builder: ir.IRBuilder, v: ir.Value, t: Vector) -> list[ir.Value]:
    runs = [list(range(i * t.part, (i + 1) * t.part)) for i in range(PARTS)]
    return [_shuffle(builder, v, _undefined(v.type), run) for run in runs]


def _address(builder: ir.IRBuilder, pointer: ir.Value, index: ir.Value, t: Vector, lanes: int) -> ir.Value:
    return builder.bitcast(builder.gep(pointer, [index]), _llvm(t, lanes).as_pointer())


def _call(builder: ir.IRBuilder, name: str, t: Vector, args: list[ir.Value]) -> ir.Value:
    """An LLVM intrinsic on vectors of the arguments' type."""
    vector = args[0].type
    function = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(vector, [vector] * len(args)),
        f"llvm.{name}.v{vector.count}f{t.dtype.bitwidth}",
    )
    return builder.call(function, args)


def _bytes(t: Vector) -> int:
    return t.dtype.bitwidth // 8


# ---- memory ----


@intrinsic
def pointer(typingctx: Any, address: Any, dtype: Any) -> Any:
    """An integer address as a pointer to numbers of that type."""
    result = types.CPointer(dtype.dtype)

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return builder.inttoptr(args[0], context.get_value_type(result))

    return result(types.int64, dtype), codegen


@intrinsic
def advance(typingctx: Any, p: Any, n: Any) -> Any:
    """p + n."""
    return p(p, types.intp), lambda context, builder, sig, args: builder.gep(args[0], [args[1]])


@intrinsic
def fetch_add(typingctx: Any, p: Any, i: Any, n: Any) -> Any:
    """The value of p[i], to which n is added atomically: how threads share out work."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return builder.atomic_rmw("add", builder.gep(args[0], [args[1]]), args[2], "monotonic")

    return types.int64(types.CPointer(types.int64), types.intp, types.int64), codegen


@intrinsic
def gather(typingctx: Any, p: Any, offsets: Any, shift: Any) -> Any:
    """The parts at p[offset + shift] for each of the offsets."""
    t = Vector(p.dtype)

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        start = builder.gep(args[0], [args[2]])
        places = [_address(builder, start, o, t, t.part) for o in cgutils.unpack_tuple(builder, args[1])]
        return _concatenate(builder, [builder.load(place, align=_bytes(t)) for place in places])

    return t(p, OFFSETS, types.intp), codegen


@intrinsic
def scatter(typingctx: Any, p: Any, offsets: Any, shift: Any, v: Any) -> Any:
    """Writes the parts of v to p[offset + shift] for each of the offsets."""
    t = Vector(p.dtype)

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        start = builder.gep(args[0], [args[2]])
        offsets = cgutils.unpack_tuple(builder, args[1])
        for offset, part in zip(offsets, _parts(builder, args[3], t), strict=True):
            builder.store(part, _address(builder, start, offset, t, t.part), align=_bytes(t))
        return context.get_dummy_value()

    return types.void(p, OFFSETS, types.intp, t), codegen


@intrinsic
def load(typingctx: Any, p: Any, i: Any) -> Any:
    """The lanes from p[i] on."""
    t = Vector(p.dtype)

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return builder.load(_address(builder, args[0], args[1], t, t.lanes), align=_bytes(t))

    return t(p, types.intp), codegen


@intrinsic
def store(typingctx: Any, p: Any, i: Any, v: Any) -> Any:
    """Writes the lanes of v from p[i] on."""
    t = Vector(p.dtype)

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        builder.store(args[2], _address(builder, args[0], args[1], t, t.lanes), align=_bytes(t))
        return context.get_dummy_value()

    return types.void(p, types.intp, t), codegen


@intrinsic
def broadcast(typingctx: Any, p: Any, i: Any) -> Any:
    """p[i] in all lanes."""
    t = Vector(p.dtype)

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return _splat(builder, builder.load(builder.gep(args[0], [args[1]])), t.lanes)

    return t(p, types.intp), codegen


@intrinsic
def splat(typingctx: Any, x: Any) -> Any:
    """x in all lanes."""
    t = Vector(x)
    return t(x), lambda context, builder, sig, args: _splat(builder, args[0], t.lanes)


# ---- arithmetic ----


@intrinsic
def fma(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """a·b + c, rounded once."""
    return a(a, a, a), lambda context, builder, sig, args: _call(builder, "fma", a, list(args))


@intrinsic
def maximum(typingctx: Any, a: Any, b: Any) -> Any:
    """The larger of a and b; b if either is NaN."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return builder.select(builder.fcmp_ordered(">", args[0], args[1]), args[0], args[1])

    return a(a, a), codegen


def _operator(python: Any, llvm: str) -> None:
    @intrinsic
    def instruction(typingctx: Any, a: Any, b: Any) -> Any:
        return a(a, b), lambda context, builder, sig, args: getattr(builder, llvm)(*args)

    @overload(python)
    def _(a, b):  # type: ignore[no-untyped-def]  # Numba compares its signature with the lambda's
        if isinstance(a, Vector) and a == b:
            return lambda a, b: instruction(a, b)
        return None


_operator(operator.add, "fadd")
_operator(operator.sub, "fsub")
_operator(operator.mul, "fmul")
_operator(operator.truediv, "fdiv")


def _exp2_polynomial(degree: int) -> list[float]:
    """Coefficients of 2^f on [−1/2, 1/2], highest first: least relative squares on Chebyshev points."""
    f = np.cos((np.arange(64) + 0.5) * np.pi / 64) / 2
    weight = np.exp2(-f)
    coefficients, *_ = np.linalg.lstsq(np.vander(f, degree + 1) * weight[:, None], np.ones(64), rcond=None)
    return coefficients.tolist()


@intrinsic
def exp2(typingctx: Any, x: Any) -> Any:
    """2^x for x ≤ 0, to the last bits of the type; what would underflow becomes its least normal number.

    2^x = 2^n 2^f with n the nearest integer: adding 1.5·2^23 (float32) leaves n in the low bits of the sum,
    which then go straight into the exponent of the polynomial's value.
    """
    single = x.dtype == types.float32
    least, digits, degree = (-126.0, 23, 6) if single else (-1022.0, 52, 12)
    integers = ir.VectorType(ir.IntType(x.dtype.bitwidth), x.lanes)

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        (value,) = args
        floor, magic = _constant(x, least), _constant(x, 1.5 * 2.0**digits)
        value = builder.select(builder.fcmp_ordered(">", floor, value), floor, value)  # NaN stays NaN
        shifted = builder.fadd(value, magic)
        fraction = builder.fsub(value, builder.fsub(shifted, magic))
        first, *rest = _exp2_polynomial(degree)
        power = _constant(x, first)
        for coefficient in rest:
            power = _call(builder, "fma", x, [power, fraction, _constant(x, coefficient)])
        exponent = builder.shl(builder.bitcast(shifted, integers), ir.Constant(integers, [digits] * x.lanes))
        return builder.bitcast(builder.add(builder.bitcast(power, integers), exponent), _llvm(x))

    return x(x), codegen


@intrinsic
def log2(typingctx: Any, x: Any) -> Any:
    """log2 of each lane, by the library: once per softmax, not worth a polynomial."""
    element = _llvm(x).element

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        (v,) = args
        name = f"llvm.log2.f{x.dtype.bitwidth}"
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(element, [element]), name)
        for lane in map(INT32, range(x.lanes)):
            v = builder.insert_element(v, builder.call(function, [builder.extract_element(v, lane)]), lane)
        return v

    return x(x), codegen


# ---- sums over lanes: kept as one part in memory, finished by the caller ----


@intrinsic
def accumulate(typingctx: Any, p: Any, i: Any, v: Any) -> Any:
    """Adds all parts of v to the one part at p[i]."""
    t = Vector(p.dtype)

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        place = _address(builder, args[0], args[1], t, t.part)
        total = builder.load(place, align=_bytes(t))
        for part in _parts(builder, args[2], t):
            total = builder.fadd(total, part)
        builder.store(total, place, align=_bytes(t))
        return context.get_dummy_value()

    return types.void(p, types.intp, t), codegen


@intrinsic
def accumulate_product(typingctx: Any, p: Any, i: Any, u: Any, v: Any) -> Any:
    """Adds all parts of u·v to the one part at p[i]."""
    t = Vector(p.dtype)

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        place = _address(builder, args[0], args[1], t, t.part)
        total = builder.load(place, align=_bytes(t))
        for a, b in zip(_parts(builder, args[2], t), _parts(builder, args[3], t), strict=True):
            total = _call(builder, "fma", t, [a, b, total])
        builder.store(total, place, align=_bytes(t))
        return context.get_dummy_value()

    return types.void(p, types.intp, t, t), codegen


@intrinsic
def lanes_of(typingctx: Any, dtype: Any) -> Any:
    """Lanes in one part of a vector of that type, a constant."""
    lanes = Vector(dtype.dtype).part
    return types.intp(dtype), lambda context, builder, sig, args: context.get_constant(types.intp, lanes)
