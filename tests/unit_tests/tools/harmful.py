"""An object that does harm where a file of it is unpickled. No test here."""

import os
from typing import Any


class Harmful:
    """Makes the folder that the environment variable HARM names, where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.environ["HARM"],)
