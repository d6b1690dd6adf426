"""DroPE: nothing rotates, in every reader's numbers."""

import numpy as np
import pytest

from unspool.core.errors import ConfigError
from unspool.rope.drope import DroPE
from unspool.rope.tables import RopeShape

K = 1024
SHAPE = RopeShape(rotary_dim=64, num_kv_heads=4, base=1e16, original_len=8 * K, max_positions=8 * K)


def test_no_angle_changes_a_number_in_fp32_at_any_position():
    found = DroPE().resolve(SHAPE, 64 * K).tables(SHAPE)

    angles = found.inv_freq * np.float32(1e9)
    assert found.inv_freq.dtype == np.float32 and (found.inv_freq > 0).all()
    assert (np.cos(angles) == 1).all()
    assert (np.float32(1) + np.sin(angles) == 1).all()
    assert found.attention_factor == 1


@pytest.mark.parametrize(("extends_to", "wanted"), [(None, 16 * K), ("64K", 64 * K)])
def test_the_config_gets_the_length_that_the_model_is_used_at(extends_to, wanted):
    found = DroPE(extends_to=extends_to).resolve(SHAPE, 16 * K)

    assert found.max_positions == found.parameters["original_max_position_embeddings"] == wanted
    assert DroPE().resolve(SHAPE, 4 * K).max_positions == 8 * K, "the context never shrinks"
    assert found.summary(SHAPE, 16 * K) == "no rotation"


def test_a_length_below_the_context_is_refused():
    with pytest.raises(ConfigError, match="extends_to 16K is shorter than the context 32K"):
        DroPE(extends_to="16K").resolve(SHAPE, 32 * K)
