"""Read one block of calls, from after its opening tag's name to its end."""

import json
from collections.abc import Callable

from dsv32_jax.encoding import markup
from dsv32_jax.encoding.events import ArgumentsDelta, CallEnd, CallStart, ProblemKind
from dsv32_jax.encoding.reader import Reader, State, quote
from dsv32_jax.encoding.scanner import Stops

TAG_END = ">\n"
# The strict format ends a parameter here and asks for `<` before it.
BARE_PARAMETER_END = markup.PARAMETER_END.removeprefix("<")
BLOCK_END = f"{markup.CALLS_END}>"

BETWEEN_CALLS = Stops(markup.INVOKE, BLOCK_END, markup.EOS)
IN_CALL = Stops(markup.PARAMETER, markup.INVOKE_END)
BEFORE_NAME = Stops(markup.NAME, BARE_PARAMETER_END)
IN_NAME = Stops(markup.TEXT_VALUE, markup.JSON_VALUE, BARE_PARAMETER_END)
# A line break after that `<` passes too: the official pattern ends in `$`.
LOOSE_PARAMETER_END = f"<\n{BARE_PARAMETER_END}"
IN_VALUE = Stops(markup.PARAMETER_END, LOOSE_PARAMETER_END, BARE_PARAMETER_END)


class CallsStates:
    """The states inside a block of calls.

    Calls are kept if it is certain what they say. A broken one is reported and left out, and
    reading goes on behind it. In a value only the parameter's own closing tag means anything.

    Args:
        reader: gets the events.
        done: returns the state after the block.
        cut: returns the state after an end of turn inside the block.
    """

    def __init__(
        self, reader: Reader, *, done: Callable[[], State], cut: Callable[[], State]
    ) -> None:
        """Begin before the first block; the class docstring has the arguments."""
        self._reader = reader
        self._done, self._cut = done, cut
        self._parts: list[str] = []
        self._count = 0  # calls started
        self._read = 0  # calls begun, broken ones too
        self._call_at = 0
        self._names: set[str] = set()
        self._is_text = False
        collect = self._parts.append
        self.start = State(BETWEEN_CALLS, collect, self._leave_gap, self._end_in_block)
        self._header = State(IN_CALL, collect, self._leave_header, self._end_in_call)
        self._before_name = State(BEFORE_NAME, collect, self._open_name, self._end_in_call)
        self._name = State(IN_NAME, collect, self._leave_name, self._end_in_call)
        self._value = State(IN_VALUE, self._take_value, self._leave_value, self._end_in_call)
        self._next = State(IN_CALL, collect, self._leave_parameter, self._end_in_call)
        self._broken = State(BETWEEN_CALLS, collect, self._leave_broken, self._end_in_block)

    def _leave_gap(self, stop: str) -> State:
        gap = self._collected()
        if stop == markup.EOS:
            return self._cut_block()
        self._check_gap(gap, "in the block of calls")
        return self._open_call() if stop == markup.INVOKE else self._done()

    def _open_call(self) -> State:
        self._read += 1
        self._call_at = self._reader.position - len(markup.INVOKE)
        self._names = set()
        return self._header

    def _leave_header(self, stop: str) -> State:
        header = self._collected()
        # The official pattern is lax about white space before the name and a second line break.
        start = markup.NAME.lstrip()
        name = _between(header.lstrip(), start, '">\n\n', '">\n')
        if name is None:
            # Without doubt about the name, other white space costs nothing.
            name = _between(header.strip(), start, '">')
            if name is None:
                message = f'call {self._read}: the invoke tag must read name="…" and end its line'
                return self._break("bad_call", f"{message}, not {quote(header)}")
            message = f"call {self._read}: the invoke tag must be followed by one line break"
            self._reader.problem("layout", message, self._reader.entered)
        self._reader.emit(CallStart(self._count, name))
        self._count += 1
        return self._after_parameter(stop)

    def _after_parameter(self, stop: str) -> State:
        if stop == markup.PARAMETER:
            return self._before_name
        self._reader.emit(ArgumentsDelta(self._count - 1, "}" if self._names else "{}"))
        self._reader.emit(CallEnd(self._count - 1))
        return self.start

    def _open_name(self, stop: str) -> State:
        text = self._collected()
        if text or stop != markup.NAME:
            return self._break_parameter(text)
        return self._name

    def _leave_name(self, stop: str) -> State:
        name = self._collected()
        if stop == BARE_PARAMETER_END:
            return self._break_parameter(markup.NAME + name)
        if name in self._names:
            message = f"call {self._read}: parameter {quote(name)} is given twice"
            return self._break("duplicate_parameter", message)
        self._is_text = stop == markup.TEXT_VALUE
        before = ", " if self._names else "{"
        self._names.add(name)
        quotation = '"' if self._is_text else ""
        self._add(f"{before}{json.dumps(name, ensure_ascii=False)}: {quotation}")
        return self._value

    def _take_value(self, text: str) -> None:
        self._add(json.dumps(text, ensure_ascii=False)[1:-1] if self._is_text else text)

    def _leave_value(self, stop: str) -> State:
        if stop == BARE_PARAMETER_END:
            message = f"call {self._read}: a parameter's closing tag must begin with '<'"
            return self._break("bad_parameter", message)
        if self._is_text:
            self._add('"')
        return self._next

    def _leave_parameter(self, stop: str) -> State:
        gap = self._collected()
        if gap.strip() != ">":
            message = f"call {self._read}: text after a parameter: {quote(gap)}"
            return self._break("bad_call", message)
        self._check_gap(gap, f"call {self._read}, after a parameter")
        return self._after_parameter(stop)

    def _leave_broken(self, stop: str) -> State:
        self._parts.clear()
        match stop:
            case markup.INVOKE:
                return self._open_call()
            case markup.EOS:
                return self._cut_block()
        return self._done()

    def _break_parameter(self, text: str) -> State:
        message = (
            f'call {self._read}: a parameter tag must read name="…" string="true|false"'
            f" and a closed value, not {quote(text)}"
        )
        return self._break("bad_parameter", message)

    def _break(self, kind: ProblemKind, message: str) -> State:
        """Give the call up, and look for the next one."""
        self._reader.problem(kind, message, self._reader.entered)
        return self._broken

    def _cut_block(self) -> State:
        self._report_open_block(self._reader.position - len(markup.EOS))
        return self._cut()

    def _end_in_block(self) -> None:
        self._report_open_block(self._reader.position)

    def _report_open_block(self, position: int) -> None:
        self._reader.problem("unterminated_calls", "the block of calls is not closed", position)

    def _end_in_call(self) -> None:
        message = f"call {self._read} is not closed"
        self._reader.problem("unterminated_call", message, self._call_at)

    def _check_gap(self, gap: str, where: str) -> None:
        if gap == TAG_END:
            return
        if gap.strip() == ">":
            message = f"{where}: a tag must be followed by one line break and nothing else"
            self._reader.problem("layout", message, self._reader.entered)
        else:
            message = f"{where}: unexpected text {quote(gap)}"
            self._reader.problem("unexpected_text", message, self._reader.entered)

    def _add(self, text: str) -> None:
        self._reader.emit(ArgumentsDelta(self._count - 1, text))

    def _collected(self) -> str:
        text = "".join(self._parts)
        self._parts.clear()
        return text


def _between(text: str, start: str, *ends: str) -> str | None:
    """Return what is between a start and the first end that fits, or None."""
    for end in ends:
        if text.startswith(start) and text.endswith(end) and len(text) >= len(start) + len(end):
            return text[len(start) : -len(end)]
    return None
