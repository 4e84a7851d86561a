"""torch.compile of every mechanism: whole, many modules and lengths in one process, and nothing run eagerly without a word."""

from __future__ import annotations

import pytest
import torch

import variants  # noqa: F401
from core import Mask, MultiHeadAttention, build, get, names

LENGTHS = (3, 5, 64, 65, 129, 130, 300, 2, 1)
COMPILED = [name for name in names() if name != "entmax"]  # the package's own autograd functions do not compile


@pytest.fixture(scope="module", autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Counted:
    """A backend that runs what it is given, and counts how often it was asked to compile."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        return graph.forward


# Beside the defaults, those whose way depends on the length: windows shorter than the sequences.
CASES = [(name, {}) for name in COMPILED] + [("local_global", {"window": 16}), ("local_global", {"window": 16, "num_global": 1})]


# One process, no reset between the mechanisms: torch keeps 8 compilations of one code object.
@pytest.mark.parametrize(("variant", "config"), CASES)
def test_many_modules_and_lengths(variant, config):
    if config:
        torch._dynamo.reset()  # the same class has used up a part of its 8 with other settings
    backend = Counted()
    for number in range(12):
        torch.manual_seed(number)
        attention = build(variant, num_heads=2, head_dim=4, **config)
        compiled = torch.compile(attention, fullgraph=True, backend=backend)
        for L in LENGTHS:
            q = torch.randn(2, 2, L, 4)
            given, expected = compiled(q, q, q, Mask(causal=True)).out, attention(q, q, q, Mask(causal=True)).out
            torch.testing.assert_close(given, expected)
    # A length or a module of its own is no reason to compile again; a length of 1 and a new number of chunks are.
    assert 1 <= backend.graphs <= 8


@pytest.mark.parametrize(("variant", "config"), CASES)
def test_masks_and_weights(variant, config):
    attention = build(variant, num_heads=2, head_dim=4, **config)
    compiled = torch.compile(attention, fullgraph=True, backend=Counted(), isolate_recompiles=True)
    for L in (4, 70):
        q = torch.randn(2, 2, L, 4)
        pairs = torch.rand(L, L) < 0.8 if get(variant).spec.pairs else None
        for mask in (Mask(), Mask(True, torch.rand(2, L) < 0.8, pairs)):
            for need_weights in (False, True):
                given, expected = compiled(q, q, q, mask, need_weights), attention(q, q, q, mask, need_weights)
                torch.testing.assert_close(given.out, expected.out)
                if need_weights:
                    torch.testing.assert_close(given.weights, expected.weights)


@pytest.mark.slow
@pytest.mark.parametrize("variant", COMPILED)
def test_many_shapes(variant):
    for number in range(9):
        attention = build(variant, num_heads=1 + number % 4, head_dim=2 + number)
        compiled = torch.compile(attention, fullgraph=True, backend="eager", isolate_recompiles=True)
        for L in (5, 70):
            q = torch.randn(2, 1 + number % 4, L, 2 + number)
            keys = torch.rand(2, L) < 0.8
            given, expected = compiled(q, q, q, Mask(True, keys)), attention(q, q, q, Mask(True, keys))
            torch.testing.assert_close(given.out, expected.out)


@pytest.mark.parametrize(("variant", "config"), CASES)
def test_training_through_a_layer(variant, config):
    layer = MultiHeadAttention(8, 2, num_kv_heads=1, variant=variant, config=config, rotary=True)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", isolate_recompiles=True)
    for L in (4, 7, 40):
        x = torch.randn(2, L, 8)
        results = []
        for each in (layer, compiled):
            layer.zero_grad()
            out = each(x, mask=Mask(causal=True))
            out.square().sum().backward()
            results.append([out.detach(), *(parameter.grad.clone() for parameter in layer.parameters())])
        for given, expected in zip(*results, strict=True):
            torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # inductor's own, while it is imported
@pytest.mark.parametrize("variant", COMPILED)
def test_with_inductor(variant):
    attention = build(variant, num_heads=2, head_dim=4)
    compiled = torch.compile(attention, fullgraph=True, isolate_recompiles=True)
    for L in (5, 70):
        q = torch.randn(2, 2, L, 4, requires_grad=True)
        mask = Mask(True, torch.rand(2, L) < 0.8)
        results = []
        for each in (attention, compiled):
            out = each(q, q, q, mask).out
            results.append((out, *torch.autograd.grad(out.square().sum(), q)))
        for given, expected in zip(*results, strict=True):
            torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-5)


def test_what_does_not_compile_says_so():
    if "entmax" not in names():
        pytest.skip("needs entmax")
    attention = build("entmax", num_heads=2, head_dim=4, learn="per_head")
    q = torch.randn(1, 2, 5, 4)
    with pytest.raises(torch._dynamo.exc.TorchDynamoException):
        torch.compile(attention, fullgraph=True, backend="eager")(q, q, q)
