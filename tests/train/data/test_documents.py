from train.data import documents


def test_a_document_is_its_name_and_text():
    assert documents.Document("file:1", "text") == ("file:1", "text")
