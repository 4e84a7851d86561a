"""From a file to configurations: what is refused, at which line, and in which order the rest is run."""

import itertools
import subprocess
import sys

import pytest

from experiments.errors import InputError
from experiments.resolve import Resolver
from experiments.sweep import is_active, load, same
from tests.experiments.small import HEAD, ROOT, sweep_of

SPACE = "method: random\nbudget: {trials: 3}\n"  # two lines

# What follows the three lines of HEAD, the line of the finding, and how it begins.
REFUSED = {
    "unknown key": ("budgets: {trials: 3}", 4, "budgets: unknown key; did you mean 'budget'?"),
    "unknown nested key": ("budget:\n  trails: 3", 5, "budget.trails: unknown key; did you mean 'trials'?"),
    "unknown key in a list": ("objectives:\n  - {metrik: a}", 5, "objectives.0.metrik: unknown key; did you mean 'metric'?"),
    "unknown key of a parameter": (
        "parameters:\n  model.num_heads: {value: [1]}",
        5,
        "parameters.model.num_heads.value: unknown key; did you mean 'values'?",
    ),
    "unknown key of base": ("  modle: {}", 4, "base.modle: unknown key; did you mean 'model'?"),
    "unknown key of model": ("  model: {num_head: 2}", 4, "base.model.num_head: unknown key; did you mean 'num_heads'?"),
    "unknown key of train": ("  train:\n    step: 2", 5, "base.train.step: unknown key; did you mean 'steps'?"),
    "unknown key far from all": ("zzz: 1", 4, "zzz: unknown key"),
    "text for a number": ("  train:\n    lr: fast", 5, "base.train.lr: must be a valid number, got 'fast'"),
    "quoted number": ('  train: {lr: "1e-3"}', 4, "base.train.lr: must be a valid number, got '1e-3'"),
    "number with underscore": ("  train: {steps: 1_000}", 4, "base.train.steps: must be a valid integer, got '1_000'"),
    "word for a truth": ("  model: {bias: off}", 4, "base.model.bias: must be a valid boolean, got 'off'"),
    "out of bounds": ("  train: {batch_size: 0}", 4, "base.train.batch_size: must be greater than or equal to 1, got 0"),
    "infinite": ("  train: {lr: .inf}", 4, "base.train.lr: must be a finite number, got inf"),
    "empty section": ("  model:", 4, "base.model: must be"),
    "empty parameter": ("parameters:\n  model.num_heads:", 5, "parameters.model.num_heads: must be"),
    "method": ("method: bayes", 4, "method: must be 'grid', 'random' or 'tpe', got 'bayes'"),
    "goal": ("objectives: [{goal: lower}]", 4, "objectives.0.goal: must be 'minimize' or 'maximize', got 'lower'"),
    "two objectives": ("objectives: [{metric: a}, {metric: b}]", 4, "objectives: List must have at most 1 item"),
    "timeout": ("budget: {timeout: soon}", 4, "budget.timeout: must be a time such as 2h, 1h30m or 45s, got 'soon'"),
    "seed twice": ("seeds: [0, 1, 0]", 4, "seeds: the same seed stands twice"),
    "seed that no store holds": ("seeds: [99999999999999999999]", 4, "seeds: a seed must be below 2**63"),
    "constraint": ("constraints: [{metric: a}]", 4, "constraints.0: give min, max or both"),
    "values and range": (
        "parameters:\n  model.num_heads: {values: [1], min: 1, max: 2}",
        5,
        "parameters.model.num_heads: give values, or min and max",
    ),
    "log from 0": (
        SPACE + "parameters:\n  model.dropout: {min: 0, max: 0.5, log: true}",
        7,
        "parameters.model.dropout: log needs min above 0, got 0",
    ),
    "range in a grid": (
        "parameters:\n  train.lr: {min: 1e-3, max: 1e-2}",
        5,
        "parameters.train.lr: a range does not go with method grid",
    ),
    "no such section": (
        "parameters:\n  modle.num_heads: {values: [1]}",
        5,
        "parameters.modle.num_heads: must be a path into base",
    ),
    "section alone": ("parameters:\n  model: {values: [1]}", 5, "parameters.model: must be a path into base"),
    "no such setting of model": (
        "parameters:\n  model.heads: {values: [1]}",
        5,
        "parameters.model.heads: model has no setting 'heads'; did you mean",
    ),
    "no such setting of train": (
        "parameters:\n  train.lrr: {values: [1e-3]}",
        5,
        "parameters.train.lrr: train has no setting 'lrr'; did you mean 'lr'?",
    ),
    "value out of bounds": (
        "parameters:\n  model.num_heads: {values: [1, 0]}",
        5,
        "parameters.model.num_heads: must be greater than or equal to 1, got 0",
    ),
    "value of another type": (
        "parameters:\n  model.num_heads: {values: [1, 2.0]}",
        5,
        "parameters.model.num_heads: must be a valid integer, got 2.0",
    ),
    "end of a range out of bounds": (
        SPACE + "parameters:\n  model.dropout: {min: 0.0, max: 1.0}",
        7,
        "parameters.model.dropout: must be less than 1, got 1.0",
    ),
    "equal values": (
        "parameters:\n  attention.keep: {values: [1, 2,\n    1]}",
        6,
        "parameters.attention.keep.values.2: 1 equals an earlier value",
    ),
    "1 and 1.0": ("parameters:\n  task.a: {values: [1, 1.0]}", 5, "parameters.task.a.values.1: 1.0 equals an earlier value"),
    "1 and true": ("parameters:\n  task.a: {values: [1, true]}", 5, "parameters.task.a.values.1: True equals an earlier value"),
    "equal lists": (
        "parameters:\n  task.a: {values: [[1], [1.0]]}",
        5,
        "parameters.task.a.values.1: [1.0] equals an earlier value",
    ),
    "heads do not divide": (
        "parameters:\n  model.num_heads: {values: [1, 3]}",
        5,
        "parameters.model.num_heads: model_dim 64 is not divisible by num_heads 3",
    ),
    "heads of base do not divide": (
        "  model: {num_layers: 1,\n    num_heads: 5}",
        5,
        "base.model.num_heads: model_dim 64 is not divisible by num_heads 5",
    ),
    "dims do not divide inside a range": (
        SPACE + "parameters:\n  model.num_heads: {min: 1, max: 4}",
        7,
        "parameters.model.num_heads: model_dim 64 is not divisible by num_heads 3",
    ),
    "key/value heads do not divide in one combination": (
        "parameters:\n  model.num_heads: {values: [4, 2]}\n  model.num_kv_heads: {values: [1, 4]}",
        6,
        "parameters.model.num_kv_heads: num_heads 2 is not divisible by num_kv_heads 4",
    ),
    "warm-up is too long": (
        "parameters:\n  train.warmup_steps: {values: [10, 301]}",
        5,
        "parameters.train.warmup_steps: warmup_steps 301 is more than steps 300",
    ),
    "lowest rate of base": ("  train:\n    lr: 1e-3\n    min_lr: 1e-2", 5, "base.train.lr: min_lr 0.01 is above lr 0.001"),
    "when: unknown": (
        "parameters:\n  attention.keep: {values: [1], when: {attention.varian: topk}}",
        5,
        "parameters.attention.keep.when.attention.varian: is not a swept parameter",
    ),
    "when: not among the values": (
        "parameters:\n  attention.variant: {values: [topk, standard]}\n  attention.keep:\n    values: [1]\n"
        "    when: {attention.variant: [topk, linear]}",
        8,
        "parameters.attention.keep.when.attention.variant: 'linear' is none of the values ['topk', 'standard']",
    ),
    "when: 1 is not true": (
        "parameters:\n  model.tied: {values: [true, false]}\n  model.num_heads: {values: [1], when: {model.tied: 1}}",
        6,
        "parameters.model.num_heads.when.model.tied: 1 is none of the values [True, False]",
    ),
    "when: nothing": (
        "parameters:\n  model.tied: {values: [true, false]}\n  model.num_heads: {values: [1], when: {model.tied: []}}",
        6,
        "parameters.model.num_heads.when.model.tied: needs at least one value",
    ),
    "when: itself": (
        "parameters:\n  model.tied: {values: [true], when: {model.tied: true}}",
        5,
        "parameters.model.tied.when: refers to itself through model.tied -> model.tied",
    ),
    "when: a circle": (
        "parameters:\n  model.tied: {values: [true], when: {model.bias: true}}\n"
        "  model.bias: {values: [true], when: {model.tied: true}}",
        5,
        "parameters.model.tied.when: refers to itself through model.tied -> model.bias -> model.tied",
    ),
    "baseline path": ("baseline: [{},\n  {model.head: 1}]", 5, "baseline.1.model.head: model has no setting 'head'"),
    "baseline section": ("baseline: [{heads: 1}]", 4, "baseline.0.heads: must be a path into base"),
    "baseline variant": (
        "baseline:\n  - {attention.variant: unifrom}",
        5,
        "baseline.0.attention.variant: unknown variant 'unifrom'; did you mean 'uniform'?",
    ),
    "random without trials": (
        "method: random\nparameters:\n  model.tied: {values: [true]}",
        1,
        "budget: trials: method random needs",
    ),
    "tpe without trials": ("method: tpe\nbudget: {parallel: 2}", 5, "budget: trials: method tpe needs a number of trials"),
    "random without parameters": (SPACE.strip(), 1, "parameters: method random needs at least one parameter"),
    "variant of base": (
        "  attention: {variant: standrad}",
        4,
        "base.attention.variant: unknown variant 'standrad'; did you mean 'standard'? (there are: ",
    ),
    "variant among values": (
        "parameters:\n  attention.variant: {values: [topk,\n    top_k]}",
        6,
        "parameters.attention.variant.values.1: unknown variant 'top_k'; did you mean 'topk'?",
    ),
    "variant in a list": ("  attention: {variant: [standard]}", 4, "base.attention.variant: unknown variant ['standard']"),
    "variant that is a list": (
        "parameters:\n  attention.variant: {values: [[topk]]}",
        5,
        "parameters.attention.variant.values.0: unknown variant ['topk']",
    ),
    "variant that is nothing": ("  attention: {variant: }", 4, "base.attention.variant: unknown variant None"),
    "no variant": ("  attention: {keep: 3}", 4, "base.attention: variant: needs to be given (there are: "),
    "variants as a range": (
        SPACE + "parameters:\n  attention.variant: {min: 0, max: 3}",
        7,
        "parameters.attention.variant: is a name, so it needs values",
    ),
    "task among values": (
        "parameters:\n  task.name: {values: [copy, txet]}",
        5,
        "parameters.task.name.values.1: unknown name 'txet'; did you mean 'text'?",
    ),
    "plugin": ("plugins:\n  - here.py\n  - nowhere.py", 5, "plugins: here.py: no such file in "),
    "plugin whose name no file has": (f"plugins: [{'a' * 300}]", 4, "plugins: aaa"),
    "a tag": ("description: !!python/name:os.system x", 4, "tag"),
    "a key twice": ("seeds: [1]\nseeds: [2]", 5, "seeds: duplicate key (first on line 4)"),
    "a tab": ("seeds:\n\t- 1", 5, "found character '\\t'"),
}


