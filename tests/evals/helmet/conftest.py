"""A tokenizer for the suites, in place of the one that tests of single tasks use."""

import pytest
from tests.evals.suites import english_tokenizer
from transformers import PreTrainedTokenizerFast


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return english_tokenizer()
