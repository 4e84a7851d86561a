"""What is proposed next depends on the trials before and on nothing else."""

import itertools
import math

import pytest

from experiments.search import Search
from experiments.sweep import is_active
from tests.experiments.small import HEAD, sweep_of

SPACE = """\
parameters:
  attention.variant: {values: [standard, temperature, topk]}
  attention.temperature: {min: 0.1, max: 1.0, log: true, when: {attention.variant: [temperature, topk]}}
  attention.keep: {min: 1, max: 9, when: {attention.variant: topk}}
  model.dropout: {min: 0.0, max: 0.5, step: 0.25}
  model.num_layers: {min: 1, max: 64, log: true}
"""


def space_of(folder, method, text=SPACE, trials=40):
    return sweep_of(folder, HEAD + f"method: {method}\nbudget: {{trials: {trials}}}\n" + text)


def worth(assignment):
    """A made-up objective that depends on every parameter; some trials fail."""
    if assignment.get("attention.keep", 0) % 3 == 1:
        return None
    variant = ["standard", "temperature", "topk"].index(assignment["attention.variant"])
    return variant + assignment["model.dropout"] + abs(math.log(assignment["model.num_layers"] / 8))


class Told:
    """Runs a search one trial after another, as the driver does with `parallel: 1`."""

    def __init__(self, sweep, history=()):
        self.search = Search(sweep)
        self.history = []
        for assignment, value in history:
            self.search.restore(len(self.history), assignment, value, running=False)
            self.history.append((assignment, value))

    def next(self, value=worth):
        tried = [assignment for assignment, _ in self.history]
        assignment = self.search.ask(lambda each: each not in tried)
        if assignment is None:
            return None
        number = len(self.history)
        self.search.begin(number)
        self.history.append((assignment, value(assignment)))
        self.search.tell(number, self.history[-1][1])
        return assignment

    def go(self, count):
        for _ in range(count):
            self.next()
        return self.history


@pytest.mark.parametrize("method", ["random", "tpe"])
def test_proposals_lie_in_the_space(tmp_path, method):
    sweep = space_of(tmp_path, method)
    history = Told(sweep).go(30)
    assert len({str(assignment) for assignment, _ in history}) == 30
    variants = set()
    for assignment, _ in history:
        variants.add(assignment["attention.variant"])
        expected = {path for path, parameter in sweep.parameters.items() if is_active(parameter, assignment)}
        assert assignment.keys() == expected
        assert ("attention.keep" in assignment) == (assignment["attention.variant"] == "topk")
        assert ("attention.temperature" in assignment) == (assignment["attention.variant"] != "standard")
        assert assignment["model.dropout"] in (0.0, 0.25, 0.5)
        assert type(assignment["model.num_layers"]) is int
        assert 1 <= assignment["model.num_layers"] <= 64
        assert 0.1 <= assignment.get("attention.temperature", 0.5) <= 1.0
        assert 1 <= assignment.get("attention.keep", 5) <= 9
    assert variants == {"standard", "temperature", "topk"}


def test_tpe_learns_and_random_does_not(tmp_path):
    """After 40 trials, the later proposals of TPE are better than those of chance."""
    late = {}
    for method in ("random", "tpe"):
        history = Told(space_of(tmp_path, method)).go(40)
        values = [value for _, value in history[20:] if value is not None]
        late[method] = sum(values) / len(values)
    assert late["tpe"] < 0.75 * late["random"]


@pytest.mark.parametrize("goal", ["minimize", "maximize"])
def test_the_goal_is_followed(tmp_path, goal):
    text = f"objectives: [{{goal: {goal}}}]\nparameters:\n  model.dropout: {{min: 0.0, max: 0.9}}\n"
    told = Told(space_of(tmp_path, "tpe", text))
    for _ in range(40):
        told.next(lambda assignment: assignment["model.dropout"])
    late = sum(assignment["model.dropout"] for assignment, _ in told.history[20:]) / 20
    assert late < 0.3 if goal == "minimize" else late > 0.6