@pytest.mark.parametrize(("text", "line", "words"), REFUSED.values(), ids=list(REFUSED))
def test_what_is_wrong_is_said_with_its_line(tmp_path, text, line, words):
    with pytest.raises(InputError) as caught:
        sweep_of(tmp_path, HEAD + text + "\n")
    assert str(caught.value).startswith(f"{tmp_path / 's.yaml'}:{line}: {words}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("base: {task: {name: copy}}", "1: name: needs to be given"),
        ("name: a", "1: base: needs to be given"),
        ("name: a\nbase: {}", "2: base.task: needs to be given"),
        ("name: a\nbase:\n  task: {length: 3}", "3: base.task: name: needs to be given (there are: copy, text)"),
        ("name: a/../b\nbase: {task: {name: copy}}", "1: name: String should match pattern"),
        ("name: a\nbase: {task: {name: coyp}}", "2: base.task.name: unknown name 'coyp'; did you mean 'copy'?"),
        ("name: 3\nbase: {task: {name: copy}}", "1: name: must be a valid string, got 3"),
        ("name: a\nbase: {task: copy}", "2: base.task: must be a valid dictionary, got 'copy'"),
    ],
)
def test_what_every_file_needs(tmp_path, text, words):
    with pytest.raises(InputError) as caught:
        sweep_of(tmp_path, text)
    assert str(caught.value).startswith(f"{tmp_path / 's.yaml'}:{words}")


