import importlib
import pickle
import subprocess
import sys
import types

import pytest
import torch

import core
from core import (
    Attention,
    AttentionConfig,
    ConfigError,
    MissingExtraError,
    PluginError,
    RegistrationError,
    UnknownNameError,
    build,
    tunable,
)
from core.registry import Registry, load_plugin, require, unknown_name
from core.registry import variants as house
from tests.core.packages import variant_module


@pytest.fixture
def registry():
    return Registry("variant", Attention, "a_group_that_nobody_uses")


@pytest.fixture
def clean_house():
    """Names registered in a test are gone after it."""
    classes, broken = dict(house._classes), dict(house.broken)
    yield house
    house._classes.clear()
    house._classes.update(classes)
    house.broken.clear()
    house.broken.update(broken)


def defined_in(module, name, base=Attention):
    """A class as another module would have defined it."""
    return types.new_class(name, (base,), exec_body=lambda body: body.update(__module__=module, __qualname__=name))


def test_register_get_names(registry):
    class Two(Attention):
        pass

    class One(Attention):
        pass

    assert registry.register("two")(Two) is Two
    registry.register("one")(One)
    assert registry.names() == ["one", "two"]
    assert registry.get("two") is Two
    assert Two.name == "two"
    assert registry.source("two") == __name__


def test_names_are_sorted_and_hold_the_house():
    assert core.names() == sorted(core.names())
    assert {"linear", "local_global", "standard", "temperature", "topk", "uniform"} <= set(core.names())
    assert core.get("topk").__module__ == "variants.topk"


@pytest.mark.parametrize("name", ["TopK", "top-k", "top k", "_topk", "topk_", "top__k", "1st", "", "topk\n", "tôpk", None, 3])
def test_names_are_lower_snake_case(registry, name):
    with pytest.raises(RegistrationError, match="lower snake case"):
        registry.register(name)


@pytest.mark.parametrize("name", ["topk", "top_k", "top_p2", "t"])
def test_good_names(registry, name):
    registry.register(name)(defined_in("somewhere", "Some"))
    assert registry.names() == [name]


def test_a_taken_name_is_an_error_that_names_both_modules(registry):
    registry.register("mine")(defined_in("first_module", "Mine"))
    with pytest.raises(RegistrationError) as caught:
        registry.register("mine")(defined_in("second_module", "Mine"))
    assert "first_module.Mine" in str(caught.value)
    assert "second_module.Mine" in str(caught.value)
    assert registry.get("mine").__module__ == "first_module"


def test_two_classes_of_one_module_do_not_share_a_name(registry):
    registry.register("mine")(defined_in("one_module", "Mine"))
    with pytest.raises(RegistrationError, match=r"one_module\.Other needs another name"):
        registry.register("mine")(defined_in("one_module", "Other"))


def test_the_house_is_not_overwritten():
    with pytest.raises(RegistrationError, match=r"variants\.standard\.Standard"):
        core.register("standard")(defined_in("elsewhere", "Standard"))
    assert core.get("standard").__module__ == "variants.standard"


def test_running_the_same_definition_again_replaces_it(registry):
    def cell():
        class Mine(Attention):
            pass

        return registry.register("mine")(Mine)

    first, second = cell(), cell()
    assert first is not second
    assert registry.get("mine") is second


def test_reloading_a_module_of_the_house():
    from variants import uniform

    before = core.get("uniform")
    try:
        importlib.reload(uniform)
        assert core.get("uniform") is not before
    finally:
        uniform.Uniform = before
        core.register("uniform")(before)


@pytest.mark.parametrize("given", [int, AttentionConfig, lambda: None, Attention(1, 1, AttentionConfig())])
def test_only_subclasses(registry, given):
    with pytest.raises(RegistrationError, match="must be a subclass of Attention"):
        registry.register("mine")(given)


def test_unknown_names_get_close_matches_and_the_list():
    with pytest.raises(UnknownNameError) as caught:
        core.get("linaer")
    message = str(caught.value)
    assert message.startswith("unknown variant 'linaer'; did you mean 'linear'?")
    assert all(name in message for name in core.names())
    with pytest.raises(UnknownNameError) as caught:
        build("zzzz", num_heads=1, head_dim=1)
    assert "did you mean" not in str(caught.value)
    assert "standard" in str(caught.value)


