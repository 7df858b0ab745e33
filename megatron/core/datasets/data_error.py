"""The error of data that does not fit a run; nothing else."""


class DataError(ValueError):
    """The data does not fit the run; the text says how."""
