"""The house's own mechanisms: one a file, whose name is the registered name. Importing this package registers them.

One that needs a library which is not installed is listed as broken, with the pip command, and spoils no other.
"""

import importlib
import pkgutil

from core import MissingExtraError, registry

for _module in pkgutil.iter_modules(__path__):
    try:
        importlib.import_module(f"{__name__}.{_module.name}")
    except MissingExtraError as _error:
        registry.variants.add_broken(_module.name, f"{__name__}.{_module.name}", _error)
