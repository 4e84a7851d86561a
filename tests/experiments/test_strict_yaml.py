"""What a YAML file says is what a person reads in it, and nothing in one can do harm."""

import math
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments import strict_yaml
from experiments.errors import InputError
from experiments.strict_yaml import Document
from tests.experiments.small import ROOT, read

INFINITY = float("inf")

# Plain scalars and their meaning by the YAML 1.2 core schema; those that differ in YAML 1.1 are what people stumble over.
SCALARS = {
    "1e-3": 0.001,
    "1e3": 1000.0,
    "1.0e3": 1000.0,
    "1.0e-3": 0.001,
    "1.e-3": 0.001,
    "1.0e+3": 1000.0,
    "1E3": 1000.0,
    ".5": 0.5,
    "-.5": -0.5,
    "5.": 5.0,
    "1.10": 1.1,
    "1_000": "1_000",
    "no": "no",
    "No": "No",
    "yes": "yes",
    "on": "on",
    "off": "off",
    "y": "y",
    "010": 10,
    "08": 8,
    "-7": -7,
    "+7": 7,
    "0x10": 16,
    "0xfF": 255,
    "0o17": 15,
    "0b11": "0b11",
    "12:30": "12:30",
    "1:2:3": "1:2:3",
    "2024-01-02": "2024-01-02",
    ".inf": INFINITY,
    "-.inf": -INFINITY,
    "+.INF": INFINITY,
    "inf": "inf",
    "nan": "nan",
    "null": None,
    "~": None,
    "Null": None,
    "none": "none",
    "true": True,
    "False": False,
    "TRUE": True,
    "tRue": "tRue",
    "1.2.3": "1.2.3",
    "e3": "e3",
    "1e": "1e",
    ".": ".",
    "٣": "٣",
}


@pytest.mark.parametrize(("text", "meaning"), SCALARS.items(), ids=list(SCALARS))
def test_a_plain_scalar_means_what_it_looks_like(text, meaning):
    found = read(f"a: {text}")["a"]
    assert found == meaning
    assert type(found) is type(meaning)


def test_not_a_number_is_read():
    assert math.isnan(read("a: .nan")["a"])


def test_an_empty_value_is_null():
    assert read("a:\nb: ''") == {"a": None, "b": ""}


@pytest.mark.parametrize("text", ["1", "1e-3", "true", "null", "0x10", ".inf"])
@pytest.mark.parametrize("quote", ["'", '"'])
def test_what_is_quoted_stays_text(text, quote):
    assert read(f"a: {quote}{text}{quote}")["a"] == text


@pytest.mark.parametrize("style", ["|\n  12\n", ">\n  12\n"])
def test_block_text_stays_text(style):
    assert read(f"a: {style}")["a"] == "12\n"


def test_nested_data_and_their_lines():
    document = strict_yaml.parse("a:\n  b: [1,\n    2]\n\nc.d:\n  - x\n  -\n    e: 3\n", "f")
    assert document.data == {"a": {"b": [1, 2]}, "c.d": ["x", {"e": 3}]}
    expected = {
        ("a",): 1,
        ("a", "b"): 2,
        ("a", "b", 0): 2,
        ("a", "b", 1): 3,
        ("c.d",): 5,
        ("c.d", 0): 6,
        ("c.d", 1): 8,
        ("c.d", 1, "e"): 8,
    }
    assert {path: document.lines[path] for path in expected} == expected
    assert document.line(("a", "b", 7, "nowhere")) == 2
    assert document.line(("nowhere",)) == 1
    assert str(document.error(("a", "b", 1), "what")) == "f:3: what"


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("a: 1\nb: 2\na: 3", 3, ["a", "duplicate", "line 1"]),
        ("x:\n  a: 1\n  b: 2\n  'a': 3", 4, ["a", "duplicate", "line 2"]),
        ("x: {a: 1, a: 1}", 1, ["a", "duplicate"]),
        ("a: 1\nb: !!python/object:os.system x", 2, ["python/object", "tag"]),
        ("a: !!python/object/apply:os.system [ls]", 1, ["tag"]),
        ("a: !foo 1", 1, ["!foo"]),
        ("a: !!str 1", 1, ["tag"]),
        ("a: ! 1", 1, ["tag"]),
        ("a: !!int '1'", 1, ["tag"]),
        ("a: 1\nb: !!set {x}", 2, ["tag"]),
        ("!foo a: 1", 1, ["!foo"]),
        ("!!map {a: 1}", 1, ["tag"]),
        ("a: &x [*x]", 1, ["deep"]),
        ("a: &x\n  b: *x", 1, ["deep"]),
        ("a: *nowhere", 1, ["alias", "nowhere"]),
        ("a: 1\n---\nb: 2", 2, ["another document"]),
        ("a: 1\n\tb: 2", 2, ["\\t"]),
        ("a: 1\nb: [1, 2", 2, ["expected"]),
        ("a: 'x", 1, ["end of stream"]),
        ("a: 1\nb\nc: 2", 3, []),
        ("a: 1\n  b: 2", 2, ["mapping values"]),
        ("1: a", 1, ["key"]),
        ("true: a", 1, ["key"]),
        ("null: a", 1, ["key"]),
        ("? [a]\n: 1", 1, ["key"]),
        ("a: \x07", 1, ["character"]),
        ("a: 1\nb: \x00", 2, ["character"]),
        ('a: 1\nb: "\\U00110000"', 2, ["out of range"]),
        ('a: "\\UFFFFFFFF"', 1, ["out of range"]),
        ('a: "\\ud800"', 1, ["surrogate"]),
        ("a: 1\nb: " + "9" * 5000, 2, ["5000 digits"]),
        ("%YAML 1." + "9" * 5000 + "\n---\na: 1", 1, ["out of range"]),
        ("%YAML 2.0\n---\na: 1", 1, ["version"]),
    ],
)
def test_a_refusal_names_its_line(text, line, words):
    with pytest.raises(InputError) as caught:
        strict_yaml.parse(text, "f")
    message = str(caught.value)
    assert message.startswith(f"f:{line}: ")
    assert "\n" not in message
    for word in words:
        assert word in message


