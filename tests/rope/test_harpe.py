"""HARPE: which base each KV head gets."""

import numpy as np
import pytest

from unspool.core.errors import ConfigError
from unspool.rope.harpe import HARPE, search_bases
from unspool.rope.tables import RopeShape, frequencies


def shape(num_kv_heads: int) -> RopeShape:
    return RopeShape(rotary_dim=64, num_kv_heads=num_kv_heads, base=1e4, original_len=4096, max_positions=4096)


def bases(num_kv_heads: int = 4, context_len: int = 16_384, **options) -> list[float]:
    return HARPE(method="harpe", **options).head_bases(shape(num_kv_heads), context_len).tolist()


def test_bases_are_spread_evenly_over_kv_heads_descending_unless_told():
    options = {"low": 10_000.0, "high": 40_000.0}

    assert bases(**options) == [4e4, 3e4, 2e4, 1e4]
    assert bases(**options, order="ascending") == [1e4, 2e4, 3e4, 4e4]


def test_each_line_of_frequencies_is_that_of_its_base():
    found = HARPE(method="harpe", low=1e4, high=1e6).resolve(shape(4), 16_384)

    assert found.parameters is None, "no config of transformers can say this"
    table = found.tables(shape(4)).inv_freq
    assert table.shape == (4, 32)
    for line, base in zip(table, found.head_bases, strict=True):
        assert np.array_equal(line, frequencies(np.array([base]), 64)[0])


def test_the_printed_list_ascends_from_1m_to_4_54m_with_the_mean_of_the_paper():
    found = bases(32, bases="printed")

    assert len(found) == 32
    assert found == sorted(found)
    assert (found[0], found[4], found[16], found[31]) == (1.0e6, 2.17e6, 3.01e6, 4.54e6)
    assert np.mean(found) == pytest.approx(3.0e6, rel=0.03)
    assert bases(32, bases="printed", order="descending") == found[::-1]


def test_the_printed_list_is_refused_for_another_number_of_heads():
    with pytest.raises(ConfigError, match=r"for 32 KV heads, but this model has 8; use bases uniform"):
        bases(8, bases="printed")


def test_one_shared_base_at_the_mean_is_plain_rope():
    for options in ({"low": 1e6, "high": 5e6}, {"low": 1e6, "high": 5e6, "bases": "search", "step": "1e5"}):
        found = HARPE(method="harpe", shared=True, **options).resolve(shape(4), 16_384)

        assert found.head_bases is None
        assert found.parameters == {"rope_type": "default", "rope_theta": pytest.approx(np.mean(bases(**options)))}


def test_a_single_kv_head_is_refused_instead_of_using_one_base_in_silence():
    with pytest.raises(ConfigError, match=r"single KV head.*method abf"):
        bases(1, low=1e4, high=1e5)


# The search


def slow_search(low: float, high: float, step: float, count: int, dim: int, context_len: int) -> list[float]:
    """The same as the text says it, one number after another."""

    def extrema(base: float) -> tuple[set[int], set[int]]:
        wave = [sum(np.cos(m * base ** (-2 * i / dim)) for i in range(dim // 2)) for m in range(context_len)]
        parts = np.array_split(range(context_len), 6)
        return {max(part, key=lambda m: wave[m]) for part in parts}, {
            min(part, key=lambda m: wave[m]) for part in parts
        }

    candidates = [low + i * step for i in range(1, int((high - low) / step) + 1)]
    known = {base: extrema(base) for base in [low, *candidates]}
    chosen, (peaks, valleys) = [low], known[low]
    while len(chosen) < count:

        def far(base: float, peaks=peaks, valleys=valleys) -> int:
            own_peaks, own_valleys = known[base]
            return sum(min(abs(p - v) for v in valleys) for p in own_peaks) + sum(
                min(abs(v - p) for p in peaks) for v in own_valleys
            )

        best = min(candidates, key=far)
        candidates.remove(best)
        chosen.append(best)
        peaks, valleys = peaks | known[best][0], valleys | known[best][1]
    return sorted(chosen)


def test_the_search_is_the_papers_greedy_choice():
    setting = (1000.0, 9000.0, 500.0, 6, 16, 240)

    assert search_bases(*setting).tolist() == slow_search(*setting)


def test_the_search_begins_with_the_lowest_stays_on_the_grid_and_is_not_the_even_spread():
    found = search_bases(1e6, 5e6, 1e5, 8, 128, 131_072)

    assert found[0] == 1e6
    assert np.all(np.diff(found) > 0)
    assert np.allclose((found - 1e6) % 1e5, 0)
    assert not np.allclose(found, np.linspace(1e6, 5e6, 8), rtol=0.02)


def test_the_search_refuses_too_few_candidates():
    with pytest.raises(ConfigError, match=r"5 bases from 1000 to 5000 in steps of 1000 are too few for 8"):
        search_bases(1000, 5000, 1000, 8, 16, 240)
