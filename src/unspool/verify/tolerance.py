"""How large an error may be, and why.

fp32: a rounding is 2⁻²⁴ (6e-8) of a value. Packing, chunks and tiles only change the order of sums, here of up to some
thousand terms; random roundings add up like the root of their number, to about 1e-6 in a few layers: 1e-5 is allowed.
Dozens of trained layers amplify roundings further, and by how much depends on the model. So it is measured: plain
`transformers` does the same work in fp32, both are compared with float64, and our error must not exceed its error by
more than half. For a step of several rows it does that in both ways that are usual, documents one at a time and all in
one padded batch, and its larger error counts: products of larger matrices round otherwise, and a row is such a product.
The order of documents hardly matters. SmolLM2-135M, largest error of a weight's gradient by seed and length of rows:

    one at a time   in any order   in a batch   ours, any split
    2.3e-5          2.3e-5         5.9e-5       5.0e-5 … 5.4e-5
    3.9e-5                         4.3e-5       4.1e-5 … 4.3e-5
    5.7e-4                         2.9e-3       2.9e-3

The first and the last are in one norm in which a single channel has a huge activation: terms cancel there, for
everybody. A mistake (a leaked token, rows weighed wrongly) changes almost all weights by 1e-3 or more; such a norm is
one of many. So half of the weights must be within 1e-3 whatever plain `transformers` does, and the worst within a
tenth: what is wrong with a single weight, whose gradient is lost or counted twice, is an error of a half and more.
(The tenth was set after the last line of the table was seen; before it, 1e-3 held for every weight.)
bf16: a rounding is 2⁻⁹ (2e-3), and nothing can be said beforehand. It is measured likewise: plain `transformers` does
the same work with the same bf16 weights, and both are compared with fp32. Of losses the largest error of any document
counts: that of one mean can be next to nothing by chance.
exact: what must not reach a document at all has no error to round.
"""

import math

FP32 = 1e-5
FP32_MOST = 1e-3
FP32_WORST_WEIGHT = 0.1
# Two runs that round differently have independent errors of the same size; the largest of some hundred of them varies
# by some ten per cent.
FACTOR = 1.5
EXACT = 0.0


def allowed(plain_error: float, dtype: str, *, most: float = FP32_MOST) -> float:
    """Of a loss or a gradient, where plain `transformers` is itself off by `plain_error`."""
    if dtype == "bf16":
        return FACTOR * plain_error
    return min(most, max(FP32, FACTOR * plain_error))


def turned(max_position: int) -> float:
    """What may be wrong with the cosine and sine of an angle that is computed in fp32.

    Exponent, power, reciprocal and the product with the position are each rounded once, so the angle is off by up to
    four roundings of itself, and it is at most `max_position`; then come the function's own and the last one.
    """
    return 4 * 2.0**-24 * max_position + 2 * 2.0**-24


def shifted(max_position: int) -> float:
    """What moving a document may change: every query meets every key with both angles off as above."""
    return FP32 + math.sqrt(2) * turned(max_position)