@pytest.mark.parametrize("name", ["", None, 7, ["standard"][0] + "x" * 1000])
def test_strange_unknown_names_do_not_crash(name):
    with pytest.raises(UnknownNameError):
        core.get(name)


def test_unknown_name_with_nothing_to_suggest():
    assert unknown_name("variant", "x", []) == "unknown variant 'x' (there are: none)"


@pytest.mark.parametrize(
    ("variant", "settings", "words"),
    [
        ("topk", {"keep": "8"}, ("topk", "keep", "'8'")),
        ("topk", {"keep": True}, ("keep", "True")),
        ("topk", {"keep": 8.0}, ("keep", "8.0")),
        ("topk", {"keep": 0}, ("keep", "1", "0")),
        ("topk", {"keep": None}, ("keep", "None")),
        ("topk", {"temperature": float("nan")}, ("temperature", "nan")),
        ("topk", {"temperature": float("inf")}, ("temperature", "inf")),
        ("topk", {"temperature": "0.5"}, ("temperature", "'0.5'")),
        ("topk", {"temprature": 0.5}, ("unknown setting 'temprature'", "did you mean 'temperature'", "keep")),
        ("topk", {"zzzz": 0.5}, ("unknown setting 'zzzz'", "keep, temperature")),
        ("topk", {"keep": 0, "temperature": 0.0}, ("keep", "temperature")),
        ("uniform", {"keep": 3}, ("unknown setting 'keep'", "none")),
        ("standard", {"backend": "flash"}, ("backend", "'flash'", "sdpa")),
        ("standard", {"chunk_size": 0}, ("chunk_size", "1", "0")),
        ("linear", {"feature_map": "softmax"}, ("feature_map", "'softmax'", "elu")),
        ("temperature", {"learn": True}, ("learn", "True", "per_head")),
    ],
)
def test_settings_are_refused_in_one_line(variant, settings, words):
    with pytest.raises(ConfigError) as caught:
        build(variant, num_heads=2, head_dim=4, **settings)
    message = str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert "\n" not in message
    assert "http" not in message
    assert all(word in message for word in words), message


def test_settings_are_frozen():
    attention = build("topk", num_heads=2, head_dim=4, keep=3)
    assert attention.config.keep == 3
    with pytest.raises(ValueError, match="frozen"):
        attention.config.keep = 4


@pytest.mark.parametrize("sizes", [(0, 4), (2, 0), (-1, 4), (2.0, 4), (True, 4), ("2", 4)])
def test_sizes_are_whole_numbers_of_at_least_one(sizes):
    with pytest.raises(ConfigError, match="must be an integer of at least 1, got"):
        build("standard", num_heads=sizes[0], head_dim=sizes[1])


