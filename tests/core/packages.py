"""Packages made for a test: their files, and the metadata that an installer would have left beside them."""

GOOD = """
from core import Attention, Spec, register

@register({name!r})
class {kind}(Attention):
    spec = Spec(causal=True)

    def attend(self, q, k, v, mask, need_weights):
        return v, None
"""


def variant_module(name):
    """The text of a plugin that registers `name`."""
    return GOOD.format(name=name, kind=name.title().replace("_", ""))


def package(folder, distribution, version, modules, entries, group="attention_variants"):
    """Put modules {name: text} and entry points {name: value} of one distribution into a folder of `sys.path`."""
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)
    metadata = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    lines = [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
