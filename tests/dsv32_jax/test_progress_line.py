import io

from dsv32_jax import progress_line


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_on_a_file_lines_come_at_intervals_and_the_last_always():
    stream, clock = io.StringIO(), Clock()
    line = progress_line.ProgressLine(stream, seconds=10.0, clock=clock)

    for second in range(25):
        clock.now = float(second)
        line.show(f"at {second}")
    line.show("end", now=True)
    line.close()

    assert stream.getvalue() == "at 0\nat 10\nat 20\nend\n"


def test_on_a_terminal_one_line_is_rewritten_and_then_ended():
    stream, clock = Terminal(), Clock()
    line = progress_line.ProgressLine(stream, seconds=10.0, clock=clock)

    for now in (0.0, 0.1, 0.3):
        clock.now = now
        line.show(f"at {now}")
    line.close()

    assert stream.getvalue() == "\rat 0.0\x1b[K\rat 0.3\x1b[K\n"
