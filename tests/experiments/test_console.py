"""What a person sees: plain lines in a pipe, a bar on a terminal."""

import io

import pytest

from experiments import console
from experiments.console import Terminal, words


class Screen(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0, "0 s"),
        (0.4, "0 s"),
        (89, "89 s"),
        (90, "2 min"),
        (119, "2 min"),
        (3600, "60 min"),
        (5400, "1.5 h"),
        (90_000, "25.0 h"),
    ],
)
def test_times(seconds, expected):
    assert words(seconds) == expected


def test_piped_output_is_plain_lines_as_they_were_said():
    stream = io.StringIO()
    long = "study [bold]x[/bold] " + "word " * 60 + "1/2 {3}"
    with Terminal(stream) as terminal:
        terminal.say(long)
        terminal.say("second")
    assert stream.getvalue() == f"{long}\nsecond\n"


def test_progress_in_a_pipe_is_a_line_now_and_then(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: clock[0])
    stream = io.StringIO()
    with Terminal(stream) as terminal:
        for second in range(25):
            clock[0] = 100.0 + second
            terminal.progress(second, 40, 2, "best val/loss 1.5000", None if second < 15 else 61.0)
    assert stream.getvalue().splitlines() == [
        "11 of 40 runs, 2 running, best val/loss 1.5000, time left unknown",
        "22 of 40 runs, 2 running, best val/loss 1.5000, about 61 s left",
    ]


def test_a_terminal_gets_a_bar_and_loses_no_line(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    stream = Screen()
    with Terminal(stream) as terminal:
        terminal.progress(3, 8, 2, "best val/loss 1.5000", 30.0)
        terminal.say("a line")
    shown = stream.getvalue()
    assert "3/8" in shown
    assert "best val/loss 1.5000" in shown
    assert "a line" in shown
    assert "\x1b[?25h" in shown  # the cursor is back
