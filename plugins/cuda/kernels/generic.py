"""Generic kernels for whatever the passes left over: right for every shape, tuned for none.

Sizes and strides come as tuples of *codes*: a number c >= 0 stands for itself, -c for c times ``n``, the
step's count of the one symbol that the shapes name. Values and accumulators are float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .activation import apply


@triton.jit
def decode(CODE: tl.constexpr, n):
    """The number that a code stands for."""
    if CODE < 0:
        number = n * (-CODE)
    else:
        number = n * 0 + CODE
    return number


@triton.jit
def offset_of(index, n, RANK: tl.constexpr, SIZES: tl.constexpr, STRIDES: tl.constexpr):
    """Where an operand with STRIDES has the element of flat ``index`` over SIZES."""
    offset = index * 0
    rest = index
    for axis in tl.static_range(RANK - 1, -1, -1):
        if axis == 0:
            coordinate = rest
        else:
            size = decode(SIZES[axis], n)
            coordinate = rest % size
            rest = rest // size
        if STRIDES[axis] != 0:
            offset += coordinate * decode(STRIDES[axis], n)
    return offset


@triton.jit
def block_index(BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """Flat indices of this block, as 64-bit numbers where 32 bits do not hold them."""
    if WIDE:
        index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    else:
        index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    return index


@triton.jit
def unary(x, y, n, low, high, TOTAL: tl.constexpr, FN: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """y = FN(x) over TOTAL elements; FN "clip" takes the bounds ``low`` and ``high``."""
    index = block_index(BLOCK, WIDE)
    inside = index < decode(TOTAL, n)
    value = tl.load(x + index, mask=inside, other=0.0).to(tl.float32)
    if FN == "clip":
        # A comparison with NaN is false: NaN stays, as in numpy.
        value = tl.where(value < low, low, value)
        value = tl.where(value > high, high, value)
    else:
        value = apply(value, FN)
    tl.store(y + index, value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def power(a, b):
    """a ** b. A negative base has a real power for whole exponents only, NaN for others."""
    size = tl.exp2(b * tl.log2(tl.abs(a)))
    whole = tl.floor(b) == b
    odd = tl.floor(b * 0.5) * 2.0 != b
    signed = tl.where(odd, -size, size)
    value = tl.where(a < 0, tl.where(whole, signed, float("nan")), size)
    return tl.where(b == 0, 1.0, value)


@triton.jit
def binary(
    a,
    b,
    y,
    n,
    RANK: tl.constexpr,
    SIZES: tl.constexpr,
    A_STRIDES: tl.constexpr,
    B_STRIDES: tl.constexpr,
    TOTAL: tl.constexpr,
    FN: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    """y = FN(a, b) with broadcasting: a stride of 0 repeats an operand along an axis."""
    index = block_index(BLOCK, WIDE)
    inside = index < decode(TOTAL, n)
    p = tl.load(a + offset_of(index, n, RANK, SIZES, A_STRIDES), mask=inside, other=0.0).to(tl.float32)
    q = tl.load(b + offset_of(index, n, RANK, SIZES, B_STRIDES), mask=inside, other=1.0).to(tl.float32)
    if FN == "add":
        value = p + q
    elif FN == "sub":
        value = p - q
    elif FN == "mul":
        value = p * q
    elif FN == "div":
        value = p / q
    elif FN == "min":
        value = tl.minimum(p, q, propagate_nan=tl.PropagateNan.ALL)
    elif FN == "max":
        value = tl.maximum(p, q, propagate_nan=tl.PropagateNan.ALL)
    elif FN == "pow":
        value = power(p, q)
    else:
        tl.static_assert(False, "unknown function")
    tl.store(y + index, value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def move(
    x,
    y,
    n,
    row_stride,
    RANK: tl.constexpr,
    SIZES: tl.constexpr,
    X_STRIDES: tl.constexpr,
    Y_STRIDES: tl.constexpr,
    X_OFFSET: tl.constexpr,
    Y_OFFSET: tl.constexpr,
    TOTAL: tl.constexpr,
    X_IS_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Copy a box of SIZES between two layouts. X_IS_ROWS: x has RANK 2 and rows ``row_stride`` apart."""
    index = block_index(BLOCK, WIDE)
    inside = index < decode(TOTAL, n)
    if X_IS_ROWS:
        width = decode(SIZES[1], n)
        source = (index // width) * row_stride + index % width
    else:
        source = offset_of(index, n, RANK, SIZES, X_STRIDES)
    target = offset_of(index, n, RANK, SIZES, Y_STRIDES)
    value = tl.load(x + decode(X_OFFSET, n) + source, mask=inside, other=0)
    tl.store(y + decode(Y_OFFSET, n) + target, value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def reduce(x, y, n, WIDTH: tl.constexpr, FN: tl.constexpr, BLOCK: tl.constexpr):
    """Block i: the sum, mean or maximum of row i, WIDTH elements long."""
    width = decode(WIDTH, n)
    row = x + tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, BLOCK)
    start = -float("inf") if FN == "max" else 0.0
    found = tl.full([BLOCK], start, tl.float32)
    for first in tl.range(0, width, BLOCK):
        value = tl.load(row + first + column, mask=first + column < width, other=start).to(tl.float32)
        if FN == "max":
            found = tl.maximum(found, value)
        else:
            found += value
    if FN == "max":
        result = tl.max(found, axis=0)
    else:
        result = tl.sum(found, axis=0)
    if FN == "mean":
        result = result / width
    tl.store(y + tl.program_id(0), result.to(y.dtype.element_ty))


@triton.jit
def softmax(x, y, n, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Block i: softmax of row i, WIDTH elements long."""
    width = decode(WIDTH, n)
    start = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, BLOCK)
    largest = tl.full([BLOCK], -float("inf"), tl.float32)
    for first in tl.range(0, width, BLOCK):
        inside = first + column < width
        value = tl.load(x + start + first + column, mask=inside, other=-float("inf")).to(tl.float32)
        largest = tl.maximum(largest, value)
    top = tl.max(largest, axis=0)
    sums = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(0, width, BLOCK):
        inside = first + column < width
        value = tl.load(x + start + first + column, mask=inside, other=-float("inf")).to(tl.float32)
        sums += tl.exp(value - top)
    scale = 1.0 / tl.sum(sums, axis=0)
    for first in tl.range(0, width, BLOCK):
        inside = first + column < width
        value = tl.load(x + start + first + column, mask=inside, other=-float("inf")).to(tl.float32)
        weight = tl.exp(value - top) * scale
        tl.store(y + start + first + column, weight.to(y.dtype.element_ty), mask=inside)


@triton.jit
def matmul(
    a,
    b,
    y,
    n,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """y[i] = a[i] · b[i], [M, K] · [K, N], in float32; blocks are (batch, tile of rows, tile of columns)."""
    rows, columns, depth = decode(M, n), decode(N, n), decode(K, n)
    batch = tl.program_id(0).to(tl.int64)
    m = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[:, None]
    c = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)[None, :]
    acc = tl.zeros([BLOCK, BLOCK], tl.float32)
    for first in tl.range(0, depth, BLOCK):
        of_a = first + tl.arange(0, BLOCK)[None, :]
        of_b = first + tl.arange(0, BLOCK)[:, None]
        p = tl.load(a + batch * rows * depth + m * depth + of_a, mask=(m < rows) & (of_a < depth), other=0.0)
        q = tl.load(
            b + batch * depth * columns + of_b * columns + c, mask=(of_b < depth) & (c < columns), other=0.0
        )
        acc = tl.dot(p.to(tl.float32), q.to(tl.float32), acc, input_precision="ieee")
    at = y + batch * rows * columns + m * columns + c
    tl.store(at, acc.to(y.dtype.element_ty), mask=(m < rows) & (c < columns))
