"""What is demanded of every mechanism, in order: each rule says it in one line.

A rule takes a `Subject` and raises `ViolationError` with its witness, or `NotClaimedError` where the Spec claims nothing
that it is about. Any other exception counts as a failure too.
"""

from __future__ import annotations

from collections.abc import Callable

from core.contract import (
    rules_devices,
    rules_inputs,
    rules_masks,
    rules_measured,
    rules_numbers,
    rules_rows,
    rules_state,
    rules_values,
)
from core.contract.subject import Subject

Rule = Callable[[Subject], None]

RULES: tuple[Rule, ...] = (
    # inputs: shapes, memory, refusals, device
    rules_inputs.shapes_and_dtypes,
    rules_inputs.heads_are_interleaved,
    rules_inputs.unclaimed_is_refused,
    rules_inputs.bad_input_is_refused,
    rules_inputs.inputs_unchanged,
    rules_inputs.memory_layout,
    rules_devices.follows_device,
    # masks: what is hidden has no influence, what is visible has
    rules_masks.single_key_returns_value,
    rules_masks.no_future_leak,
    rules_masks.causal_is_bottom_right,
    rules_masks.padding_equals_removal,
    rules_masks.pairs_hide,
    rules_masks.empty_row_is_zero,
    rules_measured.window_is_exact,
    # values: what the result is, and that every path gives the same
    rules_values.batch_independence,
    rules_rows.rows_stand_alone,
    rules_values.weights_match_output,
    rules_values.fast_path_equals_plain,
    rules_values.equals_standard,
    rules_values.temperature_divides_scores,
    rules_values.keys_per_query,
    # numbers: gradients and precision
    rules_numbers.gradcheck_float64,
    rules_numbers.gradients_finite,
    rules_numbers.half_precision_no_overflow,
    rules_numbers.low_precision_is_close,
    # state: calls, copies, decoding
    rules_state.evaluation_is_deterministic,
    rules_state.same_in_every_mode,
    rules_state.module_copies,
    rules_state.decode_equals_forward,
    # costs: what is claimed against what is measured
    rules_measured.costs_as_claimed,
)