class TestPluginFiles:
    def test_loads_what_it_registers(self, tmp_path, clean_house):
        file = tmp_path / "my_attention.py"
        file.write_text(variant_module("from_a_file"))
        load_plugin(file)
        load_plugin(str(file))
        attention = build("from_a_file", num_heads=1, head_dim=2)
        x = torch.zeros(1, 1, 2, 2)
        assert attention(x, x, x).out.shape == x.shape
        assert isinstance(pickle.loads(pickle.dumps(attention)), type(attention))

    def test_its_prints_stay_off_standard_output(self, tmp_path, clean_house, capsys):
        file = tmp_path / "loud.py"
        file.write_text("print('hello')\n" + variant_module("loud"))
        load_plugin(file)
        captured = capsys.readouterr()
        assert captured.out == ""
        assert "hello" in captured.err

    @pytest.mark.parametrize(
        ("text", "error", "words"),
        [
            ("import not_installed_anywhere", ModuleNotFoundError, "No module named 'not_installed_anywhere'"),
            ("raise RuntimeError('bad\\nluck')", RuntimeError, "RuntimeError: bad luck"),
            ("import sys; sys.exit(3)", SystemExit, "exits on import .SystemExit 3"),
            ("def (", SyntaxError, "SyntaxError"),
            (variant_module("standard"), RegistrationError, "'standard' is taken by variants.standard.Standard"),
        ],
    )
    def test_a_broken_one_raises_with_its_reason(self, tmp_path, clean_house, text, error, words):
        file = tmp_path / "broken.py"
        file.write_text(text)
        for _ in range(2):  # it is not remembered as loaded
            with pytest.raises(PluginError, match=words) as caught:
                load_plugin(file)
            assert isinstance(caught.value.__cause__, error)
            assert "\n" not in str(caught.value)
            assert "broken.py" in str(caught.value)

    def test_it_can_be_repaired(self, tmp_path, clean_house):
        file = tmp_path / "repaired.py"
        file.write_text("raise RuntimeError")
        with pytest.raises(PluginError):
            load_plugin(file)
        file.write_text(variant_module("repaired") + "# another size, so that no cached byte code is used\n")
        load_plugin(file)
        assert "repaired" in core.names()

    def test_an_interrupt_is_no_broken_plugin(self, tmp_path):
        file = tmp_path / "interrupted.py"
        file.write_text("raise KeyboardInterrupt")
        with pytest.raises(KeyboardInterrupt):
            load_plugin(file)
        with pytest.raises(KeyboardInterrupt):  # nor is it taken for loaded the next time
            load_plugin(file)

    def test_what_a_failing_file_had_registered_is_gone(self, tmp_path, clean_house):
        file = tmp_path / "half.py"
        file.write_text(variant_module("half") + "\nraise RuntimeError('second half')\n")
        with pytest.raises(PluginError):
            load_plugin(file)
        assert "half" not in core.names()

    def test_paths(self, tmp_path):
        with pytest.raises(PluginError, match=r"nowhere\.py: no such file"):
            load_plugin(tmp_path / "nowhere.py")
        (tmp_path / "notes.txt").write_text("")
        with pytest.raises(PluginError, match=r"must be a Python file"):
            load_plugin(tmp_path / "notes.txt")
        with pytest.raises(PluginError, match="is a folder; name a Python file in it"):
            load_plugin(tmp_path)

    def test_two_files_of_one_name(self, tmp_path, clean_house):
        for folder, name in (("a", "first_of_two"), ("b", "second_of_two")):
            (tmp_path / folder).mkdir()
            (tmp_path / folder / "same.py").write_text(variant_module(name))
            load_plugin(tmp_path / folder / "same.py")
        assert {"first_of_two", "second_of_two"} <= set(core.names())


def test_importing_variants_registers_the_house_and_core_alone_nothing():
    script = """
import sys, core, core.registry
print("variants" in sys.modules, sorted(core.registry.variants._classes))
import variants
print(*core.names())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    before, after = done.stdout.splitlines()
    assert before == "False []"
    assert set(after.split()) >= {"linear", "local_global", "standard", "temperature", "topk", "uniform"}


def test_a_variant_with_a_search_range_of_its_own(registry):
    @registry.register("mine")
    class Mine(Attention):
        class Config(AttentionConfig):
            share: float = tunable(0.5, low=0.1, high=0.9, ge=0.0)

    assert registry.get("mine").Config().share == 0.5


class TestRequire:
    def test_a_library_that_is_there(self):
        assert require("torch.nn", extra="any") is torch.nn

    @pytest.mark.parametrize("module", ["not_installed_anywhere", "not_installed_anywhere.part"])
    def test_one_that_is_missing(self, module):
        with pytest.raises(MissingExtraError) as caught:
            require(module, extra="some")
        assert str(caught.value) == f"{module} is not installed; pip install 'attention-experiments[some]'"
        assert isinstance(caught.value.__cause__, ModuleNotFoundError)

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("import another_that_is_missing", "ModuleNotFoundError: No module named 'another_that_is_missing'"),
            ("raise AttributeError('torch has\\nchanged')", "AttributeError: torch has changed"),
        ],
    )
    def test_one_that_is_installed_and_does_not_work(self, tmp_path, monkeypatch, text, words):
        (tmp_path / "a_library_that_fails.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        with pytest.raises(MissingExtraError) as caught:
            require("a_library_that_fails", extra="some")
        assert str(caught.value).startswith(f"a_library_that_fails cannot be imported ({words}); pip install ")
        assert "\n" not in str(caught.value)
