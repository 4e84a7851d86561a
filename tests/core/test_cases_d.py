"""Cases D1 to D3: plugins as packages, found through entry points of the environment."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from core.registry import unknown_name
from tests.core.packages import package, variant_module

LIST = """
import json, site, sys
for folder in {folders!r}:
    site.addsitedir(folder)
import core, variants
from core import registry
print(json.dumps({{
    "names": core.names(),
    "sources": {{name: registry.variants.source(name) for name in core.names()}},
    "broken": {{name: [broken.source, broken.reason] for name, broken in registry.variants.broken.items()}},
}}))
"""


ROOT = Path(__file__).parents[2]


def listed(*folders, script="", cwd=ROOT):
    """What a fresh process lists in the folder `cwd` when these folders are installed."""
    text = LIST.format(folders=[str(folder) for folder in folders]) + script
    settings = {"cwd": cwd, "env": {**os.environ, "PYTHONPATH": os.pathsep.join([str(cwd), str(ROOT)])}}
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120, **settings)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[0]), done


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A package in its folder, and where it is installed from there."""
    for tool in ("pip", "setuptools"):
        if importlib.util.find_spec(tool) is None:
            pytest.skip(f"{tool} is not installed")
    folder, prefix = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("prefix")
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
        '[project]\nname = "tiny-attention"\nversion = "1.2"\n'
        '[project.entry-points.attention_variants]\ntiny = "tiny_attention:Tiny"\n'
        '[tool.setuptools]\npy-modules = ["tiny_attention"]\n'
    )
    (folder / "tiny_attention.py").write_text(variant_module("tiny"))
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index"),
            *("--no-deps", "--no-build-isolation", "--ignore-installed"),
            *("--prefix", str(prefix), "-e", str(folder)),
        ],
        check=True,
        capture_output=True,
        timeout=200,
    )
    (installed,) = prefix.rglob("site-packages")
    return folder, installed


class TestD1:
    def test_an_editable_install_is_listed_once_from_everywhere(self, project, tmp_path):
        folder, installed = project
        # From inside, the build's own metadata lies on the path beside the installed one.
        for place in (folder, tmp_path):
            found, _ = listed(installed, cwd=place)
            assert found["names"].count("tiny") == 1
            assert found["sources"]["tiny"] == "tiny-attention 1.2"
            assert found["broken"] == {}

    def test_a_renamed_module_is_broken_and_says_so(self, project, tmp_path):
        folder, installed = project
        (folder / "tiny_attention.py").rename(folder / "other_attention.py")
        try:
            found, _ = listed(installed, cwd=tmp_path)
        finally:
            (folder / "other_attention.py").rename(folder / "tiny_attention.py")
        assert "tiny" not in found["names"]
        assert "standard" in found["names"]
        source, reason = found["broken"]["tiny"]
        assert source == "tiny-attention 1.2"
        assert "No module named 'tiny_attention'" in reason

    def test_an_entry_added_without_installing_again_is_hinted_at(self, project, tmp_path):
        folder, installed = project
        text = (folder / "pyproject.toml").read_text()
        (folder / "pyproject.toml").write_text(text.replace('tiny = "', 'added = "tiny_attention:Tiny"\ntiny = "'))
        script = """
try:
    core.get("added")
except core.UnknownNameError as error:
    print(error)
"""
        try:
            found, done = listed(installed, cwd=tmp_path, script=script)
        finally:
            (folder / "pyproject.toml").write_text(text)
        assert "added" not in found["names"]
        assert "must be installed again" in done.stdout.splitlines()[1]


class TestD2:
    NAMES = ["additive", "gqa", "linear", "local", "longformer", "mqa", "scaled_dot", "topk", "temperature"]

    @pytest.mark.parametrize(
        ("typed", "meant"),
        [("linaer", "linear"), ("scaled-dot", "scaled_dot"), ("Local", "local"), ("top_k", "topk")],
    )
    def test_close_names(self, typed, meant):
        message = unknown_name("variant", typed, self.NAMES)
        assert f"did you mean '{meant}'" in message
        assert all(name in message for name in self.NAMES)

    @pytest.mark.parametrize("typed", ["zzzz", "flash"])
    def test_nothing_close(self, typed):
        message = unknown_name("variant", typed, self.NAMES)
        assert "did you mean" not in message
        assert all(name in message for name in self.NAMES)


