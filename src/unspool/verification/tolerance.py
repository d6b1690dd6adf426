"""Tolerances of the checks, and how they were chosen.

exact: a value that must not influence a document has no rounding error.
bf16: one rounding is 2⁻⁹ (2e-3). A model's error cannot be predicted, so it is measured: plain `transformers` runs with
the same bf16 weights, and both are compared with fp32. For losses, the largest error of any document counts, because
the error of a single mean can be close to zero by chance.
fp32: one rounding is 2⁻²⁴ (6e-8). Packing, chunks and tiles only change the order of sums of up to some thousand terms.
Random roundings grow with the square root of their number, to about 1e-6 in a few layers, so 1e-5 is allowed. Dozens of
trained layers amplify them by a model-dependent factor, so this error is measured too. Plain `transformers` runs in
fp32, both are compared with float64, and our error may be 1.5 times its error. One measurement is not enough, because
two effects cause most of the error:

- Few tokens. A product of one to three rows sums its terms sequentially (torch 2.13, x86; with two threads also the
  last rows of five to eleven). In the backward pass of the head, these terms are SmolLM2's 49,152 vocabulary entries.
  The gradient that enters all layers then has an error of 5e-5 to 1e-4 instead of 4e-7. Training computes logits only
  at targets, which can be one to four per row of 16 tokens. So the reference does the same (`logits_to_keep`), one
  document at a time.
- One rounding. If a single channel has a huge activation, terms cancel in the norms, and rounding that activation
  affects all earlier layers. Another order of sums rounds it differently. So the reference also runs a step of several
  rows as a padded batch. A model with a noticeable error also runs with all its products summed in random orders
  (`ReorderedSums`).

Measured with SmolLM2-135M (ten seeds, one or two threads, torch 2.13, x86): plain `transformers` has an error of 3.7e-5
to 1.9e-3 in the worst weight, depending on how the step is computed. In 16 cases, our error was at most 1.13 times the
largest of these measurements. Without random orders, 2 cases would have failed; without logits only at targets, 7.

A bug (a leaked token, wrongly weighted rows) changes almost all weights by 1e-3 or more, while terms cancel only in a
few norms. So the median over weights must be within 1e-3, whatever the reference measures, and the worst weight within
0.1. A gradient that is lost or counted twice is an error of 0.5 or more. (The limit of 0.1 was set after 2.9e-3 was
measured in one norm, also in plain `transformers`; before, 1e-3 held for every weight.)
"""

import math

EXACT = 0.0
FP32 = 1e-5
FP32_MAX = 1e-3
FP32_WORST_WEIGHT = 0.1
# The largest of hundreds of independent errors varies by about 10%. If one rounding dominates, the error is distributed
# like the absolute value of a normal variable. Our error then exceeds 1.5 times the largest of two reference errors in
# 20 of 100 cases, and 1.5 times the largest of ten (two plus the random orders) in 2 of 100.
FACTOR = 1.5
DRAWS = 8  # random orders of sums
# Small models have errors of 2e-6 and need no random orders. Even errors four times as large give this tolerance.
DRAW_FROM = FP32 / 4


def tolerance_for(plain_error: float, dtype: str, *, max_tolerance: float = FP32_MAX) -> float:
    """Tolerance of a loss or gradient, given the error of plain `transformers`."""
    if dtype == "bf16":
        return FACTOR * plain_error
    return min(max_tolerance, max(FP32, FACTOR * plain_error))


def angle_tolerance(max_position: int) -> float:
    """Tolerance of the cosine and sine of an angle computed in fp32.

    Exponent, power, reciprocal and the product with the position are each rounded once. So the angle, which is at most
    `max_position`, has an error of up to four roundings. The function adds its own rounding and the final one.
    """
    return 4 * 2.0**-24 * max_position + 2 * 2.0**-24


def shift_tolerance(max_position: int) -> float:
    """Tolerance of hidden states at shifted positions, where the angles of queries and keys both have errors."""
    return FP32 + math.sqrt(2) * angle_tolerance(max_position)
