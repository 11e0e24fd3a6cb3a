"""A vector of numbers as a Numba type, with the few operations the CPU kernels need.

Numba leaves it to LLVM to find vector loops, and LLVM finds few in kernels like ours: pointers that may
alias, short inner loops, an ``exp`` that is a library call. So the kernels say what they mean: a value of
type ``Vector`` is ``PARTS`` registers' worth of lanes, each operation below is the LLVM instruction of the
same name on all of them, and LLVM is left with what it is good at (registers, addresses, the machine's
own vector width). Several registers side by side hide the latency of the multiply-adds and share each
broadcast filter value.

``gather``/``scatter`` read and write the parts one below the other, in ``PARTS`` rows of a map;
``load``/``store`` treat the lanes as one run.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, overload, register_model

PART_BYTES = 32  # one AVX register; other machines split or pair it
PARTS = 4
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


def _opaque(builder: ir.IRBuilder, p: ir.Value) -> ir.Value:
    """The same pointer, of which LLVM knows nothing.

    Else it keeps one pointer for every row and every array, more than there are registers, and moves them
    all forward in every iteration.
    """
    return builder.asm(ir.FunctionType(p.type, [p.type]), "", "=r,0", [p], side_effect=False)


def _rows(builder: ir.IRBuilder, t: Vector, where: Sequence[ir.Value]) -> list[ir.Value]:
    """The addresses of a vector's parts, one below the other."""
    p, i, stride = where
    first = _opaque(builder, builder.gep(p, [i]))
    steps = [builder.mul(stride, ir.Constant(stride.type, row)) for row in range(PARTS)]
    return [_address(builder, first, step, t, t.part) for step in steps]


@intrinsic
def gather(typingctx: Any, p: Any, i: Any, stride: Any) -> Any:
    """The parts at p[i], p[i + stride], …"""
    t = Vector(p.dtype)

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        places = _rows(builder, t, args)
        return _concatenate(builder, [builder.load(place, align=_bytes(t)) for place in places])

    return t(p, types.intp, types.intp), codegen


@intrinsic
def scatter(typingctx: Any, p: Any, i: Any, stride: Any, v: Any) -> Any:
    """Writes the parts of v to p[i], p[i + stride], …"""
    t = Vector(p.dtype)

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        *where, v = args
        for place, part in zip(_rows(builder, t, where), _parts(builder, v, t), strict=True):
            builder.store(part, place, align=_bytes(t))
        return context.get_dummy_value()

    return types.void(p, types.intp, types.intp, t), codegen


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


@intrinsic
def zeros(typingctx: Any, p: Any) -> Any:
    """Zero in all lanes, of the numbers that p points to."""
    t = Vector(p.dtype)
    return t(p), lambda context, builder, sig, args: _constant(t, 0.0)


