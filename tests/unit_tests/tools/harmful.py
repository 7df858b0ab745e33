"""An object whose unpickling has a visible side effect. Contains no tests."""

import os
from typing import Any


class Harmful:
    """Creates the folder named by the environment variable HARM when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.environ["HARM"],)
