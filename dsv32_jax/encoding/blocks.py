"""The prose around tool schemas and response formats: this project's wording, or a checkpoint's own.

The official wording belongs to the official checkpoint and is read from its `encoding/` folder.
"""

import ast
import hashlib
import re
import warnings
from collections.abc import Iterator, Mapping

from dsv32_jax.convert import storage
from dsv32_jax.convert.storage import Location
from dsv32_jax.encoding import markup
from dsv32_jax.encoding.errors import EncodingError

TOOL_SCHEMAS = "{tool_schemas}"
SCHEMA = "{schema}"
OFFICIAL_MODULE = "encoding_dsv32.py"
# The official tools block with no schemas: 1147 bytes of UTF-8.
OFFICIAL_TOOLS_SHA256 = "8dc0ae780567338a686768374742d8690e8039d3ec6e3649ff94740764f5cca1"
# Names by which the official templates call the tokens, for where the module itself has none.
TOKEN_NAMES = {
    "bos_token": markup.BOS,
    "eos_token": markup.EOS,
    "thinking_start_token": markup.THINK_START,
    "thinking_end_token": markup.THINK_END,
    "dsml_token": markup.DSML,
}
PLACEHOLDER = re.compile(r"\{\{|\}\}|\{([A-Za-z_]\w*)\}")

OWN_TOOLS_BLOCK = f"""## Tools

The functions listed below can help with the request. To use some of them, end the reply with one block of this form:
{markup.CALLS}>
{markup.INVOKE} name="$FUNCTION">
{markup.PARAMETER} name="$ARGUMENT" string="true|false">$VALUE{markup.PARAMETER_END}>
...
{markup.INVOKE_END}>
...
{markup.CALLS_END}>

Put an empty line before the block and nothing after it. Each invoke is one call. An argument that is a string is marked string="true" and stands as it is, with no quotes and no escapes; every other argument is marked string="false" and stands as JSON.

The results follow in the order of the calls:
{markup.RESULTS}
<result>...</result>
{markup.RESULTS_END}
Reason about them before the next step.

One JSON schema a line:
<functions>
{TOOL_SCHEMAS}
</functions>
"""  # noqa: E501

OWN_RESPONSE_FORMAT_BLOCK = f"""## Response Format:

Reply with nothing but JSON that this schema accepts:
{SCHEMA}"""


def read_tools_block(path: str | Location, *, verify: bool = True) -> str:
    """Read the wording of the tools block from a checkpoint or a file.

    Args:
        path: a checkpoint's folder, its `encoding/` folder, the Python module in there (parsed,
            never executed), or a text file that holds the block.
        verify: whether the block must be the official one, by its digest.

    Returns:
        the block, in which `{tool_schemas}` stands for the schemas.

    Raises:
        FileNotFoundError: there is no such file, or the folder has no encoding module.
        EncodingError: the file holds no such block, or `verify` and it is another one.
    """
    candidates = _read_candidates(
        storage.locate(path), heading="## Tools", placeholder=TOOL_SCHEMAS
    )
    official = [block for block in candidates if _is_official_tools_block(block)]
    if not official and verify:
        digest = _digest(candidates[-1])
        raise EncodingError(
            f"{path}: the tools block's SHA-256 without schemas is {digest}, not the official"
            f" {OFFICIAL_TOOLS_SHA256}; verify=False takes it all the same"
        )
    return official[0] if official else candidates[-1]


def read_response_format_block(path: str | Location) -> str:
    """Read the wording of the response-format block from a checkpoint or a file.

    Args:
        path: as for `read_tools_block`.

    Returns:
        the block, in which `{schema}` stands for the schema.

    Raises:
        FileNotFoundError: there is no such file, or the folder has no encoding module.
        EncodingError: the file holds no such block.
    """
    return _read_candidates(storage.locate(path), heading="## Response Format", placeholder=SCHEMA)[
        -1
    ]


