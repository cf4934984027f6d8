"""Matrix products in vector registers, beside numpy's, for every kind of machine."""

from __future__ import annotations

import numba
import numpy as np
import pytest

from rl_training.ops.tile import LANES, make_tile
from rl_training.ops.tree import linear


def blocks(weight: np.ndarray) -> np.ndarray:
    """[in, out] -> [blocks, in, LANES]"""
    return np.ascontiguousarray(np.stack(np.split(weight, weight.shape[1] // LANES, 1)))


def amid_nans(rows: int, columns: int, rng: np.random.Generator) -> np.ndarray:
    """Numbers in the first columns of a wider array that holds nothing else."""
    array = np.full((rows + 1, columns + 5), np.nan, np.float32)
    array[:rows, :columns] = rng.standard_normal((rows, columns))
    return array


@pytest.mark.parametrize("rows", [1, 3, 8, 9, 17])
@pytest.mark.parametrize("inputs", [1, 4, 31, 66])
@pytest.mark.parametrize("outputs", [LANES, 3 * LANES])
def test_a_layer_is_a_matrix_product(rows: int, inputs: int, outputs: int) -> None:
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((inputs, outputs)).astype(np.float32)
    x, out = amid_nans(rows, inputs, rng), amid_nans(rows, outputs, rng)
    expected = out.copy()
    expected[:rows, :outputs] += x[:rows, :inputs] @ weight
    linear(x, blocks(weight), out, rows)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("rows", "vectors", "ways"), [(8, 2, 1), (4, 1, 1), (1, 2, 4), (1, 1, 4)])
def test_tiles_of_every_machine(rows: int, vectors: int, ways: int) -> None:
    tile = make_tile(rows, vectors, ways)

    @numba.njit
    def run(x, weight, out, i, j, inputs):
        tile(x, weight, out, i, j, inputs)

    rng, inputs, begin = np.random.default_rng(0), 12, LANES - 16 * vectors
    weight = rng.standard_normal((inputs, LANES)).astype(np.float32)
    x, out = amid_nans(rows + 2, inputs, rng), amid_nans(rows + 2, 2 * LANES, rng)
    expected, columns = out.copy(), slice(LANES + begin, LANES + begin + 16 * vectors)
    expected[2 : rows + 2, columns] += x[2 : rows + 2, :inputs] @ weight[:, begin : begin + 16 * vectors]
    run(x, weight, out, 2, LANES + begin, inputs)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)


def test_a_tile_takes_nothing_but_rows_of_floats() -> None:
    weight = np.zeros((1, 4, LANES), np.float32)
    for x in (np.zeros((1, 4)), np.zeros((4, 4), np.float32).T[:1]):
        with pytest.raises(numba.TypingError, match=r"contiguous .* of float32"):
            linear(x, weight, np.zeros((1, LANES), np.float32), 1)
