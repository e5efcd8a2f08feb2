import json

import numpy as np
import pytest

from train.data import config


@pytest.fixture
def texts():
    """Forty documents of mixed lengths, one of them empty, two alike."""
    rng = np.random.default_rng(0)
    made = ["".join(rng.choice(list("abcdé \n"), size=n)) for n in rng.integers(1, 90, size=37)]
    return [*made, "", "twice", "twice"]


@pytest.fixture
def jsonl(tmp_path, texts):
    """The documents as JSON lines."""
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture
def cfg(jsonl):
    """Small rows of the documents, a quarter of them held out."""
    return config.DataConfig(
        sources=(config.Source(path=str(jsonl)),),
        seq_len=16,
        batch_size=8,
        seed=3,
        heldout_fraction=0.25,
    )