def fill(block: str, placeholder: str, text: str) -> str:
    """Put a text in its place in a block.

    Args:
        block: the wording.
        placeholder: what stands for the text, such as `{schema}`; other braces mean themselves.
        text: any string.

    Returns:
        the block with the text in it.

    Raises:
        EncodingError: the placeholder is not in the block exactly once.
    """
    if block.count(placeholder) != 1:
        raise EncodingError(
            f"a block must hold {placeholder} exactly once, this one has it"
            f" {block.count(placeholder)} times"
        )
    return block.replace(placeholder, text)


def _is_official_tools_block(block: str) -> bool:
    return _digest(block) == OFFICIAL_TOOLS_SHA256


def _digest(block: str) -> str:
    return hashlib.sha256(block.replace(TOOL_SCHEMAS, "").encode()).hexdigest()


def _read_candidates(path: Location, *, heading: str, placeholder: str) -> list[str]:
    """Return the readings of the first template with both marks, the likeliest last."""
    file = _file(path)
    try:
        text = file.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise EncodingError(f"{file}: not UTF-8 text: {error}") from error
    if file.suffix == ".py":
        try:
            candidates = _read_module(text, heading=heading, placeholder=placeholder)
        except (SyntaxError, RecursionError, MemoryError) as error:
            raise EncodingError(f"{file}: can not be parsed as Python: {error}") from error
    else:
        candidates = [text]
    if heading not in candidates[0] or placeholder not in candidates[0]:
        raise EncodingError(f"{file}: no text with {heading!r} and {placeholder} in it")
    return candidates


def _file(path: Location) -> Location:
    path = path.expanduser()
    if not path.is_dir():
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file or folder")
        return path
    for file in (path / "encoding" / OFFICIAL_MODULE, path / OFFICIAL_MODULE):
        if file.is_file():
            return file
    raise FileNotFoundError(f"{path}: the folder has no encoding/{OFFICIAL_MODULE}")


def _read_module(source: str, *, heading: str, placeholder: str) -> list[str]:
    """Return the template as it is spelled, and as the official code fills it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # about escapes in strings: not our module
        module = ast.parse(source)
    constants = _constants(module)
    spelled = (_string(node, constants) for node in ast.walk(module))
    template = next((s for s in spelled if s and heading in s and placeholder in s), "")
    # An f-string is filled already; the official code fills its template with str.format.
    filled = _fill_tokens(template, TOKEN_NAMES | constants, keep=placeholder)
    return [template] if filled is None else [template, filled]


def _constants(module: ast.Module) -> dict[str, str]:
    """Return the strings that the module's top level gives names, in order of assignment."""
    found: dict[str, str] = {}
    for name, node in _assignments(module):
        value = _string(node, found)
        if value is not None:
            found[name] = value
    return found


def _assignments(module: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    for statement in module.body:
        if isinstance(statement, ast.Assign):
            targets, value = statement.targets, statement.value
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            targets, value = [statement.target], statement.value
        else:
            continue
        for target in targets:
            if isinstance(target, ast.Name):
                yield target.id, value


def _string(node: ast.AST, constants: Mapping[str, str]) -> str | None:
    """Return the string that an expression spells without running anything, or None."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.Name(id=name):
            return constants.get(name)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            parts = [_string(left, constants), _string(right, constants)]
        case ast.JoinedStr(values=values):
            parts = [_string(value, constants) for value in values]
        case ast.FormattedValue(value=value, conversion=-1, format_spec=None):
            return _string(value, constants)
        case _:
            return None
    known = [part for part in parts if part is not None]
    return "".join(known) if len(known) == len(parts) else None


def _fill_tokens(template: str, values: Mapping[str, str], *, keep: str) -> str | None:
    """Do what str.format would, but leave one placeholder; None if one has no value."""

    def replacement(match: re.Match[str]) -> str:
        whole, name = match.group(), match.group(1)
        if name is None:
            return whole[0]
        return whole if whole == keep else values[name]

    try:
        return PLACEHOLDER.sub(replacement, template)
    except KeyError:
        return None
