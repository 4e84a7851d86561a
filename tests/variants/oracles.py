"""Every mechanism again, as loops over Python floats from its equation: slow, plain, and sharing no code with `core`.

Tensors come in as nested lists (`tensor.tolist()`): q [B][H][L][D], k [B][Hkv][S][D], v [B][Hkv][S][Dv]. A mechanism
is a function `weigh(query, keys, place)`: the query's vector, the visible keys as {index: vector}, and where the query
stands; it returns {index: weight}.
"""

import math
from dataclasses import dataclass, field


@dataclass
class Place:
    """Where a query stands in its call."""

    i: int
    L: int
    S: int
    causal: bool
    h: int
    position: int = field(init=False)

    def __post_init__(self):
        self.position = self.S - self.L + self.i


def can_see(b, h, place, j, keys, pairs):
    """Whether query `place.i` may attend to key j: causality, then padding, then pairs. Each hides by itself."""
    if place.causal and j > place.position:
        return False
    if keys is not None and not keys[b][j]:
        return False
    if pairs is None:
        return True
    if not isinstance(pairs[0][0], list):
        return pairs[place.i][j]
    row = pairs
    for index in (b, h, place.i, j):
        row = row[0] if len(row) == 1 else row[index]
    return row


def attend(weigh, q, k, v, *, causal=False, keys=None, pairs=None, slots=None):
    """(out [B][H][L][Dv], weights [B][H][L][S]); 0 in rows without a visible key.

    slots: keys and values ([H][N][D], [H][N][Dv]) that every query sees beside the sequence, and that weights leave out.
    """
    H, S = len(q[0]), len(k[0][0])
    out, weights = [], []
    for b in range(len(q)):
        out.append([])
        weights.append([])
        for h in range(H):
            shared = h // (H // len(k[b]))
            head_keys, head_values = k[b][shared], v[b][shared]
            out[b].append([])
            weights[b].append([])
            for i, query in enumerate(q[b][h]):
                place = Place(i, len(q[b][h]), S, causal, h)
                visible = {j: head_keys[j] for j in range(S) if can_see(b, h, place, j, keys, pairs)}
                values = dict(enumerate(head_values))
                if visible and slots is not None:
                    for n, (slot_key, slot_value) in enumerate(zip(slots[0][h], slots[1][h], strict=True)):
                        visible["slot", n], values["slot", n] = slot_key, slot_value
                row = weigh(query, visible, place) if visible else {}
                mean = [0.0] * len(head_values[0])
                for j, weight in row.items():
                    for channel, value in enumerate(values[j]):
                        mean[channel] += weight * value
                out[b][h].append(mean)
                weights[b][h].append([row.get(j, 0.0) for j in range(S)])
    return out, weights


def dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


def softmax(scores):
    """{index: score} -> {index: weight}."""
    top = max(scores.values())
    powers = {j: math.exp(score - top) for j, score in scores.items()}
    total = sum(powers.values())
    return {j: power / total for j, power in powers.items()}


def scaled(query, keys, temperature):
    return {j: dot(query, key) / (temperature * math.sqrt(len(query))) for j, key in keys.items()}


def standard(query, keys, place):
    return softmax(scaled(query, keys, 1.0))


def temperature(value):
    def weigh(query, keys, place):
        return softmax(scaled(query, keys, value))

    return weigh


def topk(keep, value=1.0):
    def weigh(query, keys, place):
        scores = scaled(query, keys, value)
        order = sorted(scores, key=lambda j: (-scores[j], j))
        return softmax({j: scores[j] for j in order[:keep]})

    return weigh


def local_global(window, num_global=0, value=1.0):
    def weigh(query, keys, place):
        reached = {}
        for j, key in keys.items():
            if place.causal:
                near = 0 <= place.position - j < window
            else:
                near = -((window - 1) // 2) <= j - place.position <= window // 2
            if near or j < num_global or place.position < num_global:
                reached[j] = key
        return softmax(scaled(query, reached, value)) if reached else {}

    return weigh


def top_p(mass, value=1.0):
    def weigh(query, keys, place):
        scores = scaled(query, keys, value)
        if mass == 1.0:
            return softmax(scores)
        shares = softmax(scores)
        kept, reached = {}, 0.0
        for j in sorted(shares, key=lambda j: (-shares[j], j)):
            if reached >= mass - 1e-6:
                break
            kept[j] = scores[j]
            reached += shares[j]
        return softmax(kept)

    return weigh


def additive(query_weight, key_weight, score_weight):
    """Parameters as lists: [H][D][hidden], [H][D][hidden], [H][hidden]."""

    def project(vector, matrix):
        return [sum(vector[d] * matrix[d][n] for d in range(len(vector))) for n in range(len(matrix[0]))]

    def weigh(query, keys, place):
        h = place.h
        ahead = project(query, query_weight[h])
        scores = {}
        for j, key in keys.items():
            hidden = [math.tanh(a + b) for a, b in zip(ahead, project(key, key_weight[h]), strict=True)]
            scores[j] = dot(hidden, score_weight[h])
        return softmax(scores)

    return weigh


def entmax(alpha):
    """alpha: one number, or one a head. The threshold is found by halving an interval of it 200 times."""

    def weigh(query, keys, place):
        power = alpha[place.h] if isinstance(alpha, list) else alpha
        scores = scaled(query, keys, 1.0)
        if power == 1.0:
            return softmax(scores)
        lifted = {j: (power - 1.0) * score for j, score in scores.items()}

        def weights(threshold):
            return {j: max(each - threshold, 0.0) ** (1.0 / (power - 1.0)) for j, each in lifted.items()}

        low, high = max(lifted.values()) - 1.0, max(lifted.values())
        for _ in range(200):
            middle = (low + high) / 2.0
            if sum(weights(middle).values()) >= 1.0:
                low = middle
            else:
                high = middle
        return weights(low)

    return weigh


def uniform(query, keys, place):
    return {j: 1.0 / len(keys) for j in keys}


def linear(feature_map):
    def product(query, key):
        if feature_map == "taylor":
            score = dot(query, key) / math.sqrt(len(query))
            return 1.0 + score + score * score / 2.0
        return dot([phi(x) for x in query], [phi(x) for x in key])

    def phi(x):
        if feature_map == "relu":
            return max(x, 0.0) + 1e-3
        return x + 1.0 if x > 0 else math.exp(x)

    def weigh(query, keys, place):
        products = {j: product(query, key) for j, key in keys.items()}
        total = sum(products.values())
        return {j: each / total for j, each in products.items()}

    return weigh
