"""A tile of a matrix product in vector registers, in instructions that numba cannot express.

Numba's cache does not check this file for changes: delete the cache of tree.py (in __pycache__, or NUMBA_CACHE_DIR).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import TypingError, njit, types
from numba.extending import intrinsic

try:
    from numba.core import cgutils  # not public: without it `plain_tile` is used
except ImportError:
    cgutils = None  # type: ignore[assignment]

LANES = 32  # outputs in a block of a layer


def make_tile(rows: int, vectors: int, ways: int) -> Any:
    """tile(x, weight, out, i, j, inputs): out [i : i + rows, j : j + 16 vectors] += x [i : i + rows, :inputs] @ weight
    [:inputs, j % LANES : j % LANES + 16 vectors].

    The tile stays in registers until the end. Compiled loops over arrays do not, and take twice as long.
    ways: the number of partial sums, of every ways-th input, that do not wait for each other. It divides `inputs`.
    """

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        arrays = zip(signature.args[:3], args[:3], strict=True)
        x, weight, out = (context.make_array(kind)(context, builder, value) for kind, value in arrays)
        i, j, inputs = args[3:]
        floats, loose = ir.VectorType(ir.FloatType(), 16), ("contract",)

        def plus(base: Any, offset: int) -> Any:
            return builder.add(base, ir.Constant(inputs.type, offset))

        def at(array: Any, row: Any, column: Any, kind: Any) -> Any:
            stride = cgutils.unpack_tuple(builder, array.strides, 2)[0]  # type: ignore[no-untyped-call]
            begin = builder.bitcast(array.data, ir.IntType(8).as_pointer())
            begin = builder.bitcast(builder.gep(begin, [builder.mul(row, stride)]), ir.FloatType().as_pointer())
            return builder.bitcast(builder.gep(begin, [column]), kind.as_pointer())

        def spread(scalar: Any) -> Any:
            first = builder.insert_element(ir.Constant(floats, ir.Undefined), scalar, ir.IntType(32)(0))
            return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(ir.IntType(32), 16), [0] * 16))

        cells = [(plus(i, row), plus(j, 16 * vector)) for row in range(rows) for vector in range(vectors)]
        columns = [plus(builder.urem(j, j.type(LANES)), 16 * vector) for vector in range(vectors)]
        zero = ir.Constant(floats, [0.0] * 16)
        sums = [[cgutils.alloca_once_value(builder, zero) for _ in cells] for _ in range(ways)]  # type: ignore[no-untyped-call]
        loop = cgutils.for_range_slice(builder, inputs.type(0), inputs, inputs.type(ways), inc=True)
        with loop as (begin, _):
            for way, totals in enumerate(sums):
                k = plus(begin, way)
                weights = [builder.load(at(weight, k, column, floats), align=4) for column in columns]
                for number, ((row, _), total) in enumerate(zip(cells, totals, strict=True)):
                    if number % vectors == 0:
                        one = spread(builder.load(at(x, row, k, ir.FloatType())))
                    product = builder.fmul(one, weights[number % vectors], flags=loose)
                    builder.store(builder.fadd(builder.load(total), product, flags=loose), total)
        for number, (row, column) in enumerate(cells):
            target = at(out, row, column, floats)
            result = builder.load(target, align=4)
            for totals in sums:
                result = builder.fadd(result, builder.load(totals[number]))
            builder.store(result, target, align=4)
        return context.get_dummy_value()

    def tile(context: Any, x: Any, weight: Any, out: Any, i: Any, j: Any, inputs: Any) -> Any:
        for array in (x, weight, out):
            if (array.dtype, array.ndim, array.layout) != (types.float32, 2, "C"):
                raise TypingError(f"a tile is made of contiguous [rows, columns] of float32, not of {array}")
        return types.void(x, weight, out, types.intp, types.intp, types.intp), build

    return intrinsic(tile)


def plain_tile(rows: int, vectors: int, ways: int) -> Any:
    """`make_tile` as loops, with the sums in the same order: the same bits in more time."""

    @njit(fastmath={"contract"}, error_model="numpy")
    def tile(x, weight, out, i, j, inputs):  # type: ignore[no-untyped-def]
        for row in range(rows):
            for lane in range(16 * vectors):
                result = out[i + row, j + lane]
                for way in range(ways):
                    total = np.float32(0.0)
                    for k in range(way, inputs, ways):
                        total += x[i + row, k] * weight[k, j % LANES + lane]
                    result += total
                out[i + row, j + lane] = result

    return tile


# The sums of a tile leave some registers free: of 32 with 16 floats each, or of 16 with 8.
ROWS, VECTORS = (8, 2) if get_host_cpu_features().get("avx512f") else (4, 1)
build_tile = plain_tile if cgutils is None else make_tile
many_rows, one_row = build_tile(ROWS, VECTORS, 1), build_tile(1, VECTORS, 4)
