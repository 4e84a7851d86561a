"""Seeds: the same on every machine, different for every purpose."""

import hashlib
import itertools
import subprocess
import sys

from experiments.seeding import derive


def test_a_seed_is_the_first_63_bits_of_the_digest():
    assert derive("a", 1) == int(hashlib.sha256(b"a/1").hexdigest()[:16], 16) // 2


def test_seeds_do_not_change_between_versions():
    """A study that is gone on with after an update must see the batches it saw before."""
    assert derive("text", 0, 0) == 9050613185197725051
    assert derive("dropout", 1) == 2708690947753590491


def test_seeds_do_not_depend_on_the_process():
    code = "from experiments.seeding import derive; print(derive('a', 2, 'b'))"
    found = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}
        ).stdout
        for seed in ("1", "2")
    }
    assert found == {f"{derive('a', 2, 'b')}\n"}


def test_every_purpose_has_its_own():
    parts = itertools.product(("init", "dropout", "text", "copy"), range(50), range(10))
    seeds = [derive(*each) for each in parts]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    # Bits that do not move would mean that the streams are related.
    for bit in range(63):
        assert 0.4 < sum(seed >> bit & 1 for seed in seeds) / len(seeds) < 0.6
