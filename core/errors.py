"""The refusals of this package. Each is a ValueError, says who refuses what, and names both numbers that disagree.

One is none of them: a library that is missing is an ImportError.
"""


class AttentionError(ValueError):
    """Base of every refusal made by `core` and by the variants."""


class ShapeError(AttentionError):
    """Shapes, dtypes or devices that do not fit together."""


class MaskError(AttentionError):
    """A mask of the wrong kind or shape, or one that the variant does not claim to honour."""


class ConfigError(AttentionError):
    """A setting outside its limits, or a setting that does not exist."""


class BackendError(AttentionError):
    """An explicitly requested kernel that cannot serve the call."""


class UnknownNameError(AttentionError):
    """A name that is not registered."""


class RegistrationError(AttentionError):
    """A registration that cannot stand: a taken or malformed name, or a class of the wrong kind."""


class PluginError(AttentionError):
    """A plugin that could not be loaded; the reason is chained."""


class MissingExtraError(ImportError):
    """A library that an extra of this project installs and that cannot be imported; the message holds the pip command."""
