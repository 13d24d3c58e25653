"""Programs of utilities/ that have no suffix, as modules."""

from __future__ import annotations

import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

UTILITIES = Path(__file__).resolve().parent.parent / "utilities"


def load(name: str) -> ModuleType:
    """utilities/NAME as the module NAME, without running its main program."""
    loader = SourceFileLoader(name, str(UTILITIES / name))
    module = module_from_spec(spec_from_loader(name, loader))  # type: ignore[arg-type]
    sys.modules[name] = module
    loader.exec_module(module)
    return module
