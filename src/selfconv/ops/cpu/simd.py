"""A vector of numbers as a Numba type, with the few operations the CPU kernels need.

Numba leaves it to LLVM to find vector loops, and LLVM finds few in kernels like ours: pointers that may
alias, short inner loops, an ``exp`` that is a library call. So the kernels say what they mean: a value of
type ``Vector`` is ``PARTS`` registers' worth of lanes, each operation below is the LLVM instruction of the
same name on all of them, and LLVM is left with what it is good at (registers, addresses, the machine's
own vector width). Several registers side by side hide the latency of the multiply-adds and share each
filter value.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, overload, register_model

PART_BYTES = 32  # one AVX register; other machines split or pair it
PARTS = 4
INT32 = ir.IntType(32)

Places = Callable[..., list[ir.Value]]  # of a builder, a vector, an address and another argument


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
    """An integer address as a pointer to numbers of that type, or of the type that another points to."""
    result = types.CPointer(dtype.dtype)

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return builder.inttoptr(args[0], context.get_value_type(result))

    return result(types.int64, dtype), codegen


@intrinsic
def advance(typingctx: Any, p: Any, n: Any) -> Any:
    """p + n."""
    return p(p, types.intp), lambda context, builder, sig, args: builder.gep(args[0], [args[1]])


@intrinsic
def read_tuple(typingctx: Any, p: Any, i: Any, names: Any) -> Any:
    """The integers from p[i] on as a named tuple."""
    fields = len(names.instance_class._fields)
    result = types.NamedUniTuple(types.int64, fields, names.instance_class)

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        first = builder.gep(args[0], [args[1]])
        values = [builder.load(builder.gep(first, [INT32(field)])) for field in range(fields)]
        return context.make_tuple(builder, result, values)

    return result(p, types.intp, names), codegen


@intrinsic
def fetch_add(typingctx: Any, p: Any, i: Any, n: Any) -> Any:
    """The value of p[i], to which n is added atomically: how threads share out work."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return builder.atomic_rmw("add", builder.gep(args[0], [args[1]]), args[2], "monotonic")

    return types.int64(types.CPointer(types.int64), types.intp, types.int64), codegen


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
def repeat(typingctx: Any, p: Any, i: Any) -> Any:
    """The one part at p[i], ``PARTS`` times."""
    t = Vector(p.dtype)

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        part = builder.load(_address(builder, args[0], args[1], t, t.part), align=_bytes(t))
        return _concatenate(builder, [part] * PARTS)

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
def tiny(typingctx: Any, p: Any) -> Any:
    """In all lanes a number to which a sum of about 1 may be added without a change, and which is not 0."""
    t = Vector(p.dtype)
    return t(p), lambda context, builder, sig, args: _constant(t, 1e-30)


def _transpose(builder: ir.IRBuilder, t: Vector, source: list[ir.Value], target: list[ir.Value]) -> None:
    """Writes a square, whose rows are at these addresses, to those with its axes swapped.

    Swaps the off-diagonal quarters of ever larger squares, all squares of a size at once.
    """
    lanes = range(t.part)
    rows = [builder.load(place, align=_bytes(t)) for place in source]
    size = 1
    while size < t.part:
        upper = [lane + t.part - size if lane & size else lane for lane in lanes]
        lower = [lane + t.part if lane & size else lane + size for lane in lanes]
        for i in lanes:
            if not i & size:
                pair = rows[i], rows[i + size]
                rows[i], rows[i + size] = (_shuffle(builder, *pair, mask) for mask in (upper, lower))
        size *= 2
    for place, row in zip(target, rows, strict=True):
        builder.store(row, place, align=_bytes(t))


def _scattered(builder: ir.IRBuilder, t: Vector, p: ir.Value, offsets: ir.Value) -> list[ir.Value]:
    """The addresses p + offsets[i] of parts."""
    indices = [builder.load(builder.gep(offsets, [INT32(i)])) for i in range(t.part)]
    return [_address(builder, p, index, t, t.part) for index in indices]


def _strided(builder: ir.IRBuilder, t: Vector, p: ir.Value, stride: ir.Value) -> list[ir.Value]:
    """The addresses p + i·stride of parts."""
    indices = [builder.mul(stride, ir.Constant(stride.type, i)) for i in range(t.part)]
    return [_address(builder, p, index, t, t.part) for index in indices]