# Findings of the second part, which asks the task and the variant.
RESOLVED = {
    "setting of base": (
        "  attention: {variant: topk,\n    kep: 3}",
        5,
        "base.attention.kep: variant 'topk' has no setting 'kep' (it has: keep, temperature); did you mean 'keep'?",
    ),
    "value of base": ("  attention: {variant: topk, keep: 0}", 4, "base.attention: topk: keep: "),
    "setting of another variant": (
        "parameters:\n  attention.variant: {values: [topk, standard]}\n  attention.keep: {values: [1, 2]}",
        6,
        "parameters.attention.keep: variant 'standard' has no setting 'keep' (it has: backend, chunk_size); "
        "if it is meant for another, add `when: {attention.variant: ...}`",
    ),
    "value of one combination": (
        "parameters:\n  attention.variant: {values: [standard, temperature]}\n"
        "  attention.temperature: {values: [1.0, -1.0], when: {attention.variant: temperature}}",
        6,
        "parameters.attention.temperature: temperature: temperature: ",
    ),
    "infinite value": (
        "  attention: {variant: temperature}\nparameters:\n  attention.temperature: {values: [1e400]}",
        6,
        "parameters.attention.temperature: temperature: temperature: ",
    ),
    "setting of the task": (
        "parameters:\n  task.lenght: {values: [3]}",
        5,
        "parameters.task.lenght: name 'copy' has no setting 'lenght' (it has: length, vocab); did you mean",
    ),
    "value of the task": ("parameters:\n  task.vocab: {values: [8, 1]}", 5, "parameters.task.vocab: copy: vocab: "),
    "setting of another task": (
        "parameters:\n  task.name: {values: [copy, text]}",
        3,
        "base.task.length: name 'text' has no setting 'length' (it has: corpus, ",
    ),
    "baseline": (
        "baseline: [{},\n  {attention.keep: 3}]",
        5,
        "baseline.1.attention.keep: variant 'standard' has no setting 'keep'",
    ),
    "baseline twice": (
        "baseline: [{attention.variant: uniform},\n  {attention.variant: uniform}]",
        5,
        "baseline.1: is the same configuration as baseline.0",
    ),
    "baseline twice in other words": (
        "baseline: [{},\n  {attention.chunk_size: null}]",
        5,
        "baseline.1: is the same configuration as baseline.0",
    ),
    "baseline that does not divide": (
        "baseline: [{model.num_heads: 3}]",
        4,
        "baseline.0.model.num_heads: model_dim 64 is not divisible by num_heads 3",
    ),
}