@pytest.mark.parametrize("method", ["random", "tpe"])
def test_a_stopped_study_goes_on_as_if_it_had_not_been(tmp_path, method):
    """Restored after every possible number of trials, it proposes what the uninterrupted one proposed."""
    sweep = space_of(tmp_path, method)
    whole = Told(sweep).go(26)
    assert any(value is None for _, value in whole)
    for stopped in range(26):
        resumed = Told(sweep, whole[:stopped])
        for number in range(stopped, min(stopped + 3, 26)):
            assert resumed.next() == whole[number][0], (stopped, number)


@pytest.mark.parametrize("method", ["random", "tpe"])
def test_a_trial_that_was_running_is_told_later(tmp_path, method):
    sweep = space_of(tmp_path, method)
    whole = Told(sweep).go(15)
    resumed = Told(sweep, whole[:12])
    resumed.search.restore(12, whole[12][0], None, running=True)
    resumed.search.tell(12, whole[12][1])
    resumed.history.append(whole[12])
    assert resumed.next() == whole[13][0]
    assert resumed.next() == whole[14][0]


def test_a_grid_goes_on_after_any_number(tmp_path):
    text = "parameters:\n  model.num_heads: {values: [1, 2, 4]}\n  model.tied: {values: [true, false]}\n"
    sweep = sweep_of(tmp_path, HEAD + text)
    expected = [{"model.num_heads": heads, "model.tied": tied} for heads, tied in itertools.product([1, 2, 4], [True, False])]
    for stopped in range(7):
        told = Told(sweep, [(assignment, 1.0) for assignment in expected[:stopped]])
        found = [told.next(lambda assignment: 1.0) for _ in range(7 - stopped)]
        assert found == [*expected[stopped:], None]


def test_another_name_gives_other_proposals(tmp_path):
    found = []
    for name in ("one", "two"):
        sweep = sweep_of(tmp_path, HEAD.replace("small", name) + "method: random\nbudget: {trials: 5}\n" + SPACE)
        found.append([assignment for assignment, _ in Told(sweep).go(5)])
    assert found[0] != found[1]


@pytest.mark.parametrize("method", ["random", "tpe"])
def test_a_space_is_tried_to_its_end(tmp_path, method):
    """TPE repeats itself in small spaces, so the last configurations must be found in another way."""
    text = "parameters:\n  model.num_heads: {values: [1, 2, 4, 8]}\n  model.num_layers: {min: 1, max: 9, step: 2}\n"
    sweep = space_of(tmp_path, method, text, trials=100)
    told = Told(sweep)
    while told.next(lambda assignment: assignment["model.num_heads"] + assignment["model.num_layers"]) is not None:
        assert len(told.history) <= 20
    found = {(each["model.num_heads"], each["model.num_layers"]) for each, _ in told.history}
    assert found == set(itertools.product([1, 2, 4, 8], [1, 3, 5, 7, 9]))
    again = Told(sweep, told.history[:18])
    assert [again.next(lambda assignment: 1.0) for _ in range(3)] == [told.history[18][0], told.history[19][0], None]


def test_every_question_has_a_stream_of_its_own(tmp_path):
    """Otherwise each proposal would be that of the question before, and only its repetition new."""
    search = Search(space_of(tmp_path, "random", "parameters:\n  model.dropout: {min: 0.0, max: 0.9}\n"))
    asked = []
    for number in range(10):
        search.ask(lambda assignment: asked.append(assignment["model.dropout"]) or True)
        search.begin(number)
    assert len(set(asked)) == len(asked) == 10


def test_a_space_without_end_gives_up_when_nothing_is_new(tmp_path):
    search = Search(space_of(tmp_path, "random"))
    assert search.ask(lambda assignment: False) is None


