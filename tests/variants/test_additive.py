import pytest
import torch

from core import ConfigError, Mask, build
from tests.variants import oracles
from tests.variants.grid import D, H, check_against_oracle, check_gradients
from variants import additive
from variants.additive import FEATURES


@pytest.mark.parametrize("hidden_dim", [1, 5])
def test_equals_the_loops(hidden_dim):
    torch.manual_seed(0)
    attention = build("additive", num_heads=H, head_dim=D, hidden_dim=hidden_dim).double()
    weights = (attention.query, attention.key, attention.score.squeeze(-1))
    weigh = oracles.additive(*(x.tolist() for x in weights))
    check_against_oracle("additive", {"hidden_dim": hidden_dim}, weigh, attention=attention)


def test_gradients():
    check_gradients("additive", {"hidden_dim": 4})


def test_both_projections_and_the_score_are_learned():
    torch.manual_seed(0)
    attention = build("additive", num_heads=2, head_dim=4)
    assert {name: tuple(p.shape) for name, p in attention.named_parameters()} == {
        "query": (2, 4, 32), "key": (2, 4, 32), "score": (2, 32, 1),
    }  # fmt: skip
    q = torch.randn(1, 2, 5, 4)
    attention(q, q, q).out.square().sum().backward()
    assert all((p.grad != 0).any(-1).all() for p in attention.parameters())


@pytest.mark.parametrize("features", [1, 300, 700])
def test_chunks_equal_the_whole(monkeypatch, features):
    torch.manual_seed(0)
    attention = build("additive", num_heads=2, head_dim=4, hidden_dim=3).double()
    for L, S in ((7, 7), (5, 9), (9, 5)):
        q, k, v = (torch.randn(2, 2, n, 4).double().requires_grad_() for n in (L, S, S))
        mask = Mask(causal=True, keys=torch.rand(2, S) < 0.8, pairs=torch.rand(2, 1, L, S) < 0.8)
        results = []
        for limit in (FEATURES, features):
            monkeypatch.setattr(additive, "FEATURES", limit)
            for plain in (False, True):
                out = attention(q, k, v, mask, need_weights=plain).out
                results.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v, *attention.parameters()))])
        for other in results[1:]:
            for given, expected in zip(other, results[0], strict=True):
                torch.testing.assert_close(given, expected, rtol=1e-12, atol=1e-12)


def test_backward_holds_no_more_features_than_forward():
    class Held:
        nbytes = 0

    def pack(tensor):
        Held.nbytes += tensor.untyped_storage().nbytes()
        return tensor

    attention = build("additive", num_heads=2, head_dim=4)
    q = torch.randn(1, 2, 400, 4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        attention(q, q, q)
    # The weights, not the 32 features of every pair.
    assert Held.nbytes < 4 * (2 * 400 * 400 * 4)


@pytest.mark.parametrize("hidden_dim", [0, -1, 1.5, "32"])
def test_a_width_that_is_none(hidden_dim):
    with pytest.raises(ConfigError, match="hidden_dim"):
        build("additive", num_heads=2, head_dim=4, hidden_dim=hidden_dim)
