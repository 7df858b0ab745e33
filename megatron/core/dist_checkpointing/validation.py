"""StrictHandling: the reaction of `load` to keys that exist only in the state dict or only in the checkpoint."""

import enum


class StrictHandling(enum.Enum):
    """Values of load's argument `strict`, as in Megatron-Core.

    A key is unexpected if the checkpoint lacks it, and missing if no rank requests it.
    """

    ASSUME_OK_UNEXPECTED = "assume_ok_unexpected"
    LOG_UNEXPECTED = "log_unexpected"
    LOG_ALL = "log_all"
    RAISE_UNEXPECTED = "raise_unexpected"
    RAISE_ALL = "raise_all"
    RETURN_UNEXPECTED = "return_unexpected"
    RETURN_ALL = "return_all"
    IGNORE_ALL = "ignore_all"

    @property
    def raises(self) -> bool:
        """Whether an unexpected key is an error."""
        return self in (
            StrictHandling.ASSUME_OK_UNEXPECTED,
            StrictHandling.RAISE_UNEXPECTED,
            StrictHandling.RAISE_ALL,
        )

    @property
    def logs(self) -> bool:
        """Whether keys that do not match are logged as a warning."""
        return self in (StrictHandling.LOG_UNEXPECTED, StrictHandling.LOG_ALL)

    @property
    def returns(self) -> bool:
        """Whether `load` also returns the missing and the unexpected keys."""
        return self in (StrictHandling.RETURN_UNEXPECTED, StrictHandling.RETURN_ALL)

    @property
    def minds_missing(self) -> bool:
        """Whether missing keys are reported in addition to unexpected keys."""
        return self in (StrictHandling.LOG_ALL, StrictHandling.RAISE_ALL, StrictHandling.RETURN_ALL)
