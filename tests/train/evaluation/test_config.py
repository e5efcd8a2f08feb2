import dataclasses

import pytest

from train import overrides
from train.evaluation.config import EvaluateConfig, PolicyConfig


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("runs/grpo", ("grpo", "runs/grpo", "")),
        ("runs/grpo/", ("grpo", "runs/grpo/", "")),
        ("old=runs/base", ("old", "runs/base", "")),
        ("http://localhost:8000/v1#dsv32", ("dsv32", "http://localhost:8000/v1", "dsv32")),
        ("us=https://h/v1#a/b", ("us", "https://h/v1", "a/b")),
        ("https://h/v1?k=3#m", ("m", "https://h/v1?k=3", "m")),
    ],
)
def test_a_policy_is_read_off_a_command_line(text, expected):
    found = PolicyConfig.from_text(text)

    assert (found.name, found.place, found.model) == expected
    assert found.is_endpoint == bool(found.model)


@pytest.mark.parametrize("text", ["http://localhost:8000/v1", "", "name="])
def test_a_policy_without_a_place_or_a_model_is_refused(text):
    with pytest.raises(ValueError, match="policy"):
        PolicyConfig.from_text(text)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["ks=1,5"], "each must be in"),
        (["policies=runs/a,other/a"], "policies share names: a, a; write NAME=PLACE"),
        (["temperature=0"], "draws the same every time"),
        (["top_p=0"], "top_p"),
        (["context=summary", "context_share=1"], "share=1.0"),
        (["samples=0"], "samples=0 must be at least 1"),
        (["rewards.style=thinking"], "without their reasoning"),
        (["held_out_fraction=0"], "held_out_fraction=0.0"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        overrides.apply_overrides(EvaluateConfig(), changes)


def test_the_context_is_managed_as_asked():
    assert EvaluateConfig().managed is None
    cfg = dataclasses.replace(EvaluateConfig(), context="discard_75", context_share=0.5)
    assert (cfg.managed.strategy, cfg.managed.share) == ("discard_75", 0.5)
