"""`python -m experiments`, and the installed command `experiments`."""

import importlib.util
import sys
from pathlib import Path

OURS = Path(__file__).resolve().parents[1]


def main() -> None:
    """Run a verb, unless a module of the person's own would be used in the place of one of ours."""
    for name in ("experiments", "core", "variants"):
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # a plain folder, which hides only what is installed as editable
            sys.path.append(str(OURS))
            if name == "experiments":
                del sys.modules[name]  # it would be searched before ours for every file
        elif Path(spec.origin).resolve() != OURS / name / "__init__.py":
            _refuse(name, Path(spec.origin))
    from experiments.cli import main as run

    run()


def _refuse(name: str, file: Path) -> None:
    found = file.parent if file.name == "__init__.py" else file
    if __name__ == "__main__" and found.parent == Path.cwd():
        way = "run the installed command `experiments`, which does not look into the working directory"
    else:
        way = f"take {found.parent} out of PYTHONPATH"
    print(f"error: Python finds {found} as {name!r}, in place of {OURS / name}; rename it, or {way}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
