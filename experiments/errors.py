"""What a person is told in one line. `cli` turns each into its exit code; none is shown with a traceback."""


class ExperimentError(Exception):
    """Base of every error of this package; exit code 1."""

    exit_code = 1


class InputError(ExperimentError, ValueError):
    """A file, flag or name that cannot be right; exit code 2, and nothing was written."""

    exit_code = 2


class StoreError(ExperimentError):
    """A study folder that cannot be used: locked, damaged, of another version, or not writable."""


class StudyChangedError(InputError):
    """A sweep file that no longer describes the study in its folder."""
