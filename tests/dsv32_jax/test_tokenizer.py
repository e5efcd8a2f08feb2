import json

import pytest
import tokenizers as hf

from dsv32_jax import tokenizer

TEXTS = ["", "plain", "naïve café – 深度求索 🙂", "a\r\nb\x00\ttab"]


@pytest.fixture
def hf_folder(tmp_path):
    """A tokenizer of single characters, with specials, truncation and padding switched on."""
    characters = sorted(set("".join(TEXTS)))
    vocab = {"<unk>": 0, "<bos>": 1, "</s>": 2} | {c: 10 + i for i, c in enumerate(characters)}
    model = hf.Tokenizer(hf.models.WordLevel(vocab, unk_token="<unk>"))
    model.pre_tokenizer = hf.pre_tokenizers.Split("", "isolated")
    model.decoder = hf.decoders.Fuse()
    model.post_processor = hf.processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 1)]
    )
    model.add_special_tokens(["<bos>", "</s>"])
    model.enable_truncation(3)
    model.enable_padding(length=5)
    model.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write_config(folder, entries):
    (folder / "tokenizer_config.json").write_text(json.dumps(entries))


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_come_back_as_the_same_text(text):
    byte_tokenizer = tokenizer.ByteTokenizer()
    assert byte_tokenizer.decode(byte_tokenizer.encode(text)) == text


def test_byte_ids_stay_below_the_specials_and_specials_below_the_vocabulary_size():
    byte_tokenizer = tokenizer.ByteTokenizer()
    specials = (byte_tokenizer.bos_id, byte_tokenizer.eos_id, byte_tokenizer.pad_id)
    assert max(byte_tokenizer.encode("".join(TEXTS))) < 256
    assert sorted(specials) == list(range(256, byte_tokenizer.vocab_size))


def test_byte_decode_drops_specials_and_marks_what_is_no_text():
    assert tokenizer.ByteTokenizer().decode([256, 72, 105, 257]) == "Hi"
    assert tokenizer.ByteTokenizer().decode([72, 255, 105]) == "H\ufffdi"
    assert tokenizer.ByteTokenizer().decode([72, 300, 105, -1]) == "H\ufffdi\ufffd"


def test_hugging_face_ids_are_the_whole_text_and_nothing_else(hf_folder):
    loaded = tokenizer.load_tokenizer(str(hf_folder))
    for text in TEXTS:
        assert len(loaded.encode(text)) == len(text)
        assert loaded.decode(loaded.encode(text)) == text


def test_a_batch_encodes_as_its_texts_do(hf_folder):
    for loaded in (tokenizer.ByteTokenizer(), tokenizer.HFTokenizer(hf_folder)):
        assert loaded.encode_batch(TEXTS) == [loaded.encode(text) for text in TEXTS]


def test_special_tokens_survive_decoding(hf_folder):
    loaded = tokenizer.load_tokenizer(str(hf_folder))
    assert loaded.decode([loaded.bos_id, *loaded.encode("plain"), loaded.eos_id]) == (
        "<bos>plain</s>"
    )


def test_vocabulary_size_counts_holes_among_the_ids(hf_folder):
    loaded = tokenizer.load_tokenizer(str(hf_folder))
    assert loaded.vocab_size == 10 + len(set("".join(TEXTS)))


def test_a_file_and_its_folder_give_the_same_tokenizer(hf_folder):
    by_file = tokenizer.load_tokenizer(str(hf_folder / "tokenizer.json"))
    by_folder = tokenizer.load_tokenizer(str(hf_folder))
    assert by_file.encode("plain") == by_folder.encode("plain")


def test_without_a_config_well_known_names_are_found(hf_folder):
    loaded = tokenizer.load_tokenizer(str(hf_folder))
    assert (loaded.bos_id, loaded.eos_id) == (1, 2)


@pytest.mark.parametrize("entry", ["a", {"content": "a", "lstrip": False}])
def test_the_config_beside_the_file_names_the_special_tokens(hf_folder, entry):
    write_config(hf_folder, {"bos_token": None, "eos_token": entry})
    loaded = tokenizer.load_tokenizer(str(hf_folder))
    assert loaded.bos_id is None
    assert [loaded.eos_id] == loaded.encode("a")


def test_a_configured_token_outside_the_vocabulary_is_an_error(hf_folder):
    write_config(hf_folder, {"eos_token": "<nowhere>"})
    with pytest.raises(ValueError, match="eos_token='<nowhere>' is not in the vocabulary"):
        tokenizer.load_tokenizer(str(hf_folder))


def test_a_tokenizer_without_an_end_token_is_an_error(hf_folder):
    write_config(hf_folder, {"eos_token": None})
    with pytest.raises(ValueError, match="no token that ends a text"):
        tokenizer.load_tokenizer(str(hf_folder))


def test_a_missing_path_is_an_error_that_names_the_built_in_tokenizer(tmp_path):
    with pytest.raises(FileNotFoundError, match='only built-in tokenizer is "bytes"'):
        tokenizer.load_tokenizer(str(tmp_path / "nowhere"))


def test_an_empty_name_is_an_error():
    with pytest.raises(ValueError, match='tokenizer="" must be "bytes" or the path'):
        tokenizer.load_tokenizer("")


def test_a_folder_without_the_file_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"the folder has no tokenizer\.json"):
        tokenizer.load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("content", ["{}", "[]", "not json", ""])
def test_a_file_that_is_no_tokenizer_is_an_error(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match="not a Hugging Face tokenizer"):
        tokenizer.load_tokenizer(str(tmp_path))


@pytest.mark.parametrize(("content", "words"), [("{", "not JSON"), ("[]", "a JSON object")])
def test_a_broken_config_is_an_error(hf_folder, content, words):
    (hf_folder / "tokenizer_config.json").write_text(content)
    with pytest.raises(ValueError, match=words):
        tokenizer.load_tokenizer(str(hf_folder))


def test_a_text_that_is_one_token_has_its_id(hf_folder):
    loaded = tokenizer.HFTokenizer(hf_folder)
    assert loaded.token_id("<bos>") == 1
    assert [loaded.token_id("a")] == loaded.encode("a")
    assert tokenizer.ByteTokenizer().token_id("a") == 97


def test_a_text_that_is_no_token_or_does_not_encode_to_it_has_no_id(hf_folder):
    loaded = tokenizer.HFTokenizer(hf_folder)
    assert loaded.token_id("<nowhere>") is None
    assert loaded.token_id("<unk>") is None  # in the vocabulary, but spelled in characters
    assert tokenizer.ByteTokenizer().token_id("</s>") is None
    assert tokenizer.ByteTokenizer().token_id("é") is None
