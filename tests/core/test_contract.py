"""The contract suite: every house variant passes it, and every planted fault is caught by the rule of its kind."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import core
import variants  # noqa: F401
from core.contract import RULES, ContractSuite, Report, check
from core.errors import ConfigError, UnknownNameError
from tests.core import planted

ROOT = Path(__file__).parents[2]
SOUND = [planted.Sound, planted.SoundTopK, planted.SoundTemperature, planted.Windowed]


@pytest.mark.parametrize("name", core.names())
def test_house_variant_conforms(name: str) -> None:
    report = check(name)
    assert report.ok, f"\n{report}"


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("variant", [*core.names(), *SOUND], ids=str)
def test_what_is_sound_is_not_accused_at_ten_seeds(variant: str | type[core.Attention]) -> None:
    report = check(variant, seeds=range(1, 11))
    assert report.ok, f"\n{report}"


@pytest.mark.parametrize("variant", SOUND, ids=lambda cls: cls.__name__)
def test_what_the_faults_are_planted_in_is_sound(variant: type[core.Attention]) -> None:
    report = check(variant)
    assert report.ok, f"\n{report}"


@pytest.mark.parametrize(("rule", "variant"), planted.FAULTS, ids=[f"{c.__name__}-{r}" for r, c in planted.FAULTS])
def test_fault_is_caught(rule: str, variant: type[core.Attention]) -> None:
    (result,) = check(variant, rules=[rule]).results
    assert not result.passed
    assert result.claimed
    assert result.config is not None
    assert ", seed 0" in result.witness


def test_every_rule_catches_a_fault() -> None:
    assert {rule.__name__ for rule in RULES} == {rule for rule, _ in planted.FAULTS}


def test_every_rule_says_in_one_line_what_it_demands() -> None:
    for rule in RULES:
        assert rule.__doc__, rule.__name__
        assert "\n" not in inspect.cleandoc(rule.__doc__), rule.__name__
    assert len({rule.__name__ for rule in RULES}) == len(RULES)


def test_witness_names_the_tokens_the_amount_and_the_settings() -> None:
    (result,) = check(planted.FutureValues, seeds=[7], rules=["no_future_leak"]).results
    assert result.witness.startswith("future leak (causal): changing token 1 moves row 0 of out by ")
    assert result.witness.endswith("config none, seed 7, B2 H4 L2 S2 D8 Dv5")


def test_report_is_json_and_a_card() -> None:
    report = check(planted.FutureValues, rules=["no_future_leak", "keys_per_query", "inputs_unchanged"])
    assert json.loads(json.dumps(report.as_dict())) == report.as_dict()
    assert not report.ok
    assert [result.status for result in report.results] == ["FAIL", "not claimed", "pass"]
    assert [failure.rule for failure in report.failures] == ["no_future_leak"]
    title, *lines = str(report).splitlines()
    assert title == "FutureValues: DOES NOT CONFORM (1 pass, 1 FAIL, 1 not claimed; 1 configs, 1 seeds)"
    assert len(lines) == 3
    assert lines[1].split(maxsplit=3) == ["not", "claimed", "keys_per_query", "the Spec does not claim keys_per_query"]


def test_report_without_failure_is_ok() -> None:
    assert Report("mine", [{}], [0], []).ok


def test_configs_given_replace_the_drawn_ones() -> None:
    report = check("topk", configs=[{"keep": 3}, core.get("topk").Config(keep=5)], rules=["inputs_unchanged"])
    assert [config["keep"] for config in report.configs] == [3, 5]
    with pytest.raises(ConfigError, match="keep"):
        check("topk", configs=[{"keep": 0}])


def test_default_both_ends_and_drawn_settings_are_checked() -> None:
    configs = check("topk", rules=["inputs_unchanged"]).configs
    assert configs[0] == {"keep": 8, "temperature": 1.0}
    assert configs[1] == {"keep": 1, "temperature": 0.1}
    assert configs[3:] == [{"keep": 64, "temperature": 1.0}]
    assert 1 <= configs[2]["keep"] <= 6
    assert 0.1 <= configs[2]["temperature"] <= 1.0
    # What is 0 by default is also left at 0, beside drawn values of the rest.
    bare = check("local_global", rules=["inputs_unchanged"]).configs[-1]
    assert bare["num_global"] == 0
    assert 1 <= bare["window"] <= 6


def test_every_choice_is_drawn() -> None:
    configs = check("linear", rules=["inputs_unchanged"]).configs
    assert {config["feature_map"] for config in configs} == {"elu", "relu", "taylor"}


def test_unknown_names_are_refused() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'inputs_unchanged'"):
        check("topk", rules=["inputs_unchangd"])
    with pytest.raises(UnknownNameError):
        check("no_such_variant")


def test_any_exception_is_a_failure_and_no_crash() -> None:
    class Raises(planted.Sound):
        def attend(self, *arguments: object) -> core.AttentionOutput:
            raise KeyError("lost")

    report = check(Raises)
    assert not report.ok
    assert report.results[0].witness.startswith("raised KeyError: 'lost'")
    assert len(report.results) == len(RULES)


def test_global_generator_and_inputs_of_the_caller_are_left_alone() -> None:
    before = torch.get_rng_state()
    with torch.no_grad():
        assert check("uniform").ok
        assert not torch.is_grad_enabled()
    assert torch.equal(before, torch.get_rng_state())


def test_core_contract_needs_no_pytest() -> None:
    code = "import sys, core.contract; assert 'pytest' not in sys.modules; core.contract.check; core.contract.RULES"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)


class TestStandard(ContractSuite):
    variant = "standard"


def test_suite_fails_with_the_witness(tmp_path: Path) -> None:
    (tmp_path / "test_plugin.py").write_text(
        "from core.contract import ContractSuite\n"
        "from tests.core.planted import FutureValues\n\n"
        "class TestFutureValues(ContractSuite):\n"
        "    variant = FutureValues\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "no_future_leak or inputs_unchanged"]
    done = subprocess.run(
        [*command, str(tmp_path)], cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 1 passed" in done.stdout
    assert "no_future_leak: future leak (causal): changing token 1 moves row 0 of out by" in done.stdout


def test_a_limit_that_the_config_refuses_is_reported() -> None:
    class WrongLimit(planted.SoundTopK):
        spec = core.Spec(**planted.CLAIMS, equals_standard_when={"keep": 0})

    (result,) = check(WrongLimit, rules=["equals_standard"]).results
    assert "raised ConfigError: : keep: Input should be greater than or equal to 1" in result.witness