@pytest.mark.parametrize(("text", "line", "words"), RESOLVED.values(), ids=list(RESOLVED))
def test_what_tasks_and_variants_refuse_is_said_with_its_line(tmp_path, text, line, words):
    sweep = sweep_of(tmp_path, HEAD + text + "\n")
    with pytest.raises(InputError) as caught:
        Resolver(sweep).check()
    assert str(caught.value).startswith(f"{tmp_path / 's.yaml'}:{line}: {words}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("corpus", ["nowhere.txt", "~nobody-of-this-name/x", "."])
def test_a_missing_corpus_is_found_before_the_first_run(tmp_path, corpus):
    sweep = sweep_of(tmp_path, f"name: a\nbase:\n  task:\n    name: text\n    corpus: {corpus}\n")
    with pytest.raises(InputError, match=rf"s\.yaml:5: base\.task\.corpus: corpus {corpus}: cannot be read"):
        Resolver(sweep).check()


def grid_of(folder, text):
    return list(sweep_of(folder, HEAD + text).grid())


def test_the_grid_in_the_order_of_the_file(tmp_path):
    found = grid_of(tmp_path, "parameters:\n  model.num_heads: {values: [4, 1]}\n  model.tied: {values: [true, false]}\n")
    expected = [(4, True), (4, False), (1, True), (1, False)]
    assert [(each["model.num_heads"], each["model.tied"]) for each in found] == expected


CONDITIONAL = """\
parameters:
  attention.temperature: {values: [0.5, 0.25], when: {attention.variant: [temperature, topk]}}
  attention.variant: {values: [standard, temperature, topk]}
  attention.keep: {values: [1, 2], when: {attention.variant: topk, attention.temperature: 0.5}}
"""


def test_conditions(tmp_path):
    """A condition is met before what depends on it, wherever it stands; all of its keys count; a list means one of them."""
    expected = [
        {"attention.variant": "standard"},
        {"attention.variant": "temperature", "attention.temperature": 0.5},
        {"attention.variant": "temperature", "attention.temperature": 0.25},
        {"attention.variant": "topk", "attention.temperature": 0.5, "attention.keep": 1},
        {"attention.variant": "topk", "attention.temperature": 0.5, "attention.keep": 2},
        {"attention.variant": "topk", "attention.temperature": 0.25},
    ]
    assert grid_of(tmp_path, CONDITIONAL) == expected


def test_what_hangs_on_an_inactive_parameter_is_inactive(tmp_path):
    sweep = sweep_of(tmp_path, HEAD + CONDITIONAL)
    keep = sweep.parameters["attention.keep"]
    assert is_active(keep, {"attention.variant": "topk", "attention.temperature": 0.5})
    assert not is_active(keep, {"attention.variant": "topk"})
    assert not is_active(keep, {"attention.variant": "topk", "attention.temperature": 0.25})


def test_equal_means_of_one_type():
    kinds = [1, 1.0, True, "1", None, [1]]
    for a, b in itertools.product(range(len(kinds)), repeat=2):
        assert same(kinds[a], kinds[b]) == (a == b)


def test_the_baseline_is_run_once(tmp_path):
    space = "parameters:\n  attention.variant: {values: [standard, uniform]}\n  model.num_heads: {values: [4, 1]}\n"
    text = space + "baseline: [{attention.variant: uniform, model.num_heads: 1}, {attention.variant: linear}, {}]\n"
    sweep = sweep_of(tmp_path, HEAD + text)
    found = [(each["attention.variant"], each["model.num_heads"]) for each in sweep.grid()]
    assert found == [("standard", 1), ("uniform", 4)]  # standard with 4 heads is base itself
    assert sweep.trials == 5


@pytest.mark.parametrize(("budget", "trials"), [(None, 5), (2, 2), (5, 5), (100, 5)])
def test_a_grid_has_an_end(tmp_path, budget, trials):
    text = "parameters:\n  model.num_heads: {values: [1, 2, 8, 16]}\nbaseline: [{}]\n"
    sweep = sweep_of(tmp_path, HEAD + text, *([f"budget.trials={budget}"] if budget else []))
    assert sweep.trials == trials


def test_other_methods_run_what_the_budget_says(tmp_path):
    text = "method: tpe\nbudget: {trials: 100}\nparameters:\n  model.num_heads: {values: [1, 2]}\nbaseline: [{}]\n"
    assert sweep_of(tmp_path, HEAD + text).trials == 100


def test_a_configuration_has_every_setting(tmp_path):
    sweep = sweep_of(tmp_path, HEAD + CONDITIONAL)
    runs = [Resolver(sweep).run(each) for each in sweep.grid()]
    assert runs[0].attention == {"variant": "standard", "backend": "auto", "chunk_size": None}
    assert runs[3].attention == {"variant": "topk", "keep": 1, "temperature": 0.5}
    assert runs[5].attention == {"variant": "topk", "keep": 8, "temperature": 0.25}
    assert runs[0].task == {"name": "copy", "length": 3, "vocab": 5}
    assert len({run.hash() for run in runs}) == 6


def test_assigned_lists_are_not_shared(tmp_path):
    sweep = sweep_of(tmp_path, HEAD + "parameters:\n  task.split: {values: [[0.5, 0.5, 0], [0.8, 0.1, 0.1]]}\n")
    assignment = next(iter(sweep.grid()))
    sweep.tree(assignment)["task"]["split"].append(9)
    assert sweep.tree(assignment)["task"]["split"] == [0.5, 0.5, 0]


OVERRIDDEN = HEAD + "parameters:\n  model.num_heads: {values: [4]}\n  attention.variant: {values: [standard]}\nseeds: [0]\n"


def test_overrides(tmp_path):
    sweep = sweep_of(
        tmp_path,
        OVERRIDDEN,
        "parameters.model.num_heads.values=[1,2]",
        "base.train.lr=1e-2",
        "base.train.grad_clip=null",
        "seeds=[3, 4]",
        "name=other",
        "budget.timeout=1h30m",
        "base.task.length=7",
        "base.task={name: copy, vocab: 9}",
    )
    assert sweep.parameters["model.num_heads"].values == [1, 2]
    assert (sweep.file.base.train.lr, sweep.file.base.train.grad_clip) == (0.01, None)
    assert (sweep.file.seeds, sweep.file.name, sweep.file.budget.timeout) == ([3, 4], "other", "1h30m")
    assert sweep.file.base.task == {"name": "copy", "vocab": 9}


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("base.train.steps", "must be key=value"),
        ("=3", "must be key=value"),
        ("base.train.step=3", "base.train.step: unknown key; did you mean 'steps'?"),
        ("base.train.steps=many", "base.train.steps: must be a valid integer, got 'many'"),
        ("base.train.steps=", "base.train.steps: must be a valid integer, got None"),
        ("bas.train.steps=3", "bas: unknown key; did you mean 'base'?"),
        ("name.x=3", "command line: name.x: name holds 'small', which has no keys"),
        ("seeds.0=3", "command line: seeds.0: seeds holds [0], which has no keys"),
        ("seeds=[1", "command line: seeds:1: "),
        ("seeds=!!python/name:os.system", "tag"),
        ("parameters.model.num_heads.values=[3]", "model_dim 64 is not divisible by num_heads 3"),
        ("parameters.model.num_heads.value=[1]", "parameters.model.num_heads.value: unknown key"),
        ("base.task.name=nothing", "unknown name 'nothing'"),
        ("description=\udcff", "command line: description:1: "),
    ],
)
def test_wrong_overrides(tmp_path, override, words):
    with pytest.raises(InputError) as caught:
        sweep_of(tmp_path, OVERRIDDEN, override)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


