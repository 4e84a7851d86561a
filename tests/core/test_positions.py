import math

import pytest
import torch

from core import ConfigError, ShapeError
from core.positions import LearnedPositions, Rotary


def test_rotary_equals_the_loops():
    torch.manual_seed(0)
    x = torch.randn(2, 3, 5, 8)
    for offset in (0, 4):
        given = Rotary(8)(x, offset)
        for i in range(5):
            for pair in range(4):
                angle = (offset + i) * 10_000.0 ** (-pair / 4)
                first, second = x[..., i, pair], x[..., i, pair + 4]
                # float32 angles
                torch.testing.assert_close(
                    given[..., i, pair], first * math.cos(angle) - second * math.sin(angle), rtol=1e-5, atol=1e-6
                )
                torch.testing.assert_close(
                    given[..., i, pair + 4], second * math.cos(angle) + first * math.sin(angle), rtol=1e-5, atol=1e-6
                )


def test_rotary_scores_depend_on_the_distance_only():
    torch.manual_seed(0)
    rotary = Rotary(6)
    q, k = torch.randn(1, 1, 1, 6).double(), torch.randn(1, 1, 1, 6).double()
    scores = [(rotary(q, i + 3) * rotary(k, i)).sum() for i in (0, 1, 17)]
    for score in scores[1:]:
        torch.testing.assert_close(score, scores[0], rtol=1e-5, atol=1e-6)  # float32 angles


def test_rotary_in_pieces_is_the_whole():
    x = torch.randn(1, 2, 9, 4)
    rotary = Rotary(4)
    pieces = [rotary(x[:, :, :4], 0), rotary(x[:, :, 4:5], 4), rotary(x[:, :, 5:], 5)]
    assert torch.equal(torch.cat(pieces, dim=2), rotary(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_rotary_keeps_dtype_length_and_norm(dtype):
    x = torch.randn(1, 1, 300, 4, dtype=torch.float64).to(dtype)
    given = Rotary(4)(x)
    assert given.dtype == dtype
    tolerance = 4 * torch.finfo(dtype).eps if dtype != torch.float64 else 1e-6  # the angles are float32
    torch.testing.assert_close(given.norm(dim=-1), x.norm(dim=-1), rtol=tolerance, atol=tolerance)


def test_rotary_needs_pairs():
    with pytest.raises(ConfigError, match="even, got 5"):
        Rotary(5)


def test_rotary_follows_its_input():
    assert Rotary(4)(torch.zeros(1, 1, 3, 4, device="meta")).device.type == "meta"
    assert list(Rotary(4).state_dict()) == []


def test_learned():
    torch.manual_seed(0)
    positions = LearnedPositions(10, 4)
    assert torch.equal(positions(3), positions.weight[:3])
    assert torch.equal(positions(3, offset=7), positions.weight[7:])
    assert 0.01 < positions.weight.std() < 0.03


@pytest.mark.parametrize(("length", "offset"), [(11, 0), (1, 10)])
def test_learned_ends(length, offset):
    with pytest.raises(ShapeError, match="made for 10, got 11"):
        LearnedPositions(10, 4)(length, offset)
