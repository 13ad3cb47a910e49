"""Isotonic fit against scipy's."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import isotonic_regression

from sgl_graft.graft.monotone import fit_rising


@given(
    st.lists(
        st.tuples(st.floats(-10, 10), st.floats(0.1, 50)),
        min_size=1,
        max_size=40,
    )
)
def test_equals_scipy(pairs):
    values, weights = map(list, zip(*pairs, strict=True))
    expected = isotonic_regression(values, weights=weights).x
    np.testing.assert_allclose(fit_rising(values, weights), expected, atol=1e-9)


def test_falling_values_are_pooled():
    assert fit_rising([3.0, 1.0], [1.0, 3.0]) == [1.5, 1.5]


@pytest.mark.parametrize("weights", [[1.0], [1.0, 0.0]])
def test_bad_weights_are_refused(weights):
    with pytest.raises(ValueError, match="weights"):
        fit_rising([1.0, 2.0], weights)
