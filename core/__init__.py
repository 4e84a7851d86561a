"""What attention is: the interface every mechanism implements, the layer that uses it, and the suite that proves it.

Axes, everywhere: B batch, H query heads, Hkv key/value heads, L query length, S key length, D query/key head dim, Dv value
head dim. Tensors on heads are (B, H, L, D); tensors on the model are (B, L, C).
"""

from core.attention import Attention, AttentionConfig, AttentionOutput, Spec
from core.cache import KeyValueState, LayerCache
from core.errors import (
    AttentionError,
    BackendError,
    ConfigError,
    MaskError,
    MissingExtraError,
    PluginError,
    RegistrationError,
    ShapeError,
    UnknownNameError,
)
from core.layers import MultiHeadAttention
from core.mask import Mask, mask_from_multihead
from core.registry import build, get, names, register
from core.tunable import tunable

__all__ = [
    "Attention",
    "AttentionConfig",
    "AttentionError",
    "AttentionOutput",
    "BackendError",
    "ConfigError",
    "KeyValueState",
    "LayerCache",
    "Mask",
    "MaskError",
    "MissingExtraError",
    "MultiHeadAttention",
    "PluginError",
    "RegistrationError",
    "ShapeError",
    "Spec",
    "UnknownNameError",
    "build",
    "get",
    "mask_from_multihead",
    "names",
    "register",
    "tunable",
]
