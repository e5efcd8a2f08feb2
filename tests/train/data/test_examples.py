import gzip
import json
import re
from dataclasses import replace

import numpy as np
import pytest

from dsv32_jax import tokenizer as tokenizers
from dsv32_jax.encoding import markup
from train.data import config, corpus, examples, loader

BOS, EOS = 256, 257
WORDS = tokenizers.ByteTokenizer()


def parse(entry):
    line = entry if isinstance(entry, str) else json.dumps(entry)
    return examples.parse_example(line, "f.jsonl:7", WORDS)


def test_the_response_trains_and_the_prompt_does_not():
    found = parse({"prompt": f"{markup.BOS}ab\n", "response": f"cd{markup.EOS}", "task": "unread"})

    assert found.tokens.tolist() == [BOS, *b"ab\ncd", EOS]
    assert found.trained.tolist() == [False] * 4 + [True] * 3


def test_of_a_conversation_the_models_turns_train():
    turns = [("user", "1?"), ("assistant", "one"), ("user", "2?"), ("assistant", "two")]
    found = parse({"messages": [{"role": role, "content": text} for role, text in turns]})

    kept = np.where(found.trained, found.tokens, ord("_"))
    text = WORDS.decode([int(t) if t < 256 else ord("|") for t in kept])
    assert [part for part in re.split("_+", text) if part] == ["one|", "two|"]


def test_ids_are_taken_as_they_are():
    found = parse({"tokens": [5, 6, 7], "trained": [0, 1, 0]})

    assert found.tokens.tolist() == [5, 6, 7]
    assert found.trained.tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "must be a JSON object, is list"),
        ({"text": "a"}, "an example has the fields of one of: prompt and response; messages;"),
        ({"prompt": "a", "response": "b", "messages": []}, "has the fields of one of"),
        ({"prompt": "a", "response": ""}, "no token trains"),
        ({"prompt": "a", "response": 3}, "not an example"),
        ({"messages": [{"role": "user", "content": "a"}]}, "no token trains"),
        ({"messages": [{"role": "robot"}]}, "role='robot'"),
        ({"tokens": [1, -2], "trained": [0, 1]}, "tokens must be a list of ids"),
        ({"tokens": [1.5], "trained": [1]}, "tokens must be a list of ids"),
        ({"tokens": [1, 2], "trained": [1]}, "trained must hold 0 or 1 for each of 2 tokens"),
        ({"tokens": [1, 2], "trained": [0, 2]}, "trained must hold 0 or 1"),
        ({"tokens": [1, 2], "trained": [1, 0]}, "no token trains that another comes before"),
    ],
)
def test_what_is_no_example_is_refused_with_its_place(entry, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        parse(entry)
    assert str(error.value).startswith("f.jsonl:7: ")


@pytest.fixture
def written(tmp_path):
    """Twelve questions, each answered in two ways."""
    path = tmp_path / "examples.jsonl.gz"
    lines = [
        json.dumps({"prompt": f"q{i}", "response": f"{'r' * j}{markup.EOS}"})
        for i in range(12)
        for j in (1, 3)
    ]
    path.write_bytes(gzip.compress("\n\n".join(lines).encode()))
    return path


@pytest.fixture
def cfg(written):
    return config.DataConfig(
        sources=(config.Source(path=str(written)),),
        seq_len=16,
        batch_size=2,
        seed=0,
        examples=True,
        heldout_fraction=0.5,
    )


def documents_of(rows):
    for row, ids, trained in zip(rows["tokens"], rows["segment_ids"], rows["trained"], strict=True):
        assert not trained[ids == 0].any()
        for segment in range(1, ids.max() + 1):
            yield row[ids == segment].tolist(), trained[ids == segment].tolist()


def test_batches_carry_whole_examples_with_their_masks(cfg):
    made = loader.make_loader(cfg, host=0, n_hosts=1, split="train", vocab_size=260)
    found = [one for _ in range(made.n_rows) for one in documents_of(next(made))]

    assert len({tuple(tokens) for tokens, _ in found}) > 4
    for tokens, trained in found:
        response = tokens.index(ord("r"))
        assert tokens[-1] == EOS
        assert trained == [i >= response for i in range(len(tokens))]


def test_all_answers_to_a_question_are_on_one_side(cfg):
    sides = {}
    for split in ("train", "heldout"):
        made = loader.make_loader(cfg, host=0, n_hosts=1, split=split, vocab_size=260)
        found = [tokens for _ in range(made.n_rows) for tokens, _ in documents_of(next(made))]
        sides[split] = {bytes(tokens[: tokens.index(ord("r"))]) for tokens in found}

    assert not sides["train"] & sides["heldout"]
    assert len(sides["train"] | sides["heldout"]) == 12


def test_an_example_longer_than_a_row_is_refused_with_its_line(cfg):
    with pytest.raises(ValueError, match=r"gz:43: 7 tokens, more than seq_len=6.* \(2 of 24 are"):
        # Blank lines count: the second answer to q10, the first of seven tokens.
        loader.make_loader(
            replace(cfg, seq_len=6), host=0, n_hosts=1, split="train", vocab_size=260
        )


@pytest.mark.parametrize("change", ["response", "mask"])
def test_a_saved_position_is_refused_on_other_responses_or_masks(cfg, tmp_path, change):
    def loader_of(response, trained):
        path = tmp_path / "one.jsonl"
        entry = {"tokens": [1, 2, 3, response], "trained": [0, 0, 1, trained]}
        path.write_text("".join(json.dumps(entry) + "\n" for _ in range(4)))
        one = replace(cfg, sources=(config.Source(path=str(path)),), heldout_fraction=0.0)
        return loader.make_loader(one, host=0, n_hosts=1, split="train", vocab_size=260)

    saved = loader_of(4, 1).state()
    loader_of(4, 1).restore(saved)
    with pytest.raises(ValueError, match="saved from other data: documents"):
        loader_of(5 if change == "response" else 4, 0 if change == "mask" else 1).restore(saved)


def test_examples_come_from_json_lines_only(cfg, tmp_path):
    (tmp_path / "a.txt").write_text("text")
    for path in ("stdlib", str(tmp_path / "a.txt")):
        with pytest.raises(ValueError, match="examples are read from JSON lines"):
            corpus.open_corpora(replace(cfg, sources=(config.Source(path=path),)))
