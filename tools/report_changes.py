"""What changed in a JSON value since an earlier state of it; `applied` in report_live.js puts it together again."""

from typing import Any


def changes(old: Any, new: Any) -> list[Any] | None:
    """What makes `new` of `old`, both JSON values; None where they are equal.

    ["=", value]: replaced. ["{", {key: change}]: an object with the same keys. ["[", {index: change}, [items]]: a list,
    with items added at its end.
    """
    if type(old) is not type(new):
        return ["=", new]
    if isinstance(new, dict):
        # The order of keys is the order on the page.
        return _of_objects(old, new) if list(old) == list(new) else ["=", new]
    if isinstance(new, list) and len(new) >= len(old):
        return _of_lists(old, new)
    return None if old == new else ["=", new]


def _of_objects(old: dict[str, Any], new: dict[str, Any]) -> list[Any] | None:
    inner = {key: change for key in new if (change := changes(old[key], new[key])) is not None}
    return ["{", inner] if inner else None


def _of_lists(old: list[Any], new: list[Any]) -> list[Any] | None:
    inner: dict[str, list[Any]] = {}
    for index, (before, after) in enumerate(zip(old, new)):
        if (change := changes(before, after)) is not None:
            inner[str(index)] = change
    if not inner and len(new) == len(old):
        return None
    # Of numbers that all moved, a list of changes is longer than the numbers.
    if 2 * len(inner) > len(new) and not isinstance(new[0], (dict, list)):
        return ["=", new]
    return ["[", inner, new[len(old) :]]
