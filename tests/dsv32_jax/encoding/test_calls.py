import pytest

from dsv32_jax.encoding import calls


def render(name, arguments):
    return calls.render_calls([{"function": {"name": name, "arguments": arguments}}])


def block(inner):
    return f"<｜DSML｜function_calls>\n{inner}\n</｜DSML｜function_calls>"


def test_strings_stand_as_they_are_and_other_values_as_json():
    arguments = (
        '{"s": "a \\"b\\"\\n<c>", "n": 1, "f": 1.0, "t": true, "z": null, "l": ["é", {"k": "v"}]}'
    )
    assert render("get", arguments) == block(
        '<｜DSML｜invoke name="get">\n'
        '<｜DSML｜parameter name="s" string="true">a "b"\n<c></｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="n" string="false">1</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="f" string="false">1.0</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="t" string="false">true</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="z" string="false">null</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="l" string="false">["é", {"k": "v"}]</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>"
    )


def test_a_call_without_arguments_keeps_an_empty_line():
    assert render("now", "{}") == block('<｜DSML｜invoke name="now">\n\n</｜DSML｜invoke>')


def test_calls_are_joined_by_line_breaks_and_ids_are_left_out():
    one = {"id": "call_1", "type": "function", "function": {"name": "a", "arguments": "{}"}}
    two = {"id": "call_2", "type": "function", "function": {"name": "b", "arguments": "{}"}}
    assert calls.render_calls([one, two]) == block(
        '<｜DSML｜invoke name="a">\n\n</｜DSML｜invoke>\n<｜DSML｜invoke name="b">\n\n</｜DSML｜invoke>'
    )


@pytest.mark.parametrize("tools", [[], [{"function": {"name": "é", "n": 1}}]])
def test_schemas_are_one_line_each(tools):
    assert calls.render_schemas(tools * 2) == "\n".join(['{"name": "é", "n": 1}'] * 2 * len(tools))