def test_aliases_are_data_when_they_are_few():
    assert read("a: &x [1, 2]\nb: *x") == {"a": [1, 2], "b": [1, 2]}


def test_an_alias_bomb_is_refused_at_once():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]  # 10 ** 9 values
    start = time.monotonic()
    with pytest.raises(InputError, match=r"^f:\d+: holds more than 50000 values once its aliases are expanded$"):
        strict_yaml.parse("\n".join(lines), "f")
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("text", ["[" * 200 + "]" * 200, "[" * 100_000, "- " * 5000, "{a: " * 300 + "1" + "}" * 300])
def test_depth_is_bounded(text):
    with pytest.raises(InputError, match="nested too deeply"):
        strict_yaml.parse(text, "f")


def test_forty_levels_are_allowed():
    value = read("[" * 40 + "]" * 40)
    for _ in range(39):
        [value] = value
    assert value == []


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "{path}:1: must be a mapping such as `name: heads`, got an empty file"),
        (b"# only a comment\n", "{path}:1: must be a mapping such as `name: heads`, got an empty file"),
        (b"- a\n- b\n", "{path}:1: must be a mapping such as `name: heads`, got list"),
        (b"heads\n", "{path}:1: must be a mapping such as `name: heads`, got str"),
        (b"12", "{path}:1: must be a mapping such as `name: heads`, got int"),
        (b"a: 1\nb: \xff\n", "{path}:2: is not UTF-8 text (byte 0xff)"),
        (b"\x89PNG\r\n\x1a\n\x00\x00", "{path}:1: is not UTF-8 text (byte 0x89)"),
        (b"a: " + b"x" * 256 * 1024, "{path}:1: is larger than 256 KiB; a sweep file is a page or two"),
    ],
)
def test_a_file_of_another_kind_is_refused(tmp_path, raw, message):
    path = tmp_path / "s.yaml"
    path.write_bytes(raw)
    with pytest.raises(InputError) as caught:
        strict_yaml.load(path)
    assert str(caught.value) == message.format(path=path)


def test_a_mark_at_the_start_and_windows_lines_are_read(tmp_path):
    path = tmp_path / "s.yaml"
    path.write_bytes(b"\xef\xbb\xbfname: a\r\nb:\r\n  c: 1e-3\r\n")
    document = strict_yaml.load(path)
    assert document.data == {"name": "a", "b": {"c": 0.001}}
    assert document.lines["b", "c"] == 3


@pytest.mark.parametrize("place", ["missing.yaml", "."])
def test_a_file_that_cannot_be_read_is_named(tmp_path, place):
    with pytest.raises(InputError, match=r"cannot be read: (No such file|Is a directory)"):
        strict_yaml.load(tmp_path / place)


def outcome(read, *arguments):
    """A Document or the text of an InputError; anything else is raised."""
    try:
        return read(*arguments)
    except InputError as error:
        return str(error)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(st.text(alphabet=st.sampled_from("ab1.-_:,?!&*#|>%@'\"[]{}\\xuU \t\n<~\ud800\x00é"), max_size=40) | st.text(max_size=40))
def test_any_text_is_data_or_refused(text):
    found = outcome(strict_yaml.parse, text, "f")
    assert isinstance(found, Document) or (found.startswith("f:") and "\n" not in found)


def test_any_damaged_sweep_file_is_data_or_refused(tmp_path):
    draw = random.Random(0)
    path = tmp_path / "s.yaml"
    originals = [file.read_bytes() for file in sorted((ROOT / "sweeps").glob("*.yaml"))]
    assert originals
    for _ in range(120):
        raw = bytearray(draw.choice(originals))
        for _ in range(draw.randint(1, 6)):
            at = draw.randrange(len(raw))
            kind = draw.randrange(3)
            if kind == 0:
                raw[at] = draw.randrange(256) if draw.random() < 0.3 else draw.choice(b"!&*:[]{}\\\"'%\t\n-")
            elif kind == 1:
                del raw[at : at + draw.randint(1, 30)]
            else:
                raw[at:at] = bytes(draw.choice(b"!&*:[]{}\"'-\n #") for _ in range(3))
        path.write_bytes(bytes(raw))
        found = outcome(strict_yaml.load, path)
        if isinstance(found, Document):
            assert isinstance(found.data, dict)
        else:
            assert found.startswith(f"{path}:")