class TestD3:
    @pytest.fixture
    def installed(self, tmp_path):
        modules = {
            "good_plugin": "print('a greeting on standard output')\n" + variant_module("good"),
            "needs_more": "import a_package_that_is_missing\n",
            "empty_plugin": "",
            "exits": "import sys\nsys.exit('no licence')\n",
            "raises": "raise RuntimeError('two\\nlines')\n",
            "registers_nothing": "class Thing:\n    pass\n",
            "takes_standard": variant_module("standard"),
            "registers_half": variant_module("half") + "raise RuntimeError('the other half')\n",
        }
        entries = {
            "good": "good_plugin:Good",
            "needs_more": "needs_more:Thing",
            "no_module": "a_module_that_does_not_exist:Thing",
            "no_attribute": "empty_plugin:Thing",
            "exits": "exits:Thing",
            "raises": "raises:Thing",
            "registers_nothing": "registers_nothing:Thing",
            "thief": "takes_standard:Standard",
            "half": "registers_half:Half",
        }
        package(tmp_path, "mixed-plugins", "0.3", modules, entries)
        return tmp_path

    def test_the_good_ones_work_and_the_broken_ones_are_marked(self, installed):
        found, done = listed(installed)
        assert {"good", "standard", "topk"} <= set(found["names"])
        assert found["sources"]["good"] == "mixed-plugins 0.3"
        assert found["sources"]["standard"] == "variants.standard"
        reasons = {name: reason for name, (source, reason) in found["broken"].items() if source == "mixed-plugins 0.3"}
        expected = {
            "needs_more": "ModuleNotFoundError: No module named 'a_package_that_is_missing'",
            "no_module": "ModuleNotFoundError: No module named 'a_module_that_does_not_exist'",
            "no_attribute": "AttributeError: module 'empty_plugin' has no attribute 'Thing'",
            "exits": "it exits on import (SystemExit no licence)",
            "raises": "RuntimeError: two lines",
            "half": "RuntimeError: the other half",
            "registers_nothing": "PluginError: registers_nothing:Thing registers no variant named 'registers_nothing'",
            "thief": "RegistrationError: variant 'standard' is taken by variants.standard.Standard",
        }
        assert set(reasons) == set(expected)
        assert not set(reasons) & set(found["names"])
        for name, reason in expected.items():
            assert reasons[name].startswith(reason)
        # One line of JSON, and nothing that a plugin printed.
        assert len(done.stdout.splitlines()) == 1
        assert "a greeting" in done.stderr

    def test_entries_that_are_odder_than_that(self, tmp_path):
        modules = {
            "good_plugin": variant_module("good"),
            "raises_no_exception": "class Odd(BaseException): pass\nraise Odd('strange')\n",
            "cannot_say": "class Odd(Exception):\n    def __str__(self): return self.absent\nraise Odd\n",
            "exits_at_length": "raise SystemExit('two\\nlines')\n",
            "moves": "import os; os.chdir('/')\n" + variant_module("moves"),
        }
        entries = {
            "good": "good_plugin:Good",
            "raises_no_exception": "raises_no_exception:Odd",
            "cannot_say": "cannot_say:Odd",
            "exits_at_length": "exits_at_length",
            "bad_value": "no module: at all",
            "uniform": "good_plugin",
            "moves": "moves",
        }
        package(tmp_path, "odd-plugins", "0.3", modules, entries)
        found, done = listed(tmp_path, script="import os; print(os.getcwd())")
        assert {"good", "moves", "uniform", "standard"} <= set(found["names"])
        # An entry for a name of the house neither takes it nor says that it is of another's.
        assert found["sources"]["uniform"] == "variants.uniform"
        assert found["broken"].pop("bad_value")[1].startswith(("AttributeError", "ValueError"))
        assert found["broken"] == {
            "raises_no_exception": ["odd-plugins 0.3", "Odd: strange"],
            "cannot_say": ["odd-plugins 0.3", "Odd: (its message cannot be shown)"],
            "exits_at_length": ["odd-plugins 0.3", "it exits on import (SystemExit two lines)"],
            "uniform": [
                "odd-plugins 0.3",
                "PluginError: good_plugin registers no variant named 'uniform', which is variants.uniform.Uniform",
            ],
        }
        assert done.stdout.splitlines()[1] == str(ROOT)

    def test_using_a_broken_one_gives_its_own_error(self, installed):
        script = """
import traceback
for name in ("needs_more", "exits", "raises"):
    try:
        core.build(name, num_heads=1, head_dim=1)
    except ValueError as error:
        print(type(error).__name__, type(error.__cause__).__name__, name in str(error), "mixed-plugins" in str(error))
print(core.build("good", num_heads=1, head_dim=1).name)
"""
        _, done = listed(installed, script=script)
        assert done.stdout.splitlines()[1:] == [
            "PluginError ModuleNotFoundError True True",
            "PluginError SystemExit True True",
            "PluginError RuntimeError True True",
            "good",
        ]

    def test_one_name_in_two_packages(self, tmp_path):
        folders = tmp_path / "one", tmp_path / "two"
        for folder in folders:
            folder.mkdir()
            module = f"same_{folder.name}"
            package(folder, f"same-{folder.name}", "1", {module: variant_module("same")}, {"same": f"{module}:Same"})
        found, _ = listed(*folders)
        assert found["names"].count("same") == 1
        _, reason = found["broken"]["same"]
        assert "same_one.Same" in reason
        assert "same_two.Same" in reason
