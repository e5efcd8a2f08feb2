import dataclasses
import math

import pytest

from train.data import config


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sources": ()}, r"sources=\(\) must name at least one source"),
        ({"seq_len": 1}, "seq_len=1 must be at least 2"),
        ({"batch_size": 0}, "batch_size=0 must be at least 1"),
        ({"seed": -1}, "seed=-1 must be in"),
        ({"seed": 2**32}, "seed=4294967296 must be in"),
        ({"heldout_fraction": -0.1}, r"heldout_fraction=-0\.1 must be in \[0, 1\)"),
        ({"heldout_fraction": 1.0}, r"heldout_fraction=1\.0 must be in \[0, 1\)"),
        ({"heldout_fraction": math.nan}, "heldout_fraction=nan must be in"),
        ({"prefetch": -1}, "prefetch=-1 must not be negative"),
    ],
)
def test_a_field_that_breaks_its_rule_is_an_error_with_name_value_and_rule(change, words):
    good = config.DataConfig(seq_len=8, batch_size=2, seed=0)
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(good, **change)


@pytest.mark.parametrize("weight", [-1.0, 0.0, math.inf, math.nan])
def test_a_weight_that_is_no_share_is_an_error(weight):
    with pytest.raises(ValueError, match=f"'here': weight={weight} must be a positive finite"):
        config.Source(path="here", weight=weight)


def test_an_empty_path_or_field_is_an_error():
    with pytest.raises(ValueError, match="path='' must name"):
        config.Source(path="")
    with pytest.raises(ValueError, match="text_field='' must name"):
        config.Source(path="here", text_field="")


@pytest.mark.parametrize(
    ("text", "path", "weight"),
    [
        ("books/", "books/", 1.0),
        ("books/*.jsonl@2.5", "books/*.jsonl", 2.5),
        ("me@home/x.txt", "me@home/x.txt", 1.0),
        ("stdlib@3", "stdlib", 3.0),
    ],
)
def test_a_source_is_read_off_the_command_line(text, path, weight):
    source = config.Source.from_text(text)
    assert (source.path, source.weight) == (path, weight)
