"""Every file under sweeps/ is sound, says what it is for, and resolves to configurations."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments import sweep as sweeps
from experiments.resolve import Resolver
from tests.experiments.conftest import ROOT

FILES = sorted((ROOT / "sweeps").glob("*.yaml"))


def test_the_promised_sweeps_are_there() -> None:
    assert {"heads", "copy", "temperature", "shakespeare"} <= {path.stem for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_resolves(path: Path, tmp_path: Path) -> None:
    overrides = []
    if path.stem == "shakespeare":  # its text is the user's own
        corpus = tmp_path / "corpus.txt"
        corpus.write_text("To be, or not to be, that is the question.\n" * 60)
        overrides = [f"base.task.corpus={corpus}"]
    sweep = sweeps.load(path, overrides)
    assert sweep.file.name == path.stem
    assert path.read_text().startswith("# ")
    resolver = Resolver(sweep)
    resolver.check()
    hashes = [resolver.run(assignment).hash() for assignment in [*sweep.file.baseline, *sweep.grid()]]
    assert len(set(hashes)) == len(hashes)
    assert len(hashes) == sweep.trials


def test_heads_compares_six_variants_with_one_to_eight_heads() -> None:
    sweep = sweeps.load(ROOT / "sweeps" / "heads.yaml")
    grid = list(sweep.grid())
    variants = {assignment["attention.variant"] for assignment in grid} | {"uniform"}
    assert variants == {"standard", "temperature", "topk", "local_global", "linear", "uniform"}
    assert {assignment["model.num_heads"] for assignment in grid} == {1, 2, 4, 8}
    assert len({assignment.get("attention.temperature") for assignment in grid}) >= 3
    assert len(sweep.file.seeds) == 3
    assert sweep.file.baseline[0]["attention.variant"] == "uniform"