def _transposing(t: Vector, source: Places, target: Places) -> Callable[..., ir.Value]:
    """Code that transposes a square: ``source`` and ``target`` return the addresses of its rows."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        _transpose(builder, t, source(builder, t, *args[:2]), target(builder, t, *args[2:]))
        return context.get_dummy_value()

    return codegen


@intrinsic
def transpose_in(typingctx: Any, p: Any, offsets: Any, q: Any, stride: Any) -> Any:
    """Writes a square, of one part at each p[offsets[i]], to q with its axes swapped, rows a stride apart."""
    return types.void(p, offsets, q, types.intp), _transposing(Vector(p.dtype), _scattered, _strided)


@intrinsic
def transpose_out(typingctx: Any, p: Any, stride: Any, q: Any, offsets: Any) -> Any:
    """The same backwards."""
    return types.void(p, types.intp, q, offsets), _transposing(Vector(p.dtype), _strided, _scattered)


@intrinsic(prefer_literal=True)
def unzip(typingctx: Any, p: Any, q: Any, stride: Any, ways: Any) -> Any:
    """Deals the numbers at p out to ``ways`` parts, a power of two, at q and a stride apart."""
    t, n = Vector(p.dtype), ways.literal_value

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        source, target, stride, _ = args
        run = builder.load(builder.bitcast(source, _llvm(t, n * t.part).as_pointer()), align=_bytes(t))
        for i, place in enumerate(_strided(builder, t, target, stride)[:n]):
            part = _shuffle(builder, run, _undefined(run.type), [i + n * lane for lane in range(t.part)])
            builder.store(part, place, align=_bytes(t))
        return context.get_dummy_value()

    return types.void(p, q, types.intp, ways), codegen


@intrinsic(prefer_literal=True)
def rezip(typingctx: Any, p: Any, stride: Any, q: Any, ways: Any) -> Any:
    """The same backwards."""
    t, n = Vector(p.dtype), ways.literal_value

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        source, stride, target, _ = args
        places = _strided(builder, t, source, stride)[:n]
        run = _concatenate(builder, [builder.load(place, align=_bytes(t)) for place in places])
        order = [i % n * t.part + i // n for i in range(n * t.part)]
        place = builder.bitcast(target, _llvm(t, n * t.part).as_pointer())
        builder.store(_shuffle(builder, run, _undefined(run.type), order), place, align=_bytes(t))
        return context.get_dummy_value()

    return types.void(p, types.intp, q, ways), codegen


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
def exp2(typingctx: Any, x: Any, shift: Any) -> Any:
    """2^(x − shift) for x ≤ 0 and a small whole number shift, to the last bits of the type.

    2^x = 2^n 2^f with n the nearest integer: adding 1.5·2^23 (float32) leaves n in the low bits of the sum.
    With the bias of the exponent among them they are, moved into its place, the number 2^n. NaN times that
    is NaN, whatever bits it has. Results that would leave the normal numbers are 0: the bias is one less than
    the type's and the polynomial that of 2·2^f, so that 2^n becomes 0 before its product is subnormal.
    """
    single = x.dtype == types.float32
    bias, digits, degree = (126, 23, 5) if single else (1022, 52, 11)
    integers = ir.VectorType(ir.IntType(x.dtype.bitwidth), x.lanes)

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        value, less = args
        floor = builder.fsub(less, _constant(x, bias))  # where the exponent's bits become 0
        magic = builder.fsub(_constant(x, 1.5 * 2.0**digits + bias), less)
        value = builder.select(builder.fcmp_ordered(">", floor, value), floor, value)  # NaN stays NaN
        shifted = builder.fadd(value, magic)
        fraction = builder.fsub(value, builder.fsub(shifted, magic))
        coefficients = [_constant(x, 2 * c) for c in _exp2_polynomial(degree)]
        pairs = zip(coefficients[::2], coefficients[1::2], strict=True)  # a shorter chain than one by one
        first, *rest = (_call(builder, "fma", x, [high, fraction, low]) for high, low in pairs)
        power, square = first, builder.fmul(fraction, fraction)
        for pair in rest:
            power = _call(builder, "fma", x, [power, square, pair])
        exponent = builder.shl(builder.bitcast(shifted, integers), ir.Constant(integers, [digits] * x.lanes))
        return builder.fmul(power, builder.bitcast(exponent, _llvm(x)))

    return x(x, x), codegen


@intrinsic
def log2(typingctx: Any, x: Any) -> Any:
    """log2 of x ≥ 1, to the last bits of the type; of NaN, NaN.

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
        result = _call(builder, "fma", x, [series, s, builder.sitofp(n, _llvm(x))])
        return builder.fadd(result, builder.fsub(args[0], args[0]))  # 0, or NaN: whose bits make a number

    return x(x), codegen


# ---- sums over parts ----


@intrinsic
def accumulate(typingctx: Any, p: Any, i: Any, v: Any) -> Any:
    """Adds all parts of v to the one part at p[i]."""
    t = Vector(p.dtype)

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        place = _address(builder, args[0], args[1], t, t.part)
        total = builder.load(place, align=_bytes(t))
        parts = _parts(builder, args[2], t)
        while len(parts) > 1:
            parts = [builder.fadd(a, b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
        builder.store(builder.fadd(total, parts[0]), place, align=_bytes(t))
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
def lanes_of(typingctx: Any, p: Any) -> Any:
    """Lanes in one part of a vector of the numbers that p points to, a constant."""
    lanes = Vector(p.dtype).part
    return types.intp(p), lambda context, builder, sig, args: context.get_constant(types.intp, lanes)
