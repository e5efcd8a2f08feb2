"""DSV32_ENCODING_DATA names the folder with official texts; ../shared/data/encoding beside the checkout by default."""

import os
from pathlib import Path

import hypothesis
import pytest
import tokenizers as hf

from dsv32_jax import tokenizer

DATA = Path(
    os.environ.get("DSV32_ENCODING_DATA")
    or Path(__file__).parents[4] / "shared" / "data" / "encoding"
)
# The same examples on every machine and in every run.
hypothesis.settings.register_profile(
    "fixed", derandomize=True, database=None, deadline=None, max_examples=150
)
hypothesis.settings.load_profile("fixed")

SPECIALS = [
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
]
CORPUS = [
    "You are a helpful assistant. What is the weather in Hangzhou tomorrow?",
    "The weather is cloudy, twelve degrees.\n\n**Hangzhou**: bring an umbrella.",
    'invoke name="get_weather" parameter name="location" string="true" function_calls',
    "<function_results>\n<result>明天杭州多云</result>\n</function_results>",
]


@pytest.fixture
def official_data():
    """Return the folder with the official golden pair and the official tools block."""
    if not DATA.is_dir():
        pytest.skip(f"no official texts in {DATA}")
    return DATA


def bpe(folder, specials):
    """Train a byte-level BPE on a few lines; its special tokens are spelled as given."""
    model = hf.Tokenizer(hf.models.BPE())
    model.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = hf.decoders.ByteLevel()
    trainer = hf.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=specials,
        initial_alphabet=hf.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(CORPUS, trainer)
    model.save(str(folder / "tokenizer.json"))
    return tokenizer.HFTokenizer(folder)


@pytest.fixture(scope="session")
def official_tokenizer(tmp_path_factory):
    """A tokenizer with the official special tokens, as ids 0 to 6."""
    return bpe(tmp_path_factory.mktemp("official"), SPECIALS)


@pytest.fixture(scope="session")
def foreign_tokenizer(tmp_path_factory):
    """A tokenizer of another family: it ends a text with `</s>`, and nothing begins one."""
    return bpe(tmp_path_factory.mktemp("foreign"), ["</s>"])
