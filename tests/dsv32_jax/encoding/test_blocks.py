import pytest

from dsv32_jax.encoding import (
    EncodingError,
    blocks,
    encode_messages,
    read_response_format_block,
    read_tools_block,
)

TEMPLATE = "## Tools\n\nWrite <{dsml_token}function_calls> {tool_schemas} {thinking_start_token}\n"
FILLED = "## Tools\n\nWrite <｜DSML｜function_calls> {tool_schemas} <think>\n"


@pytest.fixture
def checkpoint(tmp_path):
    """Write a checkpoint's encoding module."""

    def write(source):
        folder = tmp_path / "checkpoint" / "encoding"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "encoding_dsv32.py").write_text(source, encoding="utf-8")
        return folder.parent

    return write


@pytest.fixture
def official_block(official_data):
    return (official_data / "tools_preamble.txt").read_bytes().decode("utf-8")


def official_sources(block):
    """Yield modules that hold the block in each of the ways that one could."""
    yield f"TOOLS_SYSTEM_TEMPLATE = {block!r}\n"
    yield f"TOOLS_SYSTEM_TEMPLATE: str = {block!r}\n"
    yield f"import nowhere_at_all\nraise SystemExit\nA = {block[:300]!r} + {block[300:]!r}\n"
    lines = "\n".join(repr(line) for line in block.splitlines(keepends=True))
    yield f"class Templates:\n    tools = (\n{lines}\n)\n"
    marked = block.replace("｜DSML｜", "{dsml_token}").replace("<think>", "{thinking_start_token}")
    marked = marked.replace("</think>", "{thinking_end_token}")
    yield f"TOOLS = {marked!r}\n"
    yield f'dsml_token: str = "｜DSML｜"\nTOOLS = {marked!r}.strip()\n'
    own_names = marked.replace("{dsml_token}", "{marker}")
    yield f'bar = "｜"\nmarker = bar + "DSML" + bar\nTOOLS = {own_names!r}\n'
    doubled = marked.replace("{tool_schemas}", "{{tool_schemas}}")
    names = 'dsml_token = "｜DSML｜"\nthinking_start_token, = [""]\n'
    names += 'thinking_start_token = "<think>"\nthinking_end_token = "</think>"\n'
    yield f"{names}TOOLS = f{doubled!r}\n"


@pytest.mark.parametrize("way", range(8))
def test_the_official_block_is_found_however_the_module_assigns_it(checkpoint, official_block, way):
    folder = checkpoint(list(official_sources(official_block))[way])

    assert read_tools_block(folder) == official_block
    assert read_tools_block(folder / "encoding") == official_block
    assert read_tools_block(str(folder / "encoding" / "encoding_dsv32.py")) == official_block


def test_the_official_text_file_is_taken_as_it_is(official_data, official_block):
    assert len(official_block.replace("{tool_schemas}", "")) == 1103  # facts, 8.2
    assert read_tools_block(official_data / "tools_preamble.txt") == official_block


def test_another_block_is_an_error_unless_it_is_wanted(checkpoint):
    folder = checkpoint(f"TOOLS = {TEMPLATE!r}")
    with pytest.raises(EncodingError, match=r"not the official 8dc0ae78.*; verify=False"):
        read_tools_block(folder)
    assert read_tools_block(folder, verify=False) == FILLED


def test_blank_lines_lost_from_the_official_block_are_noticed(tmp_path, official_block):
    file = tmp_path / "block.txt"
    file.write_text(official_block.replace("\n\n", "\n"), encoding="utf-8")
    with pytest.raises(EncodingError, match="not the official"):
        read_tools_block(file)


def test_a_text_file_keeps_its_line_ends_and_braces(tmp_path):
    file = tmp_path / "block.txt"
    file.write_bytes(b"## Tools\r\n{x} {{ {tool_schemas}")
    assert read_tools_block(file, verify=False) == "## Tools\r\n{x} {{ {tool_schemas}"


def test_a_template_with_an_unknown_name_is_taken_as_it_stands(checkpoint):
    folder = checkpoint("TOOLS = '## Tools {unknown} {tool_schemas}'")
    assert read_tools_block(folder, verify=False) == "## Tools {unknown} {tool_schemas}"


def test_the_module_is_never_executed(checkpoint, tmp_path):
    trap = tmp_path / "executed"
    source = f"open({str(trap)!r}, 'w')\nTOOLS = {TEMPLATE!r}\n"
    read_tools_block(checkpoint(source), verify=False)
    assert not trap.exists()


def test_odd_escapes_in_the_module_are_nobodys_concern(checkpoint):
    folder = checkpoint(f"x = '\\d'\nTOOLS = {TEMPLATE!r}")
    assert read_tools_block(folder, verify=False) == FILLED


def test_the_response_format_block_is_found_too(checkpoint):
    source = 'TEMPLATE: str = (\n    "## Response Format:\\n\\nObey:\\n{schema}"\n)\n'
    block = read_response_format_block(checkpoint(source))
    assert block == "## Response Format:\n\nObey:\n{schema}"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("x = 1", "no text with '## Tools'"),
        ("TOOLS = '## Tools'", "no text with '## Tools' and {tool_schemas}"),
        ("TOOLS = (", "can not be parsed as Python"),
        ("\0", "can not be parsed as Python"),
        ("-" * 100_000 + "1", "can not be parsed as Python"),
        ("x = " + "'a' + " * 2_000 + "'b'", "can not be parsed as Python"),
    ],
)
def test_a_module_without_the_block_is_an_error(checkpoint, source, words):
    with pytest.raises(EncodingError, match=words):
        read_tools_block(checkpoint(source), verify=False)


def test_a_file_that_is_no_text_is_an_error(tmp_path):
    (tmp_path / "block.txt").write_bytes(b"\xff")
    with pytest.raises(EncodingError, match="not UTF-8"):
        read_tools_block(tmp_path / "block.txt")


def test_a_missing_file_or_module_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        read_tools_block(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"no encoding/encoding_dsv32\.py"):
        read_tools_block(tmp_path)


def test_our_own_wording_has_the_tags_of_the_format_and_is_not_the_official_one(official_block):
    tools = [{"type": "function", "function": {"name": "f"}}]
    text = encode_messages([{"role": "system", "tools": tools}], thinking_mode="chat")

    for tag in ("function_calls>", 'invoke name="', 'parameter name="'):
        assert f"<｜DSML｜{tag}" in text
    assert text.endswith('\n<functions>\n{"name": "f"}\n</functions>\n')
    prose = [line for line in official_block.splitlines() if len(line) > 60 and "｜" not in line]
    assert prose
    assert not [line for line in prose if line in blocks.OWN_TOOLS_BLOCK]


def test_our_own_wording_of_a_response_format_holds_the_schema():
    message = {"role": "system", "response_format": {"type": "object", "title": "é"}}
    text = encode_messages([message], thinking_mode="chat")
    heading, empty, _, schema = text.split("\n\n", 1)[1].split("\n")
    assert (heading, empty) == ("## Response Format:", "")
    assert schema == '{"type": "object", "title": "é"}'