@pytest.mark.parametrize("method", ["random", "tpe"])
def test_values_come_back_as_they_were_written(tmp_path, method):
    """Optuna takes 1, 1.0 and True for one choice, and cannot hold lists."""
    values = [[1, 2], [3, 4], [], True, 1.5, "1", None, {"a": [1]}, 0, "null", False]
    text = "parameters:\n  task.a: {values: [[1, 2], [3, 4], [], true, 1.5, '1', null, {a: [1]}]}\n"
    text += "  task.b: {values: [0, 'null', 'false']}\n"
    told = Told(space_of(tmp_path, method, text, trials=24))
    while told.next(lambda assignment: 1.0) is not None:
        pass
    seen = {(type(each["task.a"]), str(each["task.a"])) for each, _ in told.history}
    assert seen == {(type(value), str(value)) for value in values[:8]}
    assert len(told.history) == 24
    resumed = Told(space_of(tmp_path, method, text, trials=24), told.history[:23])
    assert resumed.next(lambda assignment: 1.0) == told.history[23][0]


def test_a_list_that_has_grown_takes_what_was_tried(tmp_path):
    text = "parameters:\n  model.num_heads: {values: [1, 2]}\n"
    history = Told(space_of(tmp_path, "tpe", text)).go(0)
    told = Told(space_of(tmp_path, "tpe", text))
    told.next(lambda assignment: 1.0)
    history = told.history
    grown = Told(space_of(tmp_path, "tpe", text.replace("2]", "2, 4]")), history)
    found = {history[0][0]["model.num_heads"], *(grown.next(lambda a: 1.0)["model.num_heads"] for _ in range(2))}
    assert found == {1, 2, 4}
    assert grown.next() is None


def test_a_range_that_has_widened_takes_what_was_tried(tmp_path):
    text = "parameters:\n  model.dropout: {min: 0.1, max: 0.2}\n"
    history = Told(space_of(tmp_path, "tpe", text))
    for _ in range(12):
        history.next(lambda assignment: -assignment["model.dropout"])
    wide = Told(space_of(tmp_path, "tpe", text.replace("0.2}", "0.9}")), history.history)
    found = [wide.next(lambda assignment: -assignment["model.dropout"])["model.dropout"] for _ in range(10)]
    assert max(found) > 0.2


def test_failed_trials_teach_nothing_and_stop_nothing(tmp_path):
    sweep = space_of(tmp_path, "tpe")
    told = Told(sweep)
    for _ in range(15):
        assert told.next(lambda assignment: None) is not None
    assert Told(sweep, told.history).next() == told.next()


def test_skipped_trials_are_taken_for_bad_ones_also_after_a_stop(tmp_path):
    """They have no value, but a sampler that learned nothing from them would propose them for ever."""
    text = "constraints: [{metric: memory/peak_mb, max: 9}]\nparameters:\n  model.num_layers: {min: 1, max: 1000}\n"
    sweep = space_of(tmp_path, "tpe", text, trials=60)

    def next_of(search, number):
        assignment = search.ask(lambda each: each not in tried)
        search.begin(number)
        tried.append(assignment)
        return assignment, assignment["model.num_layers"] > 500

    tried, search, history = [], Search(sweep), []
    for number in range(60):
        assignment, skipped = next_of(search, number)
        figures = {} if skipped else {"memory/peak_mb": 1.0}
        value = None if skipped else 1.0 + assignment["model.num_layers"] / 1e6
        search.tell(number, value, figures, skipped=skipped)
        history.append((assignment, value, figures, skipped))
    assert sum(skipped for _, _, _, skipped in history[30:]) < sum(skipped for _, _, _, skipped in history[:10])

    resumed = Search(sweep)
    for number, (assignment, value, figures, skipped) in enumerate(history):
        resumed.restore(number, assignment, value, False, figures, skipped)
    assert resumed.ask(lambda each: each not in tried) == search.ask(lambda each: each not in tried)
