"""Kernels that the tests compile. Not importable by name from a worker, like a user's plugin."""

# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped"

import triton
import triton.language as tl


@triton.jit
def doubled(x):
    return x * 2.0


@triton.jit
def double(x, y, count, BLOCK: tl.constexpr):
    """y = 2 x."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, doubled(tl.load(x + at, mask=at < count)), mask=at < count)


@triton.jit
def product(a, b, c, SIZE: tl.constexpr):
    """c = a · b of [SIZE, SIZE] matrices, in one block."""
    row, column = tl.arange(0, SIZE)[:, None] * SIZE, tl.arange(0, SIZE)[None, :]
    tl.store(c + row + column, tl.dot(tl.load(a + row + column), tl.load(b + row + column)))


@triton.jit
def narrow(a, b, c, SIZE: tl.constexpr):
    """c = a + b through float8, for which sm_89 has an instruction."""
    at = tl.arange(0, SIZE)
    tl.store(c + at, (tl.load(a + at) + tl.load(b + at)).to(tl.float8e5).to(tl.float16))


@triton.jit
def broken(x, SIZE: tl.constexpr):
    tl.store(x, tl.arange(0, SIZE) + tl.zeros((3,), tl.float32))


CUDA_SOURCE = """
extern "C" __global__ void saxpy(float a, const float* x, float* y, int n) {
    __shared__ float tile[256];
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    tile[threadIdx.x] = i < n ? x[i] : 0.0f;
    __syncthreads();
    if (i < n) y[i] += a * tile[threadIdx.x];
}
"""