PLUGIN = (
    "raise SystemExit('only read, never run')\n@register('mine')\nclass A: ...\n@tasks.register_task('my_task')\nclass B: ...\n"
)


def test_names_of_plugins_are_read_without_running_them(tmp_path):
    (tmp_path / "mine.py").write_text(PLUGIN)
    text = HEAD.replace("name: copy", "name: my_task") + "plugins: [mine.py]\nparameters:\n  attention.variant: {values: [%s]}\n"
    sweep = sweep_of(tmp_path, text % "mine, topk")
    assert sweep.plugins == (str(tmp_path / "mine.py"),)
    with pytest.raises(InputError, match="unknown variant 'mime'; did you mean 'mine'"):
        sweep_of(tmp_path, text % "mime")
    with pytest.raises(InputError, match=r":4: plugins\.0: .*exits on import"):
        Resolver(sweep)


def test_plugins_of_the_command_line(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(PLUGIN)
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "s.yaml"
    path.write_text(HEAD + "  attention: {variant: mine}\n")
    assert load(path, plugins=["mine.py"]).plugins == (str(tmp_path / "mine.py"),)


@pytest.mark.parametrize(
    ("text", "words"), [("def f(:\n", "mine.py:1: "), ("\x00", "mine.py"), ("é".encode("latin-1"), "mine.py")]
)
def test_a_plugin_that_is_no_python_is_refused(tmp_path, text, words):
    (tmp_path / "mine.py").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InputError, match=words):
        sweep_of(tmp_path, HEAD + "plugins: [mine.py]\n")


def test_a_name_that_only_an_import_could_tell_is_refused_then(tmp_path):
    (tmp_path / "mine.py").write_text("NAME = 'mine'\ndef register(name): return None\nregister(NAME)\n")
    sweep = sweep_of(tmp_path, HEAD + "plugins: [mine.py]\nparameters:\n  attention.variant: {values: [standrad]}\n")
    with pytest.raises(InputError, match=r":6: parameters\.attention\.variant: unknown variant 'standrad'; did you mean"):
        Resolver(sweep).check()


# --
def test_a_mistyped_name_is_found_without_torch(tmp_path):
    (tmp_path / "s.yaml").write_text(HEAD + "  attention: {variant: standrad}\n")
    code = f"""
import sys
from experiments.sweep import load
try:
    load({str(tmp_path / "s.yaml")!r})
except ValueError as error:
    assert "did you mean 'standard'" in str(error)
    assert not {{"torch", "optuna", "mlflow"}} & set(sys.modules)
    sys.exit(7)
"""
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 7