@intrinsic
def transpose(typingctx: Any, p: Any, stride: Any, q: Any, to_stride: Any) -> Any:
    """Writes a square at p, of one part's lanes in as many rows a stride apart, to q with its axes swapped.

    Swaps the off-diagonal quarters of ever larger squares, all squares of a size at once.
    """
    t = Vector(p.dtype)

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        source, stride, target, to_stride = args

        def place(start: ir.Value, step: ir.Value, i: int) -> ir.Value:
            return _address(builder, start, builder.mul(step, ir.Constant(step.type, i)), t, t.part)

        lanes = range(t.part)
        rows = [builder.load(place(source, stride, i), align=_bytes(t)) for i in lanes]
        size = 1
        while size < t.part:
            upper = [lane + t.part - size if lane & size else lane for lane in lanes]
            lower = [lane + t.part if lane & size else lane + size for lane in lanes]
            for i in lanes:
                if not i & size:
                    pair = rows[i], rows[i + size]
                    rows[i], rows[i + size] = (_shuffle(builder, *pair, mask) for mask in (upper, lower))
            size *= 2
        for i, row in enumerate(rows):
            builder.store(row, place(target, to_stride, i), align=_bytes(t))
        return context.get_dummy_value()

    return types.void(p, types.intp, q, types.intp), codegen


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
    least, digits, degree = (-126.0, 23, 5) if single else (-1022.0, 52, 11)
    integers = ir.VectorType(ir.IntType(x.dtype.bitwidth), x.lanes)

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        (value,) = args
        floor, magic = _constant(x, least), _constant(x, 1.5 * 2.0**digits)
        value = builder.select(builder.fcmp_ordered(">", floor, value), floor, value)  # NaN stays NaN
        shifted = builder.fadd(value, magic)
        fraction = builder.fsub(value, builder.fsub(shifted, magic))
        coefficients = [_constant(x, c) for c in _exp2_polynomial(degree)]
        pairs = zip(coefficients[::2], coefficients[1::2], strict=True)  # a shorter chain than one by one
        first, *rest = (_call(builder, "fma", x, [high, fraction, low]) for high, low in pairs)
        power, square = first, builder.fmul(fraction, fraction)
        for pair in rest:
            power = _call(builder, "fma", x, [power, square, pair])
        exponent = builder.shl(builder.bitcast(shifted, integers), ir.Constant(integers, [digits] * x.lanes))
        return builder.bitcast(builder.add(builder.bitcast(power, integers), exponent), _llvm(x))

    return x(x), codegen


@intrinsic
def log2(typingctx: Any, x: Any) -> Any:
    """log2 of x ≥ 1, to the last bits of the type.

    x = 2^n m with m from √½ to √2: counted from the bits of √½, the exponent of x is n. The series of
    log m = 2 atanh(s), s = (m − 1)/(m + 1), does the rest.
    """
    single = x.dtype == types.float32
    digits, terms = (23, 5) if single else (52, 11)
    integer = ir.IntType(x.dtype.bitwidth)
    integers = ir.VectorType(integer, x.lanes)
    dtype, unsigned = (np.float32, np.uint32) if single else (np.float64, np.uint64)
    root = int(np.array(0.5**0.5, dtype).view(unsigned))

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        def constant(value: int) -> ir.Constant:
            return ir.Constant(integers, [value] * x.lanes)

        bits = builder.bitcast(args[0], integers)
        n = builder.ashr(builder.sub(bits, constant(root)), constant(digits))
        m = builder.bitcast(builder.sub(bits, builder.shl(n, constant(digits))), _llvm(x))
        one = _constant(x, 1.0)
        s = builder.fdiv(builder.fsub(m, one), builder.fadd(m, one))
        square = builder.fmul(s, s)
        series = _constant(x, 0.0)
        for odd in range(2 * terms - 1, 0, -2):
            series = _call(builder, "fma", x, [series, square, _constant(x, 2 / np.log(2) / odd)])
        return _call(builder, "fma", x, [series, s, builder.sitofp(n, _llvm(x))])

    return x(x), codegen


# ---- sums over lanes: kept as one part in memory, finished by the caller ----


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
def lane_sum(typingctx: Any, p: Any, i: Any) -> Any:
    """The sum of the lanes of the one part at p[i]."""
    t = Vector(p.dtype)

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        total = builder.load(_address(builder, args[0], args[1], t, t.part), align=_bytes(t))
        lanes = t.part
        while lanes > 1:
            lanes //= 2
            halves = [_shuffle(builder, total, total, list(range(s, s + lanes))) for s in (0, lanes)]
            total = builder.fadd(*halves)
        return builder.extract_element(total, INT32(0))

    return p.dtype(p, types.intp), codegen


@intrinsic
def lanes_of(typingctx: Any, p: Any) -> Any:
    """Lanes in one part of a vector of the numbers that p points to, a constant."""
    lanes = Vector(p.dtype).part
    return types.intp(p), lambda context, builder, sig, args: context.get_constant(types.intp, lanes)
